"""Predicted time of a launch of class `gemm`, as the planner sees it: sizes and blocks, no kernel.

Every form of the kernel that can compute the group is asked, with a few tiles each; the fastest
counts. Arithmetic on an operand (a dequantisation, an activation in front of a product) is charged
once for each tile of the other operand.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ...config import HardwareProfile, Policy
from ...plan.group_view import dtype_bytes
from ..program.expr import HALF_DTYPES
from .launch import GemmGroup
from .side_by_side import tensor_maps_fit
from .time_forms import LaunchTime, mma_times, simt_times, skinny_times, tensor_dtype
from .work import FEW_WAVES, LINE_BYTES, STAGED_TILES, WELL_FILLED, GemmTile, GemmWork, stripe

if TYPE_CHECKING:
    from .product import Product

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
    """The fastest form that can compute the group, by prediction, if there is one."""
    known = (_hopper, skinny_times, mma_times, simt_times)  # in the order of `gemm.forms`
    if launch.has_partials or not launch.swaps_halves:
        known = (_hopper,)  # its threads hold runs of columns: they reduce or pair some of them
    found = itertools.chain.from_iterable(form(launch, hw, policy) for form in known)
    best = min(found, key=lambda time: time.seconds, default=None)
    if best is None:
        return None
    if best.more:
        terms = {**best.terms, "direct": best.more}
        best = replace(best, seconds=best.seconds + best.more, terms=terms)
    best = _not_before(best, "scattered", launch.outputs.scattered_bytes / SCATTERED_BYTES_PER_S)
    if hw.arch >= "sm_80":
        best = _not_before(best, "planes", launch.plane_terms / PLANE_TERMS_PER_S)
    return replace(best, counts=launch.run_counts(*best.runs))


def _not_before(time: LaunchTime, name: str, seconds: float) -> LaunchTime:
    """The same launch, where something takes so long."""
    if not seconds:
        return time
    terms = {**time.terms, name: seconds}
    return replace(time, seconds=max(time.seconds, time.terms["start"] + seconds), terms=terms)


def _hopper(launch: GemmGroup, hw: HardwareProfile, policy: Policy) -> Iterator[LaunchTime]:
    from .cost import gemm_time

    dtype, rate = tensor_dtype(launch, hw, policy)
    batch, m, columns, k, together = launch.sizes
    maps_fit, outputs_fit = tensor_maps_fit(launch.group, launch.parts, hw)
    if (
        hw.arch != "sm_90a"
        or not _wgmma_takes(launch, dtype)
        or launch.computed(0)
        or launch.computed(1)
        or together > 2
        or not launch.alike
        or not maps_fit
        or not all(map(_is_addressable, itertools.repeat(launch), launch.products))
    ):
        return
    pitches = [launch.pitches(p) for p in launch.products]
    _, extra, written, resident = launch.moved
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
        residual=extra >= written > 0,
    )
    widths = [n for _, _, n, _ in launch.segments]
    stored = (
        outputs_fit
        and launch.outputs.is_boxed
        and all(n * dtype_bytes(dtype) % TMA_PITCH_BYTES == 0 for n in widths)
    )
    size = min(dtype_bytes(launch.group.graph.tensors[t].dtype) for t in launch.group.outputs)
    work = replace(work, single_stores=any(n % 2 for n in widths), wide_stores=size >= 4)
    more = (
        launch.outputs.direct_bytes / DIRECT_BYTES_PER_S
        if stored and not launch.has_partials
        else 0.0
    )
    others = NARROW_TILES if m <= 64 else DIRECT_TILES
    # Matrices of the output's shape are read by the TMA, into what it stores.
    direct = extra < written and launch.tiles(128, 256 // together) <= FEW_WAVES * hw.num_sms
    for block_m, block_n in STAGED_TILES + (others if direct else ()):
        tiles = launch.tiles(block_m, block_n // together)
        staged = (block_m, block_n) in STAGED_TILES and stored
        group_m = stripe(m, block_m, staged)
        whole = GemmTile(block_m, block_n, _stages(block_m, block_n), staged, group_m=group_m)
        kinds = [whole]
        if staged:
            kinds.append(replace(whole, deferred=True))
        if staged and launch.siblings and block_m * block_n == LARGEST_TILE and m > block_m:
            kinds.append(replace(whole, deferred=True, multicast=2))
        if launch.siblings and tiles <= WELL_FILLED * hw.num_sms:
            kinds += [replace(whole, staged=False, split=split) for split in (2, 4, 8)]
        for tile in kinds:
            if not launch.holds_pairs(block_n // together // tile.split):
                continue
            time = gemm_time(work, tile, hw)
            seconds = (more if staged else 0.0) + launch.paired / PAIRED_PER_S
            yield LaunchTime("hopper", time.seconds, time.terms, more=seconds)


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
