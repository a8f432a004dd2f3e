"""Convolutions of networks with what stands behind them, channels last.

`resnet_*` are the distinct ones of ResNet-50 with batch norm and ReLU, those that end a block with
its residual; `depthwise_*` are of MobileNet, EfficientNet and ConvNeXt; `stem_*` are first layers,
`thin_*` 1 x 1 convolutions of few channels; the others of every kind. `conv_bn_relu_last` is
`conv_bn_relu` with its data channels last.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.conv_suites import RESNET50
from tvm_fusion.frontends.memory_formats import FORMATS

from .instance import Made, Sizes, Workload
from .models import MODELS

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """The tensor with its channels side by side in memory; shape as it was."""
    return x.contiguous(memory_format=FORMATS[x.ndim]) if x.ndim in FORMATS else x


def settle(module: nn.Module) -> nn.Module:
    """A network with statistics that no norm has at first, so that folding them shows."""
    generator = torch.Generator("cpu").manual_seed(7)

    def drawn(size: int, normal: bool) -> torch.Tensor:
        draw = torch.randn if normal else torch.rand
        return draw(size, generator=generator, device="cpu")

    for part in module.modules():
        if isinstance(part, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
            size = part.num_features
            with torch.no_grad():
                part.running_mean.copy_(0.2 * drawn(size, True))
                part.running_var.copy_(0.6 + drawn(size, False))
                part.weight.copy_(0.8 + 0.4 * drawn(size, False))
                part.bias.copy_(0.1 * drawn(size, True))
    return module


class ConvNorm(nn.Module):
    """A convolution, batch norm and ReLU; with `residual` a second input is added before it."""

    def __init__(self, convolution: nn.Module, rank: int, residual: bool = False) -> None:
        super().__init__()
        self.convolution, self.residual = convolution, residual
        self.norm = NORMS[rank](convolution.out_channels)

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        """Apply them."""
        y = self.norm(self.convolution(x))
        return F.relu(y + more[0]) if self.residual else F.relu(y)


def layer(
    sizes_of: Sequence[int],
    channels: int,
    filters: int,
    kernel: int | tuple[int, ...],
    stride: int = 1,
    batch: int = 32,
    groups: int = 1,
    dilation: int = 1,
    padding: int | None = None,
    transposed: bool = False,
    residual: bool = False,
) -> Workload:
    """A layer on data of `sizes_of`, padded by half of the filter unless told otherwise."""
    rank = len(sizes_of)

    def made(sizes: Sizes) -> Made:
        full = sizes.scale >= 1
        space = tuple(sizes_of) if full else tuple(min(n, 14) for n in sizes_of)
        images = batch if full else min(batch, 2)
        pad: Any = padding
        if padding is None:
            each = kernel if isinstance(kernel, tuple) else (kernel,) * rank
            pad = tuple(dilation * (k - 1) // 2 for k in each)
        options: dict[str, Any] = dict(stride=stride, padding=pad, groups=groups, bias=False)
        if transposed:
            conv = TRANSPOSED[rank](channels, filters, kernel, **options)
        else:
            conv = CONVOLUTIONS[rank](channels, filters, kernel, dilation=dilation, **options)
        module = settle(ConvNorm(conv, rank, residual))
        inputs = [channels_last(sizes.normal(images, channels, *space))]
        if residual:
            with torch.no_grad():
                shape = conv(torch.zeros(1, channels, *space)).shape[1:]
            inputs.append(channels_last(sizes.normal(images, *shape)))
        return with_format(module), tuple(inputs)

    return Workload(made, "float16")


def with_format(module: nn.Module) -> nn.Module:
    """The network with its parameters channels last."""
    for parameter in module.parameters():
        parameter.data = channels_last(parameter.data)
    return module


def _resnet(batch: int) -> dict[str, Workload]:
    found = {"stem": layer((224, 224), 3, 64, 7, 2, batch)}
    for size, kernel, channels, filters, stride in RESNET50:
        residual = stride == 1 and filters == 4 * channels  # the last of a block
        step = f"s{stride}" if stride > 1 else ""
        name = f"{size}_{kernel}x{kernel}{step}_{channels}_{filters}"
        found[name] = layer(
            (size, size), channels, filters, kernel, stride, batch, residual=residual
        )
    return {f"resnet_b{batch}_{name}": workload for name, workload in found.items()}


def _depthwise() -> dict[str, Workload]:
    shapes = (
        *((112, 3, 64, 1), (112, 3, 96, 2), (56, 3, 128, 1), (56, 3, 144, 2), (28, 3, 256, 1)),
        *((14, 3, 512, 1), (56, 5, 144, 2), (28, 5, 240, 1), (14, 5, 672, 1)),
        *((56, 7, 96, 1), (28, 7, 192, 1), (14, 7, 384, 1)),
    )
    return {
        f"depthwise_{n}_{k}x{k}{'s2' if s > 1 else ''}_{c}": layer((n, n), c, c, k, s, groups=c)
        for n, k, c, s in shapes
    }


def _few_channels() -> dict[str, Workload]:
    found = {
        "stem_224_3x3s2_3_16": layer((224, 224), 3, 16, 3, 2),
        "stem_224_3x3s2_3_32": layer((224, 224), 3, 32, 3, 2),
        "stem_299_3x3s2_3_32": layer((299, 299), 3, 32, 3, 2, padding=0),
        "stem_224_4x4s4_3_96": layer((224, 224), 3, 96, 4, 4, padding=0),
        "stem_224_16x16s16_3_768": layer((224, 224), 3, 768, 16, 16, padding=0),
        "stem_64_3x3_4_320": layer((64, 64), 4, 320, 3, batch=8),
    }
    thin = (
        *((112, 16, 16, True), (112, 16, 64, False), (112, 32, 16, False), (112, 16, 96, False)),
        *((56, 64, 24, False), (56, 144, 24, True), (56, 24, 144, False), (28, 40, 120, False)),
    )
    for n, channels, filters, residual in thin:
        name = f"thin_{n}_1x1_{channels}_{filters}"
        found[name] = layer((n, n), channels, filters, 1, residual=residual)
    return found


def _kinds() -> dict[str, Workload]:
    def up(*shape: Any, **more: Any) -> Workload:
        return layer(*shape, transposed=True, stride=2, **more)

    return {
        "audio_3000_3_80_512": layer((3000,), 80, 512, 3, batch=1),
        "audio_3000_3s2_512_512": layer((3000,), 512, 512, 3, 2, batch=1),
        "audio_16000_7_64_64": layer((16000,), 64, 64, 7, batch=4),
        "audio_8000_15_128_128": layer((8000,), 128, 128, 15, batch=4),
        "audio_4000_3_256_256_d3": layer((4000,), 256, 256, 3, batch=4, dilation=3),
        "audio_2000_5_512_512": layer((2000,), 512, 512, 5, batch=4),
        "audio_1000_9s2_256_512": layer((1000,), 256, 512, 9, 2, batch=8),
        "audio_3001_3_96_100": layer((3001,), 96, 100, 3, batch=2),
        "video_8x56_3_64_64": layer((8, 56, 56), 64, 64, 3, batch=2),
        "video_16x28_311_128_128": layer((16, 28, 28), 128, 128, (3, 1, 1), batch=4),
        "video_16x28_133_128_128": layer((16, 28, 28), 128, 128, (1, 3, 3), batch=4),
        "volume_32_3_32_32": layer((32, 32, 32), 32, 32, 3, batch=2),
        "volume_16_3_128_128": layer((16, 16, 16), 128, 128, 3, batch=2),
        "volume_16_3s2_64_128": layer((32, 32, 32), 64, 128, 3, 2, batch=2),
        "up_28_2_256_128": up((28, 28), 256, 128, 2, batch=8, padding=0),
        "up_56_4_128_64": up((56, 56), 128, 64, 4, batch=8, padding=1),
        "up_16_4_512_256": up((16, 16), 512, 256, 4, batch=16, padding=1),
        "up_8_4_512_512": up((8, 8), 512, 512, 4, batch=16, padding=1),
        "up_64_4_64_32": up((64, 64), 64, 32, 4, batch=4, padding=1),
        "up_32_3_128_64": up((32, 32), 128, 64, 3, batch=8, padding=1),
        "up3_8_2_128_64": up((8, 8, 8), 128, 64, 2, batch=2, padding=0),
        "up3_16_4_64_32": up((16, 16, 16), 64, 32, 4, batch=2, padding=1),
        "up3_8_4_128_128": up((8, 8, 8), 128, 128, 4, batch=2, padding=1),
        "up3_16_2_64_64": up((16, 16, 16), 64, 64, 2, batch=2, padding=0),
        "up3_12_2_96_48": up((12, 12, 12), 96, 48, 2, batch=2, padding=0),
        "up3_10_3_64_64": up((10, 10, 10), 64, 64, 3, batch=2, padding=1),
        "dilated_56_3_128_128_d2": layer((56, 56), 128, 128, 3, batch=8, dilation=2),
        "dilated_28_3_256_256_d4": layer((28, 28), 256, 256, 3, batch=8, dilation=4),
        "dilated_33_3_512_256_d12": layer((33, 33), 512, 256, 3, batch=4, dilation=12),
        "grouped_28_3_256_256_g8": layer((28, 28), 256, 256, 3, groups=8),
        "grouped_14_3_1024_1024_g32": layer((14, 14), 1024, 1024, 3, groups=32),
        "grouped_56_3_128_128_g32": layer((56, 56), 128, 128, 3, groups=32),
    }


def _block(sizes: Sizes) -> Made:
    module, inputs, *_ = MODELS["conv_bn_relu"].make(sizes)
    return with_format(settle(module)), tuple(map(channels_last, inputs))


CONV: dict[str, Workload] = {
    **_resnet(32),
    **_resnet(1),
    **_depthwise(),
    **_few_channels(),
    **_kinds(),
    "conv_bn_relu_last": Workload(_block, "float16"),
}
