"""Predicted time of an attention, from sizes alone: for the planner, and for the order of tiles.

The two products, the weights (2^x, on the special-function unit or by a polynomial), and all other
arithmetic on scores take turns on different units and overlap in part; a root of the sum of powers
of their times stands for that. Blocks take tiles of queries one after the other; what starts and
ends a tile is not hidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ..config import HardwareProfile, Policy
from .base import dtype_bytes
from .expr import HALF_DTYPES

# Start of a launch; exponent of the overlap of units; rate of the tensor cores beside that of large
# products, for which the card has to lower its clock; instructions of each score on the CUDA cores;
# waiting and bookkeeping of a tile of keys, of a tile of queries, and of each change between tiles
# that are looked at by point and whole ones; the part of a tile by which blocks end apart. Fitted
# together with the numbers below to 103 configurations of 31 attentions, 64 to 256 terms, causal,
# with masks and without (H200, 2026-11-22): root mean square of log(predicted / measured) 0.057,
# the configuration ranked first at most 4 % slower than the best measured one.
START_SECONDS = 2.0e-6
OVERLAP = 1.55
TENSOR_SHARE = 1.25
SCORE_INSTRUCTIONS = 4.4
STEP_SECONDS, TILE_SECONDS, CHANGE_SECONDS = 2.1e-7, 9.0e-7, 8.4e-7
APART = 0.2

# What is added to a tile of queries whose results take the shared memory of the queries, which
# cannot come ahead then; and what three warpgroups that take turns need of the time of two.
IN_PLACE_SECONDS = 2.06e-6
THREE_SHARE = 0.92

# Instructions of a power of two by polynomial (it never paid: 64 terms 78.8 us, without 76.4), and
# of conditions on a key, for each score.
POLYNOMIAL_INSTRUCTIONS, BOUND_INSTRUCTIONS = 14.0, 2.0
LANES = 128  # of a multiprocessor

# Cycles of the load/store units for each score whose mask is read: a warp's load of two columns of
# 8 rows takes as many cycles as rows.
LOAD_CYCLES = 0.136

# Rate of mma.sync beside that of wgmma. Estimates of what mma.sync waits for, in a tile of keys and
# in a tile of queries, and of the part of the time of all units that shows, by the warps that a
# multiprocessor has to fill the gaps (not fitted: the form was not timed before 2026-11-22).
MMA_SHARE = 0.62
MMA_STEP_SECONDS, MMA_TILE_SECONDS = 4.0e-7, 1.8e-6
SHOWN = {4: 0.95, 8: 0.75, 12: 0.65, 16: 0.6}
DECODE_QUERIES = 16


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

    @property
    def reads_masks(self) -> bool:
        """Whether something is read for each score, not only for each key."""
        return self.mask_bytes >= self.queries * self.keys


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Tile of queries and keys; every `polynomial`-th power of two is one (0: none).

    `overlaps` says that several warpgroups take turns with products and weights, `in_place` that
    results take the shared memory of the queries.
    """

    block_m: int
    block_n: int
    polynomial: int = 0
    overlaps: bool = True
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class MmaTile:
    """Tile of queries and keys of the mma.sync form; `warp_rows` queries share what a warp reads
    of keys and values, `warps` of a block, `resident` blocks of a multiprocessor.
    """

    block_m: int
    block_n: int
    warp_rows: int
    warps: int
    resident: int


@dataclass(frozen=True, slots=True)
class AttentionTime:
    """Predicted seconds without the launch's own cost, their terms, and the form."""

    form: str
    seconds: float
    terms: Mapping[str, float] = field(hash=False)


# Registers of a thread for the masks of each of its scores, read ahead in half precision.
MASK_REGISTERS = 0.5

# What this form is asked with; the fastest of these is near the fastest that the writer knows.
MMA_TILES = (MmaTile(64, 64, 16, 4, 2), MmaTile(128, 32, 32, 4, 2))


def predict(shape: AttentionShape, hw: HardwareProfile, policy: Policy) -> AttentionTime | None:
    """The fastest form for an attention, by prediction; None where no form has it."""
    times = [time for form in (_hopper, _mma, _decode) for time in form(shape, hw)]
    return min(times, key=lambda time: time.seconds, default=None)


def _hopper(shape: AttentionShape, hw: HardwareProfile) -> Iterator[AttentionTime]:
    if hw.arch != "sm_90a" or not _halves(shape, hw):
        return
    from .cuda.attention_hopper_config import candidates, smem_bytes

    dtype, terms, features = shape.dtype, shape.terms, shape.features
    ahead = MASK_REGISTERS if shape.reads_masks else 0.0
    limit = hw.smem_per_block_bytes
    sizes = (terms, features, shape.queries, shape.keys)
    for config in candidates(dtype, *sizes, True, ahead, limit):
        tile = AttentionTile(
            config.block_m,
            config.block_n,
            config.polynomial,
            overlaps=config.consumers > 1,
            in_place=smem_bytes(config, terms, features, True) > limit,
        )
        yield hopper_time(shape, tile, hw)


def _mma(shape: AttentionShape, hw: HardwareProfile) -> Iterator[AttentionTime]:
    if hw.arch < "sm_80" or not _halves(shape, hw):
        return
    for tile in MMA_TILES:
        yield mma_time(shape, tile, hw)


def _decode(shape: AttentionShape, hw: HardwareProfile) -> Iterator[AttentionTime]:
    if hw.arch < "sm_80" or shape.queries * shape.group > DECODE_QUERIES:
        return
    scores = shape.batch * shape.queries * shape.keys * shape.visible
    flops = 2.0 * scores * (shape.terms + shape.features)
    terms = {
        "hbm": moved_bytes(shape) / hw.hbm_bytes_per_s,
        "fma": flops / hw.fma_per_s_f32,
        "special": scores * (1 + shape.special) / hw.special_per_s,
        "start": START_SECONDS,
    }
    yield AttentionTime("decode", START_SECONDS + max(terms.values()), terms)


def _halves(shape: AttentionShape, hw: HardwareProfile) -> bool:
    sizes = (shape.terms, shape.features)
    return (
        shape.dtype in HALF_DTYPES
        and shape.dtype in hw.tensor_flop_per_s
        and all(size % 8 == 0 and size <= 256 for size in sizes)
    )


def hopper_time(shape: AttentionShape, tile: AttentionTile, hw: HardwareProfile) -> AttentionTime:
    """The time of the Hopper form with one tile."""
    return tiled_time("hopper", shape, tile, hw, 1.0)


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
    busy = sum(value**OVERLAP for value in step.values()) ** (1 / OVERLAP)
    if not tile.overlaps or tile.block_m < 128:
        # One warpgroup: its weights run beside its own products only.
        busy = max(busy, 0.7 * sum(step.values()))
    elif tile.block_m > 128:
        busy *= THREE_SHARE
    per_step = busy + loads + STEP_SECONDS
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
    own = AttentionTile(tile.block_m, tile.block_n)
    steps, longest, _ = _steps(shape, own)
    share = MMA_SHARE if hw.arch == "sm_90a" else 1.0
    step = _step(shape, own, hw, share / TENSOR_SHARE)
    reads = tile.block_m / tile.warp_rows * tile.block_n * (shape.terms + shape.features)
    step["smem"] = reads * dtype_bytes(shape.dtype) * hw.num_sms / hw.smem_bytes_per_s
    shown = SHOWN[min(max(SHOWN), tile.warps * tile.resident // 4 * 4)]
    total = sum(step.values())
    busy = max(shown * total, *step.values())
    per_step = busy + MMA_STEP_SECONDS / tile.resident
    per_tile = MMA_TILE_SECONDS / tile.resident
    tiles = shape.batch * math.ceil(shape.queries / tile.block_m)
    mean, most = steps * per_step + per_tile, longest * per_step + per_tile
    if longest > steps:
        rounds = max(most, (tiles / hw.num_sms + APART) * mean)
    else:
        rounds = math.ceil(tiles / hw.num_sms) * mean
    terms = {name: value * steps * tiles / hw.num_sms for name, value in step.items()}
    terms |= {"hbm": moved_bytes(shape) / hw.hbm_bytes_per_s, "start": START_SECONDS}
    seconds = START_SECONDS + max(rounds, terms["hbm"])
    return AttentionTime("mma", seconds, {n: t for n, t in terms.items() if t > 0})


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
    rate = hw.tensor_flop_per_s[shape.dtype] * share * TENSOR_SHARE / hw.num_sms
    clock = hw.clock_ghz * 1e9
    by_polynomial = 1 / tile.polynomial if tile.polynomial else 0.0
    instructions = SCORE_INSTRUCTIONS + by_polynomial * POLYNOMIAL_INSTRUCTIONS + shape.arithmetic
    if shape.by_point:
        instructions += BOUND_INSTRUCTIONS
    special = scores * (1 - by_polynomial + shape.special)
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
