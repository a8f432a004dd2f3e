"""Configurations of the Hopper GEMM, and everything that follows from one."""

from __future__ import annotations

from dataclasses import dataclass

from ...config import HardwareProfile
from ...errors import Unsupported
from ..contraction import Extent
from .gemm_frame import ceil_div
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

# Registers of a producer's thread, and the most a consumer takes of what the launch has left.
PRODUCER_REGISTERS = 24
CONSUMER_REGISTERS = 240

# Accumulators of a thread beside functions that are not lowered to a few instructions: with the
# branches of erff ptxas spills up to 248 bytes at 128 accumulators, up to 64 at 96, none at 64.
FUNCTION_ACCUMULATORS = 64


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
    # Boxes are taken in turn: a tile fills the ring a whole number of times, or a box would be
    # written again while the TMA still reads it.
    if c.staged and (c.boxes < 1 or out_n // BOX % c.boxes):
        raise Unsupported(f"{c.boxes} boxes for {out_n // BOX} in a tile")
    too_few = c.boxes < 2 if c.deferred else c.boxes != out_n // BOX
    if c.staged and problem.residual is not None and too_few:
        raise Unsupported(f"{c.boxes} boxes for a residual")
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
    crowded = plan.consumers > 1 and plan.accumulators > FUNCTION_ACCUMULATORS
    if crowded and problem.unlowered_functions:
        raise Unsupported("accumulators that leave no registers for the epilogue's functions")
    if plan.smem_bytes > hw.smem_per_block_bytes:
        raise Unsupported(f"{plan.smem_bytes} bytes of shared memory")
    return plan


def _rounds_alike(problem: HopperProblem) -> bool:
    """Whether rounding the accumulators is what the unfused graph does as well."""
    products = [p for s in problem.segments for p in s.products]
    return all(p.stored_dtype == problem.dtype for p in products)
