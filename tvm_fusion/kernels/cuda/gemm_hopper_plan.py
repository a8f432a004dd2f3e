"""Configurations of the Hopper GEMM, everything that follows from one, and which to try first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ...config import HardwareProfile
from ...errors import Unsupported
from ..contraction import Extent
from .gemm_frame import assumed, ceil_div
from .gemm_hopper_problem import BOX, HopperProblem
from .gemm_tensor_map import TensorMap

# Terms of one step: 64 halves are one row of the 128-byte swizzle.
BLOCK_K = 64
WGMMA_K = 16

# Columns of one piece of the epilogue: a warp's stmatrix writes 16 rows of 16 halves.
CHUNK = 16
BOX_BYTES = BOX * BOX * 2

# Shared memory for barriers and for aligning the buffers in front of them.
BARRIER_BYTES = 512

MAX_STAGES = 16

# Registers of a producer's thread, and the most a consumer takes of what the launch has left.
PRODUCER_REGISTERS = 24
CONSUMER_REGISTERS = 240

# (rows, columns) of a tile in the order of their speed on large matrices (H200, 2026-11-20: two
# consumers on 128 x 256 with 4 stages are best; ping-pong 128 x 128 and clusters of 2 slower).
STAGED_TILES = ((128, 256), (128, 192), (128, 128), (128, 64), (64, 256), (64, 128), (64, 64))

# What the model of `_seconds` adds to bytes and operations, in cycles (fitted to 30 shapes on an
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


@dataclass(frozen=True, slots=True)
class HopperConfig:
    """Choices for one kernel.

    Attributes
    ----------
    block_m, block_n : rows (64 a consumer warpgroup) and columns of a tile; `block_n` counts both
        halves of a gate/up pair.
    stages : steps of A and B in flight in shared memory.
    staged : outputs leave through shared memory and the TMA, else from registers.
    deferred : accumulators are rounded and kept, and the epilogue runs between the first steps of
        the next tile.
    boxes : 64 x 64 boxes of shared memory for the output of each consumer warpgroup.
    group_m : row tiles that share a column tile at one time.
    batched : outer row axes that count as batch: tiles then end where an inner row axis ends.
    """

    block_m: int
    block_n: int
    stages: int
    staged: bool
    deferred: bool
    boxes: int
    group_m: int = 8
    batched: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What follows from a problem and a configuration. Sizes in elements unless named otherwise."""

    config: HopperConfig
    consumers: int
    out_n: int
    steps: int
    a_rows: int
    stage_bytes: int
    transaction_bytes: int
    tiles: Extent
    blocks: int
    accumulators: int
    chunks: int
    peeled: int
    chunks_per_step: int
    a_map: TensorMap
    b_maps: tuple[tuple[TensorMap, ...], ...]

    @property
    def threads(self) -> int:
        """Threads of a block: one producer warpgroup and the consumers."""
        return 128 * (self.consumers + 1)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a block."""
        c = self.config
        return c.stages * self.stage_bytes + self.consumers * c.boxes * BOX_BYTES + BARRIER_BYTES

    @property
    def moves_registers(self) -> bool:
        """Whether consumers need more registers than a launch of equal shares gives them."""
        return self.consumers > 1 and self.accumulators >= 64

    @property
    def consumer_registers(self) -> int:
        """Registers a consumer thread may take once the producers gave theirs back."""
        groups = self.consumers + 1
        pool = groups * (65536 // (128 * groups) // 8 * 8)
        return min(CONSUMER_REGISTERS, (pool - PRODUCER_REGISTERS) // self.consumers // 8 * 8)


def make_plan(problem: HopperProblem, config: HopperConfig, hw: HardwareProfile) -> Plan:
    """Everything derived from a configuration.

    Raises
    ------
    Unsupported
        Where the tile is no box of an operand, or does not fit into shared memory.
    """
    c = config
    out_n = c.block_n // 2 if problem.dual else c.block_n
    k_major = problem.segments[0].b[0].k_major
    if c.staged and (not problem.staged or out_n % BOX):
        raise Unsupported("an output that the TMA cannot store")
    if not k_major and out_n % BOX:
        raise Unsupported("columns of B in boxes of 64")
    if c.deferred and not (c.staged and _rounds_alike(problem)):
        raise Unsupported("accumulators that the unfused graph does not round")
    a_rows = c.block_m
    if problem.a.k_major and isinstance(problem.M, int):
        a_rows = min(c.block_m, ceil_div(problem.M, 8) * 8)
    steps = ceil_div(problem.K, BLOCK_K)
    if c.deferred and steps < 3:
        raise Unsupported("too few steps to hide an epilogue between")
    chunks = ceil_div(out_n, CHUNK)
    per_step = ceil_div(chunks, max(1, steps - 2)) if c.deferred else 0
    columns = sum(ceil_div(n, out_n) for n in problem.columns)
    tiles = columns * ceil_div(problem.M, c.block_m) * problem.batch
    plan = Plan(
        config=c,
        consumers=c.block_m // BOX,
        out_n=out_n,
        steps=steps,
        a_rows=a_rows,
        stage_bytes=(c.block_m + c.block_n) * BLOCK_K * 2,
        transaction_bytes=(a_rows + c.block_n) * BLOCK_K * 2,
        tiles=tiles,
        blocks=min(tiles, hw.num_sms) if isinstance(tiles, int) else hw.num_sms,
        accumulators=c.block_n // 2,
        chunks=chunks,
        peeled=ceil_div(chunks, per_step) if c.deferred else 0,
        chunks_per_step=per_step,
        a_map=problem.a.boxes(a_rows),
        b_maps=tuple(tuple(view.boxes(out_n) for view in s.b) for s in problem.segments),
    )
    if plan.smem_bytes > hw.smem_per_block_bytes:
        raise Unsupported(f"{plan.smem_bytes} bytes of shared memory")
    return plan


def _rounds_alike(problem: HopperProblem) -> bool:
    """Whether rounding the accumulators is what the unfused graph does as well."""
    products = [p for s in problem.segments for p in s.products]
    return all(p.stored_dtype == problem.dtype for p in products)


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
        # Boxes are taken in turn, so a tile must fill the ring a whole number of times.
        count = (block_n // 2 if problem.dual else block_n) // BOX
        boxes = 2 if count % 2 == 0 else count
        if problem.residual is not None and not deferred:
            boxes = count
        if deferred and problem.residual is not None and boxes < 2:
            return None
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
