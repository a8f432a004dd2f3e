"""Tiles of the CUDA-core GEMM."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ....config import HardwareProfile

# Time of the CUDA-core GEMM, from plain numbers.

# Fitted to 49 kernels of 6 float32 shapes (H200, 2026-11-27: 3752 x 5993 x 192, 504 x 2512 x 2336,
# five of its sixths, 44 of 443 x 109 x 480, 777 x 1024 x 4096, 2048^3; the fastest of each comes
# first, and is predicted 1 to 13 % too long): latency of a step (`block_k` terms) of a block that
# is alone; threads that keep a multiprocessor's multipliers busy; multiplications that the read of
# an operand from shared memory takes the time of, and those that it takes to bring one there;
# registers of a thread beside its sums.
STEP_SECONDS = 8.1e-8
BUSY_THREADS = 100
READ_COST = 1.69
LOAD_COST = 9.0
OTHER_REGISTERS = 40
# What a warp that is alone takes for a term, its reads and products one behind the other: a step
# takes at least that for its terms, behind the latency of the L2. Of ten small products of float32
# (H200, 2026-11-29, tests/data/small_products_h200.json) kernels of 200 terms and more take 0.88 to
# 1.55 times what is predicted, 1.14 in the median; up to 2.7 times without.
TERM_SECONDS = 7e-9
# Of halves of odd sizes, of which 13 products were measured (H200, 2026-11-28,
# tests/data/odd_sweep_h200.json): elements that a read of shared memory brings a thread, fewer of
# which take as long; and the same of a term: 0.84 us of 16 terms where one or two blocks are on a
# multiprocessor, 1.2 us of 32.
READ_ELEMENTS = 4
ODD_TERM_SECONDS = 2.3e-8
# A multiprocessor's time for the epilogue of 128 x 128 elements while no other block multiplies.
EPILOGUE_SECONDS = 1.14e-5
# Estimate: start of a kernel.
START_SECONDS = 1.5e-6

Sizes = tuple[int, int, int, tuple[int, ...]]
"""Batch, M and N of a segment, and K of each of its products."""


def are_odd(segments: Sequence[Sizes]) -> bool:
    """Whether rows of all segments start anywhere: of odd columns, or of terms that are no vectors
    of 8.
    """
    return all(columns % 2 or any(k % 8 for k in depths) for *_, columns, depths in segments)


def simt_seconds(
    segments: Sequence[Sizes],
    config: SimtConfig,
    hw: HardwareProfile,
    moved_bytes: float,
    operation_s: float = 0.0,
    halves: bool = False,
) -> float:
    """Predicted seconds of one launch: the tiles of the busiest multiprocessor, each at the rate of
    its register tile and of its loads; at least the time of `moved_bytes` and of `operation_s`,
    what the device needs for prologues and epilogues; `halves`: of operands that are widened, which
    counts where sizes are odd (`are_odd`).
    """
    reads = 1 / config.thread_m + 1 / config.thread_n
    odd = halves and are_odd(segments)
    if odd:
        vectors = -(-config.thread_m // READ_ELEMENTS) + -(-config.thread_n // READ_ELEMENTS)
        reads = vectors * READ_ELEMENTS / (config.thread_m * config.thread_n)
    tiles, steps = 0, 0
    for batch, rows, columns, depths in segments:
        count = batch * -(-rows // config.block_m) * -(-columns // config.block_n)
        tiles += count
        steps += count * sum(-(-k // config.block_k) for k in depths)
    turns = rounded_waves(tiles / hw.num_sms, hw)
    registers = config.threads * (config.thread_m * config.thread_n + OTHER_REGISTERS)
    fitting = min(hw.registers_per_sm // registers, hw.max_threads_per_sm // config.threads)
    resident = max(1, min(-(-tiles // hw.num_sms), fitting))
    busy = min(1.0, resident * config.threads / BUSY_THREADS)
    terms = config.block_m * config.block_n * (1 + READ_COST * reads)
    terms += (config.block_m + config.block_n) * LOAD_COST
    rate = hw.fma_per_s_f32 / hw.num_sms * busy
    step = 2 * config.block_k * terms / rate + STEP_SECONDS / resident
    waits = config.block_k * (ODD_TERM_SECONDS if odd else TERM_SECONDS)
    step = max(step, (hw.l2_latency_s + waits) / resident)
    epilogue = config.block_m * config.block_n / 128**2 * EPILOGUE_SECONDS / resident
    body = turns * (steps / max(1, tiles) * step + epilogue) + operation_s
    return START_SECONDS + max(body, moved_bytes / hw.hbm_bytes_per_s)


def rounded_waves(waves: float, hw: HardwareProfile) -> float:
    """Waves of blocks, of which the last need not be full: the blocks of many waves drift apart."""
    whole = math.ceil(waves)
    return waves + min(1.0, hw.wave_rounding / max(1, whole)) * (whole - waves)


@dataclass(frozen=True, slots=True)
class SimtConfig:
    """Tile of a block (rows, columns, terms a step) and of a thread (rows, columns)."""

    block_m: int
    block_n: int
    block_k: int
    thread_m: int
    thread_n: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.block_m // self.thread_m * (self.block_n // self.thread_n)
