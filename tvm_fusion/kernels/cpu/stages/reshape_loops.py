"""Rewrites of single stages before they are grouped.

    p[y, x] = max_{r < 3, c < 3} a[y + r, x + c]    ->  p[y, x] = max(a[y, x], max(a[y, x + 1], ..))
    b[i, j] = f(a[j, i])                            ->  t[i, j] = a[j, i]; b[i, j] = f(t[i, j])

Small windows are written out; what is read against the grain is copied tile by tile first.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product as combinations

import tvm
from tvm import tirx
from tvm.ir import Expr, PrimType, TensorLoad, Var
from tvm.ir.prim.expr import Let, LogicalExpr

from ...program.expr import HALF_DTYPES, constant, convert, dtype_of, number, widened
from ..contraction.operands import split_product
from ..nests.point import COMBINE
from .lanes import best_lane, last_axis, runs_across, transposed_axes
from .rewrite import (
    Bindings,
    Rewriter,
    Substitute,
    branches,
    can_speculate,
    free_variables,
    is_conditional,
    loads,
    loads_with_guard,
    nodes,
    rebuild,
)
from .stages import Axis, Graph, Kind, Stage, analyzer_of, points, simplified, stage_work

# Turns conditions into selections where both sides may be evaluated.
#
#     y[i, j] = if_then_else(i <= j, x[i, j], 0)  ->  v = x[i, j]; y[i, j] = Select(i <= j, v, 0)
#
# A branch stops vectorisation; a selection does not. Loads that could leave their buffer stay under
# their condition.


def speculate(graph: Graph) -> Graph:
    """The graph with safe loads taken out of conditions."""
    return Graph(graph.params, tuple(_stage(s) for s in graph.stages))


def _stage(stage: Stage) -> Stage:
    analyzer = analyzer_of(stage.domain)
    binds: Bindings = []
    speculated = _Speculate(analyzer, binds)
    for var, value in stage.binds:
        value = speculated(value)
        binds.append((var, value))
    values = tuple(speculated(v) for v in stage.values)
    return replace(stage, binds=tuple(binds), values=values)


class _Speculate(Rewriter):
    def __init__(self, analyzer: tvm.sym.Analyzer, binds: Bindings) -> None:
        super().__init__()
        self.analyzer = analyzer
        self.binds = binds

    def visit(self, expr: Expr) -> Expr:
        if isinstance(expr, Let | LogicalExpr):
            return expr
        if not is_conditional(expr):
            return rebuild(expr, self)
        condition, yes, no = branches(expr)
        condition = self(condition)
        if not all(self._is_inside(load) for load in loads(yes, no)):
            return tirx.if_then_else(condition, yes, no)
        hoisted = _Hoist(self.binds)
        yes, no = hoisted(yes), hoisted(no)
        if can_speculate(yes) and can_speculate(no):
            return tirx.Select(condition, yes, no)
        return tirx.if_then_else(condition, yes, no)

    def _is_inside(self, load: TensorLoad) -> bool:
        """Whether the load stays in its buffer wherever it is evaluated."""
        for index, extent in zip(load.indices, load.source.ty.shape, strict=True):
            if loads(index):
                return False
            low = tirx.GE(index, constant(0, dtype_of(index)))
            high = tirx.LT(index, extent)
            if not (self.analyzer.can_prove(low) and self.analyzer.can_prove(high)):
                return False
        return True


class _Hoist(Rewriter):
    """Binds loads before the expression, together with the cast that widens a 16-bit one.

    A cast to 16 bits (a rounding) stays in the expression: no variable may be of such a type.
    """

    def __init__(self, binds: Bindings) -> None:
        super().__init__()
        self.binds = binds

    def visit(self, expr: Expr) -> Expr:
        widens = isinstance(expr, tirx.Cast) and dtype_of(expr) not in HALF_DTYPES
        load = expr.value if widens else expr
        if isinstance(load, TensorLoad):
            var = Var(load.source.name, PrimType(dtype_of(expr)))
            self.binds.append((var, expr))
            return var
        return rebuild(expr, self)


# Terms of a reduction that is written out: windows of 3 x 3 and a little more.
MOST_UNROLLED_TERMS = 16
MOST_UNROLLED_WORK = 4


def reshape_loops(graph: Graph) -> Graph:
    """Apply both rewrites."""
    stages: list[Stage] = []
    for stage in graph.stages:
        stage = _unrolled(stage)
        stages.extend(_staged(stage))
    return Graph(graph.params, tuple(stages))


# Windows


def _unrolled(stage: Stage) -> Stage:
    """A reduction over a small window as one expression; other stages as they are."""
    if stage.kind in (None, Kind.UPDATE) or split_product(stage) is not None:
        return stage
    if any(a.size is None for a in stage.reduced) or points(stage.reduced) > MOST_UNROLLED_TERMS:
        return stage
    if any(a is best_lane(stage) for a in stage.reduced) or not _is_plain(stage):
        return stage
    binds: Bindings = []
    dtype = dtype_of(stage.values[0])
    terms: list[Expr] = []
    for at in combinations(*(range(int(a.size)) for a in stage.reduced)):
        env: dict[Var, Expr] = {
            a.var: constant(i, dtype_of(a.var)) for a, i in zip(stage.reduced, at, strict=True)
        }
        for var, value in stage.binds:
            fresh = Var(var.name, PrimType(dtype_of(value)))
            binds.append((fresh, Substitute(env)(value)))
            env[var] = fresh
        terms.append(Substitute(env)(stage.values[0]))
    combine = _extremum if stage.kind in ORDER and dtype.startswith("float") else _in_turn
    total = combine(stage, convert(stage.initial[0], dtype), terms, binds)
    plain = replace(stage, reduced=(), kind=None, initial=(), binds=tuple(binds), values=(total,))
    return simplified(plain)


def _in_turn(stage: Stage, total: Expr, terms: list[Expr], binds: Bindings) -> Expr:
    """The initial value and the terms, one after the other."""
    for term in terms:
        total = _bound(binds, COMBINE[stage.kind](total, term))
    return total


# How a maximum or minimum compares, and what it starts from where that is no number of its own.
ORDER = {Kind.MAX: (tirx.GT, -math.inf), Kind.MIN: (tirx.LT, math.inf)}


def _extremum(stage: Stage, initial: Expr, terms: list[Expr], binds: Bindings) -> Expr:
    """The largest or smallest of floats, by comparisons alone; NaN if one of them is.

    A step that keeps NaN takes LLVM five instructions, a comparison that chooses one: 3 x 3 of
    64 x 111 x 111 with a stride of 2 take 251 us so on a core of a Zen 5, 88 with NaN looked for
    by itself.
    """
    compare, start = ORDER[stage.kind]
    if number(initial) != start:
        terms = [initial, *terms]
    first, *others = (_bound(binds, term, "term") for term in terms)
    total = first
    for term in others:
        total = _bound(binds, tirx.Select(compare(total, term), total, term))
    nan = constant(math.nan, dtype_of(total))
    for term in (first, *others):
        total = tirx.Select(tirx.isnan(term), nan, total)
    return total


def _is_plain(stage: Stage) -> bool:
    """Whether a term is cheap enough to be written out many times: a product of two loads, say."""
    conditions = any(is_conditional(e) for e in nodes(*stage.expressions()))
    return stage_work(stage) <= MOST_UNROLLED_WORK and not conditions


def _bound(binds: Bindings, value: Expr, name: str = "partial") -> Var:
    var = Var(name, PrimType(dtype_of(value)))
    binds.append((var, value))
    return var


# Transposed reads


def _staged(stage: Stage) -> list[Stage]:
    """Copies of what `stage` reads against the grain, then `stage` reading the copies."""
    lane = last_axis(stage)
    if stage.kind is not None or lane is None or transposed_axes(stage) is not None:
        return [stage]
    analyzer = analyzer_of(stage.domain)
    guarded = {x for e in stage.expressions() for x, under in loads_with_guard(e) if under}
    copies: dict[Var, Stage] = {}
    for load in stage.reads():
        if load not in guarded and runs_across(stage, load, lane, analyzer):
            copies[load] = _copy(stage, load)
    if not copies:
        return [stage]
    redirect = _ReadCopies(stage, {k: c.buffer for k, c in copies.items()})
    values = tuple(redirect(v) for v in stage.values)
    binds = tuple((v, redirect(e)) for v, e in stage.binds)
    return [*copies.values(), replace(stage, binds=binds, values=values)]


def _copy(stage: Stage, load: TensorLoad) -> Stage:
    """A stage that copies what `load` reads, in the order in which `stage` reads it."""
    used = _used(stage, load)
    axes = tuple(Axis(Var(a.var.name, a.var.ty), a.extent) for a in used)
    dtype = widened(dtype_of(load))
    shape = [a.extent for a in axes]
    buffer = tirx.decl_buffer(shape, dtype, f"{load.source.name}_copy", layout=None)
    env = {a.var: new.var for a, new in zip(used, axes, strict=True)}
    value = convert(Substitute(env)(load), dtype)
    return Stage(f"{load.source.name}_copy", (buffer,), axes, (), (value,))


class _ReadCopies(Rewriter):
    def __init__(self, stage: Stage, copies: dict[Expr, Var]) -> None:
        super().__init__()
        self.stage = stage
        self.copies = copies

    def visit(self, expr: Expr) -> Expr:
        if expr in self.copies:
            return tirx.BufferLoad(self.copies[expr], [a.var for a in _used(self.stage, expr)])
        return rebuild(expr, self)


def _used(stage: Stage, load: TensorLoad) -> list[Axis]:
    """The axes that a load depends on, in the order of the stage."""
    read = free_variables(load)
    return [a for a in stage.domain if a.var in read]
