"""Whole models for the time that compiling takes: language models, encoders, networks, one layer.

Their sizes are those of GPT-2, BERT base, ViT B/16, a Llama of 16 layers with 1.1B parameters,
Llama 3 8B, and of the networks' papers; weights are random, language models give the scores of the
next token. `scale` leaves fewer layers, of less width.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .instance import Made, RMSNorm, Sizes, Workload
from .models import SwiGLU
from .vision import CLASSES, Head, Inverted, conv, densenet, googlenet, network, resnet

LENGTH = 512  # of a text, in tokens


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a model of layers: their number and width, heads, heads of keys, inner width, words."""

    layers: int
    width: int
    heads: int
    key_heads: int
    inner: int
    words: int

    def scaled(self, sizes: Sizes) -> "Shape":
        """As `scale` leaves it; heads keep their width."""
        heads = sizes.count(self.heads, 4)
        return Shape(
            sizes.count(self.layers, 1),
            self.width // self.heads * heads,
            heads,
            max(1, heads * self.key_heads // self.heads),
            sizes.extent(self.inner),
            sizes.extent(self.words),
        )


GPT2 = Shape(12, 768, 12, 12, 3072, 50257)
BERT_BASE = Shape(12, 768, 12, 12, 3072, 30522)
BERT_TINY = Shape(2, 128, 2, 2, 512, 30522)
VIT_B16 = Shape(12, 768, 12, 12, 3072, CLASSES)
LLAMA_1B = Shape(16, 2048, 32, 8, 8192, 32000)
LLAMA_8B = Shape(32, 4096, 32, 8, 14336, 128256)


class SelfAttention(nn.Module):
    """Attention within a text; `rotary` tables turn queries and keys."""

    def __init__(self, shape: Shape, bias: bool, causal: bool) -> None:
        super().__init__()
        self.head, self.causal = shape.width // shape.heads, causal
        narrow = self.head * shape.key_heads
        self.query = nn.Linear(shape.width, shape.width, bias)
        self.key = nn.Linear(shape.width, narrow, bias)
        self.value = nn.Linear(shape.width, narrow, bias)
        self.out = nn.Linear(shape.width, shape.width, bias)

    def forward(
        self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Attend within [batch, length, width]."""
        batch, length, width = x.shape
        q, k, v = (
            part(x).reshape(batch, length, -1, self.head).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        if rotary is not None:
            q, k = (_turned(part, *rotary) for part in (q, k))
        grouped = k.shape[1] != q.shape[1]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=grouped)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Layer(nn.Module):
    """A layer with layer norms, before its parts or behind them."""

    def __init__(self, shape: Shape, before: bool, causal: bool) -> None:
        super().__init__()
        self.before = before
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention = SelfAttention(shape, True, causal)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, shape.inner), nn.GELU(), nn.Linear(shape.inner, shape.width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer."""
        if self.before:
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mlp(x))


class LlamaLayer(nn.Module):
    """A layer of Llama."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(shape.width), RMSNorm(shape.width)
        self.attention = SelfAttention(shape, False, True)
        self.mlp = SwiGLU(shape.width, shape.inner)

    def forward(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Apply the layer."""
        x = x + self.attention(self.norm1(x), rotary)
        return x + self.mlp(self.norm2(x))


class Text(nn.Module):
    """Tokens and places to hidden states, with layers between; a head gives the scores of words."""

    def __init__(self, shape: Shape, before: bool, causal: bool, head: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.words, shape.width)
        self.places = nn.Embedding(LENGTH, shape.width)
        self.norm = nn.LayerNorm(shape.width)
        self.first = not before
        self.layers = nn.Sequential(*(Layer(shape, before, causal) for _ in range(shape.layers)))
        self.head = nn.Linear(shape.width, shape.words, bias=False) if head else nn.Identity()
        if head:
            self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Apply it to [batch, length]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.places(places)
        x = self.layers(self.norm(x)) if self.first else self.norm(self.layers(x))
        return self.head(x)


class Llama(nn.Module):
    """Llama with its rotary tables as buffers."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.words, shape.width, dtype=dtype)
        self.layers = nn.ModuleList(LlamaLayer(shape).to(dtype) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.words, bias=False, dtype=dtype)
        head = shape.width // shape.heads
        turns = 5e5 ** -(torch.arange(0, head, 2) / head)
        angles = torch.outer(torch.arange(LENGTH), torch.cat([turns, turns]))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Apply it to [batch, length]."""
        x, length = self.words(tokens), tokens.shape[1]
        rotary = (self.cos[:length], self.sin[:length])
        for layer in self.layers:
            x = layer(x, rotary)
        return self.head(self.norm(x))


class Vision(nn.Module):
    """ViT: patches of 16 x 16 as words."""

    def __init__(self, shape: Shape, side: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, shape.width, 16, 16)
        self.kind = nn.Parameter(torch.randn(1, 1, shape.width))
        self.places = nn.Parameter(torch.randn(1, (side // 16) ** 2 + 1, shape.width))
        self.layers = nn.Sequential(*(Layer(shape, True, False) for _ in range(shape.layers)))
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, shape.words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply it to [batch, 3, side, side]."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.kind.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.norm(self.layers(x))[:, 0])


def mobilenet_v2() -> nn.Module:
    """MobileNetV2."""
    rows = (  # factor, filters, count, stride
        *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
        *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
    )
    parts: list[nn.Module] = [conv(3, 32, 3, 2, act=nn.ReLU6)]
    channels = 32
    for factor, filters, count, stride in rows:
        for i in range(count):
            step = stride if i == 0 else 1
            wide = channels * factor
            parts.append(Inverted(channels, wide, filters, 3, step, nn.ReLU6, None, 1e-5))
            channels = filters
    parts.append(conv(channels, 1280, act=nn.ReLU6))
    return nn.Sequential(*parts, Head(nn.Linear(1280, CLASSES)))


def _text(shape: Shape, before: bool, causal: bool, head: bool, length: int = LENGTH) -> Workload:
    def make(sizes: Sizes) -> Made:
        mine = shape.scaled(sizes)
        tokens = torch.randint(0, mine.words, (1, sizes.extent(length)), device=sizes.device)
        return Text(mine, before, causal, head), (tokens,)

    return Workload(make)


def _llama(shape: Shape) -> Workload:
    def make(sizes: Sizes) -> Made:
        mine = shape.scaled(sizes)
        tokens = torch.randint(0, mine.words, (1, sizes.extent(LENGTH)), device=sizes.device)
        return Llama(mine, sizes.dtype), (tokens,)

    return Workload(make)


def _vit(sizes: Sizes) -> Made:
    side = sizes.multiple(224, 16)
    return Vision(VIT_B16.scaled(sizes), side), (sizes.normal(1, 3, side, side),)


def _linear_gelu(sizes: Sizes) -> Made:
    width = sizes.extent(1024)
    module = nn.Sequential(nn.Linear(width, width), nn.GELU())
    return module, (sizes.normal(sizes.extent(512), width),)


TEXTS: dict[str, Workload] = {
    "gpt2": _text(GPT2, before=True, causal=True, head=True),
    "bert_base": _text(BERT_BASE, before=False, causal=False, head=False),
    "vit_b16": Workload(_vit),
    "llama_1b": _llama(LLAMA_1B),
    "llama_8b": _llama(LLAMA_8B),
}
DEEP_NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "googlenet": googlenet,
    "densenet201": lambda: densenet((6, 12, 48, 32)),
    "resnet101": lambda: resnet((3, 4, 23, 3)),
    "mobilenet_v2": mobilenet_v2,
}
WHOLE_MODELS: dict[str, Workload] = {
    **TEXTS,
    **{f"{name}_b1": network(make, 1) for name, make in DEEP_NETWORKS.items()},
    "linear_gelu": Workload(_linear_gelu),
}
WHOLE_MODELS_CPU: dict[str, Workload] = {
    "bert_tiny": _text(BERT_TINY, before=False, causal=False, head=False, length=128)
}
