"""Cuts a long reduction to few results in two steps, so that more than one core can work on it.

    s = sum_{k < 4096} x[k]     ->  p[c] = sum_{k < 64} x[64 * c + k];  s = sum_{c < 64} p[c]

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

from ..expr import constant, dtype_of
from .operands import split_product
from .point import COMBINE
from .rewrite import Substitute
from .scope import new_buffer
from .stages import Axis, Graph, Kind, Stage, simplified
from .work import points, stage_work

# Results fewer than this leave cores without work; less work than this is done before they wake up
# (a softmax of 2 x 100,000, whose sums are 200,100: 65 us, cut 50, on 2 cores of a Zen 4).
FEW_RESULTS = 8
MUCH_WORK = 200_000

MOST_PARTS, LEAST_PARTS = 64, 8
LEAST_RUN = 16
"""Elements of the last axis in a part, at least: vectors run along them."""

NEUTRAL = {Kind.SUM: 0, Kind.PROD: 1}


class _Cut(NamedTuple):
    """Which reduced axis is cut, in how many parts of which length, and the length of the rest."""

    axis: Axis
    parts: int
    length: int
    rest: int


def partial_sums(graph: Graph) -> Graph:
    """Apply the cut where it helps."""
    return Graph(graph.params, tuple(s for stage in graph.stages for s in _in_parts(stage)))


def _in_parts(stage: Stage) -> list[Stage]:
    cut = _cut_of(stage)
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
    axes = (*axes, part) if part else axes
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
    axes, (part,) = _fresh(stage.axes), _fresh(partial.axes[-1:])
    term = tirx.BufferLoad(partial.buffer, [*(a.index for a in axes), part.var])
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


def _cut_of(stage: Stage) -> _Cut | None:
    """How to cut a stage; None for not at all."""
    if stage.kind in (None, Kind.UPDATE) or split_product(stage) is not None:
        return None
    if points(stage.axes) >= FEW_RESULTS or not stage.reduced:
        return None
    if points(stage.domain) * stage_work(stage) < MUCH_WORK:
        return None
    for axis in stage.reduced:
        if axis.size is None:
            return None
        size, last = int(axis.size), axis is stage.reduced[-1]
        most = min(MOST_PARTS, size // LEAST_RUN if last else size)
        if most >= LEAST_PARTS:
            parts = _parts(size, most)
            return _Cut(axis, parts, size // parts, size % parts)
    return None


def _parts(size: int, most: int) -> int:
    """The largest divisor of `size` up to `most` if it makes enough parts; else, of many parts, the
    number that leaves the least rest.
    """
    divisor = max(n for n in range(1, most + 1) if size % n == 0)
    if divisor >= LEAST_PARTS:
        return divisor
    return min(range(max(LEAST_PARTS, most // 2), most + 1), key=lambda n: (size % n, -n))
