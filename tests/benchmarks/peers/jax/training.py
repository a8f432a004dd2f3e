"""Gradients, statistics, dropout and the optimiser in JAX; see workloads/training.py."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...workloads.training import ADAMW, DROPPED, MULTIPLIER, ROUND_KEYS
from .layers import Array


def _batch_norm(x: Array, weight: Array, bias: Array) -> tuple[Array, Array, Array]:
    y, axes = x.astype(jnp.float32), (0, 2, 3)
    mean = y.mean(axes, keepdims=True)
    variance = ((y - mean) ** 2).mean(axes, keepdims=True)
    weight, bias = (v.astype(jnp.float32).reshape(1, -1, 1, 1) for v in (weight, bias))
    y = (y - mean) * jax.lax.rsqrt(variance + 1e-5) * weight + bias
    return y.astype(x.dtype), mean.flatten(), variance.flatten()


def _layer_norm_backward(x: Array, grad: Array, weight: Array) -> tuple[Array, Array, Array]:
    y, g = x.astype(jnp.float32), grad.astype(jnp.float32)
    centred = y - y.mean(-1, keepdims=True)
    scale = jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    normal, h = centred * scale, g * weight.astype(jnp.float32)
    along = (h * normal).mean(-1, keepdims=True)
    dx = (h - h.mean(-1, keepdims=True) - normal * along) * scale
    return dx.astype(x.dtype), (g * normal).sum(0).astype(x.dtype), g.sum(0).astype(x.dtype)


def _rms_norm_backward(x: Array, grad: Array, weight: Array) -> tuple[Array, Array]:
    y, g = x.astype(jnp.float32), grad.astype(jnp.float32)
    scale = jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)
    normal, h = y * scale, g * weight.astype(jnp.float32)
    dx = (h - normal * (h * normal).mean(-1, keepdims=True)) * scale
    return dx.astype(x.dtype), (g * normal).sum(0).astype(x.dtype)


def _cross_entropy_gradient(x: Array, labels: Array) -> Array:
    probabilities = jax.nn.softmax(x.astype(jnp.float32), -1)
    hit = jnp.arange(x.shape[1])[None, :] == labels[:, None]
    return (jnp.where(hit, probabilities - 1, probabilities) / x.shape[0]).astype(x.dtype)


def _dropout(x: Array, seed: Array) -> Array:
    rows, columns = x.shape
    left = jnp.arange(rows, dtype=jnp.int32)[:, None] ^ (seed & 0xFFFF)
    right = jnp.arange(columns, dtype=jnp.int32)[None, :] ^ ((seed >> 16) & 0xFFFF)
    for key in ROUND_KEYS:
        left, right = right, left ^ ((((right ^ key) * MULTIPLIER) >> 9) & 0xFFFF)
    return jnp.where(right >= int(DROPPED * 0x10000), x * (1 / (1 - DROPPED)), 0.0).astype(x.dtype)


def _adamw(*tensors: Array) -> tuple[Array, ...]:
    count = len(tensors) // 4
    groups = (tensors[i * count : (i + 1) * count] for i in range(4))
    steps = [_adamw_step(*group) for group in zip(*groups, strict=True)]
    return tuple(tensor for kind in zip(*steps, strict=True) for tensor in kind)


def _adamw_step(p: Array, g: Array, m: Array, v: Array) -> tuple[Array, Array, Array]:
    beta1, beta2, step = ADAMW["beta1"], ADAMW["beta2"], ADAMW["step"]
    m = m * beta1 + g * (1 - beta1)
    v = v * beta2 + g * g * (1 - beta2)
    denominator = jnp.sqrt(v * (1 / (1 - beta2**step))) + ADAMW["epsilon"]
    update = m * (1 / (1 - beta1**step)) / denominator
    return p * (1 - ADAMW["rate"] * ADAMW["decay"]) - update * ADAMW["rate"], m, v


TRAINING: dict[str, Callable[..., Any]] = {
    "batch_norm_train": _batch_norm,
    "bias_gradient": lambda g: g.sum(0),
    "layernorm_backward": _layer_norm_backward,
    "rmsnorm_backward_bf16": _rms_norm_backward,
    "cross_entropy_gradient_bf16": _cross_entropy_gradient,
    "dropout": _dropout,
    "adamw_fp32": _adamw,
}
