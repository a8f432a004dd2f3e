"""Operators that no kernel class of this package wrote when tuning moved to MetaSchedule: on a GPU
dense convolutions, on a CPU what its classes write as plain nests. Schedules are evolved for these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F

from .instance import Apply, Workload


def _of(function: Callable[..., Any], *shapes: tuple[int, ...], dtype: str) -> Workload:
    return Workload(lambda s: (Apply(function), tuple(s.normal(*shape) for shape in shapes)), dtype)


def _conv(function: Callable[..., Any], x: tuple[int, ...], w: tuple[int, ...], **how) -> Workload:
    dtype = how.pop("dtype", "float32")
    return _of(lambda x, w: function(x, w, **how), x, w, dtype=dtype)


UNWRITTEN_GPU: dict[str, Workload] = {
    "conv1d": _conv(F.conv1d, (8, 64, 1000), (64, 64, 5), padding=2),
    "conv2d_3x3": _conv(F.conv2d, (8, 64, 28, 28), (64, 64, 3, 3), padding=1),
    "conv2d_3x3_half": _conv(F.conv2d, (8, 64, 28, 28), (64, 64, 3, 3), padding=1, dtype="float16"),
    "conv2d_strided": _conv(F.conv2d, (8, 64, 56, 56), (128, 64, 3, 3), padding=1, stride=2),
    "conv2d_1x1": _conv(F.conv2d, (8, 256, 14, 14), (256, 256, 1, 1)),
    "conv2d_dilated": _conv(F.conv2d, (4, 32, 56, 56), (32, 32, 3, 3), padding=2, dilation=2),
    "conv2d_grouped": _conv(F.conv2d, (8, 64, 28, 28), (64, 16, 3, 3), padding=1, groups=4),
    "conv2d_odd": _conv(F.conv2d, (3, 17, 37, 41), (19, 17, 5, 3), padding=2),
    "conv3d": _conv(F.conv3d, (1, 16, 8, 28, 28), (16, 16, 3, 3, 3), padding=1),
    "conv_transpose2d": _conv(F.conv_transpose2d, (4, 32, 28, 28), (32, 32, 4, 4), stride=2),
}
UNWRITTEN_CPU: dict[str, Workload] = {
    "max_pool": _of(lambda x: F.max_pool2d(x, 3, 2, 1), (4, 64, 112, 112), dtype="float32"),
    "avg_pool": _of(lambda x: F.avg_pool2d(x, 3, 1, 1), (4, 64, 56, 56), dtype="float32"),
    "max_pool3d": _of(lambda x: F.max_pool3d(x, 2), (2, 32, 16, 56, 56), dtype="float32"),
    "avg_pool1d": _of(lambda x: F.avg_pool1d(x, 4, 2), (8, 64, 4000), dtype="float32"),
    "resize_bilinear": _of(
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        (4, 64, 56, 56),
        dtype="float32",
    ),
    "response_norm": _of(lambda x: F.local_response_norm(x, 5), (8, 64, 28, 28), dtype="float32"),
    "argmax": _of(lambda x: x.argmax(-1), (512, 4096), dtype="float32"),
    "product_of_columns": _of(lambda x: x.prod(1), (64, 32, 512), dtype="float32"),
    "pooled_map": _of(lambda x: F.adaptive_avg_pool2d(x, (7, 7)), (8, 64, 28, 28), dtype="float32"),
    "transposed_sum": _of(
        lambda x: (x.transpose(1, 2) * 2).sum(-1), (32, 256, 257), dtype="float32"
    ),
}
