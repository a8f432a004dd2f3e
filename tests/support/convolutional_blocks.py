"""Small blocks of convolutional networks, with example inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


def conv_norm(inputs, outputs, taps=3, stride=1, groups=1, act=nn.ReLU) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, taps, stride, taps // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), act())


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.pool, self.gate = nn.AdaptiveAvgPool2d(1), nn.Hardsigmoid()
        self.down, self.up = nn.Conv2d(channels, 2, 1), nn.Conv2d(2, channels, 1)

    def forward(self, x):
        return x * self.gate(self.up(F.relu(self.down(self.pool(x)))))


class InvertedResidual(nn.Module):
    def __init__(self, inputs, outputs, taps=3, stride=1, act=nn.Hardswish) -> None:
        super().__init__()
        wide = 2 * inputs
        self.body = nn.Sequential(
            conv_norm(inputs, wide, 1, act=act),
            conv_norm(wide, wide, taps, stride, wide, act=act),
            SqueezeExcite(wide),
            conv_norm(wide, outputs, 1, act=nn.Identity),
        )
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x):
        return x + self.body(x) if self.is_residual else self.body(x)


class MobileNet(nn.Module):
    def __init__(self, act=nn.Hardswish) -> None:
        super().__init__()
        self.body = nn.Sequential(
            conv_norm(3, 8, 3, 2, act=act),
            InvertedResidual(8, 8, act=act),
            InvertedResidual(8, 12, 5, 2, act=act),
            conv_norm(12, 16, 1, act=act),
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        return self.head(F.adaptive_avg_pool2d(self.body(x), 1).flatten(1))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_norm(3, 8, 7, 2)
        self.body = nn.Sequential(
            conv_norm(8, 4, 1), conv_norm(4, 4), conv_norm(4, 16, 1, act=nn.Identity)
        )
        self.side = conv_norm(8, 16, 1, act=nn.Identity)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = F.max_pool2d(self.stem(x), 3, 2, 1)
        x = F.relu(self.body(x) + self.side(x))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, (1, 1)), 1))


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(
                *(nn.BatchNorm2d(n), nn.ReLU(), nn.Conv2d(n, 8, 1, bias=False)),
                *(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1, bias=False)),
            )
            for n in (8, 12)
        )
        self.end = nn.Sequential(nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 1))

    def forward(self, x):
        found = [self.stem(x)]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return F.relu(F.avg_pool2d(self.end(torch.cat(found, 1)), 2)).mean((2, 3))


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.up, self.down = nn.Linear(channels, 2 * channels), nn.Linear(2 * channels, channels)
        self.scale = nn.Parameter(torch.rand(channels, 1, 1))

    def forward(self, x):
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        return x + self.scale * self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(3, 8, 4, 4), LayerNorm2d(8), ConvNeXtBlock(8), ConvNeXtBlock(8)),
            *(LayerNorm2d(8), nn.Conv2d(8, 12, 2, 2), ConvNeXtBlock(12)),
        )
        self.norm, self.head = LayerNorm2d(12), nn.Linear(12, 10)

    def forward(self, x):
        return self.head(self.norm(F.adaptive_avg_pool2d(self.body(x), 1)).flatten(1))


class ResidualBlock(nn.Module):
    """Of a diffusion model: it is told the time."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(2, inputs), nn.GroupNorm(2, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(16, outputs)
        self.side = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x, t):
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(t))[:, :, None, None]
        return self.side(x) + self.conv2(F.silu(self.norm2(y)))


class TokenAttention(nn.Module):
    """Attention over positions, as tokens."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, channels)
        self.q, self.k, self.v, self.out = (nn.Linear(channels, channels) for _ in range(4))

    def forward(self, x):
        b, c, h, w = x.shape
        y = self.norm(x).view(b, c, h * w).transpose(1, 2)
        y = self.out(F.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y)))
        return x + y.transpose(1, 2).reshape(b, c, h, w)


class ConvAttention(nn.Module):
    """The same with convolutions of one tap, written out."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, channels)
        self.q, self.k, self.v, self.out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x):
        b, c, h, w = x.shape
        y = self.norm(x)
        q, k, v = (f(y).reshape(b, c, h * w) for f in (self.q, self.k, self.v))
        p = torch.softmax(q.permute(0, 2, 1) @ k * c**-0.5, -1)
        return x + self.out((v @ p.permute(0, 2, 1)).reshape(b, c, h, w))


class UNet(nn.Module):
    def __init__(self, attention=TokenAttention) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(4, 8, 3, padding=1), ResidualBlock(8, 8)
        self.down, self.middle = nn.Conv2d(8, 12, 3, 2, 1), ResidualBlock(12, 12)
        self.attention, self.up = attention(12), nn.Conv2d(12, 8, 3, padding=1)
        self.last, self.norm = ResidualBlock(16, 8), nn.GroupNorm(2, 8)
        self.out = nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x, t):
        high = self.first(self.stem(x), t)
        low = self.attention(self.middle(self.down(high), t))
        low = self.up(F.interpolate(low, scale_factor=2.0, mode="nearest"))
        return self.out(F.silu(self.norm(self.last(torch.cat([low, high], 1), t))))


class TransposedUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.low, self.last = conv_norm(3, 8), conv_norm(8, 8), conv_norm(16, 8)
        self.up, self.out = nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(8, 2, 1)

    def forward(self, x):
        high = self.first(x)
        return self.out(self.last(torch.cat([high, self.up(self.low(F.max_pool2d(high, 2)))], 1)))


class UNet3d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4)
        self.low, self.up = nn.Conv3d(4, 4, 3, padding=1), nn.ConvTranspose3d(4, 4, 2, 2)
        self.last = nn.Conv3d(8, 4, 3, padding=2, dilation=2)

    def forward(self, x):
        high = F.relu(self.norm(self.first(x)))
        low = F.leaky_relu(self.low(F.max_pool3d(high, 2)))
        return self.last(torch.cat([high, self.up(low)], 1))


class WhisperFront(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(8, 16, 3, padding=1), nn.Conv1d(16, 16, 3, 2, 1)
        self.places = nn.Parameter(torch.randn(16, 16))
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        y = F.gelu(self.conv2(F.gelu(self.conv1(x)))).permute(0, 2, 1) + self.places
        return y + self.linear(self.norm(y))


class Audio(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.act = nn.Conv1d(1, 8, 7, 4, 3), nn.PReLU(8)
        self.conv = nn.Conv1d(8, 8, 3, padding=2, dilation=2, groups=2)
        self.up = nn.ConvTranspose1d(8, 4, 8, 4, 2)

    def forward(self, x):
        y = self.stem(x)
        y = y + self.conv(self.act(y))
        return torch.tanh(self.up(F.avg_pool1d(F.pad(y, (1, 1), mode="reflect"), 3, 1)))


class ShuffleNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.last = conv_norm(3, 8), conv_norm(8, 8, 1)
        self.body = nn.Sequential(conv_norm(4, 4, 1), conv_norm(4, 4, 3, 1, 4))

    def forward(self, x):
        left, right = self.stem(x).chunk(2, 1)
        y = torch.cat([left, self.body(right)], 1)
        n, c, h, w = y.shape
        return self.last(y.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)).mean(
            (2, 3)
        )


class PatchEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 16)

    def forward(self, x):
        return self.linear(self.conv(x).flatten(2).transpose(1, 2))


class Segmentation(nn.Module):
    """Tokens become an image again, which is pooled and resized before a convolution reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.conv = PatchEmbedding(), nn.Conv2d(16, 5, 3, padding=1)

    def forward(self, x):
        tokens = self.patches(x)
        image = tokens.transpose(1, 2).reshape(len(x), 16, 4, 4)
        image = F.max_pool2d(F.pad(image, (1, 1, 1, 1)), 3, 1)
        scores = self.conv(F.interpolate(image, size=(8, 8), mode="bilinear"))
        return torch.softmax(scores, 1) * scores.mean(1, keepdim=True), scores.argmax(1)


Case = tuple[Callable[[], nn.Module], list[tuple[int, ...]], int]
IMAGE = [(2, 3, 16, 16)]

BLOCKS: dict[str, Case] = {
    "squeeze_excite": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), SqueezeExcite(8), nn.Conv2d(8, 8, 3)),
        IMAGE,
        2,
    ),
    "mobilenet": (MobileNet, IMAGE, 1),
    "efficientnet": (lambda: MobileNet(nn.SiLU), IMAGE, 1),
    "resnet": (ResNet, IMAGE, 1),
    "densenet": (DenseNet, IMAGE, 1),
    "convnext": (ConvNeXt, [(2, 3, 32, 32)], 1),
    "unet": (UNet, [(2, 4, 8, 8), (2, 16)], 2),
    "unet_of_convolutions": (lambda: UNet(ConvAttention), [(2, 4, 8, 8), (2, 16)], 3),
    "transposed_unet": (TransposedUNet, IMAGE, 2),
    "unet_3d": (UNet3d, [(1, 2, 4, 8, 8)], 2),
    "whisper_front": (WhisperFront, [(2, 8, 32)], 1),
    "audio": (Audio, [(2, 1, 64)], 1),
    "shufflenet": (ShuffleNet, IMAGE, 2),
    "patch_embedding": (PatchEmbedding, IMAGE, 1),
    "segmentation": (Segmentation, IMAGE, 2),
}
"""A network, the shapes of its inputs, and how many permutations stay: one for each image that goes
in or comes out, the shuffle of channels, and the keys of an attention that is written out."""
