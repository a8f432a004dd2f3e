"""Tiles of the CUDA-core GEMM."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ....config import HardwareProfile

# Time of the CUDA-core GEMM, from plain numbers.

# Fitted to 126 kernels of 10 float32 shapes (H200, 2026-11-20): latency of a step (`block_k` terms)
# of a block that is alone; threads that keep a multiprocessor's multipliers busy; multiplications
# that the read of an operand from shared memory takes the time of.
STEP_SECONDS = 4.4e-7
BUSY_THREADS = 160
READ_COST = 1.26
# A multiprocessor's time for the epilogue of 128 x 128 elements (H200, 2026-11-20, half products of
# 16 terms: 1.5 us where it only stores, 3 us where it reads a residual, too).
EPILOGUE_SECONDS = 2.2e-6
# Estimate: start of a kernel.
START_SECONDS = 1.5e-6

Sizes = tuple[int, int, int, tuple[int, ...]]
"""Batch, M and N of a segment, and K of each of its products."""


def simt_seconds(
    segments: Iterable[Sizes],
    config: SimtConfig,
    hw: HardwareProfile,
    moved_bytes: float,
    operation_s: float = 0.0,
) -> float:
    """Predicted seconds of one launch: the tiles of the busiest multiprocessor, each at the rate of
    its register tile or of its loads; at least the time of `moved_bytes` and of `operation_s`, what
    the device needs for prologues and epilogues.
    """
    reads = 1 / config.thread_m + 1 / config.thread_n
    tiles, steps = 0, 0
    for batch, rows, columns, depths in segments:
        count = batch * -(-rows // config.block_m) * -(-columns // config.block_n)
        tiles += count
        steps += count * sum(-(-k // config.block_k) for k in depths)
    turns = rounded_waves(tiles / hw.num_sms, hw)
    resident = min(-(-tiles // hw.num_sms), max(1, hw.max_threads_per_sm // (3 * config.threads)))
    busy = min(1.0, resident * config.threads / BUSY_THREADS)
    terms = config.block_m * config.block_n * config.block_k * (1 + READ_COST * reads)
    step = 2 * terms * hw.num_sms / hw.fma_per_s_f32 / busy + STEP_SECONDS / resident
    epilogue = config.block_m * config.block_n / 128**2 * EPILOGUE_SECONDS
    body = turns * (steps / max(1, tiles) * step + epilogue) + operation_s
    return START_SECONDS + max(body, moved_bytes / hw.hbm_bytes_per_s)


def rounded_waves(waves: float, hw: HardwareProfile) -> float:
    """Waves of blocks, of which the last need not be full: the blocks of many waves drift apart."""
    whole = math.ceil(waves)
    return waves + min(1.0, hw.wave_rounding / max(1, whole)) * (whole - waves)


@dataclass(frozen=True, slots=True)
class SimtConfig:
    """Tile of a block (rows, columns, terms a step) and of a thread (rows, columns); `min_blocks` a
    multiprocessor that ptxas must leave registers for, 0: no demand.
    """

    block_m: int
    block_n: int
    block_k: int
    thread_m: int
    thread_n: int
    min_blocks: int = 0

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.block_m // self.thread_m * (self.block_n // self.thread_n)
