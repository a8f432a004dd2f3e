"""Matrix products in JAX; see workloads/gemm.py and its neighbours."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ...workloads.gemm import BITS, FLOAT8_FACTOR, GEMM, GROUP, PER_WORD, ZERO_POINT
from ...workloads.gemm_layers import LORA_SCALE, token_counts
from ...workloads.gemm_sweep import SWEEP, epilogue_of
from ...workloads.models import HEADS
from .layers import Array, gelu, linear, rms, swiglu


def _float8(x: Array, weight: Array) -> Array:
    product = jnp.einsum("mk,nk->mn", x, weight, preferred_element_type=jnp.float32)
    return (product * (FLOAT8_FACTOR * x.shape[1] ** -0.5)).astype(jnp.float16)


def _int8(x: Array, weight: Array, scales: Array) -> Array:
    return linear(x, weight.astype(x.dtype)) * scales


def _int4(x: Array, packed: Array, scales: Array) -> Array:
    n, words = packed.shape
    shifts = jnp.arange(0, PER_WORD * BITS, BITS, dtype=jnp.int32)
    values = (packed[:, :, None] >> shifts) & (2**BITS - 1)
    groups = values.reshape(n, words * PER_WORD // GROUP, GROUP).astype(scales.dtype)
    groups = (groups - ZERO_POINT) * scales[:, :, None]
    return linear(x, groups.reshape(n, words * PER_WORD))


def _gate_up(x: Array, gate: Array, up: Array) -> Array:
    return jax.nn.silu(linear(x, gate)) * linear(x, up)


def _qkv(x: Array, *weights: Array) -> tuple[Array, ...]:
    return tuple(linear(x, w) for w in weights)


def _lora(x: Array, *weights: Array) -> tuple[Array, ...]:
    triples = zip(weights[::3], weights[1::3], weights[2::3], strict=True)
    return tuple(linear(x, w) + linear(linear(x, down), up) * LORA_SCALE for w, down, up in triples)


def _experts(x: Array, *weights: Array) -> Array:
    parts, start = [], 0
    counts = token_counts(x.shape[0], len(weights) // 3)
    for i, count in enumerate(counts):
        gate, up, down = weights[3 * i : 3 * i + 3]
        parts.append(linear(_gate_up(x[start : start + count], gate, up), down))
        start += count
    return jnp.concatenate(parts)


def _block_tail(x: Array, r: Array, w1: Array, norm: Array, w2: Array) -> tuple[Array, Array]:
    h = linear(x, w1) + r
    return h, linear(rms(h, norm), w2)


def _split_heads(x: Array) -> Array:
    batch, length, width = x.shape
    return x.reshape(batch, length, HEADS, width // HEADS).transpose(0, 2, 1, 3)


def _scores(q: Array, k: Array) -> Array:
    q, k = _split_heads(q), _split_heads(k)
    return q @ k.transpose(0, 1, 3, 2) * q.shape[-1] ** -0.5


def _values(p: Array, v: Array) -> Array:
    return (p @ _split_heads(v)).transpose(0, 2, 1, 3).reshape(v.shape)


_EPILOGUES: dict[str, Callable[..., Array]] = {
    "plain": linear,
    "bias": lambda x, b, w: linear(x, w, b),
    "bias_relu": lambda x, b, w: jax.nn.relu(linear(x, w, b)),
    "bias_gelu": lambda x, b, w: gelu(linear(x, w, b)),
    "residual": lambda x, r, w: linear(x, w) + r,
    "silu_gate": lambda x, g, w: jax.nn.silu(linear(x, w)) * g,
}

PRODUCTS: dict[str, Callable[..., object]] = {
    **{name: linear for name in GEMM if name.startswith("gemm_")},
    **{name: _EPILOGUES[epilogue_of(name)] for name in SWEEP},
    "gemm_fp8_4096x4096x4096": _float8,
    "bmm_512x64x64x64": jnp.matmul,
    "gemv_fp16": linear,
    "gemv_int8": _int8,
    "gemv_int4": _int4,
    "linear_residual": lambda x, r, w: linear(x, w) + r,
    "gate_up": _gate_up,
    "qkv": _qkv,
    "rmsnorm_qkv": lambda x, norm, *weights: _qkv(rms(x, norm), *weights),
    "decode_mlp_1": swiglu,
    "decode_mlp_16": swiglu,
    "lora_qkv": _lora,
    "moe": _experts,
    "attention_scores": _scores,
    "attention_values": _values,
    "block_tail": _block_tail,
}
