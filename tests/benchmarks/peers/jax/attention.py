"""Attention in JAX; see workloads/attention.py.

`jax.nn.dot_product_attention` where it does the work, on a GPU with cuDNN's kernels (which take
heads of up to 128, and several queries); written out where it does not.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...workloads.attention import ATTENTION, SOFTCAP, WINDOW
from .layers import Array

CUDNN_WIDTH = 128


def by_heads(q: Array, k: Array, v: Array, **options: Any) -> Array:
    """On [batch, heads, length, width]; fewer heads of keys than of queries are shared."""
    parts = (x.swapaxes(1, 2) for x in (q, k, v))
    return library(*parts, **options).swapaxes(1, 2)


def library(q: Array, k: Array, v: Array, **options: Any) -> Array:
    """On [batch, length, heads, width]."""
    fits = q.shape[-1] <= CUDNN_WIDTH and q.shape[1] > 1
    on_gpu = jax.default_backend() == "gpu"
    implementation = "cudnn" if on_gpu and fits else "xla"
    return jax.nn.dot_product_attention(q, k, v, implementation=implementation, **options)


def _rows(q: Array, k: Array, v: Array) -> Array:
    parts = (x.reshape(*x.shape[:2], -1, 128) for x in (q, k, v))
    return library(*parts).reshape(q.shape)


def _mask(q: Array, k: Array, v: Array, mask: Array) -> Array:
    return by_heads(q, k, v, bias=jnp.broadcast_to(mask, _scores_shape(q, k)))


def _scores_shape(q: Array, k: Array) -> tuple[int, ...]:
    return (*q.shape[:3], k.shape[2])


def _places(q: Array, k: Array) -> tuple[Array, Array]:
    return jnp.arange(q.shape[2])[:, None], jnp.arange(k.shape[2])


def _alibi(q: Array, k: Array, v: Array) -> Array:
    i, j = _places(q, k)
    heads = q.shape[1]
    slope = jnp.exp2(-8.0 / heads * jnp.arange(1, heads + 1))
    bias = (slope[:, None, None] * (j - i)).astype(q.dtype)[None]
    return by_heads(q, k, v, bias=bias, is_causal=True)


def _softcap(q: Array, k: Array, v: Array) -> Array:
    i, j = _places(q, k)
    scores = q @ k.swapaxes(2, 3) * q.shape[-1] ** -0.5
    scores = SOFTCAP * jnp.tanh(scores.astype(jnp.float32) / SOFTCAP)
    weights = jax.nn.softmax(jnp.where(j <= i, scores, -jnp.inf), axis=-1)
    return weights.astype(q.dtype) @ v


def _window(q: Array, k: Array, v: Array) -> Array:
    return by_heads(q, k, v, local_window_size=(WINDOW - 1, 0))


def _document(q: Array, k: Array, v: Array, documents: Array) -> Array:
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return by_heads(q, k, v, mask=same, is_causal=True)


_NAMED: dict[str, Callable[..., Array]] = {
    "attention_rows": _rows,
    "attention_mask": _mask,
    "attention_alibi": _alibi,
    "attention_softcap": _softcap,
    "attention_window": _window,
    "attention_document": _document,
}


def _function(name: str) -> Callable[..., Array]:
    if name in _NAMED:
        return _NAMED[name]
    return functools.partial(by_heads, is_causal="causal" in name)


FUNCTIONS: dict[str, Callable[..., Array]] = {name: _function(name) for name in ATTENTION}
