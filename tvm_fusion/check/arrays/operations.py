"""The operations of expressions on tensors of PyTorch, by name (`prim_funcs`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from tvm import tirx
from tvm.ir.prim.expr import BitwiseAnd, BitwiseOr, BitwiseXor, LShift, RShift

from .narrow import contracted

Shape = tuple[int, ...]


class NotOnArrays(Exception):
    """What a function has in it that is not computed on whole arrays, or what is wrong with its
    data.
    """


Step = TypeVar("Step")


def freeing(
    steps: Sequence[Step], touched: Callable[[Step], Iterable[int]], kept: Iterable[int]
) -> list[tuple[Step, tuple[int, ...]]]:
    """Each step, and what no later one touches of what it does; `kept` outlives all of them."""
    seen, found = set(kept), []
    for step in reversed(steps):
        last = set(touched(step)) - seen
        seen |= last
        found.append((step, tuple(sorted(last))))
    return found[::-1]


BINARY: dict[type, str] = {
    tirx.Add: "add",
    tirx.Sub: "sub",
    tirx.Mul: "mul",
    tirx.Max: "maximum",  # of torch: NaN where either is
    tirx.Min: "minimum",
    tirx.EQ: "eq",
    tirx.NE: "ne",
    tirx.LT: "lt",
    tirx.LE: "le",
    tirx.GT: "gt",
    tirx.GE: "ge",
    tirx.And: "logical_and",
    tirx.Or: "logical_or",
    BitwiseAnd: "bitwise_and",
    BitwiseOr: "bitwise_or",
    BitwiseXor: "bitwise_xor",
    LShift: "bitwise_left_shift",
    RShift: "bitwise_right_shift",
}
REDUCTIONS: dict[type, str] = {
    tirx.Add: "sum of",
    tirx.Mul: "product of",
    tirx.Max: "largest of",
    tirx.Min: "least of",
    tirx.And: "all of",
    tirx.Or: "any of",
}
INTEGER_DIVISIONS: dict[type, str] = {
    tirx.Div: "quotient",
    tirx.FloorDiv: "floored quotient",
    tirx.Mod: "rest",
    tirx.FloorMod: "floored rest",
}
# Of floats, by the names of TVM's operators; those that round to an integer where torch does not
# say how are not among them.
FUNCTIONS: dict[str, str] = {
    name: name
    for name in (
        *("exp", "exp2", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sigmoid", "tanh"),
        *("erf", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh"),
        *("atanh", "atan2", "hypot", "copysign", "fmod", "pow", "floor", "ceil", "trunc"),
        *("isnan", "isinf", "isfinite"),
    )
} | {"fabs": "abs", "nearbyint": "round"}

_DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "float32", "float64")


def dtype_in_torch(dtype: str) -> Any:
    """torch's dtype of a name of TVM's, of those that are computed in."""
    if dtype not in _DTYPES:
        raise NotOnArrays(f"the dtype {dtype}")
    return getattr(sys.modules["torch"], dtype)


def operation(name: str) -> Callable[..., Any]:
    """A function of tensors; those with further arguments take these first."""
    return _OWN.get(name) or getattr(sys.modules["torch"], name)


def _places(shape: Shape, dtype: Any, device: str) -> Any:
    """The places along the axis of a shape that is not 1."""
    count = max(shape, default=1) if 0 not in shape else 0
    return sys.modules["torch"].arange(count, dtype=dtype, device=device).reshape(shape)


def _view(shape: Shape, strides: Shape, first: int, buffer: Any) -> Any:
    return buffer.as_strided(shape, strides, buffer.storage_offset() + first)


def _taken_inside(buffer: Any, place: Any, inside: Any, where: Any = None) -> Any:
    """What lies at places of a buffer; those outside of it have to be outside of `where`."""
    outside = ~inside if where is None else ~inside & where
    if outside.any():
        raise NotOnArrays("an index is out of range")
    return buffer.take(place.where(inside, 0))


def _laid_out(whole: Shape, order: Shape, shape: Shape, value: Any) -> Any:
    return value.expand(whole).permute(order).reshape(shape).contiguous()


def _written_at(
    whole: Shape, old: Any, values: Any, places: Any, inside: Any, adds: bool = False
) -> Any:
    """A copy of a tensor with values at places of it, or with these added; of several at one place
    the last one counts, in the order of the axes of a block.
    """
    torch = sys.modules["torch"]
    if not inside.all():
        raise NotOnArrays("an index is out of range")
    flat = old.reshape(-1)
    places, values = places.expand(whole).reshape(-1), values.expand(whole).reshape(-1)
    if adds:
        return flat.index_add(0, places, values).reshape(old.shape)
    order = torch.arange(len(places), device=places.device)
    last = torch.full(flat.shape, -1, device=places.device)
    counts = last.scatter_reduce(0, places, order, "amax")[places] == order
    return flat.index_put((places[counts],), values[counts]).reshape(old.shape)


def _sum(along: Shape, value: Any) -> Any:
    return value.sum(along, keepdim=True, dtype=value.dtype)


def _product(along: Shape, value: Any) -> Any:
    for axis in along:
        value = value.prod(axis, keepdim=True, dtype=value.dtype)
    return value


def _folded(name: str) -> Callable[[Shape, Any], Any]:
    """A reduction of torch that takes one axis at a time."""

    def reduced(along: Shape, value: Any) -> Any:
        for axis in along:
            value = getattr(value, name)(axis, keepdim=True)
        return value

    return reduced


_SCANS = {
    "sum of": lambda value, axis: value.cumsum(axis, dtype=value.dtype),
    "product of": lambda value, axis: value.cumprod(axis, dtype=value.dtype),
    "largest of": lambda value, axis: value.cummax(axis).values,
    "least of": lambda value, axis: value.cummin(axis).values,
    "log sum of": lambda value, axis: value.logcumsumexp(axis),
}


def _scanned(
    name: str, source: int, axis: int, length: int, exclusive: bool, neutral: float, value: Any
) -> Any:
    """What a reduction of that name gives of all places up to each one, which lie along the axis
    `source` of the value and along `axis` of the result.
    """
    shape = list(value.shape)
    shape[source] = length
    found = _SCANS[name](value.expand(shape).transpose(source, axis), axis)
    if not exclusive:
        return found
    first = found.narrow(axis, 0, 1).new_full((), neutral).expand_as(found.narrow(axis, 0, 1))
    return sys.modules["torch"].cat([first, found.narrow(axis, 0, length - 1)], axis)


def _contracted(names: str, shape: Shape, *factors: Any) -> Any:
    return contracted(names, [factor.squeeze() for factor in factors]).reshape(shape)


def _divided(name: str, **how: Any) -> Callable[[Any, Any], Any]:
    def quotient(a: Any, b: Any) -> Any:
        if not b.all():
            raise NotOnArrays("an integer is divided by zero")
        return getattr(sys.modules["torch"], name)(a, b, **how)

    return quotient


_OWN: dict[str, Callable[..., Any]] = {
    "places": _places,
    "cast": lambda dtype, value: value.to(dtype),
    "view": _view,
    "taken": lambda buffer, place: buffer.take(place),
    "taken inside": _taken_inside,
    "laid out": _laid_out,
    "written at": _written_at,
    "added at": partial(_written_at, adds=True),
    "contracted": _contracted,
    "scanned": _scanned,
    "sum of": _sum,
    "product of": _product,
    "largest of": lambda along, value: value.amax(along, keepdim=True),
    "least of": lambda along, value: value.amin(along, keepdim=True),
    "all of": _folded("all"),
    "any of": _folded("any"),
    "quotient": _divided("div", rounding_mode="trunc"),
    "floored quotient": _divided("div", rounding_mode="floor"),
    "rest": _divided("fmod"),
    "floored rest": _divided("remainder"),
}
