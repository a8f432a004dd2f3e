"""Which configurations a row program can run with, and their ranking by the cost model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ...errors import Unsupported
from ..gpu.vectors import can_stream, vector_width
from ..gpu.windows import row_width
from ..group.traffic import clusters_on_device
from ..program.program import Program
from .config import WARP, Form, RowConfig
from .cost import (
    ENDS,
    elements_a_thread,
    estimate_rows,
    registers_limit,
    ring_bytes,
    row_resources,
    wanted_registers,
)
from .work import RowWork, row_work

if TYPE_CHECKING:
    from ...config import HardwareProfile, Policy

POWERS = tuple(1 << exponent for exponent in range(11))
BLOCKS = (64, 128, 256, 512)
"""Threads of a block that several rows share."""
CLUSTERS = (1, 2, 4, 8)
UNROLLS = (1, 2, 4)
STREAMING_THREADS = (128, 256, 512, 1024)
CLUSTER_THREADS = 64
"""Fewest threads of a block in a cluster."""
SAME = 0.01
"""Share of the time within which two estimates count as equal; the plainer kernel comes first."""
USUAL_THREADS = 128
"""Threads of a block that is neither small nor large."""
ASKED_ELEMENTS = 16
"""Elements of a step with running sums for which ptxas keeps to the estimated registers without
spills, if asked: of 8 elements it spills some kernels of bfloat16, of 32 some of float16.
"""
ASKED_BYTES = 2
"""Bytes of an element up to which it does so while the next step's loads are on their way."""


def row_configs(program: Program, hw: HardwareProfile) -> list[RowConfig]:
    """Configurations that can run, the fastest by the cost model first.

    Raises
    ------
    Unsupported
        Where there is nothing to reduce.
    """
    return [config for _, config in row_ranked(program, hw)]


def row_ranked(
    program: Program, hw: HardwareProfile, policy: Policy | None = None
) -> list[tuple[float | None, RowConfig]]:
    """As `row_configs`, each with its predicted seconds; None for rows of symbolic length."""
    if not isinstance(program.columns, int):
        return [(None, config) for config in row_candidates(program, hw)]
    work = work_of(program, hw)
    return ranked(candidates_of(program, work, hw), work, hw)


def ranked(
    configs: Iterable[RowConfig], work: RowWork, hw: HardwareProfile
) -> list[tuple[float, RowConfig]]:
    """Configurations by their estimated time; the order of `configs` decides where all is equal."""
    keyed, usual = [], _usual_threads(work, hw)
    for order, config in enumerate(configs):
        us = estimate_rows(work, config, hw).time_us
        key = (round(math.log(us) / SAME), *_unusual(config, usual), order)
        keyed.append((key, us / 1e6, config))
    return [(seconds, config) for _, seconds, config in sorted(keyed, key=lambda item: item[0])]


def _usual_threads(work: RowWork, hw: HardwareProfile) -> int:
    """Threads of a usual block that streams rows: few rows at a time and much of each leave them in
    the caches; those that are read once, and more than there are multiprocessors, need none, and
    leave less idle between blocks (H200: sums of 1376 x 10877 float32 take 15.1 us with 512 threads
    and 18.1 with 1024, 8192 x 8192 float16 exponentials 62.7 and 69.1).
    """
    once = sum(1 for sweep in work.merged if sweep.streamed or sweep.stored) == 1
    return STREAMING_THREADS[-2 if once and work.rows > hw.num_sms else -1]


def _unusual(config: RowConfig, streaming_threads: int) -> tuple[float, ...]:
    """How far a configuration is from a plain one: decides between equal estimates.

    Of blocks of one size, those of more rows have fewer warps that wait for one another.
    """
    streams = config.form is Form.LOOP
    usual = streaming_threads if streams else USUAL_THREADS
    off = abs(math.log2(config.threads * config.rows / usual))
    unroll = -config.unroll if streams else 0
    form = list(Form).index(config.form)
    return form, config.cluster, off, config.threads, unroll, config.prefetch


def row_candidates(program: Program, hw: HardwareProfile) -> list[RowConfig]:
    """All configurations worth an estimate, simple ones first.

    Rows of symbolic length can only be streamed; nothing is known to rank by.
    """
    if not isinstance(program.columns, int):
        width = row_width(program)
        return [RowConfig(Form.LOOP, threads, width=width, unroll=2) for threads in (256, 128, 512)]
    return list(candidates_of(program, work_of(program, hw), hw))


def work_of(program: Program, hw: HardwareProfile) -> RowWork:
    if program.columns == 0 or (program.is_static and program.row_count == 0):
        raise Unsupported("there is nothing to reduce")
    return row_work(program, _widths(program, hw), hw.special_slots)


def _widths(program: Program, hw: HardwareProfile) -> list[int]:
    """Widths of vectors: the widest that rows allow, one that divides them, and half of that where
    there are fewer vectors than threads.
    """
    widest, whole = row_width(program), vector_width(program)
    if not isinstance(program.columns, int):
        return [widest]
    widths = [widest, whole]
    threads = hw.num_sms * hw.max_threads_per_block
    if program.is_static and program.row_count * program.columns < threads * whole:
        widths += [whole // 2] if whole > 2 else []
    return list(dict.fromkeys(widths))


def candidates_of(program: Program, work: RowWork, hw: HardwareProfile) -> Iterator[RowConfig]:
    """Configurations worth an estimate for the rows of `work`, which are those of the program or,
    where sizes are symbolic, some of them.
    """
    clusters = _clusters(program, hw)
    for width in work.accesses:
        yield from _held(work, width, clusters, hw)
    width = next(iter(work.accesses))
    yield from _streamed(program, work, width, clusters, hw)
    if width == vector_width(program) and can_stream(program, width) and program.is_static:
        yield from _resident(work, width, clusters[:2], hw)


def _clusters(program: Program, hw: HardwareProfile) -> tuple[int, ...]:
    """Sizes of clusters: blocks exchange float32 only."""
    alike = all(reduction.dtype == "float32" for reduction in program.reductions)
    return CLUSTERS if hw.has_clusters and alike else CLUSTERS[:1]


def _held(
    work: RowWork, width: int, clusters: tuple[int, ...], hw: HardwareProfile
) -> Iterator[RowConfig]:
    """Rows in registers, of some lanes, of some warps, of a cluster."""
    vectors = -(-work.columns // width)
    for cluster in clusters:
        for threads in POWERS:
            if threads > 1 and threads * cluster >= 2 * vectors:
                break
            if cluster > 1 and threads < CLUSTER_THREADS:
                continue
            for rows in _rows_a_block(threads) if cluster == 1 else [1]:
                if threads * rows > WARP and rows >= 2 * work.rows:
                    continue
                config = RowConfig(threads=threads, rows=rows, width=width, cluster=cluster)
                if fits(work, config, hw):
                    yield config


def _rows_a_block(threads: int) -> list[int]:
    """One row where that makes whole warps, else as many as fill a warp; and blocks of several."""
    several = [block // threads for block in BLOCKS if block >= threads]
    return list(dict.fromkeys([max(1, WARP // threads), *several]))


def _streamed(
    program: Program, work: RowWork, width: int, clusters: tuple[int, ...], hw: HardwareProfile
) -> Iterator[RowConfig]:
    """Rows that nothing is held of."""
    vectors = -(-work.columns // width)
    one_pass = not work.stored and not any(s.streamed for s in work.merged[1:])
    fewest = max(WARP, min(STREAMING_THREADS[0], 1 << (vectors.bit_length() - 1)))
    for cluster in clusters:
        for threads in sorted({fewest, *STREAMING_THREADS}):
            if threads * cluster > max(vectors, fewest):
                break
            for unroll in UNROLLS if width > 1 else [4 * unroll for unroll in UNROLLS]:
                has_next = 2 * threads * cluster * unroll <= vectors
                for prefetch in (False, True) if has_next else (False,):
                    config = RowConfig(
                        Form.LOOP,
                        threads,
                        width=width,
                        cluster=cluster,
                        unroll=unroll,
                        prefetch=prefetch,
                        load="na" if one_pass else "nc",
                    )
                    yield replace(config, min_blocks=_demand(work, config, hw) if one_pass else 0)


def _demand(work: RowWork, config: RowConfig, hw: HardwareProfile) -> int:
    """Blocks a multiprocessor to ask ptxas for: those that the estimate counts, where one sweep
    has running sums. ptxas by itself gives one and the same loop 40 or 44 registers, as what
    stands behind it happens to be, and three or two blocks of 512 threads fit: 64.7 us if asked,
    72.8 if not, for the loss of 4096x32000 float16 on an H200 (2026-11-22).
    """
    running = any(s.running for s in work.merged)
    roomy = not config.prefetch or work.streamed <= ASKED_BYTES
    usual = config.cluster == 1 and config.unroll * config.width == ASKED_ELEMENTS
    if not (running and roomy and usual):
        return 0
    blocks = row_resources(work, config, hw).slots // hw.num_sms
    return blocks if blocks > 1 else 0


def _resident(
    work: RowWork, width: int, clusters: tuple[int, ...], hw: HardwareProfile
) -> Iterator[RowConfig]:
    """Rows that arrive in shared memory meanwhile: where registers hold less than two rows of a
    multiprocessor, so that its blocks cannot load while another one computes. In pairs at most:
    the device always has room for those, all of which must be resident.
    """
    vectors = work.columns // width
    if len(clusters) == 1 or not work.stored or 2 * work.columns < hw.registers_per_sm:
        return
    for cluster in clusters:
        if work.rows < 2 * clusters_on_device(cluster, 1, hw):
            continue
        for threads in STREAMING_THREADS[1:]:
            for stages in (1, 2):
                config = RowConfig(
                    Form.BULK,
                    threads,
                    width=width,
                    cluster=cluster,
                    stages=stages,
                    resident=1,
                    min_blocks=1,
                )
                ring = ring_bytes(work, config) + hw.smem_reserved_per_block_bytes
                held = 0 < ring <= hw.smem_per_block_bytes and fits(work, config, hw)
                if held and vectors % cluster == 0 and threads <= vectors // cluster:
                    yield config


def fits(work: RowWork, config: RowConfig, hw: HardwareProfile) -> bool:
    """Whether registers hold what they should."""
    return wanted_registers(work, config) <= registers_limit(config, hw)


def bounded(
    configs: Iterable[RowConfig], lengths: Iterable[int], work: RowWork, hw: HardwareProfile
) -> Iterator[RowConfig]:
    """Configurations for rows of symbolic length, up to each of `lengths` where rows are held."""
    for config in configs:
        if config.form is Form.LOOP:
            yield config
            continue
        for most in lengths:
            own = replace(config, most=most)
            if fits(work, own, hw) and (
                config.threads >= ENDS or elements_a_thread(work, own) == config.width
            ):
                yield own
