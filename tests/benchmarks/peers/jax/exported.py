"""Networks as JAX functions: the operators of an exported torch module, one by one.

For workloads of convolutions, of which there are too many to write each one twice. Operators keep
their layouts; XLA chooses those that it computes in.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tvm_fusion.errors import Unsupported

from ...workloads.instance import Instance
from .layers import shared

Array = Any


def function_of(instance: Instance) -> tuple[Callable[..., Any], list[Array]]:
    """The module as a function of its parameters, buffers and inputs, and these.

    Raises
    ------
    Unsupported
        It has an operator that no convolutional workload has.
    """
    program = torch.export.export(instance.module, instance.inputs).run_decompositions({})
    inputs, arrays = iter(instance.inputs), []
    for spec in program.graph_signature.input_specs:
        if spec.kind is torch.export.graph_signature.InputKind.USER_INPUT:
            tensor = next(inputs)
        elif spec.target in program.state_dict:
            tensor = program.state_dict[spec.target]
        else:
            tensor = program.constants[spec.target]
        arrays.append(shared(tensor))
    unknown = {str(n.target) for n in program.graph.nodes if n.op == "call_function"} - set(_OPS)
    if unknown:
        raise Unsupported(f"no JAX function for {', '.join(sorted(unknown))}")

    def run(*values: Array) -> Any:
        found: dict[Any, Array] = {}
        rest = iter(values)
        for node in program.graph.nodes:
            if node.op == "placeholder":
                found[node] = next(rest)
            elif node.op == "output":
                results = torch.fx.map_arg(node.args[0], found.get)
                return results[0] if len(results) == 1 else results
            else:
                args = torch.fx.map_arg(node.args, found.get)
                options = torch.fx.map_arg(node.kwargs, found.get)
                found[node] = _OPS[str(node.target)](*args, **options)
        raise AssertionError("a graph without an output")

    return run, arrays


def _convolution(
    x: Array,
    w: Array,
    bias: Array | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Array:
    rank = x.ndim - 2
    stride, padding, dilation = (_all(n, rank) for n in (stride, padding, dilation))
    y = jax.lax.conv_general_dilated(
        x,
        w,
        stride,
        [(p, p) for p in padding],
        rhs_dilation=dilation,
        feature_group_count=groups,
    )
    return y if bias is None else y + bias.reshape(1, -1, *[1] * rank)


def _transposed(
    x: Array,
    w: Array,
    bias: Array | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    output_padding: Sequence[int] = (0,),
    groups: int = 1,
    dilation: Sequence[int] = (1,),
) -> Array:
    rank = x.ndim - 2
    if groups != 1:
        raise Unsupported("transposed convolutions of groups")
    stride, padding, more, dilation = (
        _all(n, rank) for n in (stride, padding, output_padding, dilation)
    )
    reach = [d * (k - 1) for d, k in zip(dilation, w.shape[2:], strict=True)]
    y = jax.lax.conv_general_dilated(
        x,
        jnp.flip(w.swapaxes(0, 1), range(2, 2 + rank)),
        (1,) * rank,
        [(r - p, r - p + m) for r, p, m in zip(reach, padding, more, strict=True)],
        lhs_dilation=stride,
        rhs_dilation=dilation,
    )
    return y if bias is None else y + bias.reshape(1, -1, *[1] * rank)


def _all(numbers: int | Sequence[int], rank: int) -> list[int]:
    numbers = [numbers] if isinstance(numbers, int) else list(numbers)
    return numbers * rank if len(numbers) == 1 else numbers


def _batch_norm(
    x: Array, weight: Array, bias: Array, mean: Array, var: Array, _momentum: float, epsilon: float
) -> tuple[Array]:
    shape = (1, -1, *[1] * (x.ndim - 2))
    scale = weight.astype(jnp.float32) * jax.lax.rsqrt(var.astype(jnp.float32) + epsilon)
    shift = bias.astype(jnp.float32) - mean.astype(jnp.float32) * scale
    y = x.astype(jnp.float32) * scale.reshape(shape) + shift.reshape(shape)
    return (y.astype(x.dtype),)


def _normalised(x: Array, axes: Sequence[int], epsilon: float) -> Array:
    wide = x.astype(jnp.float32)
    mean = wide.mean(axes, keepdims=True)
    centred = wide - mean
    return centred * jax.lax.rsqrt((centred * centred).mean(axes, keepdims=True) + epsilon)


def _layer_norm(
    x: Array, shape: Sequence[int], weight: Array, bias: Array, epsilon: float = 1e-5, *_: Any
) -> Array:
    y = _normalised(x, range(x.ndim - len(shape), x.ndim), epsilon)
    return (y * weight + bias).astype(x.dtype)


def _group_norm(
    x: Array, groups: int, weight: Array, bias: Array, epsilon: float = 1e-5, *_: Any
) -> Array:
    apart = x.reshape(x.shape[0], groups, -1)
    y = _normalised(apart, (2,), epsilon).reshape(x.shape)
    shape = (1, -1, *[1] * (x.ndim - 2))
    return (y * weight.reshape(shape) + bias.reshape(shape)).astype(x.dtype)


def _pool(
    x: Array, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], largest: bool
) -> Array:
    window, steps = (1, 1, *kernel), (1, 1, *(stride or kernel))
    pads = [(0, 0), (0, 0), *((p, p) for p in padding)]
    if largest:
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, steps, pads)
    total = jax.lax.reduce_window(x.astype(jnp.float32), 0.0, jax.lax.add, window, steps, pads)
    count = 1
    for n in kernel:
        count *= n
    return (total / count).astype(x.dtype)


def _mean(x: Array, axes: Sequence[int], keepdims: bool = False) -> Array:
    return x.astype(jnp.float32).mean(tuple(axes), keepdims=keepdims).astype(x.dtype)


def _adaptive_mean(x: Array, size: Sequence[int]) -> Array:
    if list(size) != [1] * len(size):
        raise Unsupported(f"an adaptive pooling to {size}")
    return _mean(x, range(2, x.ndim), keepdims=True)


def _attention(q: Array, k: Array, v: Array) -> Array:
    # JAX has [batch, length, heads, width]
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v).swapaxes(1, 2)


def _linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    y = x @ weight.T
    return y if bias is None else y + bias


def _split(x: Array, size: int, axis: int = 0) -> list[Array]:
    return jnp.split(x, list(range(size, x.shape[axis], size)), axis)


def _gelu(x: Array, approximate: str = "none") -> Array:
    return jax.nn.gelu(x, approximate=approximate == "tanh")


_OPS: dict[str, Callable[..., Any]] = {
    "<built-in function getitem>": lambda x, i: x[i],
    **{f"aten.conv{n}d.default": _convolution for n in (1, 2, 3)},
    "aten.conv_transpose1d.default": _transposed,
    **{f"aten.conv_transpose{n}d.input": _transposed for n in (2, 3)},
    "aten._native_batch_norm_legit_no_training.default": _batch_norm,
    "aten.layer_norm.default": _layer_norm,
    "aten.group_norm.default": _group_norm,
    "aten.linear.default": _linear,
    "aten.scaled_dot_product_attention.default": _attention,
    "aten.max_pool2d.default": lambda x, kernel, stride=(), padding=(0, 0): _pool(
        x, kernel, stride, padding, True
    ),
    "aten.avg_pool2d.default": lambda x, kernel, stride=(), padding=(0, 0): _pool(
        x, kernel, stride, padding, False
    ),
    "aten.adaptive_avg_pool2d.default": _adaptive_mean,
    "aten.mean.dim": _mean,
    "aten.relu.default": jax.nn.relu,
    "aten.silu.default": jax.nn.silu,
    "aten.gelu.default": _gelu,
    "aten.sigmoid.default": jax.nn.sigmoid,
    "aten.hardsigmoid.default": jax.nn.hard_sigmoid,
    "aten.hardswish.default": jax.nn.hard_swish,
    "aten.add.Tensor": lambda x, y: x + y,
    "aten.mul.Tensor": lambda x, y: x * y,
    "aten.cat.default": lambda parts, axis=0: jnp.concatenate(parts, axis),
    "aten.permute.default": jnp.transpose,
    "aten.transpose.int": jnp.swapaxes,
    "aten.unsqueeze.default": jnp.expand_dims,
    "aten.view.default": jnp.reshape,
    "aten._unsafe_view.default": jnp.reshape,
    "aten.clone.default": lambda x, **_: x,
    "aten.split.Tensor": _split,
}
