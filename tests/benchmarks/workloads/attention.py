"""Attention alone, of queries, keys and values that are given: head widths, masks, decoding.

The modules are written out, `softmax(mask(Q K^T / sqrt(d))) V`, with masks as comparisons of
indices. Where torch has a call of its own for the work, `scaled_dot_product_attention` or
`flex_attention`, that is a peer of the row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..peers.attention import Flex, flex, sdpa
from ..peers.names import FLEX, SDPA
from .instance import Apply, Made, Sizes, Workload

Tensor = torch.Tensor
Logits = Callable[..., Tensor]  # of scores and the inputs behind q, k and v

SOFTCAP = 50.0  # Gemma 2
WINDOW = 256
DOCUMENTS = 5


def indices(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of the queries, as a column, and of the keys."""
    queries, keys = scores.shape[-2:]
    device = scores.device
    return torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device)


def hidden_where(hidden: Tensor, scores: Tensor) -> Tensor:
    """Scores, -inf where a key is hidden."""
    return scores.masked_fill(hidden, float("-inf"))


def slopes(heads: int, device: Any) -> Tensor:
    """Of ALiBi: 2^(-8 h / heads) for the heads h from 1 (Press et al., 2022)."""
    return torch.exp2(-8.0 / heads * torch.arange(1, heads + 1, device=device))


def causal(scores: Tensor) -> Tensor:
    """Only keys up to the query."""
    i, j = indices(scores)
    return hidden_where(j > i, scores)


def alibi(scores: Tensor) -> Tensor:
    """Causal, with a bias that falls with the distance."""
    i, j = indices(scores)
    slope = slopes(scores.shape[-3], scores.device)
    return causal(scores + (slope[:, None, None] * (j - i)).to(scores.dtype))


def softcap(scores: Tensor) -> Tensor:
    """Scores kept below a bound, and causal."""
    return causal(SOFTCAP * torch.tanh(scores / SOFTCAP))


def window(scores: Tensor) -> Tensor:
    """Only the last keys up to the query."""
    i, j = indices(scores)
    return torch.where((j <= i) & (i - j < WINDOW), scores, float("-inf"))


def same_document(scores: Tensor, documents: Tensor) -> Tensor:
    """Only keys of the query's document, up to the query."""
    same = documents[:, None, :, None] == documents[:, None, None, :]
    i, j = indices(scores)
    return torch.where(same & (j <= i), scores, float("-inf"))


def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, logits: Logits | None = None) -> Tensor:
    """Attention on [batch, heads, length, width], the softmax in float32 at least."""
    scores = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    if logits is not None:
        scores = logits(scores, *rest)
    wide = scores if scores.dtype == torch.float64 else scores.float()
    return torch.matmul(torch.softmax(wide, dim=-1).to(v.dtype), v)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Several heads of queries to one of keys and values, which are repeated as Llama does."""
    batch, heads, _, width = q.shape
    groups = heads // k.shape[1]

    def repeated(x: Tensor) -> Tensor:
        x = x[:, :, None].expand(-1, -1, groups, -1, -1)
        return x.reshape(batch, heads, -1, width)

    return attend(q, repeated(k), repeated(v))


def by_rows(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Attention on [batch, length, heads * width]."""
    parts = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return attend(*parts).transpose(1, 2).flatten(2)


@dataclass(frozen=True, slots=True)
class Case:
    """Shapes and a mask.

    Attributes
    ----------
    width : of a head.
    logits : what is done to the scores.
    batch, heads, key_heads, queries, keys : extents.
    """

    width: int = 128
    logits: Logits | None = None
    batch: int = 2
    heads: int = 16
    key_heads: int = 16
    queries: int = 2048
    keys: int = 2048

    def tensors(self, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v on [batch, heads, length, width]."""
        batch, key_heads = sizes.count(self.batch, 1), sizes.count(self.key_heads)
        heads = key_heads * (self.heads // self.key_heads)
        queries = self.queries if self.queries == 1 else sizes.extent(self.queries)
        keys = sizes.extent(self.keys)
        return (
            sizes.normal(batch, heads, queries, self.width),
            sizes.normal(batch, key_heads, keys, self.width),
            sizes.normal(batch, key_heads, keys, self.width),
        )

    def workload(self, **peers: Any) -> Workload:
        """The written-out module, and what torch has for it."""

        def made(sizes: Sizes) -> Made:
            q, k, v = self.tensors(sizes)
            function = grouped if k.shape[1] != q.shape[1] else _with(self.logits)
            return Apply(function), (q, k, v, *_more(self.logits, sizes, q, k))

        share = self.visible_share
        return Workload(made, "float16", peers=peers, wall=True, flop_share=share)

    @property
    def visible_share(self) -> float:
        """The part of the scores that the mask leaves."""
        length = self.keys
        below = (length + 1) / (2 * length)
        if self.logits is window:
            return WINDOW * (length - (WINDOW - 1) / 2) / length**2
        if self.logits is same_document:
            return below / DOCUMENTS
        return below if self.logits in (causal, alibi, softcap) else 1.0


def _with(logits: Logits | None) -> Callable[..., Tensor]:
    return lambda q, k, v, *rest: attend(q, k, v, *rest, logits=logits)


def _more(logits: Logits | None, sizes: Sizes, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """The inputs behind q, k and v."""
    batch, length = q.shape[0], q.shape[2]
    if logits is added_mask:
        return (sizes.normal(batch, 1, length, k.shape[2]),)
    if logits is same_document:
        number = torch.arange(length, device=sizes.device) * DOCUMENTS // length
        return (number.repeat(batch, 1),)
    return ()


def added_mask(scores: Tensor, mask: Tensor) -> Tensor:
    """Scores and a mask that is given."""
    return scores + mask


def _shown(logits: Logits, q: Tensor, k: Tensor, *rest: Tensor) -> Tensor:
    """The mask that `logits` makes, to add to scores."""
    zero = q.new_zeros(1, q.shape[1] if logits is alibi else 1, q.shape[2], k.shape[2])
    return logits(zero, *rest)


def _masked(logits: Logits) -> Callable[..., Callable[..., Tensor]]:
    """The library's attention with a mask that is there beforehand."""

    def make(q: Tensor, k: Tensor, _v: Tensor, *rest: Tensor) -> Callable[..., Tensor]:
        mask = _shown(logits, q, k, *rest)
        return lambda q, k, v, *_: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return sdpa(make)


def _called(**options: Any) -> Callable[..., Callable[..., Tensor]]:
    """The library's attention."""
    return sdpa(lambda *_: lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options))


def _rows_called(q: Tensor, *_: Tensor) -> Callable[..., Tensor]:
    """The library's attention on [batch, length, heads * width]."""

    def call(*tensors: Tensor) -> Tensor:
        parts = (x.unflatten(-1, (q.shape[-1] // 128, -1)).transpose(1, 2) for x in tensors)
        return F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)

    return call


def _make_rows(sizes: Sizes) -> Made:
    heads = sizes.count(16)
    shape = (sizes.count(2, 1), sizes.extent(2048), heads * 128)
    inputs = tuple(sizes.normal(*shape) for _ in range(3))
    return Apply(lambda q, k, v: by_rows(q, k, v, heads)), inputs


def _make_called(sizes: Sizes) -> Made:
    return Apply(F.scaled_dot_product_attention), Case().tensors(sizes)


def _below(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return j <= i


def _in_window(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (j <= i) & (i - j < WINDOW)


def _flex_alibi(q: Tensor, *_: Tensor) -> Flex:
    slope = slopes(q.shape[1], q.device)
    return Flex(lambda s, _b, h, i, j: s + slope[h] * (j - i), _below)


def _flex_softcap(*_: Tensor) -> Flex:
    return Flex(lambda s, _b, _h, _i, _j: SOFTCAP * torch.tanh(s / SOFTCAP), _below)


def _flex_documents(_q: Tensor, _k: Tensor, _v: Tensor, documents: Tensor) -> Flex:
    return Flex(mask=lambda b, _h, i, j: (documents[b, i] == documents[b, j]) & (j <= i))


_GROUPED = {SDPA: _called(enable_gqa=True)}
_DECODE = {"heads": 32, "key_heads": 8, "queries": 1}

ATTENTION: dict[str, Workload] = {
    **{
        f"attention_d{width}": Case(width).workload(**{SDPA: _called()})
        for width in (128, 64, 80, 96, 256)
    },
    **{
        f"attention_causal_d{width}": Case(width, causal).workload(
            **{SDPA: _called(is_causal=True), FLEX: flex(lambda *_: Flex(mask=_below))}
        )
        for width in (128, 64)
    },
    "attention_called": Workload(
        _make_called, "float16", peers={SDPA: _called()}, wall=True
    ),  # our import of the library's attention
    "attention_rows": Workload(_make_rows, "float16", peers={SDPA: sdpa(_rows_called)}, wall=True),
    "attention_grouped": Case(heads=32, key_heads=8).workload(**_GROUPED),
    "attention_cross": Case(keys=1500).workload(**{SDPA: _called()}),
    "attention_mask": Case(logits=added_mask).workload(
        **{
            SDPA: sdpa(
                lambda *_: lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m)
            )
        }
    ),
    "attention_alibi": Case(logits=alibi).workload(
        **{SDPA: _masked(alibi), FLEX: flex(_flex_alibi)}
    ),
    "attention_softcap": Case(logits=softcap).workload(**{FLEX: flex(_flex_softcap)}),
    "attention_window": Case(logits=window).workload(
        **{SDPA: _masked(window), FLEX: flex(lambda *_: Flex(mask=_in_window))}
    ),
    "attention_document": Case(logits=same_document).workload(
        **{SDPA: _masked(same_document), FLEX: flex(_flex_documents)}
    ),
    "decode_32x8192": Case(batch=32, keys=8192, **_DECODE).workload(**_GROUPED),
    "decode_1x2048": Case(batch=1, **_DECODE).workload(**_GROUPED),
    "decode_16x2048": Case(batch=16, **_DECODE).workload(**_GROUPED),
}
