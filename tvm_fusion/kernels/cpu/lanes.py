"""Which axis of a stage should run along the vectors."""

from __future__ import annotations

import tvm

from .access import load_stride, stride
from .rewrite import free_variables
from .stages import Axis, Stage, analyzer_of
from .work import points, size_of

# A shorter axis does not fill a vector.
LEAST_LANES = 4

# Elements that one contiguous access moves; a gather moves them one by one.
LANES = 8

# A scattered store costs more than a gathered load: `y[i, j] = x[j, i] + z[j, i]` stores in order.
SCATTER_COST = 2

# Combining the lanes of one result: a handful of dependent shuffles and additions.
FOLD_COST = 8


def lane_axis(stages: tuple[Stage, ...], candidates: list[tuple[Axis, ...]]) -> int | None:
    """Index of the best candidate: each is one axis, as every stage has it.

    The best is the one along which accesses cost least; of equals the later one.
    """
    least, chosen = float("inf"), None
    for i, axes in enumerate(candidates):
        if size_of(axes[0]) < LEAST_LANES:
            continue
        cost = sum(_cost(s, a) for s, a in zip(stages, axes, strict=True))
        if cost <= least:
            least, chosen = cost, i
    return chosen


def best_lane(stage: Stage) -> Axis | None:
    """The axis of one stage that should run along vectors."""
    domain = stage.domain
    best = lane_axis((stage,), [(a,) for a in domain])
    return None if best is None else domain[best]


def _cost(stage: Stage, axis: Axis) -> float:
    """Cost of all loads and stores, each once for every point of the axes that it depends on."""
    analyzer = analyzer_of(stage.domain)
    lanes = min(LANES, size_of(axis))
    total = 0.0
    for load in stage.reads():
        used = free_variables(load)
        times = points(a for a in stage.domain if a.var in used)
        total += times / lanes if load_stride(load, axis.var, analyzer) == 1 else times
    results = points(stage.axes)
    if not any(a is axis for a in stage.axes):
        return total + results * FOLD_COST
    contiguous = _store_stride(stage, axis, analyzer) == 1
    return total + (results / lanes if contiguous else results * SCATTER_COST)


def _store_stride(stage: Stage, axis: Axis, analyzer: tvm.sym.Analyzer) -> int | None:
    return stride(stage.buffer, [a.var for a in stage.axes], axis.var, analyzer)
