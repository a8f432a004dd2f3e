"""A fused s_tir PrimFunc as a list of stages: each computes one buffer, point by point.

    for i, k in T.grid(M, K):                 Stage(buffers=(S,), axes=(i < M,), reduced=(k < K,),
        with T.sblock("sum"):            ->         values=(A[i, k],), kind=Kind.SUM,
            S[vi] = S[vi] + A[vi, vk]               initial=(0.0,))

Stages are values: every step of the writer makes new ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from math import prod

import tvm
from tvm import tirx
from tvm.ir import Call, Expr, TensorLoad, Var

from ...program.expr import bytes_of, constant, dtype_of, flatten, number
from .rewrite import (
    SimplifyIndices,
    Substitute,
    call_name,
    children,
    free_variables,
    is_conditional,
    loads,
    nodes,
)

# Rough counts that decide between computing again and keeping in memory.

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


@lru_cache(maxsize=1024)  # a stage never changes
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


# How a load or store moves through memory when an axis advances.


def offset(buffer: Var, indices: list[Expr]) -> Expr:
    """Linear offset of an element."""
    dtype = dtype_of(indices[0]) if indices else "int64"
    return flatten(indices, list(buffer.ty.shape), dtype)


def stride(buffer: Var, indices: list[Expr], var: Var, analyzer: tvm.sym.Analyzer) -> int | None:
    """Elements by which an access moves when `var` grows by 1; None if that varies."""
    at = offset(buffer, indices)
    if var not in free_variables(at):
        return 0
    if any(var in free_variables(load) for load in loads(at)):
        return None
    ahead = Substitute({var: tirx.Add(var, constant(1, dtype_of(var)))})(at)
    return number(analyzer.simplify(ahead - at))


def load_stride(load: TensorLoad, var: Var, analyzer: tvm.sym.Analyzer) -> int | None:
    """`stride` of a load."""
    return stride(load.source, list(load.indices), var, analyzer)


def has_division(expr: Expr) -> bool:
    """Whether an index computation divides."""
    return any(
        isinstance(e, tirx.FloorDiv | tirx.FloorMod | tirx.Div | tirx.Mod) for e in nodes(expr)
    )


class Kind(Enum):
    """How a reduction combines; UPDATE is any other recurrence, in the order of its axes."""

    SUM = "sum"
    PROD = "prod"
    MAX = "max"
    MIN = "min"
    ALL = "all"
    ANY = "any"
    UPDATE = "update"


@dataclass(frozen=True, slots=True, eq=False)
class Axis:
    """One iteration axis, from 0 to `extent`."""

    var: Var
    extent: Expr

    @property
    def size(self) -> int | None:
        """The extent, if it is known at compile time."""
        return number(self.extent)

    @property
    def index(self) -> Expr:
        """The variable; 0 for an extent of 1: such variables do not occur in expressions."""
        return constant(0, dtype_of(self.var)) if self.size == 1 else self.var


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """``buffer[axes] = value``, or the reduction of `values` over `reduced`.

    Attributes
    ----------
    name : str
    buffers : tuple of Var
        What is written: one buffer, or several for a recurrence over several values.
    axes : tuple of Axis
        One an output dimension, in order. Axes of extent 1 do not occur in expressions.
    reduced : tuple of Axis
    binds : tuple of (Var, Expr)
        Values computed at each point before `values`, in order.
    values : tuple of Expr
        One a buffer: the element; the term of a reduction; the next state of a recurrence.
    kind : Kind or None
        None without a reduction.
    initial : tuple of Expr
        The state that a reduction starts from.
    carries : tuple of Var
        The state's variables in `values` of a recurrence.
    elements : tuple of Var
        Where two states can be merged: the second state's variables in `merge`.
    merge : tuple of Expr
        The merged state.
    rounding : str or None
        16-bit float that the result of a reduction is rounded to, although kept as float32.
    factors : str or None
        The type of both factors of a sum of products in the graph, whatever computes them here.
    constants : frozenset of Var
        Parameters that are the same in every call, and read in one place only.
    """

    name: str
    buffers: tuple[Var, ...]
    axes: tuple[Axis, ...]
    reduced: tuple[Axis, ...]
    values: tuple[Expr, ...]
    kind: Kind | None = None
    initial: tuple[Expr, ...] = ()
    carries: tuple[Var, ...] = ()
    elements: tuple[Var, ...] = ()
    merge: tuple[Expr, ...] = ()
    rounding: str | None = None
    binds: tuple[tuple[Var, Expr], ...] = ()
    factors: str | None = None
    constants: frozenset[Var] = frozenset()

    @property
    def buffer(self) -> Var:
        """The only buffer written."""
        return self.buffers[0]

    @property
    def domain(self) -> tuple[Axis, ...]:
        """All axes longer than 1: those of the output, then the reduced ones."""
        return tuple(a for a in (*self.axes, *self.reduced) if a.size != 1)

    def expressions(self) -> list[Expr]:
        """Everything that is evaluated at each point."""
        return [value for _, value in self.binds] + list(self.values)

    def reads(self) -> list[TensorLoad]:
        """All loads."""
        return loads(*self.expressions())


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """Stages in an order that respects their reads; `params` are the function's parameters."""

    params: tuple[Var, ...]
    stages: tuple[Stage, ...]

    def is_param(self, buffer: Var) -> bool:
        """Whether the buffer belongs to the caller."""
        return any(buffer.same_as(p) for p in self.params)

    def producers(self) -> dict[Var, Stage]:
        """The stage that writes each buffer."""
        return {b: s for s in self.stages for b in s.buffers}


def analyzer_of(axes: tuple[Axis, ...]) -> tvm.sym.Analyzer:
    """An analyzer that knows the ranges of the axes."""
    analyzer = tvm.sym.Analyzer()
    for axis in axes:
        zero = constant(0, dtype_of(axis.extent))
        analyzer.bind(axis.var, tvm.ir.Range.from_min_extent(zero, axis.extent))
    return analyzer


def simplified(stage: Stage) -> Stage:
    """`stage` with simplified indices and conditions."""
    simplify = SimplifyIndices(analyzer_of(stage.domain))
    return replace(
        stage,
        binds=tuple((v, simplify(e)) for v, e in stage.binds),
        values=tuple(simplify(v) for v in stage.values),
    )
