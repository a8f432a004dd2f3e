"""Predicted time of a launch of class `gemm`, as the planner sees it: sizes and blocks, no kernel.

Every form of the kernel that can compute the group is asked, with a few tiles each; the fastest
counts. Arithmetic on an operand (a dequantisation, an activation in front of a product) is charged
once for each tile of the other operand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

from ...config import HardwareProfile, Policy
from ...plan.group_view import dtype_bytes
from ..program.expr import HALF_DTYPES
from .hopper.cost import (
    FEW_WAVES,
    LINE_BYTES,
    STAGED_TILES,
    WELL_FILLED,
    GemmTile,
    GemmWork,
    element_seconds,
    gemm_seconds,
    gemm_time,
)
from .launch import GemmGroup
from .runs.problem import MOST_CLOSE_COLUMNS, MOST_COLUMNS, MOST_TERMS
from .runs.time import FITTED as RUNS
from .runs.time import sums_seconds
from .side_by_side import tensor_maps_fit

if TYPE_CHECKING:
    from .mma.problem import Way
    from .product import Product

# Predicted time of products in the forms that are not Hopper's: mma.sync, few rows, CUDA cores.

SKINNY_ROWS = 16
"""Rows up to which the weights of a product pass through the CUDA cores at the speed of memory."""

# (rows, columns, how often a warp's rows and columns are read on average)
MMA_TILES = (
    *((128, 256, 3), (128, 128, 3), (128, 64, 3), (64, 128, 3)),
    *((64, 64, 2), (32, 64, 2), (16, 128, 2), (16, 64, 2)),
)
MMA_STEPS = (64, 128)  # bytes of terms
# Elements of a tile whose float32 operands are split, which takes registers.
MOST_SPLIT = 128 * 128
WARP = 32

ROUNDING = 1e-9
"""Of what is added up in another order."""

# Columns of a warp of the skinny form, which computes A for each of its warps; share of the
# multipliers' rate that it reaches.
SKINNY_COLUMNS = 4
SKINNY_SHARE = 0.5
# Instructions for each weight and for each weight and row where tensor cores multiply, and how far
# they overlap with the loads (H200, 2026-11-20: int4 weights, 11008 x 4096, 1 to 16 rows).
SKINNY_INSTRUCTIONS = (0.7, 0.12)
SKINNY_EXPONENT = 3.0
# Start, and the rate of memory beside that of a copy: of weights whose terms are neighbours, and of
# others; share of the operations on weights that shows, two halves at a time.
SKINNY_START_SECONDS = 2.3e-6
SKINNY_READS, SKINNY_ACROSS = 1.12, 1.0
SKINNY_OPERATIONS = 0.5


@dataclass(frozen=True, slots=True)
class LaunchTime:
    """Predicted seconds without the launch's own cost, its terms, the form, how often elements of A
    and of B are computed, and how often each block of the group runs; `more` seconds are those
    that the writer, which chooses the form, does not know of.
    """

    form: str
    seconds: float
    terms: Mapping[str, float] = field(hash=False)
    runs: tuple[float, float] = (1, 1)
    counts: tuple[float, ...] = ()
    more: float = 0.0


def mma_times(
    launch: GemmGroup, hw: HardwareProfile, policy: Policy, known_s: float
) -> Iterator[LaunchTime]:
    """As `gemm.mma.rank` predicts it, with two blocks on a multiprocessor where there are tiles."""
    from .mma import problem, rank

    if rank.ODD_START_SECONDS + _hbm_s(launch, hw, rank.DEEP_READS) >= known_s:
        return

    dtype, rate = tensor_dtype(launch, hw, policy)
    split = rate is None and launch.dtypes == {"float32"} and policy.rounding != "exact"
    if split:
        dtype, rate = "float32", "tfloat32"
    if dtype is None or not hw.architecture.has_mma or rate not in hw.tensor_flop_per_s:
        return
    share = rank.SM90_SHARE if hw.architecture.is_rated_by_wgmma else rank.PEAK_SHARE
    flops = rank.product_rate(rate, hw) * share / hw.num_sms
    clock = hw.clock_ghz * 1e9
    size = dtype_bytes(dtype)
    depth = max(sum(depths) for *_, depths in launch.segments) * size
    ways = [_way(launch, side) for side in (0, 1)]
    waiting = max(rank.STEP_SECONDS[way] for way, _ in ways)
    shifted = any(way is rank.Way.SHIFT for way, _ in ways)
    odd = dtype in HALF_DTYPES and (shifted or all(n % 2 for _, _, n, _ in launch.segments))
    rows = max(m for _, m, *_ in launch.segments)
    deep = ways == [(rank.Way.COPY, 16)] * 2 and not split and rank.takes_deep_rings(rows, hw)
    flight = 0.0
    along_k = launch.window > 0 and launch.along_terms(launch.products[0])
    _, other, written, _ = launch.moved
    stored = rank.EPILOGUE_SECONDS / 128**2 * (1 + (other / written if other >= written else 0))
    for (block_m, block_n, warps), step in itertools.product(MMA_TILES, MMA_STEPS):
        if split and block_m * block_n > MOST_SPLIT:
            continue
        own = problem.own_columns(block_n, launch.window, along_k) if launch.window else block_n
        if not own:
            continue
        turns = -(-launch.tiles(block_m, own) // hw.num_sms)
        chunks = [n * step / 16 / WARP for n in (block_m, block_n)]
        units = sum(
            c * rank.chunk_cycles(way, piece) for c, (way, piece) in zip(chunks, ways, strict=True)
        )
        slow = rank.THIN_COMPUTED if launch.computed(1) and block_m < 64 else 1.0
        alone = waiting * slow / min(turns, 2)
        steps = -(-depth // step)
        tile = block_m, block_n, warps
        rings = {False: (alone, 1.0)}
        most = hw.smem_per_block_bytes // ((block_m + block_n) * step)
        stages = max((n for n in rank.DEEP_STAGES if n <= most), default=0)
        if deep and stages:
            flight = rank.flight_seconds(stages, hw)
            rings[True] = rank.DEEP_STEP_SECONDS, rank.DEEP_READS
        for deeper, (waits, reads) in rings.items():
            each = rank.tile_step_seconds(tile, step, size, units, flops, clock, split, deeper)
            each = max(each + waits, deeper * flight / min(turns, 2))
            body = steps * each + stored * block_m * block_n / min(turns, 2)
            few = deeper and block_m * block_n <= rank.FEW_CELLS
            start = rank.FEW_START_SECONDS if few else rank.start_seconds(turns * body, odd)
            if start + turns * body >= known_s:
                continue
            runs = launch.runs(block_m, own)
            yield _other(launch, hw, "mma", "tensor", turns * body, start, runs, 4.0, reads)


def _way(launch: GemmGroup, side: int) -> tuple[Way, int]:
    """How the slowest operand of a side comes into shared memory, and by how many bytes."""
    from .mma.problem import Way

    if launch.computed(side):
        return Way.COMPUTE, 16
    pitch = math.gcd(16, *(launch.pitches(p)[side] for p in launch.products))
    return (Way.COPY, pitch) if pitch >= 4 else (Way.SHIFT, 16)


def runs_times(
    launch: GemmGroup, hw: HardwareProfile, policy: Policy, known_s: float
) -> Iterator[LaunchTime]:
    """Few terms, whose rows are whole pieces of 16 bytes or lie close together."""
    alone = len(launch.segments) == len(launch.products) == len(launch.dtypes) == 1
    if not hw.architecture.has_mma or not alone or not all(map(_is_static, launch.products)):
        return
    ((batch, m, n, depths),), (dtype,) = launch.segments, launch.dtypes
    pitches, row = launch.pitches(launch.products[0]), sum(depths) * dtype_bytes(dtype)
    whole = pitches[0] % TMA_PITCH_BYTES == row % TMA_PITCH_BYTES == 0
    close = pitches[0] < 2 * row and launch.along_terms(launch.products[0], [0])
    plain = dtype in HALF_DTYPES and not launch.computed(0) and not launch.computed(1)
    few = sum(depths) <= MOST_TERMS and n <= (MOST_COLUMNS if whole else MOST_CLOSE_COLUMNS)
    if batch != 1 or not plain or not (whole or close) or not few:
        return
    copied = pitches[1] < 2 * row and launch.along_terms(launch.products[0], [1])
    body = sums_seconds(m, n, sum(depths), dtype, hw, copied)
    yield _other(launch, hw, "runs", "tensor", body, RUNS.start_s, (1, 1), RUNS.overlap)


def skinny_times(
    launch: GemmGroup, hw: HardwareProfile, policy: Policy, known_s: float
) -> Iterator[LaunchTime]:
    """Few rows, past which weights are streamed."""
    few = launch.equal_sizes and all(m <= SKINNY_ROWS for _, m, *_ in launch.segments)
    if not hw.architecture.has_mma or not few or not all(map(_is_static, launch.products)):
        return
    halves = all(dtype in HALF_DTYPES for dtype in launch.dtypes)
    each = [(b * n * sum(depths), m) for b, m, n, depths in launch.segments]
    a, b = SKINNY_INSTRUCTIONS
    terms = sum(weights * (a + b * m if halves else m) for weights, m in each)
    body = terms / (hw.fma_per_s_f32 / 2 * SKINNY_SHARE)
    columns = sum(n for _, _, n, _ in launch.segments)
    runs = -(-columns // SKINNY_COLUMNS), SKINNY_OPERATIONS if halves else 1
    reads = SKINNY_READS if all(map(launch.along_terms, launch.products)) else SKINNY_ACROSS
    time = _other(
        launch, hw, "skinny", "fma", body, SKINNY_START_SECONDS, runs, SKINNY_EXPONENT, reads
    )
    yield replace(time, runs=(runs[0], 1))


def simt_times(
    launch: GemmGroup, hw: HardwareProfile, policy: Policy, known_s: float
) -> Iterator[LaunchTime]:
    """Any products, on CUDA cores."""
    from .simt.config import START_SECONDS, simt_seconds
    from .simt.kernel import CONFIGS

    if START_SECONDS + max(_hbm_s(launch, hw), _fma_s(launch, hw)) >= known_s:
        return
    halves = launch.dtypes <= set(HALF_DTYPES)
    for config in CONFIGS:
        body = simt_seconds(launch.segments, config, hw, 0.0, halves=halves) - START_SECONDS
        if START_SECONDS + body >= known_s:
            continue
        runs = launch.runs(config.block_m, config.block_n)
        yield _other(launch, hw, "simt", "fma", body, START_SECONDS, runs)


def _other(
    launch: GemmGroup,
    hw: HardwareProfile,
    form: str,
    term: str,
    body: float,
    start: float,
    runs: tuple[float, float],
    exponent: float = math.inf,
    reads: float = 1.0,
) -> LaunchTime:
    """A form whose products and operations take turns, and overlap with its loads, which reach
    `reads` times the rate of a copy.
    """
    hbm = _hbm_s(launch, hw, reads)
    on_a, on_b, after = launch.operation_s
    work = runs[0] * on_a + runs[1] * on_b + after
    terms = {term: body, "hbm": hbm, "operations": work, "start": start}
    busy = max(body + work, hbm)
    busy *= ((min(body + work, hbm) / busy) ** exponent + 1) ** (1 / exponent)
    return LaunchTime(form, start + busy, terms, runs)


def _hbm_s(launch: GemmGroup, hw: HardwareProfile, reads: float = 1.0) -> float:
    """Seconds of what is moved, at so many times the rate of a copy."""
    operand, other, written, resident = launch.moved
    return (operand + other + written - resident) / (hw.hbm_bytes_per_s * reads)


def _fma_s(launch: GemmGroup, hw: HardwareProfile) -> float:
    """Seconds of all products at the full rate of the CUDA cores, rounded down."""
    flops = sum(2.0 * b * m * n * sum(depths) for b, m, n, depths in launch.segments)
    return flops / hw.fma_per_s_f32 * (1 - ROUNDING)


def tensor_dtype(
    launch: GemmGroup, hw: HardwareProfile, policy: Policy
) -> tuple[str | None, str | None]:
    """The dtype in which tensor cores would take the operands, and the name of their rate."""
    if len(launch.dtypes) != 1:
        return None, None
    (dtype,) = launch.dtypes
    if dtype == "float32":
        return (dtype, "tfloat32") if policy.allow_tf32 else (None, None)
    return (dtype, dtype) if dtype in hw.tensor_flop_per_s else (None, None)


def _is_static(product: Product) -> bool:
    return all(isinstance(axis.extent, int) for axis in product.block.axes)


TMA_PITCH_BYTES = 16  # row pitches the tensor memory accelerator can address are multiples of this

LARGEST_TILE = 128 * 256
# Beside the staged tiles; the fastest of all these is near the fastest that the writer knows
# (tests/test_gemm_cost).
DIRECT_TILES = ((64, 96), (64, 112), (64, 160), (64, 176), (128, 96), (128, 160))
NARROW_TILES = ((64, 32), *DIRECT_TILES)

# Sectors of outputs that are transposed behind the product, one for each element (H200, 2026-11-20:
# 65536 x 256 x 64 of float16, 250 us).
SCATTERED_BYTES_PER_S = 2.15e12
# Matrices behind a product that do not travel in boxes beside one that does: a second output, masks
# and inputs of float32 (H200, 2026-11-20: 1.0e12 to 2.0e12).
DIRECT_BYTES_PER_S = 1.5e12
# Elements made of two columns, with factors of their own for each (H200, 2026-11-22: rotary
# embeddings behind 4096 rows, 21e6 and 17e6 such elements: 34 and 23 us beside the products alone).
PAIRED_PER_S = 6.7e11
# Terms of batches of small planes, which the skinny form computes on CUDA cores with most of its
# threads idle (H200, 2026-11-20: 14 x 14 x 14 and 16 x 16 x 64, 1.0e12 to 1.8e12).
PLANE_TERMS_PER_S = 1.5e12


def predict(launch: GemmGroup, hw: HardwareProfile, policy: Policy) -> LaunchTime | None:
    """The fastest form that can compute the group, by prediction, if there is one. Forms that can
    be no faster than `known_s`, what one in front of them takes, give nothing.
    """
    known = (
        _hopper,
        skinny_times,
        runs_times,
        mma_times,
        simt_times,
    )  # in the order of `gemm.forms`
    if launch.window:
        known = (mma_times,)  # windows of columns pass through shared memory
    elif launch.has_partials or not launch.swaps_halves:
        known = (_hopper,)  # its threads hold runs of columns: they reduce or pair some of them
    best: LaunchTime | None = None
    for form in known:
        least_s = math.inf if best is None else best.seconds
        for time in form(launch, hw, policy, least_s):
            best = time if best is None or time.seconds < best.seconds else best
    if best is None:
        return None
    if best.more:
        terms = {**best.terms, "direct": best.more}
        best = replace(best, seconds=best.seconds + best.more, terms=terms)
    best = _not_before(best, "scattered", launch.outputs.scattered_bytes / SCATTERED_BYTES_PER_S)
    if hw.architecture.has_mma:
        best = _not_before(best, "planes", launch.plane_terms / PLANE_TERMS_PER_S)
    return replace(best, counts=launch.run_counts(*best.runs))


def _not_before(time: LaunchTime, name: str, seconds: float) -> LaunchTime:
    """The same launch, where something takes so long."""
    if not seconds:
        return time
    terms = {**time.terms, name: seconds}
    return replace(time, seconds=max(time.seconds, time.terms["start"] + seconds), terms=terms)


def _hopper(
    launch: GemmGroup, hw: HardwareProfile, policy: Policy, known_s: float
) -> Iterator[LaunchTime]:
    dtype, rate = tensor_dtype(launch, hw, policy)
    batch, m, columns, k, together = launch.sizes
    maps_fit, outputs_fit = tensor_maps_fit(launch.group, launch.parts, hw)
    if (
        not hw.architecture.has_wgmma
        or not _wgmma_takes(launch, dtype)
        or (launch.computed(0) and not launch.computes_left)
        or launch.computed(1)
        or together > 2
        or not launch.alike
        or not maps_fit
        or not all(map(_is_addressable, itertools.repeat(launch), launch.products))
    ):
        return
    pitches = [launch.pitches(p) for p in launch.products]
    _, extra, written, resident = launch.moved
    widths = [n for _, _, n, _ in launch.segments]
    size = min(dtype_bytes(launch.group.graph.tensors[t].dtype) for t in launch.group.outputs)
    work = GemmWork(
        batch,
        m,
        columns,
        k,
        rate,
        dtype_bytes(dtype),
        together,
        all(a % LINE_BYTES == 0 for a, _ in pitches),
        all(b % LINE_BYTES == 0 for _, b in pitches),
        extra,
        written,
        launch.epilogue_s,
        resident,
        launch.more_b_bytes,
        single_stores=any(n % 2 for n in widths),
        residual=extra >= written > 0,
        wide_stores=size >= 4,
        computed_s=launch.left_s + element_seconds(hw) if launch.computes_left else 0.0,
    )
    stored = (
        outputs_fit
        and launch.outputs.is_boxed
        and all(n * dtype_bytes(dtype) % TMA_PITCH_BYTES == 0 for n in widths)
    )
    more = (
        launch.outputs.direct_bytes / DIRECT_BYTES_PER_S
        if stored and not launch.has_partials
        else 0.0
    )
    others = NARROW_TILES if m <= 64 else DIRECT_TILES
    # Matrices of the output's shape are read by the TMA, into what it stores.
    direct = extra < written and launch.tiles(128, 256 // together) <= FEW_WAVES * hw.num_sms
    best: tuple[float, GemmTile] | None = None
    for block_m, block_n in STAGED_TILES + (others if direct else ()):
        tiles = launch.tiles(block_m, block_n // together)
        staged = (block_m, block_n) in STAGED_TILES and stored
        kinds = _tiles(block_m, block_n, staged)
        if not staged or launch.computes_left:
            kinds = kinds[:1]
        elif not (launch.siblings and block_m * block_n == LARGEST_TILE and m > block_m):
            kinds = kinds[:2]
        if launch.siblings and tiles <= WELL_FILLED * hw.num_sms:
            kinds += _split_tiles(block_m, block_n)
        for tile in kinds:
            if not launch.holds_pairs(block_n // together // tile.split):
                continue
            seconds = gemm_seconds(work, tile, hw, math.inf if best is None else best[0])
            if best is None or seconds < best[0]:
                best = seconds, tile
    if best is None:
        return
    tile = best[1]
    time = gemm_time(work, tile, hw)
    staged = (tile.block_m, tile.block_n) in STAGED_TILES and stored
    seconds = (more if staged else 0.0) + launch.paired / PAIRED_PER_S
    runs = (1, 1)
    if launch.computes_left:
        runs = launch.runs(tile.block_m, tile.block_n // together)
    yield LaunchTime("hopper", time.seconds, time.terms, runs, more=seconds)


@cache
def _tiles(block_m: int, block_n: int, staged: bool) -> tuple[GemmTile, ...]:
    """A tile, the same deferred, and that of two blocks that share columns."""
    whole = GemmTile(block_m, block_n, _stages(block_m, block_n), staged)
    deferred = replace(whole, deferred=True)
    return whole, deferred, replace(deferred, multicast=2)


@cache
def _split_tiles(block_m: int, block_n: int) -> tuple[GemmTile, ...]:
    """A tile whose terms several blocks share."""
    whole = GemmTile(block_m, block_n, _stages(block_m, block_n), staged=False)
    return tuple(replace(whole, split=split) for split in (2, 4, 8))


def _stages(block_m: int, block_n: int) -> int:
    return max(2, min(16, 200_000 // ((block_m + block_n) * LINE_BYTES)))


def _wgmma_takes(launch: GemmGroup, dtype: str | None) -> bool:
    """Whether wgmma multiplies such operands: of 16 bits in any order, others along their terms."""
    if dtype is None or dtype in HALF_DTYPES:
        return dtype is not None
    along_terms = all(map(launch.along_terms, launch.products))
    return along_terms and (dtype == "float32" or dtype.startswith("float8"))


def _is_addressable(launch: GemmGroup, product: Product) -> bool:
    """Whether the TMA reaches both operands, whose columns and terms are known."""
    axes = [*product.block.reduced, *product.columns]
    static = all(isinstance(product.block.axes[i].extent, int) for i in axes)
    return static and all(pitch % TMA_PITCH_BYTES == 0 for pitch in launch.pitches(product))
