"""Which configurations of the Hopper GEMM to try, the one with the least predicted time first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ...config import HardwareProfile
from ...errors import Unsupported
from .gemm_frame import assumed, ceil_div
from .gemm_hopper_plan import (
    BARRIER_BYTES,
    BLOCK_K,
    BOX_BYTES,
    HopperConfig,
    Plan,
    make_plan,
)
from .gemm_hopper_problem import BOX, HopperProblem

MAX_STAGES = 16

# (rows, columns) of a tile in the order of their speed on large matrices (H200, 2026-11-20: two
# consumers on 128 x 256 with 4 stages are best; ping-pong 128 x 128 and clusters of 2 slower).
STAGED_TILES = ((128, 256), (128, 192), (128, 128), (128, 64), (64, 256), (64, 128), (64, 64))

# What the model of `_seconds` adds to bytes and operations, in cycles (fitted to measurements on an
# H200): start of a kernel, least length of a step (barriers), epilogue of a 128 x 256 tile.
START_CYCLES = 4500
STEP_CYCLES = 200
EPILOGUE_CYCLES = 1500
# How much longer an epilogue takes that stores from registers.
DIRECT_STORE_FACTOR = 1.3
# A tie-breaker: what a grid loses that leaves multiprocessors idle.
IDLE_SECONDS = 0.5e-6
# Bytes a cycle that one multiprocessor takes from the L2, and operations a cycle of its tensor
# cores. The clock under load follows from the measured rate: the card is limited by its power.
SM_PORT_BYTES = 60
TENSOR_FLOP = 4096


def rank_configs(problems: Mapping[int, HopperProblem], hw: HardwareProfile) -> list[HopperConfig]:
    """The configurations that fit, the one with the least predicted time first."""
    found: list[tuple[float, int, HopperConfig]] = []
    for batched, problem in problems.items():
        for config in _candidates(problem, hw):
            config = replace(config, batched=batched)
            try:
                plan = make_plan(problem, config, hw)
            except Unsupported:
                continue
            found.append((_seconds(problem, plan, hw), len(found), config))
    return [config for _, _, config in sorted(found, key=lambda item: item[:2])]


def _candidates(problem: HopperProblem, hw: HardwareProfile) -> Iterator[HopperConfig]:
    """All configurations worth a look; the deepest ring that fits for each tile."""
    group_m = 16 if assumed(problem.M) >= 2048 else 8
    shapes = [(m, n, True) for m, n in STAGED_TILES] if problem.staged else []
    if problem.residual is None:
        widths = range(16, 264, 8) if not problem.dual else range(32, 264, 16)
        shapes += [(m, n, False) for m in (64, 128) for n in widths if _narrow(problem, n)]
    for block_m, block_n, staged in shapes:
        # With one tile a block there is no next one to hide an epilogue in: on a tie, no deferring.
        both = (True, False) if problem.residual is not None else (False, True)
        for deferred in both if staged else (False,):
            config = _deepest(problem, block_m, block_n, staged, deferred, group_m, hw)
            if config is not None:
                yield config


def _narrow(problem: HopperProblem, block_n: int) -> bool:
    """Stores from registers are for few rows, narrow tiles, or what the TMA cannot store."""
    return assumed(problem.M) <= 64 or block_n <= 32 or not problem.staged


def _deepest(
    problem: HopperProblem,
    block_m: int,
    block_n: int,
    staged: bool,
    deferred: bool,
    group_m: int,
    hw: HardwareProfile,
) -> HopperConfig | None:
    boxes = 0
    if staged:
        count = (block_n // 2 if problem.dual else block_n) // BOX
        boxes = 2 if count % 2 == 0 else count
        if problem.residual is not None and not deferred:
            boxes = count
    free = hw.smem_per_block_bytes - BARRIER_BYTES - block_m // BOX * boxes * BOX_BYTES
    stages = min(MAX_STAGES, free // ((block_m + block_n) * BLOCK_K * 2))
    if stages < 2:
        return None
    return HopperConfig(block_m, block_n, stages, staged, deferred, boxes, group_m)


def _seconds(problem: HopperProblem, plan: Plan, hw: HardwareProfile) -> float:
    """Predicted time: start, waves of steps, epilogues; at least that of the compulsory bytes."""
    c = plan.config
    rows, batch = assumed(problem.M), assumed(problem.batch)
    tiles = (
        sum(ceil_div(n, plan.out_n) for n in problem.columns) * ceil_div(rows, c.block_m) * batch
    )
    blocks = min(tiles, plan.blocks)
    clock = hw.tensor_flop_per_s[problem.dtype] / hw.num_sms / TENSOR_FLOP
    step = max(
        STEP_CYCLES / clock,
        2 * c.block_m * c.block_n * BLOCK_K / TENSOR_FLOP / clock,
        plan.transaction_bytes / SM_PORT_BYTES / clock,
    )
    waves = ceil_div(tiles, blocks)
    epilogue = c.block_m * plan.out_n / (128 * 256) * EPILOGUE_CYCLES / clock
    if not c.staged and rows > 64:
        epilogue *= DIRECT_STORE_FACTOR
    work = START_CYCLES / clock + waves * plan.steps * step
    work += epilogue * (1 if c.deferred else waves)
    columns = sum(problem.columns) * len(problem.segments[0].products)
    moved = 2 * batch * problem.K * (columns + rows)
    uneven = max(1.0, waves * blocks / tiles)
    memory = moved / hw.hbm_bytes_per_s * uneven + 2 * START_CYCLES / 3 / clock
    idle = IDLE_SECONDS * (1 - blocks / hw.num_sms)
    return max(work, memory) + idle
