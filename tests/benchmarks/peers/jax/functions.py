"""The workloads as JAX functions of the inputs and the parameters, in torch's order."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .attention import FUNCTIONS as ATTENTION
from .gemm import PRODUCTS
from .layers import (
    Array,
    attention,
    block,
    conv_block,
    cross_entropy,
    gelu,
    layer_norm,
    linear,
    rms,
    swiglu,
)
from .memory_more import MEMORY_MORE
from .training import TRAINING
from .transformers import FUNCTIONS as TRANSFORMERS


def _fanout(x: Array) -> tuple[Array, Array]:
    a = jax.nn.sigmoid(x) * 1.5
    return jnp.tanh(a) + x, jax.nn.relu(a) * x


def _remat(x: Array) -> tuple[Array, Array]:
    a = jnp.exp(x * 0.1)
    return a.sum(-1), a * x


softmax = jax.nn.softmax

FUNCTIONS: dict[str, Any] = {
    "chain4": lambda x: jax.nn.relu((x + 1) * 2) ** 2,
    "sigmoid_tanh": lambda x: jax.nn.sigmoid(x) * jnp.tanh(x + 1),
    "fanout2": _fanout,
    "remat_reduce": _remat,
    "softmax": lambda x: softmax(x, -1),
    "layernorm": layer_norm,
    "rmsnorm": rms,
    "add_rmsnorm": lambda x, y, weight: (x + y, rms(x + y, weight)),
    "bias_gelu": lambda x, b: gelu(x + b),
    "swiglu_act": lambda a, b: jax.nn.silu(a) * b,
    "cross_entropy": cross_entropy,
    "transpose_add": lambda x, y: jax.nn.relu(x.T + y),
    "linear_bias_gelu": lambda x, weight, bias: gelu(linear(x, weight, bias)),
    "swiglu_mlp": swiglu,
    "attention": attention,
    "block": block,
    "demo_block": functools.partial(block, rotary=True),
    "decode_mlp": swiglu,
    "conv_bn_relu": conv_block,
    **MEMORY_MORE,
    **TRAINING,
    **PRODUCTS,
    **ATTENTION,
    **TRANSFORMERS,
    "three_softmaxes_4kb": lambda x: softmax(softmax(softmax(x, 1), 0), 1),
}
