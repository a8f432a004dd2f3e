"""Rewrites of single stages before they are grouped.

    p[y, x] = max_{r < 3, c < 3} a[y + r, x + c]    ->  p[y, x] = max(a[y, x], max(a[y, x + 1], ..))
    b[i, j] = f(a[j, i])                            ->  t[i, j] = a[j, i]; b[i, j] = f(t[i, j])

Small windows are written out; what is read against the grain is copied tile by tile first.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product as combinations

from tvm import tirx
from tvm.ir import Expr, PrimType, TensorLoad, Var

from ...program.expr import constant, convert, dtype_of, widened
from ..contraction.operands import split_product
from ..nests.point import COMBINE
from .lanes import best_lane, last_axis, runs_across, turned_axes
from .rewrite import (
    Bindings,
    Rewriter,
    Substitute,
    free_variables,
    is_conditional,
    loads_with_guard,
    nodes,
    rebuild,
)
from .stage_work import points, stage_work
from .stages import Axis, Graph, Kind, Stage, analyzer_of, simplified

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
    total: Expr = convert(stage.initial[0], dtype)
    for at in combinations(*(range(int(a.size)) for a in stage.reduced)):
        env: dict[Var, Expr] = {
            a.var: constant(i, dtype_of(a.var)) for a, i in zip(stage.reduced, at, strict=True)
        }
        for var, value in stage.binds:
            fresh = Var(var.name, PrimType(dtype_of(value)))
            binds.append((fresh, Substitute(env)(value)))
            env[var] = fresh
        total = _bound(binds, COMBINE[stage.kind](total, Substitute(env)(stage.values[0])))
    plain = replace(stage, reduced=(), kind=None, initial=(), binds=tuple(binds), values=(total,))
    return simplified(plain)


def _is_plain(stage: Stage) -> bool:
    """Whether a term is cheap enough to be written out many times: a product of two loads, say."""
    conditions = any(is_conditional(e) for e in nodes(*stage.expressions()))
    return stage_work(stage) <= MOST_UNROLLED_WORK and not conditions


def _bound(binds: Bindings, value: Expr) -> Var:
    var = Var("partial", PrimType(dtype_of(value)))
    binds.append((var, value))
    return var


# Transposed reads


def _staged(stage: Stage) -> list[Stage]:
    """Copies of what `stage` reads against the grain, then `stage` reading the copies."""
    lane = last_axis(stage)
    if stage.kind is not None or lane is None or turned_axes(stage) is not None:
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
