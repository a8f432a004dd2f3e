"""The work of a column kernel from the sizes of a group: the numbers that the CUDA writer will find
in its program, as far as the planner has to know them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...cost.liveness import held_between, peak_live
from ...plan.group_view import GroupView
from ..base import Fit
from ..gpu.vectors import WIDEST_VECTOR
from ..group.footprint import costly, points
from ..group.streams import WIDEST_ACCESS, Stream
from ..group.traffic import group_streams
from ..row.planned import sweeps
from .rank import LONGEST_RUN
from .work import LOADED, PACKED, ColumnWork


def column_work(group: GroupView, fit: Fit, rows: Sequence[int], inner: int) -> ColumnWork:
    """What `work` will find in the group's program.

    `rows` are the extents of the rows, `inner` reduced neighbours in memory.
    """
    streams = loads_and_stores(group_streams(group, fit))
    turned = is_turned(streams)
    space = max(1.0, float(fit.rows * fit.columns))
    own = [s for s in streams if s.own and 2 * s.count >= space]
    loads = [s for s in own if not s.stored]
    vectors = [s for s in loads if s.along]
    sizes = [s.size for s in own] or [2]
    along_columns = inner * min(sizes) >= LONGEST_RUN
    run = inner if along_columns else inner * rows[-1]
    width = 1 if turned else _width(sizes, run)
    passes = sweeps(group, space)
    level, full = _levels(group, space)
    phases = max(1, max(level.values(), default=1))
    last = any(full.get(t) and level.get(t, 0) == phases for t in group.outputs)
    sources, weights = _values(group, full, loads)
    roots = _roots(group, level, full)
    merged = passes.exchanges < phases
    online = [root for root in roots if root[0] < 2] if merged else []
    return ColumnWork(
        tuple(rows),
        fit.columns,
        not along_columns,
        inner,
        turned,
        True,
        width,
        min((s.size for s in vectors), default=sum(s.size for s in loads) or 1),
        sum(s.size for s in loads),
        0,
        sum(s.size for s in own if s.stored),
        passes.reductions,
        4 * passes.reductions,
        phases,
        passes.exchanges,
        passes.exchanges + last,
        sum(LOADED if s.size == 2 else 1.0 for s in vectors),
        held_between(sources, roots, weights),
        held_between(sources, online, weights),
        live=peak_live(sources, tuple(t for _, wanted in roots for t in wanted)),
    )


def _width(sizes: Sequence[int], run: int) -> int:
    """Elements of the widest vectors that are single accesses."""
    width = max(1, min(WIDEST_ACCESS // min(sizes), WIDEST_VECTOR // max(sizes)))
    while width > 1 and any(
        math.gcd(run, width) * size < min(WIDEST_ACCESS, width * size) for size in sizes
    ):
        width //= 2
    return width


def _levels(group: GroupView, space: float) -> tuple[dict[int, int], dict[int, bool]]:
    """Of each tensor: dependent reductions below it, and whether every point has one."""
    level: dict[int, int] = {}
    full: dict[int, bool] = {}
    for block in group.blocks:
        own = max((level.get(a.tensor, 0) for a in block.reads), default=0)
        reduces = block.reduction is not None
        for write in block.writes:
            level[write.tensor] = own + reduces
            full[write.tensor] = not reduces and points(block) >= space
    return level, full


def _roots(
    group: GroupView, level: dict[int, int], full: dict[int, bool]
) -> list[tuple[int, tuple[int, ...]]]:
    """The sweeps, and what they end in: the operands of reductions, and full outputs."""
    found = []
    for block in group.blocks:
        if block.reduction is not None:
            reads = tuple(a.tensor for a in block.reads)
            found.append((level[block.writes[0].tensor] - 1, reads))
    return found + [(level[t], (t,)) for t in group.outputs if full.get(t)]


def _values(
    group: GroupView, full: dict[int, bool], loads: Sequence[Stream]
) -> tuple[dict[int, tuple[int, ...]], dict[int, float | None]]:
    """The values of a point with what they are computed from, and the registers of each."""
    sources: dict[int, tuple[int, ...]] = {}
    weights: dict[int, float | None] = {}
    for block in group.blocks:
        reads = tuple(a.tensor for a in block.reads)
        for write in block.writes:
            if full[write.tensor]:
                sources[write.tensor] = reads
                weights[write.tensor] = 1.0 if costly(block) else None
    for load in loads:
        packed = load.along and group.graph.tensors[load.tensor].dtype == "float16"
        sources[load.tensor] = ()
        weights[load.tensor] = PACKED if packed else 1.0
    return sources, weights


def loads_and_stores(found: Sequence[Stream]) -> tuple[Stream, ...]:
    """The reads and writes of one sweep: what several blocks read at a point is loaded once."""
    once: dict[tuple, Stream] = {}
    for number, stream in enumerate(found):
        key: tuple = stream.tensor, stream.step, stream.stored
        key = key if stream.own else (*key, number)
        if key not in once or stream.count > once[key].count:
            once[key] = stream
    return tuple(once.values())


def is_turned(found: Sequence[Stream]) -> bool:
    """Whether nothing lies along the rows: neighbouring threads are neighbouring columns then."""
    own = [s for s in found if s.own]
    return bool(own) and not any(s.along or s.chosen for s in own)


def steps_apart(stream: Stream) -> bool:
    """A read of points whose rows lie apart; its columns are neighbours, if any are."""
    return stream.own and not stream.stored and not stream.along and not stream.chosen
