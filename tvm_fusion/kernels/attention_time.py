"""Predicted time of an attention, from sizes alone: for the planner, and for the order of tiles.

The two products, the weights (2^x, on the special-function unit or by a polynomial), and all other
arithmetic on scores take turns on different units and overlap in part; a root of the sum of squares
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

START_SECONDS = 2.0e-6

# Exponent of the overlap. H200, 2 x 16 x 2048 of float16: 103.9 us at 128 terms; the products alone
# take 88.8 us, 2^x 32 us, other instructions 26 us.
OVERLAP = 2.2

# Instructions of each score on the CUDA cores: scaling, maximum, sum, half a conversion, and what
# a step has beside (counted in SASS of D = 128, 160 keys: 4.9).
SCORE_INSTRUCTIONS = 4.9
# Instructions of a power of two by polynomial, beside those.
POLYNOMIAL_INSTRUCTIONS = 9.0
# Instructions for a bound on keys in a tile that is looked at by point, and for a pair of values
# that is read for each pair of scores.
BOUND_INSTRUCTIONS, LOAD_INSTRUCTIONS = 2.0, 2.5
LANES = 128  # of a multiprocessor

# Waiting and bookkeeping of one tile of keys, and of one tile of queries.
STEP_SECONDS, TILE_SECONDS = 6.0e-8, 9.0e-7

# Rate of mma.sync beside that of wgmma.
MMA_SHARE = 0.62
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


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Tile of queries and keys; every `polynomial`-th power of two is one (0: none).

    `overlaps` says that several warpgroups take turns with products and weights.
    """

    block_m: int
    block_n: int
    polynomial: int = 0
    overlaps: bool = True


@dataclass(frozen=True, slots=True)
class AttentionTime:
    """Predicted seconds without the launch's own cost, their terms, and the form."""

    form: str
    seconds: float
    terms: Mapping[str, float] = field(hash=False)


# What the forms are asked with; the fastest of these is near the fastest that the writer knows.
HOPPER_TILES = tuple(
    AttentionTile(block_m, block_n) for block_m in (64, 128) for block_n in (64, 128, 160)
)
MMA_TILES = (AttentionTile(64, 64, overlaps=False), AttentionTile(128, 64, overlaps=False))


def predict(shape: AttentionShape, hw: HardwareProfile, policy: Policy) -> AttentionTime | None:
    """The fastest form for an attention, by prediction; None where no form has it."""
    times = [time for form in (_hopper, _mma, _decode) for time in form(shape, hw)]
    return min(times, key=lambda time: time.seconds, default=None)


def _hopper(shape: AttentionShape, hw: HardwareProfile) -> Iterator[AttentionTime]:
    if hw.arch != "sm_90a" or not _halves(shape, hw):
        return
    for tile in HOPPER_TILES:
        if tile.block_n * 0.75 + shape.features / 2 <= 208:
            yield hopper_time(shape, tile, hw)


def _mma(shape: AttentionShape, hw: HardwareProfile) -> Iterator[AttentionTime]:
    if hw.arch < "sm_80" or not _halves(shape, hw):
        return
    share = MMA_SHARE if hw.arch == "sm_90a" else 1.0
    for tile in MMA_TILES:
        yield tiled_time("mma", shape, tile, hw, share)


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
    steps, longest = _steps(shape, tile)
    tiles = shape.batch * math.ceil(shape.queries / tile.block_m)
    step = _step(shape, tile, hw, share)
    busy = sum(value**OVERLAP for value in step.values()) ** (1 / OVERLAP)
    if not tile.overlaps or tile.block_m < 128:
        # One warpgroup: its weights run beside its own products only.
        busy = max(busy, 0.7 * sum(step.values()))
    # What begins and ends a tile: half of a step is not hidden.
    per_step, per_tile = busy + STEP_SECONDS, TILE_SECONDS + busy / 2
    mean, most = steps * per_step + per_tile, longest * per_step + per_tile
    if longest > steps:
        # The longest first: blocks end within a part of a tile of each other.
        rounds = max(most, tiles / hw.num_sms * mean + 0.25 * mean)
    else:
        rounds = math.ceil(tiles / hw.num_sms) * mean
    terms = {name: value * steps * tiles / hw.num_sms for name, value in step.items()}
    terms["hbm"] = moved_bytes(shape) / hw.hbm_bytes_per_s
    terms["start"] = START_SECONDS
    return AttentionTime(form, START_SECONDS + max(rounds, terms["hbm"]), terms)


def _steps(shape: AttentionShape, tile: AttentionTile) -> tuple[float, float]:
    """Tiles of keys that a tile of queries meets: the mean, and the most."""
    every = math.ceil(shape.keys / tile.block_n)
    if shape.visible >= 1:
        return every, every
    # The edge of a range crosses tiles; half of these is computed for nothing.
    mean = shape.visible * shape.keys / tile.block_n
    mean += 0.5 * min(tile.block_m / tile.block_n + 1, every)
    mean = min(max(1.0, mean), every)
    return mean, min(every, 2 * mean)


def _step(
    shape: AttentionShape, tile: AttentionTile, hw: HardwareProfile, share: float
) -> dict[str, float]:
    """What each unit of a multiprocessor is busy for with one tile of keys."""
    scores = tile.block_m * tile.block_n
    terms = math.ceil(shape.terms / 16) * 16 + shape.features
    rate = hw.tensor_flop_per_s[shape.dtype] * share / hw.num_sms
    by_polynomial = 1 / tile.polynomial if tile.polynomial else 0.0
    special = 1 - by_polynomial + shape.special
    instructions = SCORE_INSTRUCTIONS + by_polynomial * POLYNOMIAL_INSTRUCTIONS + shape.arithmetic
    # Results are scaled now and then, and rows are reduced across threads at each step.
    instructions += 24 / tile.block_n
    if shape.by_point:
        instructions += BOUND_INSTRUCTIONS
    if shape.mask_bytes:
        instructions += LOAD_INSTRUCTIONS
    return {
        "tensor": 2.0 * scores * terms / rate,
        "special": scores * special * hw.num_sms / hw.special_per_s,
        "arithmetic": scores * instructions / (LANES * hw.clock_ghz * 1e9 * 0.9),
    }


def moved_bytes(shape: AttentionShape) -> float:
    """Bytes of HBM: queries, keys and values once, masks, the result."""
    size = dtype_bytes(shape.dtype)
    sides = shape.queries * (shape.terms + shape.features)
    sides += shape.keys * (shape.terms + shape.features) / shape.group
    return shape.batch * sides * size + shape.mask_bytes
