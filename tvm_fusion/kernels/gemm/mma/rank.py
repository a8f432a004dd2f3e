"""Which configurations of the mma.sync GEMM fit, and their predicted time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ....config import HardwareProfile, Policy
from ....errors import Unsupported
from ...contraction.reader import Contraction
from ...gpu.product_frame import assumed, ceil_div
from ...program.expr import FLOAT8_DTYPES, HALF_DTYPES, bytes_of, dtype_of
from ...program.program import Param
from ..epilogue import operation_s, starts_off_words
from .plan import MOST_STAGES, MmaConfig
from .problem import ENTRY_BYTES, Loop, MmaSegment, Source, Way, read_mma, rows_of
from .split import (
    A_REGISTERS,
    B_REGISTERS,
    GROUP_ROWS,
    GROUP_STEP_BYTES,
    GROUP_WARPS,
    PARTS,
    PRODUCTS,
    SUMS,
    part_bytes,
)
from .units import CHUNK

# (block_m, block_n, warp_m, warp_n)
TILES = (
    (128, 256, 64, 64),
    (256, 128, 64, 64),
    (128, 128, 64, 64),
    (128, 128, 64, 32),
    (128, 64, 64, 32),
    (128, 64, 32, 32),
    (64, 128, 32, 64),
    (64, 128, 16, 128),
    (64, 128, 32, 32),
    (64, 64, 32, 32),
    (32, 128, 32, 32),
    (128, 32, 32, 32),
    (32, 64, 16, 32),
    (64, 32, 32, 16),
    (16, 128, 16, 32),
    (16, 64, 16, 16),
)
# One more for float32 in parts, the first of those predicted to take as long: it is the fastest for
# 4096^3 and 2000 x 3001 x 511 (H100, tests/data/split_sweep_h100.json).
SPLIT_TILES = ((128, 64, 32, 64),)

MIN_STAGES = 3

# Rings of products of few rows, which memory binds: what a multiprocessor has under way has to be
# its share of the memory's rate times the latency, 25 bytes a ns and about 1 us on an H100
# (Little's law). Two slices of 16 x 64 are 20 KB, seven are 70. 16 x 4096 x 4096 takes 10.1 us in
# tiles of 16 x 32 with rings of 16, 11.2 with 8, 13.0 with 6; by the form of Hopper 10.8 (H200 as
# sm_90, 2026-11-28, tests/results/portable_h200.json). 256 rows of 4,096 columns take 2.0 times as
# long as by the form of Hopper: mma.sync's products alone would take 1.1 times.
DEEP_STAGES = (6, 8, 16)
MOST_DEEP_ROWS = 256
# Four slices of 32 or 64 rows of weights are 16 or 32 KB. An A100 has 15 KB under way for each
# multiprocessor, an H100 23, a B200 48.
SHALLOW_BYTES = 20e3
# Tiles for them alone: half of N = 4096 in columns of 64 leaves half of the device idle.
DEEP_TILES = ((16, 32, 16, 16), (32, 32, 32, 16))

# Registers of a thread: its sums, two sets of fragments, and what addresses and loads take.
OTHER_REGISTERS = 40
EVALUATION_REGISTERS = 8
# What a block splits beside its wgmmas: 239 and 143 registers with 64 and 32 sums (sm_90a, CUDA
# 13.0), each of which has two more of a step's products.
SPLIT_REGISTERS = 8
# Of products of 8-bit floats that are made of halves, beside what those of halves take: 27 and 35
# of tiles of warps of 64 x 32 (sm_90, CUDA 13.0); those of 64 x 64 spilled 96 to 264 bytes.
WIDE_FLOAT8_REGISTERS = 36

# Registers that hold 16 bytes on their way: two aligned vectors where they start anywhere.
# At windows, rows have an offset and places beside them, and each element a register of its own.
HELD_REGISTERS = {
    Way.COPY: 0,
    Way.SHIFT: 11,
    Way.WINDOW: 3,
    Way.GATHER: 2,
    Way.EVALUATE: 3,
    Way.COMPUTE: 4,
}
MAX_SHIFTS = 8

# Instructions of an element that is split (5.5, some at half the rate), and of a sum of 8 terms
# that is added to others: half of what is added and kept from NaN for 16 terms (machine code for
# sm_90a). They add to the time of the products: of 21 kernels of seven shapes on an H100 those of
# four shapes are predicted within 10 %, the others at 0.65 to 0.97 of their time
# (tests/data/split_sweep_three_parts_h100.json; so are, with 2 instructions, 68 kernels of two
# parts, split_sweep_h100.json).
SPLIT_INSTRUCTIONS, SUM_INSTRUCTIONS = 7.0, 1.0
# Products of split operands, in products of tfloat32, which take as long as two of bfloat16.
SPLIT_PRODUCTS = PRODUCTS / 2
# Rows and columns of most of the tiles of warps that split.
SPLIT_TILE = (32, 32)

# Of blocks that split what their warpgroups multiply (machine code for sm_90a: 432 instructions a
# warp for 128 x 128 x 32): an element, with its way through registers, and what a warp does beside.
# Share of the rate of wgmma by its columns: those of 64 read as many bytes of shared memory as it
# has (seven shapes on an H200, 2026-11-28, tests/data/split_sweep_groups_h200.json).
GROUP_TILES = ((128, 128), (64, 64))
ELEMENT_INSTRUCTIONS, GROUP_INSTRUCTIONS = 7.0, 144.0
GROUP_SHARE = {128: 0.75, 64: 0.53}

# What follows is fitted to 18 shapes on an H200 (2026-11-20, 220 kernels; predictions are off by 7
# to 16 % a shape, first choices lose 5 % at most where nothing is computed).

# Share of the rate of wgmma that mma.sync reaches on sm_90; on earlier devices the datasheet's rate
# is that of mma.sync, of which a main loop keeps PEAK_SHARE (an estimate).
SM90_SHARE = 0.75
PEAK_SHARE = 0.85
# Share of the rate of halves that 8-bit floats reach which are made halves: 4096^3 takes 434 us, of
# halves 288 (H200 as sm_90, 2026-11-28).
FLOAT8_SHARE = 0.66

# Seconds of a block: start and first slices; what a step waits for (barrier, latency of its loads),
# more where they pass through registers; the epilogue of 128 x 128 elements.
START_SECONDS = 4.2e-6
# Of halves of odd sizes, which were measured below 8 us, too: what is not hidden of first slices
# and last epilogues is a share of what the blocks take (13 shapes on an H200, 2026-11-28,
# tests/data/odd_sweep_h200.json).
ODD_START_SECONDS, EXPOSED_SHARE = 1.2e-6, 0.7
STEP_SECONDS = {
    Way.COPY: 7e-8,
    Way.SHIFT: 1.7e-7,
    Way.WINDOW: 9e-8,
    Way.GATHER: 2.2e-7,
    Way.EVALUATE: 2.2e-7,
    Way.COMPUTE: 2.2e-7,
}
# A step of a tile of less than 64 rows waits this much longer for an operand that is computed.
THIN_COMPUTED = 4.0
EPILOGUE_SECONDS = 2.8e-6
# How much longer it takes where rows start off 4 bytes. Predictions of 11 shapes on an H200
# (2026-11-28) are as exact as without it, but 1500 x 4099 x 256 is left to the form of Hopper then
# (16 us, and 27 in tiles of 128 x 128).
OFF_WORDS = 1.6
# Estimate: operations of an epilogue, beside threads that never wait.
OPERATION_LATENCY = 2.0

# Bytes a cycle between one multiprocessor and the L2, as far as rings of up to 5 stages wait for
# it; and what the copies of the form of Hopper reach at 256 x 4096 x 4096 (H100, 15 us).
PORT_BYTES, DEEP_PORT_BYTES = 33, 53
# What a step of a deep ring waits for, its barrier: 13 to 33 ns at 256 rows, beside what its warps
# read from shared memory (H100, as sm_90). Reads alone are faster than a copy, as
# `gemm.skinny.rank` has it.
DEEP_STEP_SECONDS = 3e-8
DEEP_READS = 1.12
# Start of tiles of so many cells at most, and the share of memory's latency that is waited for: 12
# kernels of 16 x 4096 x 4096, rings of 3 to 16 (H200 as sm_90), which were predicted 1.2 to 1.3
# times as long without these.
FEW_CELLS, FEW_START_SECONDS = 64 * 64, 2.4e-6
WAITED_LATENCY = 0.78

# Cycles of a multiprocessor for what each warp does beyond 16-byte copies to 16 bytes a thread.
SMALL_PIECE_CYCLES = 3.9
CHUNK_CYCLES = {Way.COPY: 0.0, Way.SHIFT: 44.0, Way.COMPUTE: 26.0}
# Estimate: instructions of an element that is read at a window, and of a copy there, of which a
# multiprocessor issues four a cycle. Of ten layers on an H100 (2026-11-26) seven come within 19 %;
# patches of 16 x 16 x 3 and groups of four channels take twice the time, a stem of 3 x 3 x 3 takes
# three quarters. EVALUATE was not measured.
WINDOW_INSTRUCTIONS = {Way.WINDOW: 10, Way.GATHER: 8, Way.EVALUATE: 40}


def mma_ranked(
    contraction: Contraction, hw: HardwareProfile, policy: Policy | None = None
) -> list[tuple[float, MmaConfig]]:
    """Predicted seconds and configurations that fit the device, best first.

    Raises
    ------
    Unsupported
        Where `kernel.emit_gemm_mma` cannot compute the contraction, or no tile fits.
    """
    segments = read_mma(contraction, hw, wide=True)
    tf32 = bool(getattr(policy, "allow_tf32", False))
    if not tf32 and policy is not None and policy.rounding == "exact" and _has_float32(segments):
        raise Unsupported("float32 is not multiplied in parts where rounding is 'exact'")
    found: list[tuple[float, int, MmaConfig]] = []
    beside = _Beside.of(contraction, segments, hw)
    for config in _candidates(segments, hw, tf32):
        try:
            check_config(segments, config, hw)
        except Unsupported:
            continue
        if beside.off_words and sum(_tiles(beside, config)) <= hw.num_sms:
            config = replace(config, wide=False)
        found.append((_seconds(beside, segments, config, hw), len(found), config))
    if not found:
        raise Unsupported("no tile of this contraction fits")
    return [(seconds, config) for seconds, _, config in sorted(found, key=lambda x: x[:2])]


def _are_off_words(contraction: Contraction, segments: Sequence[MmaSegment]) -> bool:
    """Whether all outputs have rows that start off 4 bytes. Words of them pay where blocks take
    turns (647 x 2593 x 96 takes 6.4 us on an H200, and 11.4 element by element), not where none
    waits for another's stores (393 x 1209 x 91: 7.4 and 6.9).
    """
    return all(
        starts_off_words(output, contraction.params[output.param].shape, s.groups)
        for s in segments
        for output in s.outputs
    )


def _has_float32(segments: Sequence[MmaSegment]) -> bool:
    return any(loop.a.dtype == "float32" for s in segments for loop in s.loops)


def _candidates(segments: Sequence[MmaSegment], hw: HardwareProfile, tf32: bool) -> list[MmaConfig]:
    tall = max(assumed(rows_of(loop.a)) for s in segments for loop in s.loops) >= 2048
    wanted = _has_float32(segments)
    by_groups = hw.architecture.has_wgmma
    runs = max((width for s in segments for width in s.runs), default=0)
    found = []
    for tile in (*(SPLIT_TILES if wanted and not tf32 else ()), *TILES):
        if tile[3] > 64 and tile[3] != runs:
            continue
        for step_bytes in (64, 128):
            for stages in range(MIN_STAGES, MOST_STAGES + 1):
                group = 16 if tall else 8
                config = MmaConfig(
                    *tile, step_bytes, stages, group, wanted and tf32, split=wanted and not tf32
                )
                found.append(config)
    if has_deep_rings(segments, hw):
        found += [
            MmaConfig(*tile, step_bytes, stages)
            for tile in (*TILES, *DEEP_TILES)
            for step_bytes in (64, 128)
            for stages in DEEP_STAGES
            if tile[3] <= 64 or tile[3] == runs
        ]
    if wanted and not tf32 and by_groups:
        group = 16 if tall else 8
        for m, n in GROUP_TILES:
            config = MmaConfig(m, n, 16, n, GROUP_STEP_BYTES, 3, group, split=True, wgmma=True)
            found.append(config)
    return found


def takes_deep_rings(rows: int, hw: HardwareProfile) -> bool:
    """Whether products of plain operands, of so many rows, have rings of `DEEP_STAGES`: where a
    multiprocessor's share of what memory has under way is more than shorter ones hold. They were
    measured on Hopper as sm_90. The form of Hopper takes such products on sm_90a.
    """
    under_way = hw.hbm_bytes_per_s * hw.bytes_in_flight_latency_s / hw.num_sms
    few = rows <= MOST_DEEP_ROWS
    return few and under_way > SHALLOW_BYTES and not hw.architecture.has_wgmma


def has_deep_rings(segments: Sequence[MmaSegment], hw: HardwareProfile) -> bool:
    """The same of a contraction."""
    sources = [x for s in segments for loop in s.loops for x in (loop.a, *loop.b)]
    plain = all(x.way is Way.COPY and x.piece == CHUNK and x.dtype != "float32" for x in sources)
    return plain and takes_deep_rings(max(assumed(s.segment.M) for s in segments), hw)


def check_config(segments: Sequence[MmaSegment], config: MmaConfig, hw: HardwareProfile) -> None:
    """Raises Unsupported where a configuration cannot be written, or would not fit."""
    c = config
    if c.block_m % c.warp_m or c.block_n % c.warp_n or c.warp_m % 16 or c.warp_n % 16:
        raise Unsupported("a tile that is not divided evenly among warps")
    sizes = (c.block_m, c.block_n, c.warp_m, c.warp_n)
    if any(n & (n - 1) for n in sizes) or c.step_bytes not in (64, 128):
        raise Unsupported("tiles and steps are powers of two")
    if any(s.window for s in segments):
        _check_windows(segments, c)
    elif any(c.warp_n % width for s in segments for width in s.runs):
        raise Unsupported("runs of columns that do not lie in one warp's tile")
    if c.stages < MIN_STAGES:
        raise Unsupported(f"a ring of less than {MIN_STAGES} stages")
    if c.threads > hw.max_threads_per_block:
        raise Unsupported("more threads than a block has")
    if c.wgmma:
        _check_groups(segments, c, hw)
    if shared_bytes(segments, c) > hw.smem_per_block_bytes:
        raise Unsupported("more shared memory than a block has")
    most = max(_shifts(loop, c) for s in segments for loop in s.loops)
    if most > (MAX_SHIFTS if c.warp_n <= 64 else 0):
        raise Unsupported("more vectors to shift than a thread has registers for")
    registers = max(_registers(s, c, hw) for s in segments)
    if registers > min(hw.max_registers_per_thread, hw.registers_per_sm // c.threads):
        raise Unsupported("more registers than a thread has")


def _check_windows(segments: Sequence[MmaSegment], c: MmaConfig) -> None:
    """Raises Unsupported where no tile holds whole windows of columns."""
    (first, *others), outputs = segments, segments[0].outputs
    alike = all(o.partial is not None for o in outputs) and len(set(first.runs)) == 1
    if others or not alike or len(first.runs) != len(outputs):
        raise Unsupported("windows of columns beside other outputs")
    if any(dtype_of(o.value) != "float32" for o in outputs):
        raise Unsupported("windows of other elements than float32")
    fits = len(outputs) * c.window_bytes <= ring_bytes(segments, c)
    if not fits or not first.own_columns(c.block_n):
        raise Unsupported("windows of columns that do not fit into a tile")


def _check_groups(segments: Sequence[MmaSegment], c: MmaConfig, hw: HardwareProfile) -> None:
    """Raises Unsupported where warpgroups cannot multiply the parts of float32."""
    if not hw.architecture.has_wgmma:
        raise Unsupported(f"{hw.arch} has no wgmma")
    if not c.split or any(loop.a.dtype != "float32" for s in segments for loop in s.loops):
        raise Unsupported("warpgroups multiply float32 in parts only")
    rows = (c.warp_m * GROUP_WARPS, c.block_m % GROUP_ROWS)
    if rows != (GROUP_ROWS, 0) or c.warp_n != c.block_n or c.step_bytes != GROUP_STEP_BYTES:
        raise Unsupported("a tile that is not one of warpgroups")


def shared_bytes(segments: Sequence[MmaSegment], config: MmaConfig) -> int:
    """Shared memory of a block."""
    ring, tables = ring_bytes(segments, config), table_bytes(segments, config)
    return ring + parts_bytes(segments, config) + tables


def parts_bytes(segments: Sequence[MmaSegment], config: MmaConfig) -> int:
    """Shared memory of what the block splits."""
    if not config.wgmma:
        return 0
    return part_bytes(config, max(len(loop.b) for s in segments for loop in s.loops))


def ring_bytes(segments: Sequence[MmaSegment], config: MmaConfig) -> int:
    """Shared memory of the ring."""
    widest = max(len(loop.b) for s in segments for loop in s.loops)
    return config.stages * config.stage_bytes(widest)


def table_bytes(segments: Sequence[MmaSegment], config: MmaConfig) -> int:
    """Shared memory of the tables of terms, one for each stage."""
    sources = [x for s in segments for loop in s.loops for x in (loop.a, *loop.b)]
    elements = [x.element for x in sources if x.way is Way.GATHER]
    if not elements:
        return 0
    return config.stages * config.step_bytes // min(elements) * ENTRY_BYTES


def _registers(segment: MmaSegment, c: MmaConfig, hw: HardwareProfile) -> int:
    accumulators = {p.accumulator for loop in segment.loops for p in loop.products}
    sums = c.tiles_m * c.tiles_n * 4 * len(accumulators)
    most = max(len(loop.b) for loop in segment.loops)
    fragments = 2 * (c.tiles_m * 4 + most * c.tiles_n * 2)
    held = max(_held(loop, c) for loop in segment.loops)
    if c.wgmma:
        return 3 * sums + held + SPLIT_REGISTERS + OTHER_REGISTERS
    parts = c.tiles_m * (PARTS * A_REGISTERS + SUMS) + PARTS * B_REGISTERS if c.split else 0
    float8 = any(loop.a.dtype in FLOAT8_DTYPES for loop in segment.loops)
    wide = WIDE_FLOAT8_REGISTERS if float8 and hw.architecture.has_float8_as_halves else 0
    return sums + fragments + parts + held + wide + OTHER_REGISTERS


def _chunks(source: Source, c: MmaConfig) -> int:
    """16-byte chunks of a slice that each thread brings in."""
    block = c.block_m if source.side == "m" else c.block_n
    return math.ceil(block * c.step_bytes / 16 / c.threads)


def _shifts(loop: Loop, c: MmaConfig) -> int:
    return sum(_chunks(x, c) for x in (loop.a, *loop.b) if x.way is Way.SHIFT)


def _held(loop: Loop, c: MmaConfig) -> int:
    """Registers that hold slices on their way, and what their evaluation takes."""
    held = sum(_held_of(x) * _chunks(x, c) for x in (loop.a, *loop.b))
    computed = any(source.way is Way.COMPUTE for source in (loop.a, *loop.b))
    return held + (EVALUATION_REGISTERS if computed else 0)


def _held_of(source: Source) -> int:
    single = source.way in (Way.GATHER, Way.EVALUATE)
    return HELD_REGISTERS[source.way] + (16 // source.element if single else 0)


def _resident(segments: Sequence[MmaSegment], c: MmaConfig, hw: HardwareProfile) -> int:
    """Blocks of a multiprocessor."""
    memory = shared_bytes(segments, c) + hw.smem_reserved_per_block_bytes
    registers = 8 * math.ceil(max(_registers(s, c, hw) for s in segments) / 8)
    return max(
        1,
        min(
            hw.smem_per_sm_bytes // memory,
            hw.registers_per_sm // (registers * c.threads),
            hw.max_threads_per_sm // c.threads,
        ),
    )


@dataclass(frozen=True, slots=True)
class _Beside:
    """What all configurations of a contraction have in common.

    Attributes
    ----------
    sizes : batch, M and N of each segment, and K of each of its loops.
    moved_bytes : of all tensors.
    residuals : see `_residuals`.
    operations_s : what the device needs for the epilogue's operations.
    off_words : see `_are_off_words`.
    segments : the contraction's.
    odd : see `start_seconds`.
    """

    sizes: tuple[tuple[int, int, int, tuple[int, ...]], ...]
    moved_bytes: int
    residuals: float
    operations_s: float
    off_words: bool
    segments: tuple[MmaSegment, ...]
    odd: bool

    @classmethod
    def of(
        cls, contraction: Contraction, segments: Sequence[MmaSegment], hw: HardwareProfile
    ) -> _Beside:
        """That of a contraction; symbolic sizes are assumed."""
        spaces = [s.segment for s in segments]
        terms = (tuple(assumed(loop.K) for loop in s.loops) for s in segments)
        sizes = tuple(
            (assumed(s.B), assumed(s.M), assumed(s.N), k)
            for s, k in zip(spaces, terms, strict=True)
        )
        cells = sum(batch * m * n for batch, m, n, _ in sizes)
        moved = sum(bytes_of(p.dtype) * p.elements for p in contraction.params if _static(p))
        operations = OPERATION_LATENCY * operation_s(spaces, hw) * cells
        off_words = _are_off_words(contraction, segments)
        residuals = _residuals(contraction, segments)
        sources = [x for s in segments for loop in s.loops for x in (loop.a, *loop.b)]
        shifted = any(x.way is Way.SHIFT for x in sources)
        odd = (shifted or off_words) and all(x.dtype in HALF_DTYPES for x in sources)
        return cls(sizes, moved, residuals, operations, off_words, tuple(segments), odd)


def _tiles(beside: _Beside, c: MmaConfig) -> list[int]:
    """Tiles of each segment."""
    columns = (s.own_columns(c.block_n) for s in beside.segments)
    pairs = zip(beside.sizes, columns, strict=True)
    return [ceil_div(m, c.block_m) * ceil_div(n, own) * b for (b, m, n, _), own in pairs]


def _seconds(
    beside: _Beside, segments: Sequence[MmaSegment], c: MmaConfig, hw: HardwareProfile
) -> float:
    """Predicted time: tiles of the busiest multiprocessor, each at the rate of what limits it,
    beside the compulsory bytes (they overlap, more so where one takes much longer).
    """
    work, waiting, epilogue, flight = 0.0, 0.0, 0.0, 0.0
    counts = _tiles(beside, c)
    for s, sizes, count in zip(segments, beside.sizes, counts, strict=True):
        for loop, k in zip(s.loops, sizes[-1], strict=True):
            steps = ceil_div(k, c.step_bytes // loop.a.element)
            work += count * steps * _step_seconds(loop, c, hw)
            waiting += count * steps * _waiting_seconds(loop, c)
            flight += count * steps * flight_seconds(c.stages, hw) if c.is_deep else 0.0
        epilogue += count * c.block_m * c.block_n / 128**2 * EPILOGUE_SECONDS
    epilogue *= (1 + beside.residuals) * (OFF_WORDS if beside.off_words else 1.0)
    tiles = sum(counts)
    turns = math.ceil(tiles / hw.num_sms)
    resident = min(turns, _resident(segments, c, hw))
    # Blocks beside each other hide one another's waits and epilogues.
    each = work / tiles + (epilogue + waiting) / tiles / resident
    each = max(each, (flight + epilogue) / tiles / resident)
    rate = hw.hbm_bytes_per_s * (DEEP_READS if c.is_deep else 1.0)
    busy = math.hypot((turns * each) ** 2, (beside.moved_bytes / rate) ** 2) ** 0.5
    few = c.is_deep and c.block_m * c.block_n <= FEW_CELLS
    start = FEW_START_SECONDS if few else start_seconds(busy, beside.odd)
    start += hw.kernel_gap_us * 1e-6
    return start + busy + beside.operations_s


def start_seconds(busy: float, odd: bool) -> float:
    """What a kernel whose blocks are at work for so many seconds takes beside them; `odd`: it
    multiplies halves whose rows start anywhere, or stores such rows.
    """
    return min(START_SECONDS, ODD_START_SECONDS + EXPOSED_SHARE * busy) if odd else START_SECONDS


def flight_seconds(stages: int, hw: HardwareProfile) -> float:
    """A step of a block that waits for nothing but memory, with all but one of its slices under
    way.
    """
    return WAITED_LATENCY * hw.bytes_in_flight_latency_s / (stages - 1)


def _residuals(contraction: Contraction, segments: Sequence[MmaSegment]) -> float:
    """Bytes of matrices of an output's size that the epilogue reads, for each that it writes."""
    loads = [x.operand.stored for s in segments for loop in s.loops for x in (loop.a, *loop.b)]
    operands = [load.source for load in loads if load is not None]
    outputs = {o.param for s in segments for o in s.segment.outputs}
    params = [(i, p) for i, p in enumerate(contraction.params) if _static(p)]
    sizes = {p.elements for i, p in params if i in outputs}
    written = sum(bytes_of(p.dtype) * p.elements for i, p in params if i in outputs)
    read = sum(
        bytes_of(p.dtype) * p.elements
        for i, p in params
        if i not in outputs and p.elements in sizes and not any(p.var.same_as(x) for x in operands)
    )
    return read / written if written else 0.0


def _step_seconds(loop: Loop, c: MmaConfig, hw: HardwareProfile) -> float:
    """A step of a block that is alone on its multiprocessor, nothing waiting."""
    clock = hw.clock_ghz * 1e9
    dtype = "tfloat32" if loop.a.dtype == "float32" else loop.a.dtype.replace("uint8", "int8")
    rate = product_rate(dtype, hw) or hw.tensor_flop_per_s.get("float16", hw.fma_per_s_f32)
    rate *= (SM90_SHARE if hw.architecture.is_rated_by_wgmma else PEAK_SHARE) / hw.num_sms
    terms = c.step_bytes // loop.a.element
    flop = 2.0 * c.block_m * c.block_n * terms * len(loop.products)
    # Few warps leave tensor cores idle: each multiprocessor has four.
    idle = max(1.0, 4 / c.warps)
    split = c.split and loop.a.dtype == "float32"
    arithmetic = flop / rate * idle
    if c.wgmma:
        return _group_step_seconds(loop, c, hw)
    if split:
        tile = c.warp_m, c.warp_n
        arithmetic *= SPLIT_PRODUCTS
        arithmetic += c.rounds * c.warps * split_cycles(tile) * idle / clock
    # ldmatrix reads each warp's rows; a pass over all banks is 128 bytes.
    read = c.warps * (c.warp_m + c.warp_n * len(loop.b)) * c.step_bytes / 128
    written = c.stage_bytes(len(loop.b)) / 128
    units = sum(_loading_cycles(x, c) for x in (loop.a, *loop.b))
    shared = (read + written + units) / clock
    reached = DEEP_PORT_BYTES if c.is_deep else PORT_BYTES
    port = c.stage_bytes(len(loop.b)) / reached / clock
    return max(arithmetic, shared, port)


def product_rate(dtype: str, hw: HardwareProfile) -> float | None:
    """Operations a second of a device's tensor cores on a dtype, as profiles have them; what
    mma.sync reaches of it where 8-bit floats are made halves.
    """
    if dtype in FLOAT8_DTYPES and hw.architecture.has_float8_as_halves:
        return FLOAT8_SHARE * hw.tensor_flop_per_s["float16"]
    return hw.tensor_flop_per_s.get(dtype)


def _group_step_seconds(loop: Loop, c: MmaConfig, hw: HardwareProfile) -> float:
    """The same where the block splits the step behind while its warpgroups multiply."""
    clock, products = hw.clock_ghz * 1e9, len(loop.products)
    share = GROUP_SHARE[128 if c.block_n >= 128 else 64]
    rate = hw.tensor_flop_per_s["bfloat16"] * share / hw.num_sms
    rows, terms = c.block_m + len(loop.b) * c.block_n, c.step_bytes // loop.a.element
    cells = c.block_m * c.block_n * products
    arithmetic = 2.0 * PRODUCTS * cells * terms / rate
    issued = rows * terms * ELEMENT_INSTRUCTIONS / 32 + cells / 32 + c.warps * GROUP_INSTRUCTIONS
    # Slices are written and read once, parts written once and read by each warpgroup.
    group = (GROUP_ROWS + c.block_n) * PRODUCTS * products * (c.block_m // GROUP_ROWS)
    shared = (2 * rows * c.step_bytes + (PARTS * rows + group) * c.step_bytes // 2) / 128
    port = c.stage_bytes(len(loop.b)) / PORT_BYTES
    # Copies of small pieces are not hidden (1537 x 2051 x 1999).
    units = sum(_loading_cycles(x, c) for x in (loop.a, *loop.b))
    return max(arithmetic, max(issued / 4, shared, port) / clock) + units / clock


def split_cycles(warp: tuple[int, int]) -> float:
    """Cycles in which a multiprocessor issues what a warp's tile of 8 terms takes beside its
    products where float32 is split: for each element of its fragments, and each sum.
    """
    rows, columns = warp
    elements, sums = (rows + columns) * 8 / 32, rows * columns / 32
    return (elements * SPLIT_INSTRUCTIONS + sums * SUM_INSTRUCTIONS) / 4


def tile_step_seconds(
    tile: tuple[int, int, int],
    step: int,
    size: int,
    units: float,
    flops: float,
    clock: float,
    split: bool = False,
    deep: bool = False,
) -> float:
    """The same as the planner sees it: of a tile of `gemm.time.MMA_TILES`, for so many bytes of
    terms of `size` each; `units` are cycles of the load units, `flops` and `clock` the rates of a
    multiprocessor; `split`: float32 is multiplied in parts; `deep`: by one of `DEEP_STAGES`.
    """
    block_m, block_n, reads = tile
    cells = block_m * block_n * step / size
    arithmetic = 2.0 * cells / flops
    if split:
        issued = cells / (SPLIT_TILE[0] * SPLIT_TILE[1] * 8) * split_cycles(SPLIT_TILE)
        arithmetic = SPLIT_PRODUCTS * arithmetic + issued / clock
    shared = ((reads + 1) * (block_m + block_n) * step / 128 + units) / clock
    port = (block_m + block_n) * step / (DEEP_PORT_BYTES if deep else PORT_BYTES) / clock
    return max(arithmetic, shared, port)


def _waiting_seconds(loop: Loop, c: MmaConfig) -> float:
    """What a step waits for where no other block works meanwhile."""
    if c.is_deep:
        return DEEP_STEP_SECONDS
    ways = {x.way for x in (loop.a, *loop.b)}
    thin = Way.COMPUTE in ways and c.block_m < 64
    return max(STEP_SECONDS[way] for way in ways) * (THIN_COMPUTED if thin else 1.0)


def _loading_cycles(source: Source, c: MmaConfig) -> float:
    """Cycles of the load/store units beyond those of 16-byte copies."""
    chunks = (c.block_m if source.side == "m" else c.block_n) * c.step_bytes / 16 / 32
    size = source.element if source.way in (Way.GATHER, Way.EVALUATE) else source.piece
    return chunks * chunk_cycles(source.way, size)


def chunk_cycles(way: Way, piece: int) -> float:
    """The same for 16 bytes of each of 32 threads, which come in by so many bytes."""
    if way in WINDOW_INSTRUCTIONS:
        return 16 / piece * WINDOW_INSTRUCTIONS[way] / 4
    if way is Way.COPY:
        return 16 / piece * SMALL_PIECE_CYCLES if piece < 16 else 0.0
    return CHUNK_CYCLES[way]


def _static(param: Param) -> bool:
    return param.shape is not None and all(isinstance(n, int) for n in param.shape)
