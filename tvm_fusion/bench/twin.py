"""A Relax function as a function on torch or JAX arrays, for timing their compilers on it.

    lv = R.nn.rms_norm(x, w, axes=[-1])      env[2] = rms_norm(env[0], env[1])
    lv1 = R.matmul(lv, q)               ->   env[4] = xp.matmul(env[2], env[3])
    return lv1                               return env[4]

Static shapes only. Both libraries follow NumPy's names, so one table of operators serves them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tvm
from tvm import relax

from ..errors import Unsupported
from ..ir.weights import numbers

Function = Callable[..., Any]


class Library(NamedTuple):
    """An array library: a lookup of NumPy-like functions, the cast, and constants."""

    find: Callable[[str], Function]
    cast: Callable[[Any, str], Any]
    constant: Callable[[Any], Any]


def torch_library(device: str) -> Library:
    """torch on a device."""
    import torch

    return Library(
        find=lambda name: getattr(torch, name),
        cast=lambda x, dtype: x.to(getattr(torch, dtype)),
        constant=lambda value: torch.from_numpy(value).to(device),
    )


def jax_library() -> Library:
    """JAX on its default device."""
    import jax
    import jax.numpy as jnp

    def find(name: str) -> Function:
        owners = (jnp, jax.nn, jax.lax)
        return next(getattr(owner, name) for owner in owners if hasattr(owner, name))

    return Library(find, lambda x, dtype: x.astype(dtype), jnp.asarray)


def twin(mod: tvm.IRModule, library: Library) -> tuple[Function, dict[int, Any]]:
    """Return `main` of a module as a function of its constants and inputs, and the constants.

    Raises
    ------
    Unsupported
        If the function uses an operator that the table lacks, or a symbolic shape.
    """
    main = mod["main"]
    slots: dict[relax.Var, int] = {param: i for i, param in enumerate(main.params)}
    constants: dict[int, Any] = {}
    steps: list[tuple[int, Function, tuple[int, ...]]] = []

    def slot(expr: Any) -> int:
        if isinstance(expr, relax.Var):
            return slots[expr]
        number = len(slots) + len(constants)
        if isinstance(expr, tvm.ir.GenericConst):
            constants[number] = library.constant(numbers(expr))
            return number
        raise Unsupported(f"the benchmark's twin of a model has no {type(expr).__name__}")

    def add_step(var: relax.Var, value: Any) -> None:
        if isinstance(value, relax.Var):
            slots[var] = slots[value]
            return
        function, operands = _step(value, library)
        inputs = tuple(slot(operand) for operand in operands)
        slots[var] = len(slots) + len(constants)
        steps.append((slots[var], function, inputs))

    for block in main.body.blocks:
        for binding in block.bindings:
            add_step(binding.var, binding.value)
    result = slots[main.body.body]

    def run(constants: dict[int, Any], *inputs: Any) -> Any:
        values = dict(enumerate(inputs)) | constants
        for number, function, operands in steps:
            values[number] = function(*[values[i] for i in operands])
        return values[result]

    return run, constants


def _step(value: Any, library: Library) -> tuple[Function, Sequence[Any]]:
    """Return the function of one binding's value, and its array operands."""
    if isinstance(value, relax.Tuple):
        return lambda *fields: fields, value.fields
    if isinstance(value, relax.TupleGetItem):
        index = value.index
        return lambda fields: fields[index], [value.tuple_value]
    if not isinstance(value, relax.Call) or not isinstance(value.op, tvm.ir.Op):
        raise Unsupported(f"the benchmark's twin of a model has no {type(value).__name__}")
    name = value.op.name.removeprefix("relax.").removeprefix("nn.")
    if name in _ALIKE:
        return library.find(_ALIKE[name]), value.args
    if name not in _WRITTEN:
        raise Unsupported(f"the benchmark's twin of a model has no operator {value.op.name}")
    return _WRITTEN[name](value, library)


_ALIKE = {
    "add": "add",
    "subtract": "subtract",
    "multiply": "multiply",
    "divide": "divide",
    "power": "pow",
    "maximum": "maximum",
    "minimum": "minimum",
    "negative": "negative",
    "exp": "exp",
    "log": "log",
    "sqrt": "sqrt",
    "rsqrt": "rsqrt",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "erf": "erf",
    "sin": "sin",
    "cos": "cos",
    "abs": "abs",
    "relu": "relu",
    "where": "where",
    "matmul": "matmul",
}


def _out_shape(call: relax.Call) -> tuple[int, ...]:
    shape = call.ty.shape
    if not isinstance(shape, relax.ShapeExpr) or any(
        not isinstance(extent, tvm.tirx.IntImm) for extent in shape.values
    ):
        raise Unsupported("the benchmark's twin of a model has static shapes only")
    return tuple(int(extent) for extent in shape.values)


def _reshape(call: relax.Call, _library: Library) -> tuple[Function, Sequence[Any]]:
    shape = _out_shape(call)
    return lambda x: x.reshape(shape), call.args[:1]


def _permute(call: relax.Call, library: Library) -> tuple[Function, Sequence[Any]]:
    rank = len(_out_shape(call))
    axes = [int(a) for a in call.attrs.axes or reversed(range(rank))]
    move = library.find("moveaxis")
    return lambda x: move(x, axes, list(range(rank))), call.args


def _broadcast(call: relax.Call, library: Library) -> tuple[Function, Sequence[Any]]:
    shape, broadcast = _out_shape(call), library.find("broadcast_to")
    return lambda x: broadcast(x, shape), call.args[:1]


def _cast(call: relax.Call, library: Library) -> tuple[Function, Sequence[Any]]:
    dtype = str(call.attrs.dtype)
    return lambda x: library.cast(x, dtype), call.args


def _concat(call: relax.Call, library: Library) -> tuple[Function, Sequence[Any]]:
    concat, axis = library.find("concat"), int(call.attrs.axis or 0)
    return lambda *parts: concat(parts, axis=axis), call.args[0].fields


def _slice(call: relax.Call, _library: Library) -> tuple[Function, Sequence[Any]]:
    axes, begins, ends, *strides = ([int(v) for v in part] for part in call.args[1:])
    steps = strides[0] if strides else [1] * len(axes)
    index = [slice(None)] * len(_out_shape(call))
    for axis, begin, end, step in zip(axes, begins, ends, steps, strict=True):
        index[axis] = slice(begin, end, step)
    return lambda x: x[tuple(index)], call.args[:1]


def _take(call: relax.Call, _library: Library) -> tuple[Function, Sequence[Any]]:
    before = (slice(None),) * int(call.attrs.axis or 0)
    return lambda x, indices: x[(*before, indices)], call.args


def _reduce(name: str) -> Callable[[relax.Call, Library], tuple[Function, Sequence[Any]]]:
    def make(call: relax.Call, library: Library) -> tuple[Function, Sequence[Any]]:
        axes = call.attrs.axis
        over = tuple(range(call.args[0].ty.ndim)) if axes is None else tuple(map(int, axes))
        keep, reduce = bool(call.attrs.keepdims), library.find(name)
        return lambda x: reduce(x, axis=over, keepdims=keep), call.args

    return make


def _softmax(call: relax.Call, library: Library) -> tuple[Function, Sequence[Any]]:
    softmax, axis = library.find("softmax"), int(call.attrs.axis)
    return lambda x: softmax(x, axis), call.args


def _silu(call: relax.Call, library: Library) -> tuple[Function, Sequence[Any]]:
    sigmoid = library.find("sigmoid")
    return lambda x: x * sigmoid(x), call.args


def _gelu(call: relax.Call, library: Library) -> tuple[Function, Sequence[Any]]:
    erf = library.find("erf")
    return lambda x: 0.5 * x * (1.0 + erf(x * 0.5**0.5)), call.args


def _norm(centred: bool) -> Callable[[relax.Call, Library], tuple[Function, Sequence[Any]]]:
    def make(call: relax.Call, library: Library) -> tuple[Function, Sequence[Any]]:
        axes, epsilon = tuple(map(int, call.attrs.axes)), float(call.attrs.epsilon)
        mean, rsqrt = library.find("mean"), library.find("rsqrt")
        dtype = str(call.ty.dtype)

        def norm(x: Any, weight: Any, *bias: Any) -> Any:
            y = library.cast(x, "float32")
            y = y - mean(y, axis=axes, keepdims=True) if centred else y
            y = y * rsqrt(mean(y * y, axis=axes, keepdims=True) + epsilon) * weight
            return library.cast(y + bias[0] if bias else y, dtype)

        return norm, call.args

    return make


_WRITTEN = {
    "reshape": _reshape,
    "expand_dims": _reshape,
    "squeeze": _reshape,
    "flatten": _reshape,
    "permute_dims": _permute,
    "broadcast_to": _broadcast,
    "astype": _cast,
    "concat": _concat,
    "strided_slice": _slice,
    "take": _take,
    "sum": _reduce("sum"),
    "mean": _reduce("mean"),
    "max": _reduce("amax"),
    "min": _reduce("amin"),
    "softmax": _softmax,
    "silu": _silu,
    "gelu": _gelu,
    "rms_norm": _norm(centred=False),
    "layer_norm": _norm(centred=True),
}
