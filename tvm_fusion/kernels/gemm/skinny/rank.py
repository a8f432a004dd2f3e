"""Predicted time of the skinny products.

    seconds = start + (memory^p + l2^p + latency^p + arithmetic^p)^(1/p)

The constants are fitted to about 230 kernels measured on an H200 2026-11-20 (1, 4 and 16 rows,
weights of 16, 8 and 4 bits), where nothing else is said.
"""

from __future__ import annotations

import math

from ....config import HardwareProfile, Policy
from ....errors import Unsupported
from ...contraction.reader import Contraction
from ...program.expr import bytes_of
from .candidates import Layouts, candidates
from .config import MMA_LANES, WARP, SkinnyConfig, check_problem, paired, tensor_dtype

MMA_ROWS = 8  # threads of a warp side by side along the columns, on tensor cores
START = 1.89e-06
"""Seconds before the first weights arrive and after the last."""
TRIP = 5.66e-07
"""Seconds from a batch of loads to the next one of a thread, under traffic."""
TURN = 1e-07
"""Seconds that a block spends before and behind its loads: its start, the sums of its warps."""
LOADS = 3.6
"""Loads of a thread that ptxas keeps in flight, whatever the unrolling (from the SASS)."""
L2_SHARE = 1.5
"""Of the L2's rate, what weights and rows together reach."""
READS = 1.12
"""Rate of reads alone, of that of a copy."""
UNEVEN = 0.146
"""Of the bytes that the fullest multiprocessor has above the mean, the share that shows."""
ISSUE = 0.406
"""Share of the issue slots that unrolled arithmetic between loads fills."""
POWER = 4.81
"""p among the terms: between the slowest alone and all one after another."""
NARROW = {16: 1.0, 8: 1.1, 4: 1.35, 2: 2.0, 1: 3.0}
"""Loss by narrow accesses: more requests for the same bytes (estimate)."""
SHORT_SEGMENT = 1.14
"""Loss where neighbouring threads read 64 bytes of a row, half of a line."""
APART = 0.02
"""Loss for each doubling of the warps that read other rows at the same time: gate and up of one
row took 40.4 us with all warps of a block on the same two columns, 42.6 with pairs of warps and
46.8 with four warps on columns of their own (H200, 2026-11-20)."""
SHARED = 2.29e-07
"""Seconds that warps which share a sum wait for each other."""
ROWS = 0.407
"""Instructions for each element of a row that a thread reads on CUDA cores."""
OVERHEAD = 2
"""Instructions of a step beside those for each weight: addresses, loop."""
UNEVEN_WORK = 0.347
"""The same share of the arithmetic that the fullest multiprocessor has above the mean."""
RING = 1.15
"""Cost of a ring: two steps in flight hide less than registers do where these suffice."""


def skinny_ranked(
    contraction: Contraction, hw: HardwareProfile, policy: Policy | None = None
) -> list[tuple[float, SkinnyConfig]]:
    """Predicted seconds of a launch and configurations, the fastest first.

    Parameters
    ----------
    contraction : Contraction
        Static, at most 16 rows.
    hw : HardwareProfile
        A CUDA device of compute capability 8.0 or later.
    policy : Policy, optional
        Not needed: sums run in float32 always.

    Raises
    ------
    Unsupported
        For any other contraction.
    """
    check_problem(contraction, hw)
    contraction = paired(contraction)
    layouts = Layouts(contraction)
    tensor = tensor_dtype(contraction)
    found = [
        (_seconds(contraction, layouts, config, hw), config)
        for config in candidates(contraction, hw, layouts, tensor)
    ]
    if not found:
        raise Unsupported("no division of the columns and the sum fits the device")
    return sorted(found, key=lambda entry: entry[0])


def _seconds(
    contraction: Contraction, layouts: Layouts, config: SkinnyConfig, hw: HardwareProfile
) -> float:
    sms, size = hw.num_sms, bytes_of
    tiles = contraction.batch * sum(-(-s.N // config.block_n) for s in contraction.segments)
    per_sm = tiles / sms
    waves = math.ceil(per_sm / _resident_blocks(contraction, config, hw))
    piece, count = layouts.accesses(config.steps, config.width)

    k = max(p.K for p in contraction.products)

    # The memory: every parameter once, of one with symbolic extents the rows that are read; short
    # segments and uneven blocks lose some of the rate.
    side = MMA_ROWS if config.tensor else config.lanes
    lanes = side if config.width > 1 else MMA_LANES if config.tensor else WARP
    loss = NARROW[piece] * (SHORT_SEGMENT if piece * lanes < 128 else 1.0)
    if config.width == 1 and not config.tensor:
        loss *= 1 + APART * math.log2(config.warps_n)
    sizes = ((p.elements, size(p.dtype)) for p in contraction.params if p.shape)
    read = contraction.batch * contraction.M * k
    total = sum((n if isinstance(n, int) else read) * each for n, each in sizes)
    uneven = math.ceil(per_sm) / per_sm - 1
    memory = total / (hw.hbm_bytes_per_s * READS) * loss * (1 + UNEVEN * uneven)

    # The L2: each tile of columns reads all rows.
    rows = tiles * contraction.M * k * 2
    l2 = (total + rows) / (hw.l2_bytes_per_s * L2_SHARE)

    # A thread's batches of loads, one after the other.
    along = 1 if config.tensor else WARP // config.lanes
    steps = max(1.0, k / config.run / (config.warps_k * along))
    products = max(len(s.products) for s in contraction.segments)
    loads = config.runs * products * count
    if config.tensor:  # each thread reads its run of a row too, two bytes a term
        loads += -(-contraction.M // 8) * max(1.0, config.steps / 8)
    ahead = config.stages or min(config.unroll, LOADS / loads)
    latency = (max(1.0, steps / ahead) * TRIP + TURN) * waves

    issue = hw.fma_per_s_f32 / 2 * ISSUE * min(1.0, per_sm * config.threads / WARP / 4)
    work = _instructions(contraction, layouts, config) / issue * (1 + UNEVEN_WORK * uneven)
    busy = sum(t**POWER for t in (memory, l2, latency, work)) ** (1 / POWER)
    start = hw.kernel_gap_us * 1e-6 + START + (SHARED if config.warps_k > 1 else 0.0)
    # Sums meet in shared memory: a thread adds up one element of each share.
    each = -(-contraction.M * config.block_n // config.threads)
    start += hw.barrier_s + each * config.warps_k * 5e-9
    if not config.tensor:
        sums = config.columns * config.width * contraction.M * products
        start += math.log2(along) * sums * 2e-9
    return (start + busy) * (RING if config.stages else 1.0)


def _resident_blocks(contraction: Contraction, config: SkinnyConfig, hw: HardwareProfile) -> int:
    """Blocks that a multiprocessor holds at once, by threads, registers and shared memory."""
    by_registers = hw.registers_per_sm // (_registers(contraction, config) * config.threads)
    by_smem = hw.smem_per_sm_bytes // (config.smem_bytes(contraction) + 1024)
    by_threads = hw.max_threads_per_sm // config.threads
    return max(1, min(by_registers, by_smem, by_threads, hw.max_blocks_per_sm))


def _registers(contraction: Contraction, config: SkinnyConfig) -> int:
    """Registers of a thread, as ptxas gives them to most (16 kernels on tensor cores)."""
    if not config.tensor:
        return 40
    rows = -(-contraction.M // 8)
    return 14 + 16 * rows + (6 + 8 * rows) * config.columns


def _instructions(contraction: Contraction, layouts: Layouts, config: SkinnyConfig) -> float:
    """Instructions of all threads together."""
    total = 0.0
    points = config.steps * config.width
    tensor = config.tensor
    numbers = iter(layouts.values(config.steps, config.width, tensor))
    costs = iter(layouts.conversions(config.steps, config.width, tensor))
    for s in contraction.segments:
        for p in s.products:
            values, each = next(numbers), next(costs)
            weights = contraction.batch * s.N * p.K
            rows, left = contraction.M, layouts.left_operations(p)
            overhead = OVERHEAD / (config.runs * points)
            if tensor:
                tiles = -(-rows // 8)
                each += tiles * (0.25 + 0.5 * (1 + left) / config.columns)
            else:
                each += rows * (1 + (ROWS + left) / (config.columns * config.width))
            if any(values.step):
                each += rows / config.steps
            total += weights * (each + overhead)
    return total
