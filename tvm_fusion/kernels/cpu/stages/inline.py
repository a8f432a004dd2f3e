"""Computing pointwise stages where they are read, if that repeats little work.

t[i, j] = exp(x[i, j])                      u[i, j] = (v = exp(x[j, i]); v * v)
u[i, j] = t[j, i] * t[j, i]         ->
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from tvm.ir import Expr, TensorLoad, Var
from tvm.ir.prim.expr import Let, LogicalExpr

from ...program.expr import convert, dtype_of, number, same
from ..contraction.operands import split_product
from .rewrite import (
    LEAVES,
    Bindings,
    Substitute,
    children,
    free_variables,
    is_conditional,
    key_of,
    let_chain,
    loads,
    loads_with_guard,
    nodes,
    with_children,
)
from .stages import LOAD_COST, Graph, Stage, hoisted_points, points, simplified, stage_work

# Cost of storing an element and loading it again from a cache, in additions.
KEEP_COST = 4

# A contraction packs its operands once for each of its tiles.
PACKS = 2

MOST_NODES = 300
MOST_NODES_UNDER_CONDITION = 60


def inline(graph: Graph) -> Graph:
    """Inline what is worth it, and drop what nobody reads."""
    chosen = _choose(graph)
    bodies: dict[Var, Stage] = {}
    stages = []
    for stage in graph.stages:
        if any(load.source in bodies for load in stage.reads()):
            stage = simplified(_Inliner(stage, bodies).run())
        if stage.buffer in chosen:
            bodies[stage.buffer] = stage
        else:
            stages.append(stage)
    return Graph(graph.params, tuple(stages))


def _choose(graph: Graph) -> set[Var]:
    """Buffers of the stages to inline; consumers are decided before their producers."""
    sizes = _sizes(graph)
    runs: dict[Var, int] = {}
    chosen: set[Var] = set()
    for i in range(len(graph.stages) - 1, -1, -1):
        stage = graph.stages[i]
        key = stage.buffer
        runs[key] = points(stage.domain)
        if stage.kind is not None or len(stage.buffers) > 1 or graph.is_param(stage.buffer):
            continue
        uses = _uses(stage.buffer, graph.stages[i + 1 :])
        count, guarded, transposed = 0, False, False
        for reader, load, under_condition in uses:
            guarded |= under_condition
            transposed |= _is_transposing(reader, load)
            inlined = reader.buffer in chosen
            count += runs[reader.buffer] if inlined else _evaluations(reader, load)
        most = MOST_NODES_UNDER_CONDITION if guarded else MOST_NODES
        work, own = stage_work(stage), points(stage.domain)
        cheap = (work - LOAD_COST) * count <= (work + KEEP_COST - LOAD_COST) * own
        plain = not transposed or work <= LOAD_COST
        if cheap and plain and sizes[key] <= most:
            chosen.add(key)
            runs[key] = count
    return chosen


def _sizes(graph: Graph) -> dict[Var, int]:
    """Nodes of each stage with all its pointwise producers inlined."""
    sizes: dict[Var, int] = {}
    for stage in graph.stages:
        total = sum(1 for _ in nodes(*stage.expressions()))
        for load in stage.reads():
            total += sizes.get(load.source, 0)
        sizes[stage.buffer] = total if stage.kind is None else 0
    return sizes


def _uses(buffer: Var, readers: tuple[Stage, ...]) -> list[tuple[Stage, TensorLoad, bool]]:
    """Where a buffer is read: equal indices in one stage count once."""
    uses = []
    for reader in readers:
        found: list[tuple[TensorLoad, bool]] = []
        for root in reader.expressions():
            for load, guarded in loads_with_guard(root):
                if not load.source.same_as(buffer):
                    continue
                if not any(_same_indices(load, seen) for seen, _ in found):
                    found.append((load, guarded))
        uses.extend((reader, load, guarded) for load, guarded in found)
    return uses


def _is_transposing(reader: Stage, load: TensorLoad) -> bool:
    """Whether a pointwise stage reads another axis contiguously than it writes.

    What is computed there would read all its inputs against the grain; a tile of it is kept.
    """
    axes = [a.var for a in reader.axes if a.size != 1]
    long = [i for i in load.indices if number(i) is None]
    if reader.kind is not None or len(axes) < 2 or len(long) < 2:
        return False
    across = any(isinstance(i, Var) and i.same_as(axes[-1]) for i in long[:-1])
    return across and any(long[-1].same_as(v) for v in axes[:-1])


def _same_indices(a: TensorLoad, b: TensorLoad) -> bool:
    return all(same(i, j) for i, j in zip(a.indices, b.indices, strict=True))


def _evaluations(reader: Stage, load: TensorLoad) -> int:
    """How often `reader` would evaluate what it loads."""
    if split_product(reader) is not None:
        used = free_variables(load)
        return PACKS * points(a for a in reader.domain if a.var in used)
    return hoisted_points(reader, load)


class _Inliner:
    """Rewrites one stage with the loads of inlined buffers replaced by their values."""

    def __init__(self, stage: Stage, bodies: dict[Var, Stage]) -> None:
        self.stage = stage
        self.bodies = bodies
        self.binds: Bindings = []
        self._known: list[tuple[TensorLoad, Expr]] = []
        self._done: dict[tuple[Hashable, bool], Expr] = {}

    def run(self) -> Stage:
        """The stage without loads of inlined buffers."""
        for var, value in self.stage.binds:
            self.binds.append((var, self._visit(value, False)))
        values = tuple(self._visit(v, False) for v in self.stage.values)
        return replace(self.stage, binds=tuple(self.binds), values=values)

    def _visit(self, expr: Expr, guarded: bool) -> Expr:
        key = (key_of(expr), guarded)
        if key not in self._done:
            self._done[key] = self._rewrite(expr, guarded)
        return self._done[key]

    def _rewrite(self, expr: Expr, guarded: bool) -> Expr:
        lazy = is_conditional(expr) or isinstance(expr, LogicalExpr | Let)
        old = children(expr)
        new = [self._visit(x, guarded or (lazy and i > 0)) for i, x in enumerate(old)]
        if not all(a.same_as(b) for a, b in zip(old, new, strict=True)):
            expr = with_children(expr, new)
        if isinstance(expr, TensorLoad) and expr.source in self.bodies:
            return self._value_of(expr, guarded)
        return expr

    def _value_of(self, load: TensorLoad, guarded: bool) -> Expr:
        if guarded:
            binds, value = self._instance(load)
            return let_chain(binds, value)
        for seen, value in self._known:
            if seen.source.same_as(load.source) and _same_indices(seen, load):
                return value
        binds, value = self._instance(load)
        self.binds.extend(binds)
        if not isinstance(value, LEAVES):
            var = _fresh(load.source.name, value)
            self.binds.append((var, value))
            value = var
        self._known.append((load, value))
        return value

    def _instance(self, load: TensorLoad) -> tuple[Bindings, Expr]:
        """Bindings and value of the inlined stage at the loaded indices, in fresh variables."""
        body = self.bodies[load.source]
        binds: Bindings = []
        env: dict[Var, Expr] = {}
        for axis, index in zip(body.axes, load.indices, strict=True):
            index = convert(index, dtype_of(axis.var))  # an index that is loaded may be wider
            if loads(index):
                var = _fresh("index", index)
                binds.append((var, index))
                index = var
            env[axis.var] = index
        for var, value in body.binds:
            fresh = _fresh(var.name, value)
            binds.append((fresh, _Fresh(env)(value)))
            env[var] = fresh
        return binds, _Fresh(env)(body.values[0])


class _Fresh(Substitute):
    """Substitution that renews the variables of Let expressions."""

    def visit(self, expr: Expr) -> Expr:
        if isinstance(expr, Let):
            var = _fresh(expr.var.name, expr.value)
            inner = _Fresh({**self.env, expr.var: var})
            return Let(var, self(expr.value), inner(expr.body))
        return super().visit(expr)


def _fresh(name: str, value: Expr) -> Var:
    from tvm.ir import PrimType

    return Var(name, PrimType(dtype_of(value)))
