"""Which axis of a stage should run along the vectors."""

from __future__ import annotations

import tvm

from .access import load_stride, score, stride
from .stages import Axis, Stage, analyzer_of
from .work import size_of

# A shorter axis does not fill a vector.
LEAST_LANES = 4
STORE_WEIGHT = 2.0


def lane_axis(stages: tuple[Stage, ...], candidates: list[tuple[Axis, ...]]) -> int | None:
    """Index of the best candidate: each is one axis, as every stage has it.

    The best is the one along which most loads and stores are contiguous; of equals the later one.
    """
    best, chosen = float("-inf"), None
    for i, axes in enumerate(candidates):
        if size_of(axes[0]) < LEAST_LANES:
            continue
        value = sum(_score(s, a) for s, a in zip(stages, axes, strict=True))
        if value >= best:
            best, chosen = value, i
    return chosen


def best_lane(stage: Stage) -> Axis | None:
    """The axis of one stage that should run along vectors."""
    domain = stage.domain
    best = lane_axis((stage,), [(a,) for a in domain])
    return None if best is None else domain[best]


def _score(stage: Stage, axis: Axis) -> float:
    analyzer = analyzer_of(stage.domain)
    total = sum(score(load_stride(r, axis.var, analyzer)) for r in stage.reads())
    if any(a is axis for a in stage.axes):
        total += STORE_WEIGHT * score(_store_stride(stage, axis, analyzer))
    return total


def _store_stride(stage: Stage, axis: Axis, analyzer: tvm.sym.Analyzer) -> int | None:
    return stride(stage.buffer, [a.var for a in stage.axes], axis.var, analyzer)
