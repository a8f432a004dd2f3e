"""Factors within an operand of a matrix product: what multiplies a tensor, and along which axis.

    A = f16(f32(x) * r * g)       x: f16 [M, K]    r: f32 [M, 1]    g: [K]

Read from A downwards, each operator is a step to the tensor below: x, with the factors r (one value
for each row: `KEPT`, the axis that the product keeps) and g (one for each term of the sum:
`SUMMED`). Steps are casts between float types, reshapes that keep the last axis, transpositions of
the last two axes, and products and quotients with a factor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import Call
from tvm.relax import Expr, Var

from ..decompose.opening import FLOAT_DTYPES, HALF_DTYPES, dtype_of, normalize_axes, shape_of

FLOAT8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
PACKED_DTYPES = ("int8", "uint8", *FLOAT8_DTYPES)
"""Types that weights are stored in; all their values are values of every wider float type too."""

Lookup = Callable[[Expr], Expr | None]
"""What a variable is bound to, or None."""


class Along(Enum):
    """The axis of a matrix that a factor varies along."""

    KEPT = "kept"
    SUMMED = "summed"


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """`value` multiplies (or, `inverse`, divides) a tensor of `ndim` axes.

    `flipped` and `reshaped`: the steps between the tensor and the operand of the product.
    """

    value: Expr
    along: Along
    inverse: bool
    ndim: int
    flipped: bool
    reshaped: bool


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """A tensor within an operand: operand = flipped, reshaped `source` times `factors`."""

    source: Expr
    factors: tuple[Factor, ...] = ()
    flipped: bool = False
    reshaped: bool = False


def is_call(value: Expr | None, *names: str) -> bool:
    """Whether a value is a call of one of these operators (without `relax.`)."""
    op = value.op if isinstance(value, Call) else None
    return isinstance(op, tvm.ir.Op) and op.name.removeprefix("relax.") in names


def is_constant(value: Expr | None) -> bool:
    """Whether a value is a tensor known at compile time."""
    return isinstance(value, tvm.ir.Constant) and isinstance(value.value, tvm.runtime.Tensor)


def is_one(extent: Expr) -> bool:
    """Whether an extent is known to be 1."""
    return isinstance(extent, tvm.tirx.IntImm) and int(extent) == 1


def levels(operand: Expr, summed: int, lookup: Lookup) -> list[Level]:
    """All tensors within an operand from itself downwards.

    Parameters
    ----------
    operand : Expr
        An operand of two axes or more.
    summed : int
        The axis that the product sums over: -1 in the left operand, -2 in the right one.
    lookup : Lookup
    """
    found = [Level(operand)]
    while (below := _below(found[-1], summed, lookup)) is not None:
        found.append(below)
    return found


def steps_to(operand: Expr, source: Expr, lookup: Lookup) -> list[Var]:
    """The variables from an operand down to the one before `source`."""
    variables = []
    while not operand.same_as(source):
        variables.append(operand)
        operand = _tensor_side(lookup(operand))
    return variables


def constant_behind(operand: Expr, lookup: Lookup) -> Level | None:
    """The constant that a right operand is, or is the transposition of; None if it is neither."""
    *_, last = levels(operand, -2, lookup)
    if last.factors or not is_constant(last.source) or len(shape_of(last.source)) < 2:
        return None
    return last if dtype_of(last.source) == dtype_of(operand) else None


def _below(level: Level, summed: int, lookup: Lookup) -> Level | None:
    value = lookup(level.source)
    tensor = _tensor_side(value)
    if tensor is None or dtype_of(tensor) not in (*FLOAT_DTYPES, *PACKED_DTYPES):
        return None
    if is_call(value, "astype"):
        return replace(level, source=tensor) if dtype_of(value) in FLOAT_DTYPES else None
    if is_call(value, "reshape"):
        keeps = summed == -1 and not level.flipped and _keeps_last_axis(value)
        return replace(level, source=tensor, reshaped=True) if keeps else None
    if is_call(value, "permute_dims"):
        flips = not level.reshaped and swaps_last_axes(value)
        return replace(level, source=tensor, flipped=not level.flipped) if flips else None
    other = value.args[1] if tensor.same_as(value.args[0]) else value.args[0]
    ndim = len(shape_of(value))
    along = _along(other, ndim, -3 - summed if level.flipped else summed)
    if along is None or dtype_of(other) not in FLOAT_DTYPES:
        return None
    inverse = is_call(value, "divide")
    factor = Factor(other, along, inverse, ndim, level.flipped, level.reshaped)
    if level.reshaped and along is Along.KEPT and not _fits_rows(factor, shape_of(value)):
        return None
    return replace(level, source=tensor, factors=(*level.factors, factor))


def _tensor_side(value: Expr | None) -> Expr | None:
    """The operand of a step that is the tensor; the other one, if any, is smaller."""
    if is_call(value, "astype", "reshape", "permute_dims"):
        return value.args[0] if _known(value, value.args[0]) else None
    if not is_call(value, "multiply", "divide") or not _known(value, *value.args):
        return None
    pair = list(value.args) if is_call(value, "multiply") else [value.args[0]]
    shape = shape_of(value)
    whole = [a for a in pair if tvm_ffi.structural_equal(shape_of(a), shape)]
    computed = [a for a in whole if not is_constant(a)]
    return (computed or whole)[0] if whole else None


def _known(*tensors: Expr) -> bool:
    """Whether the shapes of all are known."""
    types = [tensor.ty for tensor in tensors]
    return all(isinstance(ty, relax.TensorType) for ty in types) and all(
        isinstance(ty.shape, relax.ShapeExpr) for ty in types
    )


def _along(other: Expr, ndim: int, summed: int) -> Along | None:
    shape = padded_shape(shape_of(other), ndim)
    if is_one(shape[summed]):
        return Along.KEPT
    rest = [extent for axis, extent in enumerate(shape) if axis != ndim + summed]
    return Along.SUMMED if all(map(is_one, rest)) else None


def padded_shape(shape: Sequence, ndim: int) -> list:
    """A shape with ones in front, up to `ndim` axes."""
    return [*[tvm.tirx.IntImm("int64", 1)] * (ndim - len(shape)), *shape]


def _keeps_last_axis(value: Call) -> bool:
    new, old = shape_of(value), shape_of(value.args[0])
    return len(new) > 1 and len(old) > 1 and tvm_ffi.structural_equal(new[-1], old[-1])


def _fits_rows(factor: Factor, shape: Sequence) -> bool:
    """Whether a factor has a value for each row, or one alone: it can be reshaped as the rows."""
    own = padded_shape(shape_of(factor.value), len(shape))
    return all(map(is_one, own)) or tvm_ffi.structural_equal(own[:-1], list(shape[:-1]))


def swaps_last_axes(value: Call) -> bool:
    """Whether a permutation is the transposition of the last two axes."""
    ndim = len(shape_of(value))
    order = list(range(ndim))
    axes = value.attrs.axes
    axes = order[::-1] if axes is None else normalize_axes(axes, ndim)
    return ndim > 1 and axes == [*order[:-2], ndim - 1, ndim - 2]


def keeps_values(source: str, target: str) -> bool:
    """Whether an operand of type `target` can be made of a tensor of type `source` exactly."""
    if source in PACKED_DTYPES:
        return target in FLOAT_DTYPES
    return source == target or (source in HALF_DTYPES and target == "float32")
