"""Layers of models in JAX, with the parameters in the order of transformers' modules.

JAX writes nothing in place: the step attends to what the caches hold before the position and to the
new key beside them, and leaves the write itself out.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from ...workloads.transformers import (
    ENCODER_EPSILON,
    ENCODER_WIDTH,
    LLAMA_WIDTH,
    RMS_EPSILON,
    ROPE_THETA,
)
from .attention import library
from .layers import Array, gelu, layer_norm, linear, rms, swiglu


def _tables(length: int, width: int, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Cosines and sines [length, width] of Llama's rotary embedding."""
    rates = ROPE_THETA ** -(np.arange(0, width, 2, dtype=np.float32) / width)
    angles = np.arange(length, dtype=np.float32)[:, None] * rates
    angles = np.concatenate([angles, angles], -1)
    return jnp.asarray(np.cos(angles), dtype), jnp.asarray(np.sin(angles), dtype)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    """RoPE on [batch, length, heads, width]."""
    first, second = jnp.split(x, 2, -1)
    turned = jnp.concatenate([-second, first], -1)
    return x * cos[:, None] + turned * sin[:, None]


def _heads(x: Array, width: int) -> Array:
    return x.reshape(*x.shape[:2], -1, width)


def _llama_end(x: Array, mixed: Array, o: Array, mlp: tuple[Array, ...], norm: Array) -> Array:
    """What follows the attention of a layer."""
    x = x + linear(mixed.reshape(x.shape[0], x.shape[1], -1), o)
    return x + swiglu(rms(x, norm, RMS_EPSILON), *mlp)


def prefill(x: Array, q: Array, k: Array, v: Array, o: Array, *rest: Array) -> Array:
    """The first tokens of each text: [batch, length, width]; four heads share a key."""
    *mlp, norm, mlp_norm = rest
    y = rms(x, norm, RMS_EPSILON)
    tables = _tables(x.shape[1], LLAMA_WIDTH, x.dtype)
    queries, keys, values = (_heads(linear(y, w), LLAMA_WIDTH) for w in (q, k, v))
    mixed = library(_rotate(queries, *tables), _rotate(keys, *tables), values, is_causal=True)
    return _llama_end(x, mixed, o, tuple(mlp), mlp_norm)


def step(x: Array, position: Array, past_keys: Array, past_values: Array, *weights: Array) -> Array:
    """One token of each text; caches [batch, key heads, context, width]."""
    q, k, v, o, *mlp, norm, mlp_norm = weights
    width, context = past_keys.shape[3], past_keys.shape[2]
    y = rms(x, norm, RMS_EPSILON)
    tables = tuple(t[position] for t in _tables(context, width, x.dtype))
    queries, keys, values = (_heads(linear(y, w), width) for w in (q, k, v))
    queries, keys = _rotate(queries, *tables), _rotate(keys, *tables)
    groups = queries.reshape(x.shape[0], past_keys.shape[1], -1, width) * width**-0.5
    keys, values = (t.swapaxes(1, 2) for t in (keys, values))
    past = (groups @ past_keys.swapaxes(2, 3)).astype(jnp.float32)
    past = jnp.where(jnp.arange(context) < position, past, -jnp.inf)
    new = (groups @ keys.swapaxes(2, 3)).astype(jnp.float32)
    top = jnp.maximum(past.max(-1, keepdims=True), new)
    past, new = jnp.exp(past - top), jnp.exp(new - top)
    total = past.sum(-1, keepdims=True) + new
    mixed = (past / total).astype(x.dtype) @ past_values + (new / total).astype(x.dtype) * values
    return _llama_end(x, mixed.reshape(x.shape[0], 1, -1), o, tuple(mlp), mlp_norm)


def _mix(x: Array, q: Array, qb: Array, k: Array, kb: Array, v: Array, vb: Array) -> Array:
    """Attention of an encoder, without its last product."""
    pairs = ((q, qb), (k, kb), (v, vb))
    parts = (_heads(linear(x, w, b), ENCODER_WIDTH) for w, b in pairs)
    return library(*parts).reshape(x.shape)


def _bert(x: Array, *weights: Array) -> Array:
    """Norms behind the residuals."""
    attention, (o, ob, g1, b1, up, up_b, down, down_b, g2, b2) = weights[:6], weights[6:]
    mixed = linear(_mix(x, *attention), o, ob)
    x = layer_norm(mixed + x, g1, b1, ENCODER_EPSILON)
    y = linear(gelu(linear(x, up, up_b)), down, down_b)
    return layer_norm(y + x, g2, b2, ENCODER_EPSILON)


def _vit(x: Array, *weights: Array) -> Array:
    """Norms before the products."""
    attention, (o, ob, g1, b1, g2, b2, up, up_b, down, down_b) = weights[:6], weights[6:]
    x = x + linear(_mix(layer_norm(x, g1, b1, ENCODER_EPSILON), *attention), o, ob)
    y = layer_norm(x, g2, b2, ENCODER_EPSILON)
    return x + linear(gelu(linear(y, up, up_b)), down, down_b)


FUNCTIONS: dict[str, Callable[..., Array]] = {
    "llama_prefill_1x2048": prefill,
    "llama_prefill_8x512": prefill,
    "llama_decode_1": step,
    "llama_decode_16": step,
    "bert_large_16x512": _bert,
    "vit_base_32x197": _vit,
}
