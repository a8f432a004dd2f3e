"""How the CUDA writer will cut a row group, from sizes alone: what `candidates` ranks
first, as far as the planner has to know it.

Rows that are gone over once are streamed; others are held in registers, by few threads each where
rows are many and by all threads that have work where they are few, by several blocks where one
cannot hold them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ...config import HardwareProfile
from ...ir.access import Reduction
from ...plan.group_view import GroupView
from ..base import Fit
from ..group.footprint import index_of
from ..group.streams import WIDEST_ACCESS, Stream, bytes_a_point, element_sizes, streams
from ..group.traffic import Shape, power_below

WARP = 32
MANY_ELEMENTS = 64
"""Elements of a row that a thread holds where rows are many."""
MOST_BYTES = 512
"""Bytes of registers for a held row; with more, blocks share one."""
BLOCK_THREADS = 128
MOST_THREADS = 512
"""Threads that hold a row where rows are many."""
BASE_REGISTERS = 16
STREAMING_REGISTERS = 32
STREAMED_VECTORS = 128
"""Vectors from which on a row that is gone over once is streamed."""
PARTIAL_BYTES = 128
MOST_PIECES = 4
"""Of a row whose pieces are worked on side by side: so many vectors a thread holds at least."""
CLUSTERS = (1, 2, 4, 8)


class Sweeps(NamedTuple):
    """Passes over a row: exchanges between them, reductions altogether, and whether values of the
    row are needed after the first one.
    """

    exchanges: int
    reductions: int
    again: bool


def sweeps(group: GroupView, space: float) -> Sweeps:
    """The passes that a group's reductions ask for; `space` is the number of its points."""
    level: dict[int, int] = {}
    merged: dict[int, bool] = {}
    reductions, deepest, online = 0, 0, 0
    again = False
    outputs = frozenset(group.outputs)
    for block, facts in zip(group.blocks, index_of(group).facts, strict=True):
        own, behind_max = 0, False
        for t in facts.sources:
            if t in level:
                own = max(own, level[t])
                behind_max |= merged[t]
        if facts.reduces:
            reductions += 1
            own += 1
            deepest = max(deepest, own)
            if block.reduction is Reduction.SUM and own == 2:
                online += behind_max
        is_max = facts.reduces and block.reduction in (Reduction.MAX, Reduction.MIN)
        for t in facts.tensors:
            level[t] = own
            if own and t in outputs and facts.points >= space:
                again = not facts.reduces
            merged[t] = is_max or (own > 0 and behind_max)
    passes = deepest - bool(online)
    return Sweeps(max(1, passes), max(1, reductions), again or passes > 1)


def row_streams(group: GroupView, fit: Fit) -> tuple[Stream, ...]:
    """The reads and writes of a row kernel, and the runs that its rows are made of."""
    space = float(fit.rows * fit.columns)
    return group.once("row streams", lambda: streams(group, fit.evaluations, space, True))


def row_shape(group: GroupView, fit: Fit, hw: HardwareProfile) -> Shape:
    """Blocks, threads and vectors of a row kernel."""
    return group.once(("shape", fit.kernel_class), lambda: _shape(group, fit, hw))


def _shape(group: GroupView, fit: Fit, hw: HardwareProfile) -> Shape:
    found = row_streams(group, fit)
    passes = sweeps(group, float(fit.rows * fit.columns))
    space = max(1.0, float(fit.rows * fit.columns))
    sizes = element_sizes(found, space)
    narrow, wide = min(sizes, default=2), max((s.size for s in found), default=2)
    width = max(1, min(WIDEST_ACCESS // narrow, 32 // wide))
    runs = [s.run for s in found if s.own and s.run]
    while width > 1 and (width > fit.columns or any(run % width for run in runs)):
        width //= 2
    vectors = -(-fit.columns // width)
    read = max(1.0, bytes_a_point(found, space))
    shape = None
    if passes.again or vectors < STREAMED_VECTORS:
        shape = _held(fit, hw, passes, width, vectors, read)
    shape = shape or _streamed(fit, hw, passes, width, vectors, read)
    if any(s.alone for s in found):  # the places are loaded before what is read there
        shape = shape._replace(rounds=shape.rounds + 1.0)
    return shape


def _held(
    fit: Fit, hw: HardwareProfile, passes: Sweeps, width: int, vectors: int, read: float
) -> Shape | None:
    """Rows in registers; None where no cluster of blocks holds one."""
    rows = max(1, fit.rows)
    usual = fit.columns / MANY_ELEMENTS
    wanted = hw.num_sms * hw.max_threads_per_sm / rows
    most = 1 << max(0, (vectors - 1).bit_length())
    threads = min(hw.max_threads_per_block, most, power_below(max(usual, wanted, 1.0)))
    held = max(4, read) * width
    while threads < min(most, MOST_THREADS) and vectors / threads * held > MOST_BYTES:
        threads *= 2
    for cluster in CLUSTERS if hw.has_clusters else CLUSTERS[:1]:
        room = min(hw.max_registers_per_thread, hw.registers_per_sm // (threads * 4) * 4)
        if vectors / (threads * cluster) * held <= 4 * (room - 2 * BASE_REGISTERS):
            break
    else:
        return None
    turns = -(-vectors // (threads * cluster))
    points = turns * width
    side = min(BLOCK_THREADS // threads, -(-rows // hw.num_sms)) if cluster == 1 else 1
    side = max(1, WARP // threads, side)
    return Shape(
        blocks=float(-(-rows // side) * cluster),
        threads=max(WARP, threads * side),
        width=width,
        points=float(points),
        registers=int(BASE_REGISTERS + points * max(1.0, read / 4)),
        smem_bytes=PARTIAL_BYTES,
        spills=float(passes.exchanges),
        flight_bytes=float(points * read) * min(1.0, threads * side / WARP),
        rounds=1.0,
        exchanges=passes.exchanges * _exchange(threads, cluster, hw),
        shuffles=passes.reductions * (math.log2(min(WARP, max(1, threads))) + 3 * (threads > WARP)),
    )


def _exchange(threads: int, cluster: int, hw: HardwareProfile) -> float:
    """Barriers' worth of time of one exchange."""
    if cluster > 1:
        return hw.cluster_barrier_s / hw.barrier_s if hw.barrier_s else 1.0
    return 1.0 if threads > WARP else 0.0


def _streamed(
    fit: Fit, hw: HardwareProfile, passes: Sweeps, width: int, vectors: int, read: float
) -> Shape:
    rows = max(1, fit.rows)
    wanted = max(vectors / 8, hw.num_sms * hw.max_threads_per_sm / rows)
    threads = min(hw.max_threads_per_block, power_below(vectors), power_below(wanted))
    threads = max(BLOCK_THREADS, threads) if vectors >= BLOCK_THREADS else max(WARP, threads)
    cluster = 1
    if hw.has_clusters and threads == hw.max_threads_per_block:
        while cluster < CLUSTERS[-1] and rows * cluster < hw.num_sms // 2:
            if vectors < 4 * threads * cluster:
                break
            cluster *= 2
    turns = -(-vectors // (threads * cluster))
    count = passes.exchanges + passes.again if passes.again else 1
    flight = min(float(turns * width * read), max(hw.thread_bytes_in_flight, float(width * read)))
    return Shape(
        blocks=float(rows * cluster),
        threads=threads,
        width=width,
        points=float(min(4, turns) * width),
        registers=STREAMING_REGISTERS,
        smem_bytes=PARTIAL_BYTES,
        flight_bytes=flight,
        spills=1.0,
        rounds=float(count * math.ceil(turns * width * read / flight)),
        reads_again=float((count - 1) * fit.rows * fit.columns * read),
        exchanges=passes.exchanges * _exchange(threads, cluster, hw),
        shuffles=passes.reductions * (math.log2(min(WARP, threads)) + 3 * (threads > WARP)),
    )
