"""Predicted time of an attention, from sizes alone: for the planner, and for the order of tiles.

The two products, the weights (2^x, on the special-function unit), and all other
arithmetic on scores take turns on different units and overlap in part; a root of the sum of powers
of their times stands for that. Blocks take tiles of queries one after the other; what starts and
ends a tile is not hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ...config import HardwareProfile, Policy
from ...cost.traffic import Resources
from ...plan.group_view import dtype_bytes
from ..program.expr import HALF_DTYPES

# Attention as the time model sees it: sizes, tiles, and a predicted time with its terms.


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What the time depends on.

    Attributes
    ----------
    batch : independent attentions, batch times heads.
    group : heads that share keys and values.
    queries, keys, terms, features : of one attention.
    dtype : of the operands.
    visible : share of the scores that has to be computed, by tiles that can be left out.
    mask_bytes : what is read for logits and visibility.
    arithmetic, special : operations on each score beside scaling and softmax.
    by_point : whether visibility is looked at for each score, not only at the edge of a range.
    edges : ends of the range of visible keys that move with the query: 1 causal, 2 a window. Used
        where `visible` is less than 1.
    matching : share of those scores that remain where an equality of what is read for the query and
        for the key hides the others (documents). Forms for tensor cores leave these out by tile.
    transposed : operands lie along queries or keys, which only the Hopper form reads.
    """

    batch: int
    group: int
    queries: int
    keys: int
    terms: int
    features: int
    dtype: str
    visible: float = 1.0
    mask_bytes: float = 0.0
    arithmetic: float = 0.0
    special: float = 0.0
    by_point: bool = False
    edges: int = 1
    matching: float = 1.0
    transposed: bool = False

    @property
    def reads_masks(self) -> bool:
        """Whether something is read for each score, not only for each key."""
        return self.mask_bytes >= self.queries * self.keys


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Tile of queries and keys.

    `overlaps` says that several warpgroups take turns with products and weights, `in_place` that
    results take the shared memory of the queries.
    """

    block_m: int
    block_n: int
    overlaps: bool = True
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class MmaTile:
    """Tile of the mma.sync form: `warps` of a block, `warp_rows` queries of each, which share what
    it reads of keys and values, and `resident` blocks of a multiprocessor; `shares` warps have the
    same queries, each with its part of the keys."""

    block_m: int
    block_n: int
    warp_rows: int
    warps: int
    resident: int
    shares: int = 1


@dataclass(frozen=True, slots=True)
class AttentionTime:
    """Predicted seconds without the launch's own cost, their terms, the form, and what a block of
    it takes.
    """

    form: str
    seconds: float
    terms: Mapping[str, float] = field(hash=False)
    resources: Resources | None = None


Form = Callable[[AttentionShape, HardwareProfile], Iterator[AttentionTime]]

# Start of a launch; exponent of the overlap of units; rate of the tensor cores beside that of large
# products, for which the card has to lower its clock; instructions of each score on the CUDA cores;
# waiting and bookkeeping of a tile of keys, of a tile of queries, and of each change between tiles
# that are looked at by point and whole ones; the part of a tile by which blocks end apart. Fitted
# together with the numbers below to 44 configurations of 21 attentions (H200, 2026-11-23) and, with
# less weight, to 109 of the day before: root mean square of log(predicted / measured) 0.068 and
# 0.060 of all; the configuration ranked first is at most 2.4 % slower than the best of the 44.
START_SECONDS = 2.5e-6
OVERLAP = 1.22
TENSOR_SHARE = 1.34
SCORE_INSTRUCTIONS = 1.46
STEP_SECONDS, TILE_SECONDS, CHANGE_SECONDS = 1.39e-7, 5.5e-7, 1.45e-6
APART = 0.33

# What is added to a tile of queries whose results take the shared memory of the queries, which
# cannot come ahead then; and the overlap of three warpgroups that take turns.
IN_PLACE_SECONDS = 1.1e-6
OVERLAP_OF_THREE = 1.56

# Time of one warpgroup alone, beside the sum of the units' times.
LONE_SHARE = 1.17

# What a tile of keys takes longer where others of the range are left out for what they hold.
MATCH_SECONDS = 1.0e-7

# Tiles of keys from which on a block of the mma.sync form looks for those that match before it
# begins, and what that takes: latency, and for each key that a thread reads. Not measured.
MATCH_TILES, MATCH_BLOCK_SECONDS, MATCH_KEY_SECONDS = 8, 1.2e-6, 1.5e-7

# Instructions of conditions on a key, for each score.
BOUND_INSTRUCTIONS = 4.8
LANES = 128  # of a multiprocessor

# Cycles of the load/store units for each score whose mask is read: a warp's load of two columns of
# 8 rows takes as many cycles as rows.
LOAD_CYCLES = 0.12

# Rate of mma.sync beside that of wgmma; what it waits for, in a tile of keys and of queries; what
# shows of all units' time, by the warps of a multiprocessor. Fitted to 32 kernels of 8 attentions
# (H200, 2026-11-22, 4 to 12 warps): root mean square of log(predicted / measured) 0.10.
MMA_SHARE = 0.66
MMA_STEP_SECONDS, MMA_TILE_SECONDS = 3.2e-7, 4.0e-7
SHOWN = {4: 0.95, 8: 0.675, 12: 0.575, 16: 0.5}

# Products of float32 are six of parts that tensor cores take (`gemm.mma.split`); instructions that
# split an element, by each warp that reads it, and that add the sum of 16 terms to the others.
TF32, TF32_PRODUCTS = "tfloat32", 3
SPLIT_INSTRUCTIONS, SUM_INSTRUCTIONS, SUM_TERMS = 5.5, 2.0, 16
# What such kernels take of the time predicted of their units: 1.40 to 1.69 of four with parts of
# tfloat32, whose 14.5 instructions an element mostly had half the rate (H100, 2026-11-28,
# tests/results/attention_float32_h100.json). So predicted, four of bfloat16 take 0.89 to 1.11 of it
# (attention_float32_shared_h100.json).
WIDE_SHOWN = 1.56

# Registers of a thread for the masks of each of its scores, read ahead in half precision.
MASK_REGISTERS = 0.5

# What this form is asked with; the fastest of these is near the fastest that the writer knows.
MMA_TILES = (
    MmaTile(64, 64, 16, 4, 2),
    MmaTile(64, 32, 16, 4, 2),
    MmaTile(128, 64, 32, 4, 2),
    MmaTile(128, 32, 32, 4, 2),
)
# The same for float32, whose warps may share queries.
WIDE_TILES = (*MMA_TILES, MmaTile(32, 64, 16, 4, 2, 2), MmaTile(16, 128, 16, 4, 2, 4))
MMA_REGISTERS = 232

# Vector instructions for each score on a CPU beside products and exponentials: the largest of a
# row, loads and stores of scores and sums.
CPU_SCORE_INSTRUCTIONS = 6.0


def predict(
    shape: AttentionShape, hw: HardwareProfile, policy: Policy | None = None
) -> AttentionTime | None:
    """The fastest form for an attention, by prediction; None where no form has it."""
    if hw.kind == "llvm":
        forms: tuple[Form, ...] = (_cpu,)
    else:
        forms = (_hopper,) if shape.transposed else (_hopper, _mma, _decode)
    times = [time for form in forms for time in form(shape, hw)]
    return min(times, key=lambda time: time.seconds, default=None)


def _hopper(shape: AttentionShape, hw: HardwareProfile) -> Iterator[AttentionTime]:
    if not hw.architecture.has_wgmma or not _halves(shape, hw):
        return
    from .hopper.config import candidates, smem_bytes

    dtype, terms, features = shape.dtype, shape.terms, shape.features
    ahead = MASK_REGISTERS if shape.reads_masks else 0.0
    limit = hw.smem_per_block_bytes
    sizes = (terms, features, shape.queries, shape.keys)
    for config in candidates(dtype, *sizes, True, ahead, limit):
        tile = AttentionTile(
            config.block_m,
            config.block_n,
            overlaps=config.consumers > 1,
            in_place=smem_bytes(config, terms, features, True) > limit,
        )
        size = smem_bytes(config, terms, features, not tile.in_place)
        needs = _needs(hw, config.threads, size, 1)
        yield replace(hopper_time(shape, tile, hw), resources=needs)


def _mma(shape: AttentionShape, hw: HardwareProfile) -> Iterator[AttentionTime]:
    if not hw.architecture.has_mma or not (_halves(shape, hw) or _is_wide(shape, hw)):
        return
    from .mma.config import AttentionMmaConfig, Layout

    for tile in WIDE_TILES if shape.dtype == "float32" else MMA_TILES:
        # Scores, weights in half precision and results of a thread.
        keys = tile.block_n // tile.shares
        held = tile.warp_rows // 16 * (0.75 * keys + shape.features / 2)
        if held <= MMA_REGISTERS:
            sizes = tile.warps, tile.warp_rows // 16, tile.block_n
            config = AttentionMmaConfig(*sizes, shares=tile.shares)
            wide = dtype_bytes(shape.dtype)
            size = Layout(config, shape.terms, shape.features, size=wide).smem_bytes
            if size * tile.resident > hw.smem_per_sm_bytes or size > hw.smem_per_block_bytes:
                continue
            needs = _needs(hw, config.threads, size, tile.resident)
            yield replace(mma_time(shape, tile, hw), resources=needs)


def _decode(shape: AttentionShape, hw: HardwareProfile) -> Iterator[AttentionTime]:
    from .decode.config import MAX_FEATURES
    from .decode.problem import MAX_QUERIES
    from .decode.rank import DecodeSizes, rank

    rows, units = shape.queries * shape.group, max(1, shape.batch // shape.group)
    fits = shape.queries <= MAX_QUERIES and shape.features <= MAX_FEATURES
    if not hw.architecture.has_mma or shape.dtype not in HALF_DTYPES or not fits:
        return
    sides = shape.batch * shape.queries * (shape.terms + shape.features)
    others = int(sides * dtype_bytes(shape.dtype) + shape.mask_bytes)
    sizes = DecodeSizes(units, rows, shape.keys, shape.terms, shape.features, others)
    for seconds, config in rank(sizes, hw)[:1]:
        terms = {"hbm": moved_bytes(shape) / hw.hbm_bytes_per_s, "start": START_SECONDS}
        needs = _needs(hw, config.threads, sizes.smem_bytes(config), 1)
        yield AttentionTime("decode", seconds, terms, needs)


def _cpu(shape: AttentionShape, hw: HardwareProfile) -> Iterator[AttentionTime]:
    from .cpu.tile import LEAST_QUERIES, padded_queries

    if shape.queries < LEAST_QUERIES:
        return
    queries, tiles = padded_queries(shape.queries, hw.warp_size)
    scores = shape.batch * queries * shape.keys * shape.visible
    tasks = shape.batch * tiles
    waiting = math.ceil(tasks / hw.num_sms) * hw.num_sms / tasks
    flops = 2.0 * scores * (shape.terms + shape.features)
    lanes = hw.num_sms * hw.warp_size * hw.clock_ghz * 1e9
    terms = {
        "arithmetic": waiting * flops / hw.fma_per_s_f32,
        "special": waiting * scores * (1 + shape.special) / hw.special_per_s,
        "logits": waiting * scores * (CPU_SCORE_INSTRUCTIONS + shape.arithmetic) / lanes,
        "hbm": moved_bytes(shape) / hw.hbm_bytes_per_s,
    }
    # Products, weights and logits take turns in a core; memory is read beside them.
    seconds = max(terms["arithmetic"] + terms["special"] + terms["logits"], terms["hbm"])
    yield AttentionTime("cpu", seconds, terms)


def _needs(hw: HardwareProfile, threads: int, smem_bytes: int, resident: int) -> Resources:
    """What a block takes that shares its multiprocessor with `resident - 1` others: the registers
    that are there.
    """
    registers = hw.registers_per_sm // (threads * resident) // 8 * 8
    return Resources(min(registers, hw.max_registers_per_thread), smem_bytes, threads)


def _halves(shape: AttentionShape, hw: HardwareProfile) -> bool:
    sizes = (shape.terms, shape.features)
    return (
        shape.dtype in HALF_DTYPES
        and shape.dtype in hw.tensor_flop_per_s
        and all(size % 8 == 0 and size <= 256 for size in sizes)
    )


def _is_wide(shape: AttentionShape, hw: HardwareProfile) -> bool:
    """Whether it is one in float32 that tensor cores can compute in parts."""
    sizes = (shape.terms, shape.features)
    return (
        shape.dtype == "float32"
        and TF32 in hw.tensor_flop_per_s
        and all(size % 8 == 0 and size <= 256 for size in sizes)
    )


def hopper_time(shape: AttentionShape, tile: AttentionTile, hw: HardwareProfile) -> AttentionTime:
    """The time of the Hopper form with one tile."""
    return tiled_time("hopper", _matching(shape), tile, hw, 1.0)


def _matching(shape: AttentionShape) -> AttentionShape:
    """The shape with what remains where tiles of keys are left out that do not match."""
    if shape.matching >= 1:
        return shape
    share = shape.visible * shape.matching
    return replace(shape, visible=share, edges=max(2, shape.edges))


def looks_for_matches(keys: int | None, block_n: int) -> bool:
    """Whether blocks of the mma.sync form look for matching tiles among so many keys, or a number
    that is not known.
    """
    return keys is None or keys >= MATCH_TILES * block_n


def tiled_time(
    form: str, shape: AttentionShape, tile: AttentionTile, hw: HardwareProfile, share: float
) -> AttentionTime:
    """The time of a form that keeps a tile of queries and walks over tiles of keys.

    `share` is that of the tensor cores' rate which its instructions reach.
    """
    steps, longest, changes = _steps(shape, tile)
    tiles = shape.batch * math.ceil(shape.queries / tile.block_m)
    step = _step(shape, tile, hw, share)
    loads = step.pop("loads")
    overlap = OVERLAP_OF_THREE if tile.block_m > 128 else OVERLAP
    busy = sum(value**overlap for value in step.values()) ** (1 / overlap)
    if not tile.overlaps or tile.block_m < 128:
        # One warpgroup: its weights run beside its own products only.
        busy = max(busy, LONE_SHARE * sum(step.values()))
    per_step = busy + loads + STEP_SECONDS + (shape.matching < 1) * MATCH_SECONDS
    per_tile = TILE_SECONDS + changes * CHANGE_SECONDS + tile.in_place * IN_PLACE_SECONDS
    mean, most = steps * per_step + per_tile, longest * per_step + per_tile
    if longest > steps:
        # The longest first: blocks end within a part of a tile of each other.
        rounds = max(most, (tiles / hw.num_sms + APART) * mean)
    else:
        rounds = math.ceil(tiles / hw.num_sms) * mean
    terms = {name: value * steps * tiles / hw.num_sms for name, value in step.items()}
    terms["loads"] = loads * steps * tiles / hw.num_sms
    terms["hbm"] = moved_bytes(shape) / hw.hbm_bytes_per_s
    terms["start"] = START_SECONDS
    seconds = START_SECONDS + max(rounds, terms["hbm"])
    return AttentionTime(form, seconds, {n: t for n, t in terms.items() if t > 0})


def mma_time(shape: AttentionShape, tile: MmaTile, hw: HardwareProfile) -> AttentionTime:
    """The time of the mma.sync form with one tile: one block for each tile of queries."""
    own, looking = AttentionTile(tile.block_m, tile.block_n), 0.0
    if shape.matching < 1 and looks_for_matches(shape.keys, tile.block_n):
        read = shape.visible * shape.keys / (tile.warps * hw.warp_size)
        looking = MATCH_BLOCK_SECONDS + read * MATCH_KEY_SECONDS
        shape = _matching(shape)
    steps, longest, _ = _steps(shape, own)
    share = MMA_SHARE if hw.architecture.is_rated_by_wgmma else 1.0
    step = _step(shape, own, hw, share / TENSOR_SHARE)
    if shape.dtype != "float16":
        # Its results are scaled at every tile of keys.
        clock = hw.clock_ghz * 1e9
        step["arithmetic"] += tile.block_m * shape.features / (LANES * clock)
    reads = tile.block_m / tile.warp_rows * tile.block_n * (shape.terms + shape.features)
    if shape.dtype == "float32":
        step["split"] = _split_seconds(shape, tile, reads, hw)
    step["smem"] = reads * dtype_bytes(shape.dtype) * hw.num_sms / hw.smem_bytes_per_s
    tiles = shape.batch * math.ceil(shape.queries / tile.block_m)
    resident = min(tile.resident, math.ceil(tiles / hw.num_sms))
    shown = SHOWN[min(max(SHOWN), max(min(SHOWN), tile.warps * resident // 4 * 4))]
    total = sum(step.values())
    busy = max(shown * total, *step.values()) * (WIDE_SHOWN if shape.dtype == "float32" else 1.0)
    per_step = busy + MMA_STEP_SECONDS / resident
    per_tile = (MMA_TILE_SECONDS + looking) / resident
    mean, most = steps * per_step + per_tile, longest * per_step + per_tile
    if longest > steps:
        rounds = max(most, (tiles / hw.num_sms + APART) * mean)
    else:
        rounds = math.ceil(tiles / hw.num_sms) * mean
    terms = {name: value * steps * tiles / hw.num_sms for name, value in step.items()}
    terms |= {"hbm": moved_bytes(shape) / hw.hbm_bytes_per_s, "start": START_SECONDS}
    seconds = START_SECONDS + max(rounds, terms["hbm"])
    return AttentionTime("mma", seconds, {n: t for n, t in terms.items() if t > 0})


def _split_seconds(
    shape: AttentionShape, tile: MmaTile, reads: float, hw: HardwareProfile
) -> float:
    """What splits the operands of a tile of keys in float32, of which warps read `reads` elements
    of keys and values, and adds its products.
    """
    scores = tile.block_m * tile.block_n
    elements = reads + scores + tile.block_m * shape.terms
    sums = scores * (shape.terms + shape.features) / SUM_TERMS
    instructions = elements * SPLIT_INSTRUCTIONS + sums * SUM_INSTRUCTIONS
    return instructions / (LANES * hw.clock_ghz * 1e9)


def _steps(shape: AttentionShape, tile: AttentionTile) -> tuple[float, float, float]:
    """Tiles of keys that a tile of queries meets: the mean, and the most; and how often a tile of
    queries changes between tiles of keys that are looked at by point and whole ones.
    """
    every = math.ceil(shape.keys / tile.block_n)
    if shape.visible >= 1:
        return every, every, 0
    # Each edge adds half a tile of queries, and is rounded to whole tiles of keys.
    m, n = tile.block_m, tile.block_n
    uneven = n - math.gcd(m, n)
    if shape.matching < 1:
        # Documents end anywhere; queries of two of them see the keys of both.
        uneven = max(uneven, n / 2)
    mean = (shape.visible * shape.keys + shape.edges * (m + uneven) / 2) / n
    mean = min(max(1.0, mean), every)
    changes = (uneven > 0 or m > n) + (shape.edges > 1)
    longest = every if shape.edges == 1 else mean
    return mean, longest, changes


def _step(
    shape: AttentionShape, tile: AttentionTile, hw: HardwareProfile, share: float
) -> dict[str, float]:
    """What each unit of a multiprocessor is busy for with one tile of keys."""
    scores = tile.block_m * tile.block_n
    # wgmma takes 16 terms, and columns of the result by 32 (80 features cost what 96 do).
    terms = math.ceil(shape.terms / 16) * 16 + math.ceil(shape.features / 32) * 32
    own = hw.tensor_flop_per_s
    rate = own[TF32] / TF32_PRODUCTS if shape.dtype == "float32" else own[shape.dtype]
    rate *= share * TENSOR_SHARE / hw.num_sms
    clock = hw.clock_ghz * 1e9
    instructions = SCORE_INSTRUCTIONS + shape.arithmetic
    if shape.by_point:
        instructions += BOUND_INSTRUCTIONS
    special = scores * (1 + shape.special)
    return {
        "tensor": 2.0 * scores * terms / rate,
        "special": special * hw.num_sms / hw.special_per_s,
        "arithmetic": scores * instructions / (LANES * clock),
        "loads": scores * LOAD_CYCLES / clock if shape.reads_masks else 0.0,
    }


def moved_bytes(shape: AttentionShape) -> float:
    """Bytes of HBM: queries, keys and values once, masks, the result."""
    size = dtype_bytes(shape.dtype)
    sides = shape.queries * (shape.terms + shape.features)
    sides += shape.keys * (shape.terms + shape.features) / shape.group
    return shape.batch * sides * size + shape.mask_bytes
