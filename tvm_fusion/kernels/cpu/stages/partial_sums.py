"""Cuts a long reduction in two steps, where its results are too few for all cores.

    s = sum_{k < 4096} x[k]     ->  p[c] = sum_{k < 64} x[64 * c + k];  s = sum_{c < 64} p[c]

Columns are few if a core that takes some of them reads short pieces of rows:

    s[j] = sum_{k < 4096} x[k, j]
        ->  p[c, j] = sum_{k < 64} x[64 * c + k, j];  s[j] = sum_{c < 64} p[c, j]

What no number of parts divides leaves a rest:

    s = sum_{k < 4099} x[k]     ->  p[c] = sum_{k < 66} x[66 * c + k];  a = sum_{c < 62} p[c]
                                    b = sum_{k < 7} x[4092 + k];        s = a + b

The number of parts does not depend on the machine: equal inputs give equal sums everywhere.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from tvm import tirx
from tvm.ir import Expr, Var

from ...program.expr import constant, dtype_of
from ..contraction.operands import split_product
from ..nests.point import COMBINE
from ..nests.scope import new_buffer
from ..tiles import MANY_TERMS
from .lanes import best_lane
from .rewrite import Substitute
from .stages import Axis, Graph, Kind, Stage, points, simplified, size_of, stage_work

# Results fewer than this leave cores without work; less work than this is done before they wake up
# (a softmax of 2 x 100,000, whose sums are 200,100: 65 us, cut 50, on 2 cores of a Zen 4).
FEW_RESULTS = 8
MUCH_WORK = 200_000

# Elements from which on sums of columns are cut: smaller tensors lie in a core's second cache,
# whose pieces may be short. On 2 cores of a Zen 4 sums of exp(x) over the rows of 8192 x 1024 take
# 1.11 ms, by columns 2.41; of x * x over those of 1000 x 777 33 us and 47, of x over 50001 x 16 28
# and 45; but of x over 500 x 1000 22 us and 17.
MANY_ELEMENTS = 512 << 10

MOST_PARTS, LEAST_PARTS = 64, 8
LEAST_RUN, LEAST_ROWS = 16, MANY_TERMS
"""Elements of the last axis in a part, at least, if vectors run along them, and rows otherwise."""

NEUTRAL = {Kind.SUM: 0, Kind.PROD: 1}


class _Cut(NamedTuple):
    """Which reduced axis is cut, in how many parts of which length, and the length of the rest."""

    axis: Axis
    parts: int
    length: int
    rest: int


def partial_sums(graph: Graph) -> Graph:
    """Apply the cut where it helps."""
    cuts = ((stage, _cut_of(stage, graph)) for stage in graph.stages)
    return Graph(graph.params, tuple(s for stage, cut in cuts for s in _in_parts(stage, cut)))


def _in_parts(stage: Stage, cut: _Cut | None) -> list[Stage]:
    if cut is None:
        return [stage]
    index = dtype_of(cut.axis.var)
    part = Axis(Var("part", cut.axis.var.ty), constant(cut.parts, index))
    partial = _piece(stage, cut, part, cut.length, part.var * constant(cut.length, index))
    if not cut.rest:
        return [partial, _over_parts(stage, partial, stage.buffers, stage.rounding)]
    whole = new_buffer(f"{stage.name}_whole", _shape(stage), dtype_of(stage.values[0]))
    rest = _piece(stage, cut, None, cut.rest, constant(cut.parts * cut.length, index))
    return [partial, _over_parts(stage, partial, (whole,), None), rest, _both(stage, whole, rest)]


def _piece(stage: Stage, cut: _Cut, part: Axis | None, length: int, first: Expr) -> Stage:
    """The reduction over `length` elements of the cut axis from `first` on, for each part."""
    inner = Axis(Var(cut.axis.var.name, cut.axis.var.ty), constant(length, dtype_of(first)))
    axes = _fresh(stage.axes)
    others = {a: b for a, b in zip(stage.reduced, _fresh(stage.reduced), strict=True)}
    env = {a.var: b.index for a, b in (*zip(stage.axes, axes, strict=True), *others.items())}
    env[cut.axis.var] = first + inner.index
    binds = []
    for var, value in stage.binds:
        fresh = Var(var.name, var.ty)
        binds.append((fresh, Substitute(env)(value)))
        env[var] = fresh
    name, dtype = f"{stage.name}_{'parts' if part else 'rest'}", dtype_of(stage.values[0])
    axes = (part, *axes) if part else axes
    reduced = (inner if a is cut.axis else others[a] for a in stage.reduced)
    neutral = constant(NEUTRAL[stage.kind], dtype) if stage.kind in NEUTRAL else stage.initial[0]
    piece = Stage(
        name,
        (new_buffer(name, [a.extent for a in axes], dtype),),
        axes,
        tuple(a for a in reduced if a.size != 1),
        tuple(Substitute(env)(v) for v in stage.values),
        stage.kind,
        (neutral,),
        binds=tuple(binds),
    )
    return simplified(piece)


def _over_parts(
    stage: Stage, partial: Stage, buffers: tuple[Var, ...], rounding: str | None
) -> Stage:
    """The reduction of the parts' results."""
    axes, (part,) = _fresh(stage.axes), _fresh(partial.axes[:1])
    term = tirx.BufferLoad(partial.buffer, [part.var, *(a.index for a in axes)])
    return replace(
        stage,
        buffers=buffers,
        axes=axes,
        reduced=(part,),
        values=(term,),
        binds=(),
        rounding=rounding,
    )


def _both(stage: Stage, whole: Var, rest: Stage) -> Stage:
    """The result of the parts with that of the rest."""
    axes = _fresh(stage.axes)
    at = [a.index for a in axes]
    value = COMBINE[stage.kind](*(tirx.BufferLoad(b, at) for b in (whole, rest.buffer)))
    return Stage(stage.name, stage.buffers, axes, (), (value,), rounding=stage.rounding)


def _fresh(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    return tuple(Axis(Var(a.var.name, a.var.ty), a.extent) for a in axes)


def _shape(stage: Stage) -> list[Expr]:
    return [a.extent for a in stage.axes]


def _cut_of(stage: Stage, graph: Graph) -> _Cut | None:
    """How to cut a stage; None for not at all."""
    if stage.kind in (None, Kind.UPDATE) or split_product(stage) is not None:
        return None
    if not stage.reduced or not (_has_few_results(stage) or _has_few_columns(stage, graph)):
        return None
    for axis in stage.reduced:
        if axis.size is None:
            return None
        size, last = int(axis.size), axis is stage.reduced[-1]
        least = 1 if not last else LEAST_RUN if _has_few_results(stage) else LEAST_ROWS
        most = min(MOST_PARTS, size // least)
        if most >= LEAST_PARTS:
            parts = _parts(size, most)
            return _Cut(axis, parts, size // parts, size % parts)
    return None


def _has_few_results(stage: Stage) -> bool:
    """Whether cores would have no work that is worth waking them."""
    much = points(stage.domain) * stage_work(stage) >= MUCH_WORK
    return much and points(stage.axes) < FEW_RESULTS


def _has_few_columns(stage: Stage, graph: Graph) -> bool:
    """Whether a large tensor that is read once is summed along its rows, and there is not a row for
    each core to begin with.
    """
    lane = best_lane(stage)
    if lane is None or points(stage.domain) < MANY_ELEMENTS:
        return False
    if not any(a is lane for a in stage.axes) or points(stage.axes) >= LEAST_PARTS * size_of(lane):
        return False
    if not all(graph.is_param(r.source) for r in stage.reads()):
        return False
    others = (s for s in graph.stages if s is not stage)
    return all(points(s.domain) < points(stage.domain) for s in others)


def _parts(size: int, most: int) -> int:
    """The largest divisor of `size` up to `most` if it makes enough parts; else, of many parts, the
    number that leaves the least rest.
    """
    divisor = max(n for n in range(1, most + 1) if size % n == 0)
    if divisor >= LEAST_PARTS:
        return divisor
    return min(range(max(LEAST_PARTS, most // 2), most + 1), key=lambda n: (size % n, -n))
