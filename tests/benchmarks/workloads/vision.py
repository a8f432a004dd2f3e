"""Whole convolutional networks with random weights, channels last, batch 1 and 32.

ResNet-50, MobileNetV3 large, EfficientNet-B0, ConvNeXt-T, DenseNet-121 and GoogLeNet as their
papers (and torchvision) have them, a U-Net for segmentation, a block of a diffusion U-Net with
attention, and Whisper's encoder (small).
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from .conv import channels_last, settle, with_format
from .instance import Made, Sizes, Workload

CLASSES = 1000


def conv(
    channels: int,
    filters: int,
    kernel: int = 1,
    stride: int = 1,
    groups: int = 1,
    act: Callable[[], nn.Module] | None = nn.ReLU,
    epsilon: float = 1e-5,
) -> nn.Sequential:
    """A convolution, batch norm and an activation."""
    parts: list[nn.Module] = [
        nn.Conv2d(channels, filters, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False),
        nn.BatchNorm2d(filters, eps=epsilon),
    ]
    return nn.Sequential(*parts, *([act()] if act else []))


class Head(nn.Module):
    """The mean over an image, and a matrix product."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply it."""
        return self.parts(x.mean((2, 3)))


class Bottleneck(nn.Module):
    """The block of ResNet-50."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        filters = 4 * width
        self.body = nn.Sequential(
            conv(channels, width), conv(width, width, 3, stride), conv(width, filters, act=None)
        )
        self.short = nn.Identity()
        if stride != 1 or channels != filters:
            self.short = conv(channels, filters, 1, stride, act=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply it."""
        return F.relu(self.body(x) + self.short(x))


def resnet(counts: Sequence[int] = (3, 4, 6, 3)) -> nn.Module:
    """ResNet-50, or with other numbers of bottlenecks one that is deeper."""
    parts: list[nn.Module] = [conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for width, count, stride in zip((64, 128, 256, 512), counts, (1, 2, 2, 2), strict=True):
        for i in range(count):
            parts.append(Bottleneck(channels, width, stride if i == 0 else 1))
            channels = 4 * width
    return nn.Sequential(*parts, Head(nn.Linear(channels, CLASSES)))


class Squeeze(nn.Module):
    """Squeeze and excite."""

    def __init__(
        self, channels: int, inner: int, act: Callable[[], nn.Module], gate: Callable[[], nn.Module]
    ) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.Conv2d(channels, inner, 1), act(), nn.Conv2d(inner, channels, 1), gate()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply it."""
        return x * self.gate(F.adaptive_avg_pool2d(x, 1))


class Inverted(nn.Module):
    """An inverted residual: wide, depthwise, squeezed and excited, narrow."""

    def __init__(
        self,
        channels: int,
        wide: int,
        filters: int,
        kernel: int,
        stride: int,
        act: Callable[[], nn.Module],
        squeeze: nn.Module | None,
        epsilon: float,
    ) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        if wide != channels:
            parts.append(conv(channels, wide, act=act, epsilon=epsilon))
        parts.append(conv(wide, wide, kernel, stride, wide, act, epsilon))
        if squeeze is not None:
            parts.append(squeeze)
        parts.append(conv(wide, filters, act=None, epsilon=epsilon))
        self.body = nn.Sequential(*parts)
        self.adds = stride == 1 and channels == filters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply it."""
        return x + self.body(x) if self.adds else self.body(x)


def mobilenet_v3() -> nn.Module:
    """MobileNetV3 large."""
    epsilon = 1e-3
    rows = (  # kernel, wide, filters, squeeze, hardswish, stride
        *((3, 16, 16, 0, 0, 1), (3, 64, 24, 0, 0, 2), (3, 72, 24, 0, 0, 1), (5, 72, 40, 1, 0, 2)),
        *((5, 120, 40, 1, 0, 1), (5, 120, 40, 1, 0, 1), (3, 240, 80, 0, 1, 2)),
        *((3, 200, 80, 0, 1, 1), (3, 184, 80, 0, 1, 1), (3, 184, 80, 0, 1, 1)),
        *((3, 480, 112, 1, 1, 1), (3, 672, 112, 1, 1, 1), (5, 672, 160, 1, 1, 2)),
        *((5, 960, 160, 1, 1, 1), (5, 960, 160, 1, 1, 1)),
    )
    parts: list[nn.Module] = [conv(3, 16, 3, 2, act=nn.Hardswish, epsilon=epsilon)]
    channels = 16
    for kernel, wide, filters, squeezed, swish, stride in rows:
        inner = max(8, int(wide / 4 + 4) // 8 * 8)
        squeeze = Squeeze(wide, inner, nn.ReLU, nn.Hardsigmoid) if squeezed else None
        act = nn.Hardswish if swish else nn.ReLU
        parts.append(Inverted(channels, wide, filters, kernel, stride, act, squeeze, epsilon))
        channels = filters
    parts.append(conv(channels, 960, act=nn.Hardswish, epsilon=epsilon))
    head = Head(nn.Linear(960, 1280), nn.Hardswish(), nn.Linear(1280, CLASSES))
    return nn.Sequential(*parts, head)


def efficientnet_b0() -> nn.Module:
    """EfficientNet-B0."""
    rows = (  # factor, kernel, stride, filters, count
        *((1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3)),
        *((6, 5, 1, 112, 3), (6, 5, 2, 192, 4), (6, 3, 1, 320, 1)),
    )
    parts: list[nn.Module] = [conv(3, 32, 3, 2, act=nn.SiLU)]
    channels = 32
    for factor, kernel, stride, filters, count in rows:
        for i in range(count):
            wide = channels * factor
            squeeze = Squeeze(wide, max(1, channels // 4), nn.SiLU, nn.Sigmoid)
            step = stride if i == 0 else 1
            parts.append(Inverted(channels, wide, filters, kernel, step, nn.SiLU, squeeze, 1e-5))
            channels = filters
    parts.append(conv(channels, 1280, act=nn.SiLU))
    return nn.Sequential(*parts, Head(nn.Linear(1280, CLASSES)))


class ConvNeXtBlock(nn.Module):
    """A depthwise 7 x 7, layer norm over channels, an MLP, a scale."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.wide, self.narrow = (
            nn.Linear(channels, 4 * channels),
            nn.Linear(4 * channels, channels),
        )
        self.scale = nn.Parameter(0.5 + torch.rand(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply it."""
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        y = self.narrow(F.gelu(self.wide(y))) * self.scale
        return x + y.permute(0, 3, 1, 2)


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of [batch, channels, height, width]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply it."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def convnext_t() -> nn.Module:
    """ConvNeXt-T."""
    widths = (96, 192, 384, 768)
    parts: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), ChannelNorm(widths[0], eps=1e-6)]
    for i, (width, depth) in enumerate(zip(widths, (3, 3, 9, 3), strict=True)):
        if i:
            parts.append(ChannelNorm(widths[i - 1], eps=1e-6))
            parts.append(nn.Conv2d(widths[i - 1], width, 2, 2))
        parts += [ConvNeXtBlock(width) for _ in range(depth)]
    head = Head(nn.LayerNorm(widths[-1], eps=1e-6), nn.Linear(widths[-1], CLASSES))
    return nn.Sequential(*parts, head)


class Dense(nn.Module):
    """A layer of DenseNet: its results stand behind its data."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            conv(channels, 4 * growth),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply it."""
        return torch.cat([x, self.body(x)], 1)


def densenet(depths: Sequence[int] = (6, 12, 24, 16)) -> nn.Module:
    """DenseNet-121, or with other numbers of layers one that is deeper."""
    growth, channels = 32, 64
    parts: list[nn.Module] = [conv(3, channels, 7, 2), nn.MaxPool2d(3, 2, 1)]
    for i, depth in enumerate(depths):
        for _ in range(depth):
            parts.append(Dense(channels, growth))
            channels += growth
        if i < 3:
            parts += [nn.BatchNorm2d(channels), nn.ReLU()]
            parts += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
            channels //= 2
    parts += [nn.BatchNorm2d(channels), nn.ReLU(), Head(nn.Linear(channels, CLASSES))]
    return nn.Sequential(*parts)


class Inception(nn.Module):
    """A block of GoogLeNet: four branches side by side."""

    def __init__(self, channels: int, widths: Sequence[int]) -> None:
        super().__init__()
        one, before3, three, before5, five, pooled = widths
        self.branches = nn.ModuleList(
            [
                conv(channels, one),
                nn.Sequential(conv(channels, before3), conv(before3, three, 3)),
                nn.Sequential(conv(channels, before5), conv(before5, five, 3)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(channels, pooled)),
            ]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply it."""
        return torch.cat([branch(x) for branch in self.branches], 1)


def googlenet() -> nn.Module:
    """GoogLeNet with 3 x 3 in place of 5 x 5, as torchvision has it."""
    rows = (
        *((192, (64, 96, 128, 16, 32, 32)), (256, (128, 128, 192, 32, 96, 64)), None),
        *((480, (192, 96, 208, 16, 48, 64)), (512, (160, 112, 224, 24, 64, 64))),
        *((512, (128, 128, 256, 24, 64, 64)), (512, (112, 144, 288, 32, 64, 64))),
        *((528, (256, 160, 320, 32, 128, 128)), None),
        *((832, (256, 160, 320, 32, 128, 128)), (832, (384, 192, 384, 48, 128, 128))),
    )
    parts: list[nn.Module] = [conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    parts += [conv(64, 64), conv(64, 192, 3), nn.MaxPool2d(3, 2, 1)]
    parts += [nn.MaxPool2d(3, 2, 1) if row is None else Inception(*row) for row in rows]
    return nn.Sequential(*parts, Head(nn.Linear(1024, CLASSES)))


class UNet(nn.Module):
    """A U-Net for segmentation: four halvings by maxima, four doublings by nearest neighbours, with
    what was before each halving beside what comes back.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        widths = [width << i for i in range(5)]
        self.down = nn.ModuleList(
            nn.Sequential(conv(a, b, 3), conv(b, b, 3))
            for a, b in zip((3, *widths), widths, strict=False)
        )
        self.up = nn.ModuleList(nn.Conv2d(2 * w, w, 3, padding=1) for w in widths[:-1])
        self.back = nn.ModuleList(
            nn.Sequential(conv(2 * w, w, 3), conv(w, w, 3)) for w in widths[:-1]
        )
        self.last = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply it."""
        skipped = []
        for i, part in enumerate(self.down):
            x = part(F.max_pool2d(x, 2) if i else x)
            skipped.append(x)
        for up, back, skip in zip(
            reversed(self.up), reversed(self.back), reversed(skipped[:-1]), strict=True
        ):
            x = back(torch.cat([skip, up(F.interpolate(x, scale_factor=2.0))], 1))
        return self.last(x)


class UNetBlock(nn.Module):
    """Of a diffusion U-Net: a residual block with a time embedding, and self-attention."""

    def __init__(self, channels: int, embedding: int, heads: int, groups: int = 32) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.GroupNorm(groups, channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.time = nn.Linear(embedding, channels)
        self.norm2 = nn.GroupNorm(groups, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm3 = nn.GroupNorm(groups, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Apply it to [batch, channels, height, width] and [batch, embedding]."""
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        x = x + self.conv2(F.silu(self.norm2(y)))
        batch, channels, height, width = x.shape
        q, k, v = (
            part.reshape(batch, self.heads, channels // self.heads, height * width).transpose(2, 3)
            for part in self.qkv(self.norm3(x)).chunk(3, 1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(2, 3)
        return x + self.out(mixed.reshape(batch, channels, height, width))


class EncoderLayer(nn.Module):
    """A layer of Whisper's encoder."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.v, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply it to [batch, length, width]."""
        y = self.norm1(x)
        batch, length, width = y.shape
        split = (batch, length, self.heads, width // self.heads)
        q, k, v = (f(y).reshape(split).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(y.shape)
        x = x + self.out(y)
        return x + self.narrow(F.gelu(self.wide(self.norm2(x))))


class WhisperEncoder(nn.Module):
    """Whisper's encoder, on spectrograms [batch, bands, 2 * length]."""

    def __init__(self, width: int, heads: int, layers: int, length: int, bands: int = 80) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(bands, width, 3, padding=1)
        self.conv2 = nn.Conv1d(width, width, 3, stride=2, padding=1)
        self.register_buffer("positions", 0.1 * torch.randn(length, width))
        self.layers = nn.Sequential(*(EncoderLayer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply it."""
        x = F.gelu(self.conv2(F.gelu(self.conv1(x)))).transpose(1, 2)
        return self.norm(self.layers(x + self.positions))


def network(make: Callable[[], nn.Module], batch: int, side: int = 224) -> Workload:
    def made(sizes: Sizes) -> Made:
        full = sizes.scale >= 1
        images, edge = (batch, side) if full else (min(batch, 2), 64)
        x = channels_last(sizes.normal(images, 3, edge, edge))
        return with_format(calm(settle(make()))), (x,)

    return Workload(made, "float16", wall=True)


def calm(module: nn.Module) -> nn.Module:
    """Weights that keep values of the order of one through many layers, also in float16."""
    for part in module.modules():
        if isinstance(part, (nn.Conv1d, nn.Conv2d, nn.Linear)):
            terms = math.prod(part.weight.shape[1:])
            nn.init.normal_(part.weight, std=terms**-0.5)
    return module


def _unet(batch: int) -> Workload:
    def made(sizes: Sizes) -> Made:
        full = sizes.scale >= 1
        side, channels, images = (32, 640, batch) if full else (8, 64, 2)
        x = channels_last(sizes.normal(images, channels, side, side))
        module = with_format(UNetBlock(channels, 1280 if full else 64, 10 if full else 2))
        return module, (x, sizes.normal(images, 1280 if full else 64))

    return Workload(made, "float16", wall=True)


def _whisper(batch: int) -> Workload:
    def made(sizes: Sizes) -> Made:
        full = sizes.scale >= 1
        width, heads, layers, length = (768, 12, 12, 1500) if full else (64, 2, 1, 50)
        module = WhisperEncoder(width, heads, layers, length)
        return module, (sizes.normal(batch if full else 1, 80, 2 * length),)

    return Workload(made, "float16", wall=True)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet50": resnet,
    "mobilenet_v3": mobilenet_v3,
    "efficientnet_b0": efficientnet_b0,
    "convnext_t": convnext_t,
    "densenet121": densenet,
}
BATCHES: Sequence[int] = (1, 32)
VISION: dict[str, Workload] = {
    **{f"{name}_b{b}": network(make, b) for name, make in NETWORKS.items() for b in BATCHES},
    "googlenet_b32": network(googlenet, 32),
    "unet_b8": network(UNet, 8, 256),
    **{f"unet_block_b{b}": _unet(b) for b in (1, 8)},
    **{f"whisper_encoder_b{b}": _whisper(b) for b in (1, 8)},
}
