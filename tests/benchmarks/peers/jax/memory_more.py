"""Rows, layouts and quantisation in JAX; see workloads/rows.py and workloads/layout.py."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...workloads.layout import GROUPS
from ...workloads.rows import FP8_LARGEST, INT8_LARGEST
from .layers import Array, layer_norm, rms

softmax = functools.partial(jax.nn.softmax, axis=-1)


def _quantise(x: Array, largest: float, dtype: Any) -> tuple[Array, Array]:
    y = x.astype(jnp.float32)
    top = jnp.maximum(jnp.abs(y).max(-1, keepdims=True), 1e-12)
    scaled = jnp.clip(y * (largest / top), -largest, largest)
    if not jnp.issubdtype(dtype, jnp.floating):
        scaled = jnp.round(scaled)
    return scaled.astype(dtype), (top / largest).squeeze(-1)


def _rope(x: Array, cos: Array, sin: Array) -> Array:
    first, second = jnp.split(x, 2, -1)
    return x * cos + jnp.concatenate([-second, first], -1) * sin


def _group_norm_silu(x: Array, weight: Array, bias: Array) -> Array:
    batch, height, width, channels = x.shape
    y = x.astype(jnp.float32).reshape(batch, height * width, GROUPS, channels // GROUPS)
    centred = y - y.mean((1, 3), keepdims=True)
    variance = (centred**2).mean((1, 3), keepdims=True)
    y = (centred * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape)
    y = y * weight.astype(jnp.float32) + bias.astype(jnp.float32)
    return jax.nn.silu(y).astype(x.dtype)


def _maxpool_add(x: Array, y: Array) -> Array:
    window = (1, 1, 2, 2)
    lowest = jnp.array(-jnp.inf, x.dtype)
    return jax.lax.reduce_window(x, lowest, jax.lax.max, window, window, "VALID") + y


def _concat_slice_pad(x: Array, y: Array, bias: Array) -> Array:
    joined = jnp.pad(jnp.concatenate([x[:, 3:], y], 1), ((0, 0), (1, 2)))
    return jax.nn.silu(joined + bias)


MEMORY_MORE: dict[str, Callable[..., Any]] = {
    "softmax_63": softmax,
    "softmax_1000_fp32": softmax,
    "softmax_5003": softmax,
    "softmax_65536": softmax,
    "softmax_128256_bf16": softmax,
    "softmax_middle_axis": functools.partial(jax.nn.softmax, axis=1),
    "log_softmax_32000_fp32": functools.partial(jax.nn.log_softmax, axis=-1),
    "layernorm_768": layer_norm,
    "layernorm_12288_fp32": layer_norm,
    "layernorm_one_row_768": layer_norm,
    "layernorm_one_row_65536": layer_norm,
    "rmsnorm_5120_bf16": rms,
    "rmsnorm_16_rows": rms,
    "embedding_rmsnorm_bf16": lambda table, i, weight: rms(table[i], weight),
    "argmax_32000": functools.partial(jnp.argmax, axis=-1),
    "quantise_fp8": lambda x: _quantise(x, FP8_LARGEST, jnp.float8_e4m3fn),
    "quantise_int8": lambda x: _quantise(x, INT8_LARGEST, jnp.int8),
    "bias_gelu_5003_bf16": lambda x, b: jax.nn.gelu(x + b, approximate=True),
    "add_silu_3d": lambda x, a: jax.nn.silu(x + a),
    "chain3_4kb": lambda x: jax.nn.relu((x + 1) * 2),
    "rope": _rope,
    "groupnorm_silu_nhwc": _group_norm_silu,
    "maxpool_add": _maxpool_add,
    "nchw_to_nhwc_scale": lambda x, s: x.transpose(0, 2, 3, 1) * s,
    "concat_slice_pad": _concat_slice_pad,
    "sum_middle_axis": lambda x: x.sum(1),
}
