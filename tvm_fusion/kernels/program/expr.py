"""Small helpers on TIR expressions: dtypes, numbers, substitution, linear index forms."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Expr, Var
from tvm.ir.prim.expr import BinaryOpExpr as Binary
from tvm.ir.prim.expr import BitwiseNot, Let, LogicalExpr
from tvm.ir.prim.expr import CmpExpr as Comparison
from tvm.tirx.analysis import undefined_vars

from ...ir.blocks import same, substitute  # noqa: F401

HALF_DTYPES = ("float16", "bfloat16")
FLOAT8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
_NUMBERS = (tirx.IntImm, tirx.FloatImm)
_BOOL = tvm.ir.PrimType("bool")
DIVISIONS = (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod)


_MOST_TYPES = 1024
_dtypes: dict[int, tuple[Any, str]] = {}
"""By address types, which are kept, and their dtypes: TVM has one for each dtype, and makes a new
object of its dtype each time that it is asked for.
"""


def dtype_of(expr: Expr) -> str:
    """The dtype of a scalar expression."""
    ty = expr.ty
    address = ty.__chandle__()
    known = _dtypes.get(address)
    if known is None:
        if len(_dtypes) >= _MOST_TYPES:  # types that were read from a file are none of TVM's own
            _dtypes.clear()
        known = _dtypes[address] = ty, str(ty.dtype)
    return known[1]


@cache
def bits_of(dtype: str) -> int:
    """Bits of one element in memory; a bool takes a byte."""
    return 8 if dtype == "bool" else int(re.search(r"\d+", dtype).group())


def bytes_of(dtype: str) -> int:
    """Bytes of one element in memory."""
    return max(1, bits_of(dtype) // 8)


def is_integer(dtype: str) -> bool:
    """Whether `dtype` is a signed or unsigned integer (bool is not)."""
    return dtype.startswith(("int", "uint"))


def widened(dtype: str) -> str:
    """The dtype a value is computed in: float32 for 8-bit and half precision, else itself."""
    return "float32" if dtype in HALF_DTYPES + FLOAT8_DTYPES else dtype


def number(expr: Expr | int | float | None) -> int | float | None:
    """The Python number behind an immediate, or None."""
    if isinstance(expr, int | float):
        return expr
    if isinstance(expr, tirx.IntImm):
        return int(expr.value)
    return float(expr.value) if isinstance(expr, tirx.FloatImm) else None


def extent_of(expr: Expr | int) -> int | Expr:
    """A size as a Python int if it is known, else the expression itself."""
    value = number(expr)
    return expr if value is None else int(value)


def constant(value: float, dtype: str) -> Expr:
    """An immediate; infinities allowed for floats."""
    if dtype.startswith(("float", "bfloat")):
        return tirx.FloatImm(dtype, float(value))
    return tirx.IntImm(dtype, int(value))


def keeps_value(source: str, target: str) -> bool:
    """Whether every number of `source` is one of `target` too."""
    if source in HALF_DTYPES:
        return target in (source, "float32", "float64")
    if source in FLOAT8_DTYPES:
        return target in (source, "float16", "bfloat16", "float32", "float64")
    if source in ("int8", "uint8"):
        return target in (source, "int16", "int32", "int64", "float32", "float64")
    return source == target


def convert(expr: Expr, dtype: str) -> Expr:
    """`expr` as `dtype`: itself, a converted immediate, or a cast."""
    if dtype_of(expr) == dtype:
        return expr
    if isinstance(expr, tirx.IntImm) and dtype != "bool":
        return constant(int(expr.value), dtype)
    return tirx.Cast(dtype, expr)


def rebuild(expr: Expr, visit: Callable[[Expr], Expr]) -> Expr:
    """`expr` with `visit` applied to its children.

    Types follow the children: a float16 addition of what is now float32 becomes a float32 one.
    Loads are left to the caller.
    """
    build = _rebuilder(type(expr))
    return expr if build is None else build(expr, visit)


@cache
def _rebuilder(kind: type) -> Callable[[Any, Callable[[Expr], Expr]], Expr] | None:
    """How expressions of a class are rebuilt; None of leaves. (TVM's classes take 0.2 us each to
    say that something is none of theirs.)
    """
    if issubclass(kind, tirx.Not | BitwiseNot):
        return lambda expr, visit: kind(visit(expr.a))
    if issubclass(kind, Binary | Comparison | LogicalExpr):
        return _rebuild_binary
    if issubclass(kind, tirx.Select):
        return lambda expr, visit: tirx.Select(
            *map(visit, (expr.condition, expr.true_value, expr.false_value))
        )
    if issubclass(kind, tirx.Cast):
        return lambda expr, visit: convert(visit(expr.value), dtype_of(expr))
    if issubclass(kind, Call):
        return lambda expr, visit: tirx.call_intrin(
            widened(dtype_of(expr)), expr.op, *map(visit, expr.args)
        )
    if issubclass(kind, Let):
        return lambda expr, visit: substitute(visit(expr.body), {expr.var: visit(expr.value)})
    return None


def _rebuild_binary(expr: Any, visit: Callable[[Expr], Expr]) -> Expr:
    left, right = expr.a, expr.b
    a, b = visit(left), visit(right)
    return expr if a is left and b is right else type(expr)(a, b)


def is_if_then_else(expr: Expr) -> bool:
    """Whether `expr` is a conditional that evaluates only the side its condition picks."""
    return isinstance(expr, Call) and expr.op.name == "prim.if_then_else"


def variables(*exprs: Expr) -> list[Var]:
    """Free variables in order of first use, each once; symbolic extents of what is loaded are."""
    found: dict[Var, None] = {}
    for expr in exprs:
        if type(expr) is Var:
            found.setdefault(expr)
        elif type(expr) not in _NUMBERS:
            # of scalars alone; `x != y` has no type until it is used
            is_scalar = isinstance(getattr(expr, "ty", _BOOL), tvm.ir.PrimType)
            free = list(undefined_vars(expr, [])) if is_scalar else None
            if free is not None and all(map(_has_numbers, free)):
                found.update(dict.fromkeys(free))
            else:
                tvm_ffi.structural_walk(expr, (Var, found.setdefault))
    return list(found)


def _has_numbers(var: Var) -> bool:
    """Whether a variable is a scalar, or a tensor whose extents are numbers: `undefined_vars` does
    not look at those, and takes a quarter of the time of a walk.
    """
    ty = var.ty
    return not isinstance(ty, tirx.BufferType) or all(type(n) is tirx.IntImm for n in ty.shape)


def occurrences(expr: Expr) -> Counter[Var]:
    """How often each variable stands in `expr`."""
    found: list[Var] = []
    tvm_ffi.structural_walk(expr, (Var, found.append))
    return Counter(found)


def uses_any(expr: Expr, wanted: Iterable[Var]) -> bool:
    """Whether one of the variables `wanted` occurs in `expr`."""
    wanted = set(wanted)
    return any(var in wanted for var in variables(expr))


def conjunction(*conditions: Expr | None) -> Expr | None:
    """All conditions at once; None stands for true."""
    result = None
    for condition in conditions:
        if condition is not None:
            result = condition if result is None else tirx.And(result, condition)
    return result


def conjuncts(condition: Expr | None) -> Iterator[Expr]:
    """The conditions that `condition` is the conjunction of; None stands for true."""
    if isinstance(condition, tirx.And):
        yield from conjuncts(condition.a)
        yield from conjuncts(condition.b)
    elif condition is not None:
        yield condition


def flatten(indices: Sequence[Expr], shape: Sequence[Expr | int], dtype: str) -> Expr:
    """Linear offset of `indices` in a row-major buffer of `shape`."""
    offset = constant(0, dtype)
    for index, extent in zip(indices, shape, strict=True):
        size = constant(extent, dtype) if isinstance(extent, int) else convert(extent, dtype)
        offset = offset * size + convert(index, dtype)
    return offset


def unflatten(
    offset: Expr, shape: Sequence[Expr | int], analyzer: tvm.sym.Analyzer
) -> tuple[Expr, ...]:
    """Indices of the element at linear `offset` in a row-major buffer of `shape`."""
    dtype = dtype_of(offset)
    indices: list[Expr] = []
    for axis in range(len(shape) - 1, -1, -1):
        extent = shape[axis]
        size = constant(extent, dtype) if isinstance(extent, int) else convert(extent, dtype)
        index = analyzer.simplify(offset if axis == 0 else tirx.FloorMod(offset, size))
        indices.append(convert(index, dtype))  # what is 0 comes back as one of int32
        offset = convert(analyzer.simplify(tirx.FloorDiv(offset, size)), dtype)
    return tuple(reversed(indices))


def linear_form(expr: Expr, unknowns: Sequence[Var]) -> tuple[list[Expr], Expr] | None:
    """Coefficients of `unknowns` and the rest, or None where `expr` is not linear in them."""
    if not unknowns:
        return [], expr
    parts = list(tvm.sym.detect_linear_equation(expr, list(unknowns)))
    return (parts[:-1], parts[-1]) if parts else None


def bounds(expr: Expr, analyzer: tvm.sym.Analyzer) -> tuple[int, int]:
    """Smallest and largest value that `analyzer` proves possible."""
    bound = analyzer.const_int_bound(expr)
    return int(bound.min_value), int(bound.max_value)


def known_factor(expr: Expr | int, analyzer: tvm.sym.Analyzer) -> int:
    """Largest integer known to divide `expr`; 0 where `expr` is known to be 0."""
    if isinstance(expr, int):
        return abs(expr)
    modular = analyzer.modular_set(expr)
    return math.gcd(int(modular.coeff), int(modular.base))
