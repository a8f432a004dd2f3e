"""What is measured on a CPU: forty programs of all kinds in sizes of one text or a few images, and
thirty random products.

Weights and inputs are float32; a third of the extents are odd. The names hold the full sizes.
"""

import itertools
import math
import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from .instance import Apply, Made, Product, RMSNorm, Sizes, Workload, applied
from .models import SwiGLU

PRODUCTS_SEED, PRODUCTS_COUNT = 2026, 30
MOST_ROWS, LEAST_EXTENT, MOST_EXTENT = 512, 64, 4096

Tensor = torch.Tensor


class ConvNorm(nn.Module):
    """A 3x3 convolution, batch norm and ReLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to [batch, channels, height, width]."""
        return F.relu(self.norm(self.conv(x)))


class Embedding(nn.Module):
    """Words and positions looked up, added and normalised."""

    def __init__(self, words: int, length: int, width: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, numbers: Tensor) -> Tensor:
        """Numbers of words [batch, length], to [batch, length, width]."""
        return self.norm(self.words(numbers) + self.positions.weight[: numbers.shape[1]])


class FeedForward(nn.Module):
    """x + down(gelu(up(norm(x))))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to the last axis."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class LSTMStep(nn.Module):
    """One step of an LSTM, its states as two tensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)

    def forward(self, x: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Apply to [batch, width] each."""
        return self.cell(x, (hidden, memory))


def _twice(x: Tensor) -> tuple[Tensor, Tensor]:
    e = torch.exp(x)
    return e / (1 + e), e * x


def _add_layernorm(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, F.layer_norm(total, weight.shape, weight, bias)


def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    mean = x.mean((0, 2, 3))
    return mean, (x * x).mean((0, 2, 3)) - mean * mean


def _softmax_by_hand(x: Tensor) -> Tensor:
    return torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)


def _layers(*widths: int) -> Callable[[Sizes], nn.Sequential]:
    """Linear layers with ReLU between them."""

    def make(sizes: Sizes) -> nn.Sequential:
        extents = [sizes.extent(width) for width in widths]
        parts: list[nn.Module] = []
        for inner, outer in itertools.pairwise(extents):
            parts += [nn.Linear(inner, outer), nn.ReLU()]
        return nn.Sequential(*parts[:-1])

    return make


def _on(make: Callable[[Sizes], nn.Module], *shape: int, batched: int = 0) -> Workload:
    """A module on normal values; the first `batched` extents are no sizes that are scaled."""

    def made(sizes: Sizes) -> Made:
        scaled = (n if i < batched else sizes.extent(n) for i, n in enumerate(shape))
        return make(sizes), (sizes.normal(*scaled),)

    return Workload(made)


def _linear(rows: int, terms: int, columns: int, *after: nn.Module) -> Workload:
    def make(sizes: Sizes) -> nn.Module:
        return nn.Sequential(nn.Linear(sizes.extent(terms), sizes.extent(columns)), *after)

    return _on(make, rows, terms)


def _images(function: Callable[..., Tensor], batch: int, channels: int, side: int) -> Workload:
    """A function of images and a number for each channel."""

    def make(sizes: Sizes) -> Made:
        b, c, n = sizes.count(batch), sizes.count(channels, 8), sizes.count(side, 7)
        return Apply(function), (sizes.normal(b, c, n, n), sizes.normal(c, 1, 1))

    return Workload(make)


def _heads(function: Callable[..., Tensor], batch: int, heads: int, length: int) -> Workload:
    """A function of queries, keys and values of 64 a head."""

    def make(sizes: Sizes) -> Made:
        shape = (batch, heads, sizes.extent(length), 64)
        return Apply(function), tuple(sizes.normal(*shape) for _ in range(3))

    return Workload(make)


def _written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v


def _cross_entropy(sizes: Sizes) -> Made:
    return Apply(F.cross_entropy), (sizes.large(512, 5003), sizes.labels(512, 5003))


def _embedding(sizes: Sizes) -> Made:
    words, length, width = sizes.extent(30522), sizes.extent(128), sizes.extent(256)
    module = Embedding(words, length, width)
    numbers = torch.randint(0, words, (4, length))
    return module, (numbers,), (words - len(set(numbers.flatten().tolist()))) * width * 4


def _lstm_step(sizes: Sizes) -> Made:
    width = sizes.extent(256)
    return LSTMStep(width), tuple(sizes.normal(16, width) for _ in range(3))


def _encoder(sizes: Sizes) -> nn.Module:
    width = sizes.extent(256)
    return nn.TransformerEncoderLayer(width, 4, 4 * width, activation="gelu", batch_first=True)


_POINTWISE = {
    "chain_1024x1024": applied(lambda x: torch.relu((x + 1) * 2) ** 2, (1024, 1024)),
    "bias_gelu_512x3072": applied(lambda x, b: F.gelu(x + b), (512, 3072), (3072,)),
    "gelu_tanh_197x3071": applied(lambda x: F.gelu(x, approximate="tanh"), (197, 3071)),
    "sigmoid_tanh_513x1023": applied(lambda x: torch.sigmoid(x) * torch.tanh(x + 1), (513, 1023)),
    "exp_twice_1000x777": applied(_twice, (1000, 777)),
    "scale_shift_relu_4x64x56x56": _images(lambda x, s: F.relu(x * s + s), 4, 64, 56),
}
_ROWS = {
    "softmax_512x1000": applied(lambda x: torch.softmax(x, -1), (512, 1000)),
    "softmax_12608x49": applied(lambda x: torch.softmax(x, -1), (12608, 49)),
    "softmax_by_hand_1000x333": applied(_softmax_by_hand, (1000, 333)),
    "log_softmax_256x10007": applied(lambda x: torch.log_softmax(x, -1), (256, 10007)),
    "layernorm_512x768": _on(lambda s: nn.LayerNorm(s.extent(768)), 512, 768),
    "layernorm_197x1023": _on(lambda s: nn.LayerNorm(s.extent(1023)), 197, 1023),
    "rmsnorm_128x4096": _on(lambda s: RMSNorm(s.extent(4096)), 128, 4096),
    "add_layernorm_384x1024": applied(_add_layernorm, (384, 1024), (384, 1024), (1024,), (1024,)),
    "groupnorm_silu_4x64x32x32": _images(
        lambda x, s: F.silu(F.group_norm(x, 8, s[:, 0, 0], s[:, 0, 0])), 4, 64, 32
    ),
    "cross_entropy_512x5003": Workload(_cross_entropy),
    "argmax_1024x1000": applied(lambda x: torch.argmax(x, -1), (1024, 1000)),
}
_COLUMNS = {
    "column_sums_2048x1024": applied(lambda x: x.sum(0), (2048, 1024)),
    "column_squares_1000x777": applied(lambda x: (x * x).mean(0), (1000, 777)),
    "mean_of_tokens_16x197x384": _on(lambda _: Apply(lambda x: x.mean(1)), 16, 197, 384, batched=1),
    "batch_statistics_8x64x28x28": _images(lambda x, _: _statistics(x), 8, 64, 28),
}
_LAYOUTS = {
    "transpose_add_1000x1031": applied(
        lambda x, y: torch.relu(x.permute(1, 0) + y), (1000, 1031), (1031, 1000)
    ),
    "heads_4x128x8x64": _on(
        lambda _: Apply(lambda x: (x * 0.125).permute(0, 2, 1, 3).contiguous()),
        *(4, 128, 8, 64),
        batched=1,
    ),
    "channels_last_8x64x56x56": _images(
        lambda x, s: F.relu(x + s).permute(0, 2, 3, 1).contiguous(), 8, 64, 56
    ),
    "max_pool_4x64x56x56": _images(lambda x, _: F.relu(F.max_pool2d(x, 3, 2, 1)), 4, 64, 56),
}
_PRODUCTS = {
    "linear_1x1024x1024": _linear(1, 1024, 1024, nn.ReLU()),
    "linear_gelu_128x256x1024": _linear(128, 256, 1024, nn.GELU()),
    "linear_silu_37x331x517": _linear(37, 331, 517, nn.SiLU()),
    "linear_gelu_512x768x3072": _linear(512, 768, 3072, nn.GELU()),
    "layers_64x784x256x10": _on(_layers(784, 256, 10), 64, 784),
    "batched_12x128x64x128": applied(lambda a, b: F.relu(a @ b), (12, 128, 64), (12, 64, 128)),
    "swiglu_128x256x688": _on(lambda s: SwiGLU(s.extent(256), s.extent(688)), 128, 256),
    "feed_forward_64x512x2048": _on(lambda s: FeedForward(s.extent(512), s.extent(2048)), 64, 512),
}
_LAYERS = {
    "attention_by_hand_1x8x128": _heads(_written_out, 1, 8, 128),
    "sdpa_2x8x256": _heads(F.scaled_dot_product_attention, 2, 8, 256),
    "sdpa_causal_1x6x197": _heads(
        lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True), 1, 6, 197
    ),
    "encoder_layer_1x128x256": _on(_encoder, 1, 128, 256, batched=1),
    "conv_bn_relu_1x64x56x56": _on(lambda _: ConvNorm(64), 1, 64, 56, 56, batched=4),
}
CPU: dict[str, Workload] = {
    **_POINTWISE,
    **_ROWS,
    **_COLUMNS,
    **_LAYOUTS,
    **_PRODUCTS,
    **_LAYERS,
    "embedding_norm_4x128x256": Workload(_embedding),
    "lstm_cell_16x256": Workload(_lstm_step),
}


def _random_products() -> dict[str, Workload]:
    """x W^T, extents drawn evenly over their logarithms, every second one made odd."""
    draw = random.Random(PRODUCTS_SEED)

    def extent(least: int, most: int) -> int:
        drawn = round(math.exp(draw.uniform(math.log(least), math.log(most))))
        return drawn | 1 if draw.random() < 0.5 else drawn & ~1 or 1

    found: dict[str, Workload] = {}
    while len(found) < PRODUCTS_COUNT:
        rows = min(extent(1, MOST_ROWS), MOST_ROWS)
        terms, columns = (min(extent(LEAST_EXTENT, MOST_EXTENT), MOST_EXTENT) for _ in range(2))
        found[f"product_{rows}x{terms}x{columns}"] = _product(rows, terms, columns)
    return found


def _product(rows: int, terms: int, columns: int) -> Workload:
    def make(sizes: Sizes) -> Made:
        extents = sizes.extent(columns), sizes.extent(terms)
        return Product(sizes, *extents), (sizes.large(rows, terms),)

    return Workload(make, plain=True)


CPU_PRODUCTS = _random_products()
