"""Programs of all kernel families, with sizes that `torch.export` keeps open.

A program has one number, its size, of which the shapes of its inputs are made: where it has several
symbolic sizes, they are functions of that number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

from tvm_fusion.demo import rope_tables

from ..real_models.models import Where
from ..workloads.attention import attend
from ..workloads.conv import ConvNorm, channels_last, settle, with_format
from ..workloads.instance import Apply, RMSNorm, wide
from ..workloads.models import Block, SwiGLU

Tensor = torch.Tensor
Inputs = Callable[[int], tuple[Tensor, ...]]
Make = Callable[[Where, int], tuple[nn.Module, Inputs]]

ODD = 7  # a size of all programs
TINY = 33  # the largest size of small programs


@dataclass(frozen=True, slots=True)
class Program:
    """A program and what of it is symbolic.

    Attributes
    ----------
    make : callable
        Takes a `Where` and the largest size; gives the module and what makes inputs of a size.
    axes : tuple
        Of each input a mapping from axes to names of symbolic sizes; "8*s" are multiples of 8.
    largest, least : int
        Sizes.
    bounds : mapping of str to callable
        The largest value of symbolic sizes that are others than the program's size, by that one.
    """

    make: Make
    axes: tuple[Mapping[int, str], ...]
    largest: int
    bounds: Mapping[str, Callable[[int], int]]
    least: int

    def most(self, tiny: bool) -> int:
        """The largest size, that of a small program if it is `tiny`."""
        return TINY if tiny else self.largest

    def dynamic_shapes(self, module: nn.Module, tiny: bool) -> Any:
        """What `torch.export` takes for the module."""
        most, dims = self.most(tiny), {}

        def dim(name: str) -> Any:
            factor, _, symbol = name.rpartition("*")
            if symbol not in dims:
                bound = self.bounds.get(symbol, lambda size: size)(most)
                dims[symbol] = Dim(symbol, min=self.least, max=bound)
            return int(factor) * dims[symbol] if factor else dims[symbol]

        shapes = tuple({axis: dim(name) for axis, name in each.items()} for each in self.axes)
        return (shapes,) if isinstance(module, Apply) else shapes  # all inputs are one parameter


PROGRAMS: dict[str, Program] = {}


def program(
    largest: int, *axes: Mapping[int, str], least: int = 1, **bounds: Callable[[int], int]
) -> Callable[[Make], Make]:
    """Enter what a function makes among `PROGRAMS`, by its name."""

    def enter(make: Make) -> Make:
        PROGRAMS[make.__name__] = Program(make, axes, largest, bounds, least)
        return make

    return enter


def made(name: str, where: Where) -> tuple[nn.Module, Inputs]:
    """A program of this name, in evaluation mode, and what makes its inputs of a size; equal
    arguments give equal numbers.
    """
    torch.manual_seed(0)
    one = PROGRAMS[name]
    with torch.device(where.device):
        module, draw = one.make(where, one.most(where.tiny))
    module = module.to(where.device, where.dtype).eval().requires_grad_(False)

    def inputs(size: int) -> tuple[Tensor, ...]:
        torch.manual_seed(size)
        return draw(size)

    return module, inputs


# ---- rows and columns


@program(20_001, {0: "rows"}, {0: "rows"})
def mean_squared(where, _most):
    width = where.of(1024, 64)
    module = Apply(lambda x, y: (wide(x) - wide(y)).square().mean())
    return module, lambda n: (where.normal(n, width), where.normal(n, width))


@program(8192, {1: "columns"})
def softmax_columns(where, _most):
    rows = where.of(4096, 64)
    return Apply(lambda x: torch.softmax(x, -1)), lambda n: (where.normal(rows, n),)


@program(8192, {1: "columns"})
def layer_norm_columns(where, _most):
    rows = where.of(4096, 64)
    module = Apply(lambda x: F.layer_norm(x, x.shape[-1:]))
    return module, lambda n: (where.normal(rows, n),)


class AddRMSNorm(nn.Module):
    """A residual, and a norm of the sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = RMSNorm(width)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Both."""
        h = x + residual
        return h, self.norm(h)


@program(8192, {0: "rows"}, {0: "rows"})
def rows(where, _most):
    width = where.of(4096, 64)
    return AddRMSNorm(width), lambda n: (where.normal(n, width), where.normal(n, width))


@program(20_001, {0: "rows"})
def column_sums(where, _most):
    width = where.of(1024, 64)
    return Apply(lambda x: F.silu(wide(x)).sum(0).to(x.dtype)), lambda n: (where.normal(n, width),)


def _int8(x: Tensor) -> tuple[Tensor, Tensor]:
    y = wide(x)
    scale = y.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
    return torch.round(y / scale).clamp(-127, 127).to(torch.int8), scale


@program(8192, {0: "rows"})
def int8_rows(where, _most):
    width = where.of(4096, 64)
    return Apply(_int8), lambda n: (where.normal(n, width),)


@program(32_768, {1: "columns"})
def argmax_columns(where, _most):
    rows = where.of(64, 8)

    def inputs(n: int) -> tuple[Tensor]:
        x, place = where.normal(rows, n), torch.randint(0, n, (rows, 1), device=where.device)
        return (x.scatter_(1, place, 10.0),)  # one is the largest, whatever is rounded

    return Apply(lambda x: torch.argmax(x, -1)), inputs


@program(32_768, {1: "columns"})
def cumsum_columns(where, _most):
    rows = where.of(256, 8)
    module = Apply(lambda x: torch.cumsum(wide(x), -1).to(x.dtype))
    return module, lambda n: (where.normal(rows, n),)


@program(4096, {0: "n", 1: "m"}, {0: "m", 1: "n"}, m=lambda n: n // 2 + 1)
def transposed_sum(where, _most):
    def inputs(n: int) -> tuple[Tensor, Tensor]:
        m = n // 2 + 1
        return where.normal(n, m), where.normal(m, n)

    return Apply(lambda x, y: torch.relu(x + y.t())), inputs


# ---- products


@program(4096, {0: "tokens"})
def swiglu(where, _most):
    width, inner = where.of((2048, 5632), (64, 96))
    return SwiGLU(width, inner), lambda n: (where.normal(n, width),)


@program(4096, {0: "tokens"})
def linear_gelu(where, _most):
    width, inner = where.of((2048, 8192), (64, 128))
    return nn.Sequential(nn.Linear(width, inner), nn.GELU()), lambda n: (where.normal(n, width),)


class LastToken(nn.Module):
    """The scores of the word behind a text: a norm, the last token, a head."""

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.norm, self.head = RMSNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it to [texts, tokens, width]."""
        return self.head(self.norm(x)[:, -1])


@program(4096, {1: "tokens"})
def last_token(where, _most):
    width, words = where.of((2048, 32_000), (64, 99))
    return LastToken(width, words), lambda n: (where.normal(1, n, width),)


class Merged(nn.Module):
    """Eight neighbours side by side, a norm and a product, as between stages of a network."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(8 * width), nn.Linear(8 * width, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it to [8 tokens, width]."""
        return self.reduction(self.norm(x.reshape(x.shape[0] // 8, 8 * x.shape[1])))


@program(2048, {0: "8*s"}, least=2)  # torch.export tells one token from several
def multiples_of_8(where, _most):
    width, out = where.of((256, 1024), (16, 48))
    return Merged(width, out), lambda s: (where.normal(8 * s, width),)


# ---- attention, and layers with it


def _biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return attend(q, k, v, bias, logits=lambda scores, bias: scores + bias)


@program(2000, {2: "n"}, {2: "n"}, {2: "n"}, {2: "n", 3: "n"})
def t5_attention(where, _most):
    heads = where.of(12, 2)

    def inputs(n: int) -> tuple[Tensor, ...]:
        return (*(where.normal(1, heads, n, 64) for _ in range(3)), where.normal(1, heads, n, n))

    return Apply(_biased), inputs


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@program(8192, {}, {2: "keys"}, {2: "keys"})
def decode_attention(where, _most):
    batch, heads, key_heads, width = where.of((8, 32, 8, 128), (2, 4, 2, 64))

    def inputs(n: int) -> tuple[Tensor, ...]:
        cache = (batch, key_heads, n, width)
        return where.normal(batch, heads, 1, width), where.normal(*cache), where.normal(*cache)

    return Apply(_grouped), inputs


@program(2048, {2: "queries"}, {2: "keys"}, {2: "keys"}, keys=lambda n: n // 2 + 3)
def cross_attention(where, _most):
    heads = where.of(16, 2)

    def inputs(n: int) -> tuple[Tensor, ...]:
        keys = (1, heads, n // 2 + 3, 64)
        return where.normal(1, heads, n, 64), where.normal(*keys), where.normal(*keys)

    return Apply(F.scaled_dot_product_attention), inputs


def _with_past(q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor) -> tuple:
    keys, values = torch.cat((past_k, k), 2), torch.cat((past_v, v), 2)
    return F.scaled_dot_product_attention(q, keys, values), keys, values


_NEW, _PAST = {2: "new"}, {2: "past"}


@program(4096, _NEW, _NEW, _NEW, _PAST, _PAST, new=lambda past: past // 16 + 2)
def past_and_new(where, _most):
    heads = where.of(16, 2)

    def inputs(past: int) -> tuple[Tensor, ...]:
        new, before = (1, heads, past // 16 + 2, 64), (1, heads, past, 64)
        return (*(where.normal(*new) for _ in range(3)), *(where.normal(*before) for _ in range(2)))

    return Apply(_with_past), inputs


class SelfAttention(nn.Module):
    """torch's attention within a text, between the products of a layer."""

    def __init__(
        self, width: int, heads: int, key_heads: int | None = None, bias: bool = True
    ) -> None:
        super().__init__()
        self.heads, self.key_heads = heads, key_heads or heads
        self.head_width = width // heads
        inner = (heads + 2 * self.key_heads) * self.head_width
        self.qkv, self.out = nn.Linear(width, inner, bias=bias), nn.Linear(width, width, bias=bias)

    def placed(self, x: Tensor) -> Tensor:
        """Queries or keys [batch, tokens, heads, head width] with what tells their places."""
        return x

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend within [batch, tokens, width], where a mask says or to what came before."""
        counts = (self.heads, self.key_heads, self.key_heads)
        parts = self.qkv(x).split([count * self.head_width for count in counts], -1)
        q, k, v = (x.unflatten(-1, (count, -1)) for x, count in zip(parts, counts, strict=True))
        q, k, v = (x.transpose(1, 2) for x in (self.placed(q), self.placed(k), v))
        grouped = self.heads != self.key_heads
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class RotarySelfAttention(SelfAttention):
    """The same with RoPE, whose tables are cut to the text."""

    def __init__(self, width: int, heads: int, key_heads: int, length: int) -> None:
        super().__init__(width, heads, key_heads, bias=False)
        tables = rope_tables(length, self.head_width, "float32")
        for name, table in zip(("cos", "sin"), tables, strict=True):
            self.register_buffer(name, torch.as_tensor(table))

    def placed(self, x: Tensor) -> Tensor:
        """Turned by their places."""
        first, second = x.chunk(2, -1)
        cos, sin = (table[:, : x.shape[1]] for table in (self.cos, self.sin))
        return x * cos + torch.cat((-second, first), -1) * sin


@program(4000, {1: "tokens"})
def llama_layer(where, most):
    width, inner, heads, key_heads = where.of((2048, 8192, 32, 8), (64, 96, 4, 2))
    attention = RotarySelfAttention(width, heads, key_heads, most)
    return Block(width, inner, attention), lambda n: (where.normal(1, n, width),)


class GPT2Block(nn.Module):
    """A block with norms in front, on [batch, tokens, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), SelfAttention(width, heads)
        self.mlp_norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        x = x + self.attention(self.norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


@program(1024, {1: "tokens"})
def gpt2_block(where, _most):
    width, heads = where.of((768, 12), (64, 2))
    return GPT2Block(width, heads), lambda n: (where.normal(4, n, width),)


class BertLayer(nn.Module):
    """A layer with norms behind, on [texts, tokens, width] and a mask of what is no padding."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.norm = SelfAttention(width, heads), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.out_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, is_word: Tensor) -> Tensor:
        """Apply the layer."""
        x = self.norm(x + self.attention(x, is_word[:, None, None]))
        return self.out_norm(x + self.down(F.gelu(self.up(x))))


@program(64, {0: "batch"}, {0: "batch"})
def bert_layer(where, _most):
    width, heads, tokens = where.of((768, 12, 128), (64, 2, 12))

    def inputs(n: int) -> tuple[Tensor, Tensor]:
        place = torch.arange(tokens, device=where.device)
        words = torch.randint(1, tokens + 1, (n, 1), device=where.device)
        return where.normal(n, tokens, width), place < words

    return BertLayer(width, heads), inputs


# ---- images, lines, steps


def _image(where: Where, *shape: int) -> Tensor:
    x = where.normal(*shape)
    return x if where.device == "cpu" else channels_last(x)


@program(112, {2: "side", 3: "side"})
def conv_side(where, _most):
    channels, filters = where.of((64, 128), (8, 16))
    conv = nn.Conv2d(channels, filters, 3, padding=1, bias=False)
    module = with_format(settle(ConvNorm(conv, 2)))
    return module, lambda n: (_image(where, where.of(8, 2), channels, n, n),)


class Bottleneck(nn.Module):
    """Three convolutions and a residual, as in ResNet-50."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.first = ConvNorm(nn.Conv2d(channels, inner, 1, bias=False), 2)
        self.second = ConvNorm(nn.Conv2d(inner, inner, 3, padding=1, bias=False), 2)
        self.last = ConvNorm(nn.Conv2d(inner, channels, 1, bias=False), 2, residual=True)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        return self.last(self.second(self.first(x)), x)


@program(64, {0: "batch"})
def conv_batch(where, _most):
    channels, inner, side = where.of((512, 128, 28), (16, 8, 6))
    module = with_format(settle(Bottleneck(channels, inner)))
    return module, lambda n: (_image(where, n, channels, side, side),)


@program(8192, {2: "length"})
def depthwise_line(where, _most):
    channels = where.of(512, 16)
    conv = nn.Conv1d(channels, channels, 7, padding=3, groups=channels)
    return nn.Sequential(conv, nn.SiLU()), lambda n: (where.normal(where.of(4, 2), channels, n),)


@program(224, {2: "side", 3: "side"}, least=3)  # torch.export tells one window from several
def pool_side(where, _most):
    channels = where.of(64, 8)
    module = Apply(lambda x: F.max_pool2d(torch.relu(x), 3, 2, 1))
    return module, lambda n: (_image(where, where.of(8, 2), channels, n, n),)


class LastState(nn.Module):
    """What an LSTM knows behind the last step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it to [batch, steps, width]."""
        return self.lstm(x)[0][:, -1]


@program(64, {0: "batch"})
def lstm_batch(where, _most):
    width, steps = where.of((256, 32), (16, 5))
    return LastState(width), lambda n: (where.normal(n, steps, width),)
