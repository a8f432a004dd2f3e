"""How the CUDA writer will cut a column group: the configuration that it ranks first for work of
these sizes (`rank`), and what follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from ...config import HardwareProfile
from ...cost.liveness import held_between, peak_live
from ...cost.traffic import Traffic
from ...plan.group_view import GroupView
from ..base import Fit
from ..gpu.vectors import WIDEST_VECTOR
from ..group.footprint import costly, points
from ..group.streams import WIDEST_ACCESS, Stream, loads_and_stores
from ..group.traffic import Shape, cuda_traffic, group_streams
from ..row.planned import sweeps
from .config import ColumnConfig
from .estimate import LOADED, PACKED, ColumnEstimate, ColumnWork
from .rank import LONGEST_RUN, ranked, small_config

# The work of a column kernel from the sizes of a group: the numbers that the CUDA writer will find
# in its program, as far as the planner has to know them.


def column_work(group: GroupView, fit: Fit, rows: Sequence[int], inner: int) -> ColumnWork:
    """What `work` will find in the group's program.

    `rows` are the extents of the rows, `inner` reduced neighbours in memory.
    """
    streams = loads_and_stores(group_streams(group, fit))
    transposed = is_transposed(streams)
    space = max(1.0, float(fit.rows * fit.columns))
    own = [s for s in streams if s.own and 2 * s.count >= space]
    loads = [s for s in own if not s.stored]
    vectors = [s for s in loads if s.along]
    sizes = [s.size for s in own] or [2]
    along_columns = inner * min(sizes) >= LONGEST_RUN
    run = inner if along_columns else inner * rows[-1]
    width = 1 if transposed else _width(sizes, run)
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
        transposed,
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


def is_transposed(found: Sequence[Stream]) -> bool:
    """Whether nothing lies along the rows: neighbouring threads are neighbouring columns then."""
    own = [s for s in found if s.own]
    return bool(own) and not any(s.along or s.gathered for s in own)


def steps_apart(stream: Stream) -> bool:
    """A read of points whose rows lie apart; its columns are neighbours, if any are."""
    return stream.own and not stream.stored and not stream.along and not stream.gathered


TERM_SHUFFLES = 0.8
"""Steps of a shuffle that reading one partial result takes; with the next, fitted to the launches
of tests/data/kernels_h200.jsonl."""
SHUFFLE_SHARE = 0.1
"""Of the latency of a shuffle and of what is done with it, the part in which the multiprocessor can
do nothing for another warp."""


def column_kernel(
    group: GroupView, fit: Fit, hw: HardwareProfile, rows: Sequence[int], inner: int
) -> ColumnEstimate:
    """What the writer will choose; `rows` are the extents of the rows, `inner` reduced neighbours
    in memory.
    """

    def find() -> ColumnEstimate:
        work = column_work(group, fit, rows, inner)
        return ColumnEstimate(work, _best(work, hw), hw)

    return group.once("column", find)


def column_shape(fit: Fit, kernel: ColumnEstimate) -> Shape:
    """Blocks, threads and vectors of a column kernel."""
    work, together = kernel.work, kernel.together()
    count = 1 if kernel.is_held else work.sweeps
    rounds = count * max(1.0, kernel.turns() / together)
    again = (count - 1) * fit.rows * fit.columns * work.moving
    needed, given = kernel.needed_registers(), kernel.given_registers()
    return Shape(
        blocks=float(kernel.blocks()),
        threads=kernel.config.threads,
        width=kernel.config.width,
        points=float(together * kernel.config.width),
        registers=int(max(needed, min(given, kernel.registers()))),
        smem_bytes=kernel.shared_bytes(),
        flight_bytes=float(kernel.thread_bytes()),
        rounds=rounds,
        waste=_waste(fit, kernel),
        spills=rounds,
        reads_again=float(again),
        exchanges=_exchanges(kernel),
        shuffles=_shuffles(kernel),
        staged_bytes=2.0 * kernel.blocks() * kernel.shared_bytes(),
    )


def _waste(fit: Fit, kernel: ColumnEstimate) -> float:
    """Time of the memory over that of the bytes alone: for parts of sectors that nobody uses, for
    what blocks side by side do not keep up, and while they exchange.
    """
    work, hw = kernel.work, kernel.hw
    wave = hw.num_sms * max(1, kernel.resident())
    waves = -(-kernel.blocks() // wave)
    size = max(1, fit.rows * fit.columns * (work.moving + work.stored))
    idle = (waves - 1) * kernel.exchange_seconds() * hw.hbm_bytes_per_s / size
    if work.transposed:  # neighbouring threads are neighbouring columns
        return 1.0 + idle
    return 1.0 / (kernel.used_share() * kernel.sustained(min(kernel.blocks(), wave))) + idle


def _exchanges(kernel: ColumnEstimate) -> float:
    """Those that pass through shared memory."""
    return float(kernel.phases() * (kernel.config.partials > 1 or kernel.work.inner > 1))


def _shuffles(kernel: ColumnEstimate) -> float:
    """Steps within warps, and partial results that are read one after the other.

    The lanes of a thread exchange one by one; a step takes its latency, or as long as the
    multiprocessor takes for all its warps.
    """
    config, work, hw = kernel.config, kernel.work, kernel.hw
    if not config.lanes:
        return work.reductions * 2 * math.log2(hw.warp_size)
    steps = math.log2(config.by_shuffle)
    beside = min(max(1, kernel.resident()), max(1.0, kernel.blocks() / hw.num_sms))
    crowd = SHUFFLE_SHARE * config.width * config.threads / hw.warp_size * beside
    items = -(-config.lanes * config.width // config.threads)
    terms = config.partials * items * (config.partials > 1) + work.inner * (work.inner > 1)
    return work.reductions * (steps * (1.0 + crowd) + TERM_SHUFFLES * terms)


@lru_cache(maxsize=4096)
def _best(work: ColumnWork, hw: HardwareProfile) -> ColumnConfig:
    """The configuration that the writer takes."""
    found = ranked(work, hw)
    return found[0][1] if found else small_config(work, hw)


def column_traffic(group: GroupView, fit: Fit, kernel: ColumnEstimate) -> Traffic:
    """What a column kernel moves: every sweep asks for what it reads once more.

    Reads whose rows lie apart are no vectors; as many walkers as a warp has read neighbours.
    """
    hw, shape = kernel.hw, column_shape(fit, kernel)
    found = loads_and_stores(group_streams(group, fit))
    transposed = is_transposed(found)
    near = tuple(_next_to(s) if steps_apart(s) or (transposed and s.own) else s for s in found)
    traffic = cuda_traffic(group, fit, hw, shape, near)
    loads = [s for s in near if s.own and not s.stored]
    asked = sum(s.count * s.size for s in loads)
    again = shape.reads_again / asked if asked else 0.0
    wavefronts = again * sum(s.wavefronts(shape.width, shape.piece) for s in loads)
    accesses = again * sum(s.accesses(shape.width, shape.piece) for s in loads)
    sectors = 0.0
    for stream in found if not transposed else ():
        if steps_apart(stream):
            side = min(hw.warp_size, max(1, kernel.config.lanes))
            run = hw.warp_size // side * stream.size
            times = stream.count * (1.0 + again)
            wavefronts += times * side / hw.warp_size
            accesses += times
            sectors += times * stream.size * (max(1.0, hw.sector_bytes / run) - 1.0)
    operations = dict(traffic.operations)
    operations["arithmetic"] += accesses
    return replace(
        traffic,
        operations=operations,
        wavefronts=traffic.wavefronts + wavefronts,
        sector_bytes=traffic.sector_bytes + sectors,
    )


def _next_to(stream: Stream) -> Stream:
    return stream._replace(step=1)
