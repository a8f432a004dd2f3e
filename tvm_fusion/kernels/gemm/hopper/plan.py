"""Everything that follows from a problem and a configuration of the Hopper GEMM."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from tvm import tirx

from ....config import HardwareProfile
from ....errors import Unsupported
from ...contraction.model import RowPartial
from ...gpu.product_frame import ceil_div
from ...gpu.tensor_map import TensorMap
from ...group.traffic import clusters_on_device
from ...program.expr import constant, dtype_of
from ...program.program import Extent
from ..epilogue import starts_off_words
from ..partials import RUN_DTYPES
from .config import CHUNK, MULTICASTS, SPLITS, HopperConfig
from .model import BOX, STEP_BYTES, HopperProblem, HopperSegment

# Which configurations of the Hopper GEMM the kernel has a form for.

# Columns of the accumulators that 4 threads hold side by side.
GROUP = 8

# Steps that an epilogue can be spread over; fewer leave no room for it.
DEFERRED_STEPS = 3

# Boxes of A under way for each consumer where A has stages of its own: one is read, one arrives.
DATA_STAGES = 2


def check_config(problem: HopperProblem, config: HopperConfig, out_n: int, steps: int) -> None:
    """Refuses what cannot be planned.

    Parameters
    ----------
    problem, config : the product and the choice for it.
    out_n : columns of a tile's outputs.
    steps : steps of the tiles that have the fewest.

    Raises
    ------
    Unsupported
        With what is in the way.
    """
    _check_cluster(config)
    _check_prologue(problem, config)
    if not problem.shared and config.split > 1:
        raise Unsupported("segments of their own with split terms")
    if problem.streams and (config.split > 1 or config.deferred):
        raise Unsupported("stages of A beside those of B, with split terms or a kept tile")
    if problem.rounds_operands and not config.tf32:
        raise Unsupported("float32 operands, which may not be rounded to tfloat32")
    if steps < config.split:
        raise Unsupported(f"{steps} steps for {config.split} blocks")
    _check_columns(problem, config, out_n)
    _check_runs(problem, out_n // config.split)
    _check_pairs(problem, out_n // config.split)
    if config.staged:
        _check_boxes(problem, config, out_n // config.split)
    if config.deferred and not (config.staged and problem.kept_dtype):
        raise Unsupported("accumulators that the unfused graph does not round")
    if config.deferred and steps < DEFERRED_STEPS:
        raise Unsupported("too few steps to hide an epilogue between")


def _check_prologue(problem: HopperProblem, config: HopperConfig) -> None:
    """Raises where fragments of A cannot be computed on their way."""
    if problem.prologue is None:
        return
    if config.deferred:
        raise Unsupported("an operand that is computed, beside a kept tile")
    if problem.prologue.terms % 2:
        raise Unsupported("an operand of an odd number of terms that is computed")


def _check_cluster(config: HopperConfig) -> None:
    """Raises for clusters that the kernel has no form for."""
    if config.split not in SPLITS:
        raise Unsupported(f"terms split between {config.split} blocks")
    if config.multicast not in MULTICASTS:
        raise Unsupported(f"tiles of B shared by {config.multicast} blocks")
    if config.split > 1 and config.multicast > 1:
        raise Unsupported("clusters that split the terms and share tiles")
    if config.deferred and (config.split > 1 or config.promote):
        raise Unsupported("a deferred epilogue of split terms, or of sums kept twice")


def _check_columns(problem: HopperProblem, config: HopperConfig, out_n: int) -> None:
    """Raises where blocks of a cluster cannot divide the columns of a tile, or those of B."""
    if out_n % (8 * config.split):
        raise Unsupported(f"{out_n} columns shared by {config.split} blocks")
    if problem.segments[0].b[0].k_major:
        whole = out_n % (8 * config.multicast) == 0
    elif out_n % BOX:
        raise Unsupported("columns of B in boxes of 64")
    else:
        whole = config.block_n // BOX % config.multicast == 0
    if not whole:
        raise Unsupported(f"{out_n} columns of B loaded by {config.multicast} blocks")


def _check_boxes(problem: HopperProblem, config: HopperConfig, columns: int) -> None:
    """Raises where the outputs of so many columns cannot leave through the boxes.

    Boxes are taken in turn: a tile fills the ring a whole number of times, or a box would be
    written again while the TMA still reads it.
    """
    if not problem.staged or columns % BOX:
        raise Unsupported("an output that the TMA cannot store")
    boxes, needed = config.boxes, columns // BOX
    if problem.residual is not None and not config.deferred:
        if boxes == needed or (boxes == 2 * needed and config.split == 1):
            return
        raise Unsupported(f"{boxes} boxes for the {needed} of a residual")
    if boxes < 1 or needed % boxes:
        raise Unsupported(f"{boxes} boxes for {needed} in a tile")
    if problem.residual is not None and boxes < 2:
        raise Unsupported(f"{boxes} boxes for a residual")


def _check_runs(problem: HopperProblem, columns: int) -> None:
    """Raises Unsupported where so many columns, a block's share of a tile, are no whole runs; runs
    of rows have those of a warp, whatever the tile.
    """
    outputs = [o for segment in problem.segments for o in segment.outputs if o.partial is not None]
    for output in outputs:
        partial = output.partial
        if isinstance(partial, RowPartial) and (columns % partial.width or partial.width % CHUNK):
            raise Unsupported(f"runs of {partial.width} columns in a tile of {columns}")
        if isinstance(partial, RowPartial) and partial.finish is not None:
            raise Unsupported("what is made of runs of columns")
        if dtype_of(output.value) not in RUN_DTYPES:
            raise Unsupported(f"a run of {dtype_of(output.value)}")


def _check_pairs(problem: HopperProblem, columns: int) -> None:
    """Raises Unsupported where a thread does not hold both columns of a pair: those of groups of 8
    lie in threads side by side, two neighbours in one.
    """
    for segment in problem.segments:
        if segment.partners is None:
            continue
        width, distance = segment.partners.width, segment.partners.distance
        if width != 2 and (width % GROUP or distance % GROUP):
            raise Unsupported(f"columns {distance} apart in runs of {width}")
        if columns % width:
            raise Unsupported(f"runs of {width} columns in a tile of {columns}")


BOX_BYTES = BOX * BOX * 2

# Kernel parameters.
MAP_BYTES = 128
POINTER_BYTES = 8

# Shared memory for barriers and for aligning the buffers in front of them.
BARRIER_BYTES = 512

# Registers of a producer's thread, that of one that counts taps of windows, and the most a consumer
# takes of what the launch has left.
PRODUCER_REGISTERS = 24
WINDOW_REGISTERS = 40
CONSUMER_REGISTERS = 240
MOST_REGISTERS = 255

# Accumulators of a thread beside functions that are not lowered to a few instructions: with the
# branches of erff ptxas spills up to 248 bytes at 128 accumulators, up to 64 at 96, none at 64.
FUNCTION_ACCUMULATORS = 64

# Consumers up to which there are registers to keep a tile of any size; more may keep so many sums.
MOST_THAT_KEEP, KEPT_BY_MANY = 3, 32

# Registers of a thread that are neither sums nor for a computed A.
OTHER_REGISTERS = 16

# The most sums that a thread can hold and still compute an epilogue.
MAX_ACCUMULATORS = 192


@dataclass(frozen=True, slots=True)
class Plan:
    """What follows from a problem and a configuration. Sizes in elements unless named otherwise.

    `out_n` are the columns of a tile's outputs, `share_n` those that one block of a cluster stores.
    Where A has `data_stages` of its own, `data_bytes` arrive in one; else in each of the
    configuration's, with B. A block takes `least_steps` of the `steps` of a tile, the first
    `spare_steps` blocks of a cluster one more. `clusters` take tiles in turn, single blocks unless
    the configuration has clusters. `depths` are the steps of each segment, `steps` the most;
    `a_maps` are those of A's tensors, once if segments share A, else for each. `by_rows` is the
    position of each segment's output that leaves row by row through a box of shared memory, if one
    does. A deferred epilogue takes `chunks_per_step` of its pieces in each of `peeled` steps. Where
    the call tells the rows of A's box, these are `few_rows`.
    """

    config: HopperConfig
    consumers: int
    out_n: int
    share_n: int
    steps: int
    a_rows: int
    a_bytes: int
    b_bytes: int
    transaction_bytes: int
    tiles: Extent
    clusters: int
    accumulators: int
    chunks: int
    peeled: int
    chunks_per_step: int
    depths: tuple[int, ...]
    a_maps: tuple[tuple[TensorMap, ...], ...]
    b_maps: tuple[tuple[TensorMap, ...], ...]
    by_rows: tuple[int | None, ...]
    data_stages: int = 0
    data_bytes: int = 0
    producer_registers: int = PRODUCER_REGISTERS
    few_rows: Extent | None = None

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.config.split * self.config.multicast

    @property
    def blocks(self) -> int:
        """Blocks of the launch."""
        return self.clusters * self.cluster

    @property
    def least_steps(self) -> int:
        """Steps of the block of a cluster that has the fewest."""
        return self.steps // self.config.split

    @property
    def spare_steps(self) -> int:
        """How many blocks of a cluster have one step more."""
        return self.steps % self.config.split

    @property
    def ahead(self) -> bool:
        """Whether there are boxes for the residuals of two tiles: that of the next one travels
        while a tile is computed.
        """
        return not self.config.deferred and self.config.boxes > self.share_n // BOX

    @property
    def ring_bytes(self) -> int:
        """Shared memory of all stages."""
        return self.a_stages * self.a_bytes + self.config.stages * self.b_bytes

    @property
    def a_stages(self) -> int:
        """Stages of A."""
        return self.data_stages or self.config.stages

    @property
    def exchange_bytes(self) -> int:
        """Shared memory that partial sums of other blocks arrive in; it is that of the stages."""
        c = self.config
        return c.block_m * c.block_n // c.split * (c.split - 1) * 4

    @property
    def threads(self) -> int:
        """Threads of a block: one producer warpgroup and the consumers."""
        return 128 * (self.consumers + 1)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a block."""
        return self.ring_bytes + self.consumers * self.boxes * BOX_BYTES + BARRIER_BYTES

    @property
    def boxes(self) -> int:
        """Boxes of each consumer."""
        return self.config.boxes or int(any(found is not None for found in self.by_rows))

    @property
    def live_accumulators(self) -> int:
        """Registers of a thread for sums, those of full precision included."""
        return self.accumulators * (2 if self.config.promote else 1)

    @property
    def moves_registers(self) -> bool:
        """Whether consumers need more registers than a launch of equal shares gives them."""
        return self.consumers > 1 and self.live_accumulators >= 64

    @property
    def consumer_registers(self) -> int:
        """Registers a consumer thread may take, once the producers gave theirs back if they do."""
        groups = self.consumers + 1
        pool = groups * (65536 // (128 * groups) // 8 * 8)
        if not self.moves_registers:
            return min(MOST_REGISTERS, pool // groups)
        return min(CONSUMER_REGISTERS, (pool - self.producer_registers) // self.consumers // 8 * 8)


def make_plan(problem: HopperProblem, config: HopperConfig, hw: HardwareProfile) -> Plan:
    """Everything derived from a configuration.

    Raises
    ------
    Unsupported
        Where the kernel has no form for the configuration, the tile is no box of an operand, or
        registers or shared memory do not suffice.
    """
    c = config
    out_n = c.block_n // 2 if problem.dual else c.block_n
    share_n = out_n // c.split
    steps = ceil_div(problem.K, problem.block_k)
    depths = tuple(ceil_div(s.K, problem.block_k) for s in problem.segments)
    check_config(problem, c, out_n, min(depths))
    a_rows = c.block_m
    if problem.a.k_major and isinstance(problem.M, int):
        a_rows = min(c.block_m, ceil_div(problem.M, 8) * 8)
    chunks = ceil_div(share_n, CHUNK)
    per_step = ceil_div(chunks, max(1, min(depths) - 2)) if c.deferred else 0
    peeled = ceil_div(chunks, per_step) if c.deferred else 0
    own = problem.segments[:1] if problem.shared else problem.segments
    tiles = _tiles(problem, c.block_m * c.multicast, out_n)
    b_bytes = c.block_n * problem.taps_of_stage * STEP_BYTES
    clusters = clusters_on_device(c.split * c.multicast, 1, hw)
    if not clusters:
        raise Unsupported(f"clusters of {c.split * c.multicast} blocks on this device")
    plan = Plan(
        config=c,
        consumers=c.block_m // BOX,
        out_n=out_n,
        share_n=share_n,
        steps=steps,
        a_rows=a_rows,
        a_bytes=c.block_m // BOX * problem.box_bytes,
        b_bytes=b_bytes,
        transaction_bytes=b_bytes + (0 if problem.streams else _arriving(problem, a_rows)),
        tiles=tiles,
        clusters=min(tiles, clusters) if isinstance(tiles, int) else clusters,
        accumulators=c.block_n // 2,
        chunks=chunks,
        peeled=peeled,
        chunks_per_step=per_step,
        depths=depths,
        a_maps=tuple(tuple(view.boxes(a_rows) for view in s.views) for s in own),
        b_maps=tuple(
            tuple(view.boxes(out_n // c.multicast) for view in s.b) for s in problem.segments
        ),
        by_rows=tuple(None if c.staged else output_by_rows(problem, s) for s in problem.segments),
        data_stages=DATA_STAGES if problem.streams else 0,
        data_bytes=_arriving(problem, a_rows) if problem.streams else 0,
        producer_registers=WINDOW_REGISTERS if problem.has_windows else PRODUCER_REGISTERS,
        few_rows=_few_rows(problem, c),
    )
    if plan.smem_bytes > hw.smem_per_block_bytes:
        plan = replace(plan, by_rows=(None,) * len(problem.segments))
    if plan.live_accumulators > MAX_ACCUMULATORS:
        raise Unsupported(f"{plan.live_accumulators} registers of sums")
    if problem.prologue is not None:
        found = problem.prologue
        own = found.registers_in_place if problem.streams else found.registers
        used = plan.accumulators + own + OTHER_REGISTERS
        if used > plan.consumer_registers:
            raise Unsupported(f"{used} registers for sums and for what A is computed of")
    crowded = plan.consumers > 1 and plan.live_accumulators > FUNCTION_ACCUMULATORS
    if crowded and problem.unlowered_functions:
        raise Unsupported("accumulators that leave no registers for the epilogue's functions")
    if c.deferred and plan.consumers > MOST_THAT_KEEP and plan.accumulators > KEPT_BY_MANY:
        raise Unsupported(f"{plan.consumers} consumers, which have no registers for a kept tile")
    if crowded and c.deferred and problem.pairs_with_wide_loads:
        raise Unsupported("kept pairs of columns that leave no registers for wide loads")
    if plan.exchange_bytes > plan.ring_bytes:
        raise Unsupported(f"{plan.exchange_bytes} bytes of partial sums in {c.stages} stages")
    if plan.smem_bytes > hw.smem_per_block_bytes:
        raise Unsupported(f"{plan.smem_bytes} bytes of shared memory")
    if _parameter_bytes(problem, plan) > hw.kernel_param_bytes:
        raise Unsupported(f"{_parameter_bytes(problem, plan)} bytes of kernel parameters")
    return plan


def _few_rows(problem: HopperProblem, config: HopperConfig) -> Extent | None:
    """Rows of A's box where their number is symbolic: no more than there are. 7 rows of 2048 terms
    take 14.3 us in boxes of 64, 11.6 in boxes of 8 (H200, 2026-11-28).
    """
    one = isinstance(problem.batch, int) and problem.batch == 1
    if isinstance(problem.M, int) or not one or problem.has_windows or not problem.a.k_major:
        return None
    if config.multicast > 1 or not problem.shared:
        return None
    rows = ceil_div(problem.M, 8) * 8
    return tirx.Min(rows, constant(config.block_m, dtype_of(rows)))


def _arriving(problem: HopperProblem, rows: int) -> int:
    """Bytes of A that arrive in a step; a box's last ones may be left as they are."""
    windows = problem.segments[0].windows
    if windows is None:
        return rows * STEP_BYTES
    return rows // BOX * math.prod(windows.held) * STEP_BYTES


@lru_cache(maxsize=64)  # of each segment for all of its configurations
def output_by_rows(problem: HopperProblem, segment: HopperSegment) -> int | None:
    """An output whose rows start off 4 bytes."""
    for position, output in enumerate(segment.outputs):
        shape = problem.contraction.params[output.param].shape
        if starts_off_words(output, shape, segment.groups):
            return position
    return None


def stores_by_rows(problem: HopperProblem) -> bool:
    """Whether any output has rows that start off 4 bytes."""
    return any(output_by_rows(problem, s) is not None for s in problem.segments)


def _tiles(problem: HopperProblem, rows: int, out_n: int) -> Extent:
    if problem.shared:
        columns = sum(ceil_div(n, out_n) for n in problem.columns)
        return columns * ceil_div(problem.whole_tiles(rows), rows) * problem.batch
    parts = [ceil_div(s.N, out_n) * ceil_div(s.M, rows) * s.B for s in problem.segments]
    return sum(parts[1:], parts[0])


def _parameter_bytes(problem: HopperProblem, plan: Plan) -> int:
    """Kernel parameters: tensor maps, and at most a pointer for each parameter of the function."""
    maps = sum(map(len, (*plan.a_maps, *plan.b_maps)))
    if plan.config.staged:
        maps += len(problem.segments) * (2 if problem.residual is not None else 1)
    return MAP_BYTES * maps + POINTER_BYTES * len(problem.contraction.params)
