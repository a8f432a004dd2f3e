"""A small language model with a paged cache of keys and values, as compilers for such models have
it: functions `embed`, `prefill` and `decode` over the same weights, and one that makes the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tvm
from tvm import te, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache, RopeMode, TIRPagedKVCache

Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; those of TinyLlama by default, but for the number of layers."""

    layers: int = 1
    width: int = 2048
    inner: int = 5632
    heads: int = 32
    groups: int = 4  # heads of keys and values
    words: int = 32000
    dtype: str = "float16"
    epsilon: float = 1e-5
    theta: int = 10000

    @property
    def head(self) -> int:
        """Columns of a head."""
        return self.width // self.heads


class _Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        columns = (shape.heads + 2 * shape.groups) * shape.head
        self.qkv = nn.Linear(shape.width, columns, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: nn.Tensor, cache: PagedKVCache, layer: int) -> nn.Tensor:
        shape, (batch, length, _) = self.shape, x.shape
        heads = shape.heads + 2 * shape.groups
        qkv = nn.op.reshape(self.qkv(x), (batch, length, heads, shape.head))
        mixed = cache.attention_with_fused_qkv(layer, qkv, shape.heads, shape.head**-0.5)
        return self.out(nn.op.reshape(mixed, (batch, length, shape.width)))


class _Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention = _Attention(shape)
        self.before = nn.RMSNorm(shape.width, -1, shape.epsilon, bias=False)
        self.between = nn.RMSNorm(shape.width, -1, shape.epsilon, bias=False)
        self.gate_up = nn.Linear(shape.width, 2 * shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: nn.Tensor, cache: PagedKVCache, layer: int) -> nn.Tensor:
        x = self.attention(self.before(x), cache, layer) + x
        gate, up = nn.op.split(self.gate_up(self.between(x)), 2, axis=-1)
        return self.down(nn.op.silu(gate) * up) + x


class LanguageModel(nn.Module):
    """Logits of the next word."""

    def __init__(self, shape: Shape, target: tvm.target.Target) -> None:
        super().__init__()
        self.shape, self.target = shape, target
        self.words = nn.Embedding(shape.words, shape.width)
        self.layers = nn.ModuleList([_Layer(shape) for _ in range(shape.layers)])
        self.norm = nn.RMSNorm(shape.width, -1, shape.epsilon, bias=False)
        self.head = nn.Linear(shape.width, shape.words, bias=False)
        self.to(shape.dtype)

    def embed(self, words: nn.Tensor) -> nn.Tensor:
        """(n,) -> (n, width)."""
        return self.words(words)

    def prefill(self, x: nn.Tensor, cache: PagedKVCache) -> tuple[nn.Tensor, PagedKVCache]:
        """(1, n, width) -> (1, 1, words)."""

        def last(h: te.Tensor) -> te.Tensor:
            batch, length, width = h.shape
            return te.compute((batch, 1, width), lambda b, _, k: h[b, length - 1, k], name="last")

        h = nn.op.tensor_expr_op(last, "last", [self._layers(x, cache)])
        return self._logits(h), cache

    def decode(self, x: nn.Tensor, cache: PagedKVCache) -> tuple[nn.Tensor, PagedKVCache]:
        """(1, 1, width) -> (1, 1, words)."""
        return self._logits(self._layers(x, cache)), cache

    def _layers(self, x: nn.Tensor, cache: PagedKVCache) -> nn.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x, cache, number)
        return self.norm(x)

    def _logits(self, h: nn.Tensor) -> nn.Tensor:
        logits = self.head(h)
        return logits.astype("float32") if logits.dtype != "float32" else logits

    def make_cache(
        self,
        max_batch: tirx.Var,
        max_length: tirx.Var,
        chunk: tirx.Var,
        page: tirx.Var,
    ) -> PagedKVCache:
        """An empty cache."""
        shape = self.shape
        return TIRPagedKVCache(
            attn_kind="mha",
            max_batch_size=max_batch,
            max_total_seq_len=max_length,
            prefill_chunk_size=chunk,
            page_size=page,
            support_sliding_window=0,
            layer_partition=tvm.relax.ShapeExpr([0, shape.layers]),
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.groups,
            qk_head_dim=shape.head,
            v_head_dim=shape.head,
            mla_original_qk_head_dim=0,
            mla_original_v_head_dim=0,
            rope_mode=RopeMode.NORMAL,
            rope_scale=1,
            rope_theta=shape.theta,
            rope_scaling={},
            rope_ext_factors=tvm.relax.prim_value(0),
            rotary_dim=shape.head,
            enable_disaggregation=False,
            dtype=shape.dtype,
            target=self.target,
        )


def language_model(
    shape: Shape, target: tvm.target.Target
) -> tuple[tvm.IRModule, list[tuple[str, nn.Parameter]]]:
    """The module, and its weights by name in the order of its parameters."""
    cache = nn.spec.Object(object_type=PagedKVCache)
    plain = {"param_mode": "packed", "effect_mode": "none"}
    functions = {
        "embed": {"words": nn.spec.Tensor(["n"], "int32"), "$": plain},
        "prefill": {
            "x": nn.spec.Tensor([1, "n", shape.width], shape.dtype),
            "cache": cache,
            "$": plain,
        },
        "decode": {
            "x": nn.spec.Tensor([1, 1, shape.width], shape.dtype),
            "cache": cache,
            "$": plain,
        },
        "make_cache": {
            "max_batch": int,
            "max_length": int,
            "chunk": int,
            "page": int,
            "$": {"param_mode": "none", "effect_mode": "none"},
        },
    }
    mod, parameters = LanguageModel(shape, target).export_tvm(functions)
    return mod, parameters


# ---- the same in NumPy


def embedded(shape: Shape, weights: Weights, words: np.ndarray) -> np.ndarray:
    """(n,) -> (n, width)."""
    return weights["words.weight"][words]


def logits(shape: Shape, weights: Weights, x: np.ndarray) -> np.ndarray:
    """Of the last of n positions: (n, width) -> (words,)."""
    x = x.astype("float64")
    for layer in range(shape.layers):
        own = {
            name.removeprefix(f"layers.{layer}."): value.astype("float64")
            for name, value in weights.items()
            if name.startswith(f"layers.{layer}.")
        }
        x = x + _attention(shape, own, _rms(shape, x, own["before.weight"]))
        inner = _rms(shape, x, own["between.weight"]) @ own["gate_up.weight"].T
        gate, up = np.split(inner, 2, axis=-1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ own["down.weight"].T
    return _rms(shape, x[-1], weights["norm.weight"]) @ weights["head.weight"].T


def _attention(shape: Shape, own: Weights, x: np.ndarray) -> np.ndarray:
    count = len(x)
    qkv = (x @ own["attention.qkv.weight"].T).reshape(count, -1, shape.head)
    query, key, value = np.split(qkv, [shape.heads, shape.heads + shape.groups], axis=1)
    query, key = _turned(shape, query), _turned(shape, key)
    key, value = (np.repeat(held, shape.heads // shape.groups, axis=1) for held in (key, value))
    scores = np.einsum("qhd,khd->hqk", query, key) * shape.head**-0.5
    scores[:, np.triu(np.ones((count, count), bool), 1)] = -np.inf
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    mixed = np.einsum("hqk,khd->qhd", shares, value).reshape(count, -1)
    return mixed @ own["attention.out.weight"].T


def _turned(shape: Shape, x: np.ndarray) -> np.ndarray:
    """Rotary embeddings: the halves of a head's columns turned by the position."""
    rates = shape.theta ** (-np.arange(0, shape.head, 2) / shape.head)
    angle = np.arange(len(x))[:, None, None] * rates
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _rms(shape: Shape, x: np.ndarray, gamma: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + shape.epsilon) * gamma
