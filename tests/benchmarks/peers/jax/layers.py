"""Layers in JAX, with their parameters as arguments in torch's order."""

import jax
import jax.numpy as jnp
import torch

from tvm_fusion.demo import causal_mask, rope_tables

from ...workloads.instance import Instance
from ...workloads.models import HEADS

Array = jax.Array
_BUFFERS = ("running_mean", "running_var", "packed", "scales")  # that its functions take


def arguments(instance: Instance) -> list[Array]:
    """Return inputs, parameters and buffers of a workload as JAX arrays on the same memory."""
    module = instance.module
    buffers = [b for n, b in module.named_buffers() if n.endswith(_BUFFERS)]
    return [shared(t) for t in (*instance.inputs, *module.parameters(), *buffers)]


def shared(tensor: torch.Tensor) -> Array:
    """A tensor as a JAX array on the same memory, if it is contiguous."""
    tensor = tensor.detach().contiguous()
    if not str(tensor.dtype).startswith("torch.float8"):
        return jnp.from_dlpack(tensor)
    bits = jnp.from_dlpack(tensor.view(torch.uint8))  # 8-bit floats do not pass by DLPack
    dtype = getattr(jnp, str(tensor.dtype).removeprefix("torch."))
    return jax.lax.bitcast_convert_type(bits, dtype)


def rms(x: Array, weight: Array, epsilon: float = 1e-6) -> Array:
    """RMS norm over the last axis."""
    y = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + epsilon)
    return (y * scale).astype(x.dtype) * weight


def layer_norm(x: Array, weight: Array, bias: Array, epsilon: float = 1e-5) -> Array:
    """Layer norm over the last axis."""
    y = x.astype(jnp.float32)
    mean = y.mean(-1, keepdims=True)
    scale = jax.lax.rsqrt(((y - mean) ** 2).mean(-1, keepdims=True) + epsilon)
    y = (y - mean) * scale * weight.astype(jnp.float32) + bias.astype(jnp.float32)
    return y.astype(x.dtype)


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """x W^T + b."""
    exact = "highest" if x.dtype == jnp.float32 else None  # without it, TF32
    y = jnp.einsum("...i,oi->...o", x, weight, precision=exact)
    return y if bias is None else y + bias


def gelu(x: Array) -> Array:
    """GELU with erf."""
    return jax.nn.gelu(x, approximate=False)


def swiglu(x: Array, gate: Array, up: Array, down: Array) -> Array:
    """down(silu(gate(x)) * up(x))."""
    return linear(jax.nn.silu(linear(x, gate)) * linear(x, up), down)


def attention(
    x: Array, query: Array, key: Array, value: Array, out: Array, *, rotary: bool = False
) -> Array:
    """Attention, written out; `rotary` adds RoPE and a causal mask."""
    batch, length, width = x.shape
    split = (batch, length, HEADS, width // HEADS)
    q, k, v = (linear(x, w).reshape(split) for w in (query, key, value))
    if rotary:
        q, k = _rotate(q), _rotate(k)
    scores = q.transpose(0, 2, 1, 3) @ k.transpose(0, 2, 3, 1) * (1.0 / (width // HEADS) ** 0.5)
    if rotary:
        scores = scores + jnp.asarray(causal_mask(length, "float16"), x.dtype)
    mixed = jax.nn.softmax(scores, axis=-1) @ v.transpose(0, 2, 1, 3)
    return linear(mixed.transpose(0, 2, 1, 3).reshape(batch, length, width), out)


def _rotate(x: Array) -> Array:
    """RoPE on [batch, length, heads, head width]."""
    cos, sin = (jnp.asarray(t, x.dtype) for t in rope_tables(x.shape[1], x.shape[3], "float32"))
    first, second = jnp.split(x, 2, -1)
    return x * cos + jnp.concatenate([-second, first], -1) * sin


def block(
    x: Array, attention_norm: Array, mlp_norm: Array, *weights: Array, rotary: bool = False
) -> Array:
    """A pre-norm transformer block."""
    x = x + attention(rms(x, attention_norm), *weights[:4], rotary=rotary)
    return x + swiglu(rms(x, mlp_norm), *weights[4:])


def cross_entropy(x: Array, labels: Array) -> Array:
    """Mean of -log softmax at the labels."""
    logs = jax.nn.log_softmax(x.astype(jnp.float32), -1)
    return -jnp.take_along_axis(logs, labels[:, None], 1).mean()


def conv_block(
    x: Array, w1: Array, g1: Array, b1: Array, w2: Array, g2: Array, b2: Array, *stats: Array
) -> Array:
    """Two convolutions with batch norm and ReLU, and a residual."""
    y = jax.nn.relu(_batch_norm(_conv(x, w1), g1, b1, *stats[:2]))
    return jax.nn.relu(_batch_norm(_conv(y, w2), g2, b2, *stats[2:]) + x)


def _conv(x: Array, weight: Array) -> Array:
    layouts = ("NCHW", "OIHW", "NCHW")
    return jax.lax.conv_general_dilated(x, weight, (1, 1), "SAME", dimension_numbers=layouts)


def _batch_norm(
    x: Array, weight: Array, bias: Array, mean: Array, var: Array, epsilon: float = 1e-5
) -> Array:
    weight, bias, mean, var = (a.astype(jnp.float32) for a in (weight, bias, mean, var))
    scale = weight * jax.lax.rsqrt(var + epsilon)
    shift = bias - mean * scale
    y = x.astype(jnp.float32) * scale[None, :, None, None] + shift[None, :, None, None]
    return y.astype(x.dtype)
