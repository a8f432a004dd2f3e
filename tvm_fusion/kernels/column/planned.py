"""How the CUDA writer will cut a column group: the configuration that it ranks first for work of
these sizes (`rank`), and what follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from ...config import HardwareProfile
from ...cost.traffic import Traffic
from ...plan.group_view import GroupView
from ..base import Fit
from ..group.streams import Stream
from ..group.traffic import Shape, cuda_traffic, group_streams
from .config import ColumnConfig
from .estimate import ColumnEstimate
from .planned_work import column_work, is_turned, loads_and_stores, steps_apart
from .rank import ranked, small_config
from .work import ColumnWork

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
    if work.turned:  # neighbouring threads are neighbouring columns
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
    turned = is_turned(found)
    near = tuple(_next_to(s) if steps_apart(s) or (turned and s.own) else s for s in found)
    traffic = cuda_traffic(group, fit, hw, shape, near)
    loads = [s for s in near if s.own and not s.stored]
    asked = sum(s.count * s.size for s in loads)
    again = shape.reads_again / asked if asked else 0.0
    wavefronts = again * sum(s.wavefronts(shape.width, shape.piece) for s in loads)
    accesses = again * sum(s.accesses(shape.width, shape.piece) for s in loads)
    sectors = 0.0
    for stream in found if not turned else ():
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
