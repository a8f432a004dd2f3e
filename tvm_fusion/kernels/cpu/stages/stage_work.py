"""Rough counts that decide between computing again and keeping in memory."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from tvm import tirx
from tvm.ir import Call, Expr, TensorLoad

from ...program.expr import bytes_of, number
from .rewrite import call_name, children, free_variables, is_conditional
from .stages import Axis, Stage

# Symbolic extents count as this many.
ASSUMED_EXTENT = 256

# Cost of an operation in additions: the polynomials of math.py, and the throughput of division.
CALL_COST = {"exp": 12, "tanh": 16, "sigmoid": 16, "erf": 16, "log": 14, "pow": 30, "sqrt": 5}
CHEAP_CALLS = ("fabs", "floor", "ceil", "trunc", "isnan", "if_then_else", "reinterpret")
OTHER_CALL_COST = 30
DIVISION_COST = 4
LOAD_COST = 1


def size_of(axis: Axis) -> int:
    """Extent of an axis, assumed where it is symbolic."""
    return ASSUMED_EXTENT if axis.size is None else int(axis.size)


def points(axes: Iterable[Axis]) -> int:
    """Number of points of a space."""
    return prod(size_of(a) for a in axes)


def operations(*roots: Expr) -> int:
    """Cost of evaluating `roots` once, indices excluded."""
    total, seen, stack = 0, set(), list(roots)
    while stack:
        expr = stack.pop()
        if expr in seen:
            continue
        seen.add(expr)
        total += _cost(expr)
        if not isinstance(expr, TensorLoad):
            stack.extend(children(expr))
    return total


def _cost(expr: Expr) -> int:
    if isinstance(expr, TensorLoad):
        return LOAD_COST
    if is_conditional(expr):
        return 2
    if isinstance(expr, Call):
        name = call_name(expr)
        return 1 if name in CHEAP_CALLS else CALL_COST.get(name, OTHER_CALL_COST)
    if isinstance(expr, tirx.Div | tirx.FloorDiv | tirx.FloorMod | tirx.Mod):
        return DIVISION_COST
    return 1 if children(expr) else 0


def stage_work(stage: Stage) -> int:
    """Cost of one point of a stage."""
    return operations(*stage.expressions())


def hoisted_points(stage: Stage, used: Expr | Iterable[Expr]) -> int:
    """How often something that depends on `used` is evaluated in the loops of `stage`.

    It is evaluated in the innermost loop that it depends on; loops inside do not repeat it.
    """
    roots = [used] if isinstance(used, Expr) else list(used)
    names = free_variables(*roots)
    domain = stage.domain
    depth = max((i + 1 for i, a in enumerate(domain) if a.var in names), default=0)
    return points(domain[:depth])


def bytes_of_buffer(shape: Iterable[Expr], dtype: str) -> int:
    """Bytes of a buffer, symbolic extents assumed."""
    return bytes_of(dtype) * prod(
        ASSUMED_EXTENT if number(e) is None else int(number(e)) for e in shape
    )
