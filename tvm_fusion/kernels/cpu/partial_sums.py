"""Cuts a long reduction to few results in two steps, so that more than one core can work on it.

    s = sum_{k < 4096} x[k]     ->  p[c] = sum_{k < 64} x[64 * c + k];  s = sum_{c < 64} p[c]

The number of parts does not depend on the machine: equal inputs give equal sums everywhere.
"""

from __future__ import annotations

from dataclasses import replace

from tvm import tirx
from tvm.ir import Var

from ..expr import constant, dtype_of
from .operands import split_product
from .rewrite import Substitute
from .scope import new_buffer
from .stages import Axis, Graph, Kind, Stage, simplified
from .work import points, stage_work

# Results fewer than this leave cores without work; less work than this is done before they wake up
# (a softmax of 2 x 100,000, whose sums are 200,100: 65 us, cut 50, on 2 cores of a Zen 4).
FEW_RESULTS = 8
MUCH_WORK = 200_000

# Number of parts: the largest divisor of the axis up to this, if it is not too small.
MOST_PARTS, LEAST_PARTS = 64, 8


def partial_sums(graph: Graph) -> Graph:
    """Apply the cut where it helps."""
    return Graph(graph.params, tuple(s for stage in graph.stages for s in _cut(stage)))


def _cut(stage: Stage) -> list[Stage]:
    parts = _parts(stage)
    if parts is None:
        return [stage]
    first, *others = stage.reduced
    size, index = int(first.size), dtype_of(first.var)
    part = Axis(Var("part", first.var.ty), constant(parts, index))
    inner = Axis(Var(first.var.name, first.var.ty), constant(size // parts, index))
    position = part.var * constant(size // parts, index) + inner.index
    substitute = Substitute({first.var: position})
    binds = []
    for var, value in stage.binds:
        fresh = Var(var.name, var.ty)
        binds.append((fresh, substitute(value)))
        substitute = Substitute({**substitute.env, var: fresh})
    dtype = dtype_of(stage.values[0])
    shape = [*(a.extent for a in stage.axes), part.extent]
    buffer = new_buffer(f"{stage.name}_parts", shape, dtype)
    partial = Stage(
        f"{stage.name}_parts",
        (buffer,),
        (*stage.axes, part),
        tuple(a for a in (inner, *others) if a.size != 1),
        tuple(substitute(v) for v in stage.values),
        stage.kind,
        stage.initial if stage.kind in (Kind.MAX, Kind.MIN) else (_neutral(stage, dtype),),
        binds=tuple(binds),
    )
    axes = tuple(Axis(Var(a.var.name, a.var.ty), a.extent) for a in stage.axes)
    part = Axis(Var("part", first.var.ty), part.extent)
    term = tirx.BufferLoad(buffer, [*(a.index for a in axes), part.var])
    final = replace(stage, axes=axes, reduced=(part,), values=(term,), binds=())
    return [simplified(partial), final]


def _neutral(stage: Stage, dtype: str) -> object:
    return constant(0 if stage.kind is Kind.SUM else 1, dtype)


def _parts(stage: Stage) -> int | None:
    """In how many parts to cut the first reduced axis; None for not at all."""
    if stage.kind in (None, Kind.UPDATE) or split_product(stage) is not None:
        return None
    first = stage.reduced[0] if stage.reduced else None
    if first is None or first.size is None or points(stage.axes) >= FEW_RESULTS:
        return None
    if len(stage.reduced) == 1 and int(first.size) <= MOST_PARTS:
        return None
    if points(stage.domain) * stage_work(stage) < MUCH_WORK:
        return None
    size = int(first.size)
    parts = max(n for n in range(1, MOST_PARTS + 1) if size % n == 0)
    return parts if parts >= LEAST_PARTS else None
