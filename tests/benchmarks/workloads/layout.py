"""Pointwise work with broadcasts and changes of layout, and reductions over other axes."""

import torch
import torch.nn.functional as F

from .instance import Apply, Made, Sizes, Workload, applied, wide

GROUPS = 32


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE on [batch, length, heads, head width]."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _rope(sizes: Sizes) -> Made:
    length, width = sizes.extent(8192), 128
    x = sizes.normal(2, length, sizes.count(32), width)
    return Apply(_rotate), (x, sizes.normal(length, 1, width), sizes.normal(length, 1, width))


def _group_norm_silu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """GroupNorm and SiLU of [batch, height, width, channels], in that order in memory."""
    batch, height, width, channels = x.shape
    y = wide(x).reshape(batch, height * width, GROUPS, channels // GROUPS)
    centred = y - y.mean((1, 3), keepdim=True)
    variance = centred.pow(2).mean((1, 3), keepdim=True)
    y = (centred * torch.rsqrt(variance + 1e-5)).reshape(x.shape)
    return F.silu(y * wide(weight) + wide(bias)).to(x.dtype)


def _group_norm_nhwc(sizes: Sizes) -> Made:
    side, channels = sizes.count(64, 4), GROUPS * sizes.count(10)
    x = sizes.normal(sizes.count(32), side, side, channels)
    return Apply(_group_norm_silu), (x, sizes.normal(channels), sizes.normal(channels))


def _maxpool_add(sizes: Sizes) -> Made:
    """2x2 max pooling with stride 2, and a sum: the case of apache/tvm#20401."""
    planes, side = (sizes.count(32), sizes.count(64)), sizes.count(112, 8)
    x = sizes.normal(*planes, side, side)
    return Apply(lambda x, y: F.max_pool2d(x, 2) + y), (
        x,
        sizes.normal(*planes, side // 2, side // 2),
    )


def _to_nhwc(sizes: Sizes) -> Made:
    side, channels = sizes.count(64, 4), sizes.extent(320)
    x = sizes.normal(sizes.count(32), channels, side, side)
    # A permuted view times a vector keeps the old order in memory; the copy is the point here
    return Apply(lambda x, s: (x.permute(0, 2, 3, 1) * s).contiguous()), (x, sizes.normal(channels))


def _concat_slice_pad(sizes: Sizes) -> Made:
    """All but three columns of one tensor beside another, padded on both sides, and pointwise."""
    rows, left, right = sizes.extent(4096), sizes.extent(8192), sizes.extent(1000)

    def function(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.silu(F.pad(torch.cat([x[:, 3:], y], 1), (1, 2)) + bias)

    x, y = sizes.normal(rows, left), sizes.normal(rows, right)
    return Apply(function), (x, y, sizes.normal(left + right)), rows * 3 * x.element_size()


LAYOUT: dict[str, Workload] = {
    "bias_gelu_5003_bf16": applied(
        lambda x, b: F.gelu(x + b, approximate="tanh"), (8192, 5003), (5003,), dtype="bfloat16"
    ),
    "add_silu_3d": Workload(
        lambda s: (
            Apply(lambda x, a: F.silu(x + a)),
            (
                s.normal(s.count(64), s.extent(257), s.extent(1023)),
                s.normal(s.count(64), 1, s.extent(1023)),
            ),
        ),
        "float16",
    ),
    "chain3_4kb": applied(lambda x: torch.relu((x + 1) * 2), (2048,), dtype="float16"),
    "rope": Workload(_rope, "float16"),
    "groupnorm_silu_nhwc": Workload(_group_norm_nhwc, "float16"),
    "maxpool_add": Workload(_maxpool_add, "float16"),
    "nchw_to_nhwc_scale": Workload(_to_nhwc, "float16"),
    "concat_slice_pad": Workload(_concat_slice_pad, "float16"),
    "sum_middle_axis": Workload(
        lambda s: (
            Apply(lambda x: x.sum(1)),
            (s.normal(s.count(32), s.extent(1024), s.extent(2048)),),
        ),
        "float16",
    ),
}
