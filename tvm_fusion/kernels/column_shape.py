"""How the CUDA writer will cut a column group, from sizes alone: what `cuda.column_rank` ranks
first, as far as the planner has to know it.

Lanes lie side by side along what is contiguous, walkers share the reduced axis. Several sweeps are
held in registers where they fit, else read again out of the L2.
"""

from __future__ import annotations

import math

from ..config import HardwareProfile
from .base import Fit, GroupView
from .row_shape import sweeps
from .streams import WIDEST_ACCESS, bytes_a_point, element_sizes
from .traffic import Shape, group_streams, power_below

THREADS = 512
HELD_THREADS = 256
STEPS_A_WALKER = 32
LEAST_WALKERS, MOST_WALKERS = 4, 256
LEAST_LANES = 4
SHORTEST_RUN = 64
"""Bytes that lanes side by side read."""
LONGEST_RUN = 512
"""Bytes of neighbouring columns from which on a row is a block's own."""
BYTES_A_STEP = 128
"""A thread's loads under way."""
BASE_REGISTERS = 32
MOST_HELD_BYTES = 320
"""Bytes of registers for what a thread holds."""


def column_shape(group: GroupView, fit: Fit, hw: HardwareProfile, inner: int, last: int) -> Shape:
    """Blocks, threads and vectors of a column kernel.

    `inner` are reduced neighbours in memory, `last` the rows that lie side by side before them.
    """
    return group.once(("shape", fit.kernel_class), lambda: _shape(group, fit, hw, inner, last))


def _shape(group: GroupView, fit: Fit, hw: HardwareProfile, inner: int, whole: int) -> Shape:
    found = group_streams(group, fit)
    passes = sweeps(group, float(fit.rows * fit.columns))
    space = max(1.0, float(fit.rows * fit.columns))
    size = min(element_sizes(found, space), default=2)
    read = max(1.0, bytes_a_point(found, space))
    turns_of_data = passes.exchanges + passes.again
    if inner * size >= LONGEST_RUN:
        return _along_columns(fit, hw, passes.exchanges, size, read, turns_of_data)
    run = inner * whole
    width = max(1, WIDEST_ACCESS // size)
    while width > 1 and run % width:
        width //= 2
    steps = max(1, fit.columns // inner)
    walkers = min(MOST_WALKERS, max(LEAST_WALKERS, power_below(steps / STEPS_A_WALKER)))
    walkers = min(walkers, steps)
    held = turns_of_data > 1
    threads = HELD_THREADS if held else THREADS
    if held and width > 1:
        width = max(1, width // 2)
    vectors = max(1, run // width)
    outer = max(1, fit.rows * inner // run)
    least = max(LEAST_LANES, SHORTEST_RUN // (width * size))
    lanes = max(1, min(max(least, threads // walkers), vectors))
    while held and steps / walkers * width * read > MOST_HELD_BYTES and walkers < MOST_WALKERS:
        walkers, lanes = 2 * walkers, max(least, lanes // 2)
        if walkers * lanes >= THREADS:
            break
    while lanes > least and fit.rows * inner / width / lanes < hw.num_sms:
        lanes //= 2
        walkers *= 2 if steps > LEAST_WALKERS * walkers else 1
    turns = -(-steps // walkers)
    fits = held and turns * width * read <= MOST_HELD_BYTES
    data = turns * width * read if fits else min(turns * width * read, BYTES_A_STEP)
    count = 1 if fits else turns_of_data
    return Shape(
        blocks=float(outer * max(1, math.ceil(vectors / lanes))),
        threads=min(hw.max_threads_per_block, lanes * walkers),
        width=width,
        points=float(turns * width if fits else min(8, turns) * width),
        registers=int(BASE_REGISTERS + width * (passes.reductions + 2) + data / 4),
        smem_bytes=walkers * lanes * width * 4,
        flight_bytes=float(data),
        rounds=count * math.ceil(turns * width * read / max(1.0, data)),
        waste=_waste(lanes * width * size, run * size, hw),
        spills=1.0,
        reads_again=float((count - 1) * fit.rows * fit.columns * read),
        exchanges=3.0 * passes.exchanges,
        shuffles=passes.reductions * 5.0,
    )


def _waste(run: int, pitch: int, hw: HardwareProfile) -> float:
    """Sectors moved over those asked for: runs that start within one touch one more."""
    return (run + hw.sector_bytes - math.gcd(run, pitch, hw.sector_bytes)) / run


def _along_columns(
    fit: Fit, hw: HardwareProfile, exchanges: int, size: int, read: float, passes: int
) -> Shape:
    """A block for each row; threads walk along its contiguous columns."""
    width = max(1, WIDEST_ACCESS // size)
    turns = max(1, math.ceil(fit.columns / width / HELD_THREADS))
    data = min(turns * width * read, BYTES_A_STEP)
    return Shape(
        blocks=float(fit.rows),
        threads=HELD_THREADS,
        width=width,
        points=float(min(8, turns) * width),
        registers=int(BASE_REGISTERS + data / 4),
        smem_bytes=1024,
        flight_bytes=float(data),
        spills=1.0,
        reads_again=float((passes - 1) * fit.rows * fit.columns * read),
        rounds=float(passes * math.ceil(turns * width * read / data)),
        exchanges=3.0 * exchanges,
        shuffles=10.0,
    )
