"""Ranks the configurations of a column kernel by their estimated time (`estimate`)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ...errors import Unsupported
from ..gpu.memory import WIDEST
from ..program.expr import bytes_of
from ..program.narrow import narrow_indices
from ..program.program import Program
from .config import ColumnConfig, Form
from .estimate import ColumnEstimate, ColumnWork, work_of
from .lanes import Lanes, find_inner, lanes_along_columns, lanes_along_rows, widths
from .state import check

if TYPE_CHECKING:
    from ...config import HardwareProfile, Policy

LEAST_THREADS = 256  # a multiprocessor; without a demand ptxas aims at more, and spills a little
ROOMY_THREADS = 512  # a multiprocessor that ptxas may leave 128 registers a thread
LONGEST_RUN = 512  # bytes of neighbouring columns from which on a row is a block's own
SMALL_THREADS = 128  # a block, where there is less to do than that many threads could
BEST = 8


def column_configs(program: Program, hw: HardwareProfile) -> list[ColumnConfig]:
    """Configurations that can run, the best guess first.

    Raises
    ------
    Unsupported
        Where no column kernel computes the program well: there are no rows along memory.
    """
    return [config for _, config in column_ranked(program, hw)]


def column_ranked(
    program: Program, hw: HardwareProfile, policy: Policy | None = None
) -> list[tuple[float | None, ColumnConfig]]:
    """As `column_configs`, each with its predicted seconds."""
    check(program)
    if program.columns == 0 or (program.is_static and program.row_count == 0):
        raise Unsupported("there is nothing to reduce")
    work = column_work_of(program)
    found = ranked(work, hw)
    if not isinstance(program.columns, int):
        found = [(None, config) for _, config in found if config.form is Form.LOOP]
    return [*found] or [(None, small_config(work, hw))]


def column_work_of(program: Program) -> ColumnWork:
    """The work of a program with its widest vectors."""
    program = narrow_indices(program)
    return work_of(program, _widest(program, find_inner(program)))


def estimated_seconds(program: Program, config: ColumnConfig, hw: HardwareProfile) -> float:
    """The estimate by which configurations are ranked; infinite where one cannot run."""
    program = narrow_indices(program)
    find = lanes_along_rows if config.lanes else lanes_along_columns
    lanes = find(program, find_inner(program), config.width)
    return ColumnEstimate(work_of(program, lanes), config, hw).seconds


def ranked(work: ColumnWork, hw: HardwareProfile) -> list[tuple[float, ColumnConfig]]:
    """The best configurations with their seconds, the best one first; none where there is less to
    do than the smallest blocks could.
    """
    found = [
        (ColumnEstimate(work, config, hw).seconds, number, config)
        for number, config in enumerate(possible(work, hw))
    ]
    best = sorted(item for item in found if math.isfinite(item[0]))[:BEST]
    return [(seconds, config) for seconds, _, config in best]


def small_config(work: ColumnWork, hw: HardwareProfile) -> ColumnConfig:
    """For tensors that do not even fill a block of 128 threads: no more threads than elements."""
    if not work.along_rows:
        return ColumnConfig(lanes=0, walkers=hw.warp_size, width=work.width, unroll=1)
    unit = work.inner // math.gcd(work.inner, work.width)
    side = unit * max(1, min(_lanes_side_by_side(work), hw.warp_size) // unit)
    walkers = max(1, min(work.columns // work.inner, SMALL_THREADS // side))
    return ColumnConfig(lanes=side, walkers=walkers, width=work.width, unroll=1)


def possible(work: ColumnWork, hw: HardwareProfile) -> Iterator[ColumnConfig]:
    """All configurations worth an estimate."""
    unit = work.inner // math.gcd(work.inner, work.width) if work.along_rows else 1
    most = 1 if work.transposed else _lanes_side_by_side(work)
    for threads in (128, 256, 512, 1024):
        for side in (unit << shift for shift in range(8)) if work.along_rows else (0,):
            if side > max(unit, most) or side > threads:
                break
            warps = hw.warp_size // math.gcd(hw.warp_size, max(1, side))
            walkers = max(1, threads // max(1, side))
            walkers = walkers // warps * warps or walkers
            plain = ColumnConfig(lanes=side, walkers=walkers, width=work.width)
            if plain.threads > hw.max_threads_per_block:
                continue
            if work.sweeps > 1:
                yield from _held(plain, hw)
            for unroll, demand in itertools.product((2, 4, 8, 16), _demands(plain, work.sweeps)):
                yield replace(plain, unroll=unroll, min_blocks=demand)


def _demands(config: ColumnConfig, sweeps: int) -> tuple[int, ...]:
    """Blocks a multiprocessor to ask ptxas for: one sweep may do without."""
    if sweeps > 1:
        return (max(1, LEAST_THREADS // config.threads),)
    roomy = max(2, ROOMY_THREADS // config.threads)
    return (roomy, 0) if config.threads <= ROOMY_THREADS else (0,)


def _held(plain: ColumnConfig, hw: HardwareProfile) -> Iterator[ColumnConfig]:
    """Columns in registers; also by twice the threads with half the vectors each."""
    plain = replace(plain, form=Form.REGISTERS)
    yield plain
    yield replace(plain, keep=True)
    halved = replace(plain, lanes=2 * plain.lanes, width=plain.width // 2)
    if halved.lanes and halved.width and halved.threads <= hw.max_threads_per_block:
        yield halved


def _lanes_side_by_side(work: ColumnWork) -> int:
    """Threads that all lanes take, as a power of two."""
    if not work.known:
        return 32
    count = work.rows[-1] * work.inner
    return 1 << (-(-count // work.width) - 1).bit_length()


def _widest(program: Program, inner: int) -> Lanes:
    """The widest vectors that are single accesses (or 16 bytes each)."""
    narrow = min((bytes_of(t.dtype) for t in (*program.tiles, *program.elements)), default=1)
    for width in widths(program):
        along_columns = inner > 1 and inner % width == 0 and inner * narrow >= LONGEST_RUN
        find = lanes_along_columns if along_columns else lanes_along_rows
        lanes = find(program, inner, width)
        moving = [v for v in (*lanes.loads.values(), *lanes.outputs.values()) if v.moves]
        if all(v.piece >= min(WIDEST, width * bytes_of(v.dtype)) for v in moving):
            return lanes
    raise Unsupported("there is no vector")
