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
from typing import TYPE_CHECKING

from ..config import HardwareProfile, Policy
from .base import dtype_bytes
from .gemm_launch import GemmGroup
from .side_by_side import tensor_maps_fit

if TYPE_CHECKING:
    from .gemm import Product

TMA_PITCH_BYTES = 16  # row pitches the tensor memory accelerator can address are multiples of this
LINE_BYTES = 128
HALF_DTYPES = ("float16", "bfloat16")
LARGE_ROWS = 2048
SKINNY_ROWS = 16
"""Rows up to which the weights of a product pass through the CUDA cores at the speed of memory."""

PARTIAL_FORMS = ("hopper",)
"""Forms that reduce runs of columns in their epilogue."""

# (rows, columns) of tiles; the fastest of them is near the fastest of all (tests/test_gemm_cost).
TILES = (
    *((128, 256), (128, 192), (128, 128), (128, 64)),
    *((64, 256), (64, 192), (64, 128), (64, 64)),
)
DIRECT_TILES = ((64, 96), (64, 112), (64, 160), (64, 176), (128, 96), (128, 160))
NARROW_TILES = ((64, 32), *DIRECT_TILES)
FEW_WAVES = 3  # of the largest tiles: others may fill them better
MMA_TILES = ((128, 128), (64, 128), (64, 64), (16, 128))

# Estimates, to be replaced by measurements: share of the tensor cores' rate that mma.sync reaches
# on a device with wgmma and on others; columns of a warp of the skinny form, which computes A for
# each of its warps; share of the multipliers' rate that it reaches.
MMA_SHARE = {True: 0.63, False: 0.85}
# Cycles of a multiprocessor for each element that mma.sync's form computes, loads by copies of less
# than 16 bytes, or loads by itself (H200, 2026-11-20: 2048 x 4096 x 4096 behind silu(x) * y, int4
# weights of 256 rows, 4096 x 4096 x 4098, 4096 x 4095 x 4097).
COMPUTED_CYCLES, SHORT_COPY_CYCLES, NO_COPY_CYCLES = 0.2, 0.05, 0.18
SKINNY_COLUMNS = 4
SKINNY_SHARE = 0.5
# Instructions for each weight and for each weight and row where tensor cores multiply, and how far
# they overlap with the loads (H200, 2026-11-20: int4 weights, 11008 x 4096, 1 to 16 rows).
SKINNY_INSTRUCTIONS = (0.75, 0.22)
SKINNY_EXPONENT = 3.0
MMA_START_SECONDS = 2.9e-6
SKINNY_START_SECONDS = 1.4e-6


@dataclass(frozen=True, slots=True)
class LaunchTime:
    """Predicted seconds without the launch's own cost, its terms, the form, how often elements of A
    and of B are computed, and how often each block of the group runs.
    """

    form: str
    seconds: float
    terms: Mapping[str, float] = field(hash=False)
    runs: tuple[float, float] = (1, 1)
    counts: tuple[float, ...] = ()


def predict(launch: GemmGroup, hw: HardwareProfile, policy: Policy) -> LaunchTime | None:
    """The fastest form that can compute the group, by prediction, if there is one."""
    from .cuda.gemm_forms import FORMS

    forms = {"hopper": _hopper, "skinny": _skinny, "mma": _mma, "simt": _simt}
    known = [forms[form.name] for form in FORMS if form.name in forms]
    if launch.has_partials:
        known = [forms[name] for name in PARTIAL_FORMS]
    found = itertools.chain.from_iterable(form(launch, hw, policy) for form in known)
    best = min(found, key=lambda time: time.seconds, default=None)
    return best and replace(best, counts=launch.run_counts(*best.runs))


def _hopper(launch: GemmGroup, hw: HardwareProfile, policy: Policy) -> Iterator[LaunchTime]:
    from .cuda.gemm_cost import GemmTile, GemmWork, gemm_time

    dtype, rate = _tensor_dtype(launch, hw, policy)
    batch, m, columns, k, together = launch.sizes
    maps_fit, outputs_fit = tensor_maps_fit(launch.group, launch.parts, hw)
    if (
        hw.arch != "sm_90a"
        or not _wgmma_takes(launch, dtype)
        or launch.computed(0)
        or launch.computed(1)
        or together > 2
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
        launch.operation_s[2],
        resident,
        launch.more_b_bytes,
    )
    widths = [n for _, _, n, _ in launch.segments]
    stored = outputs_fit and all(n * dtype_bytes(dtype) % TMA_PITCH_BYTES == 0 for n in widths)
    work = replace(work, single_stores=any(n % 2 for n in widths))
    others = NARROW_TILES if m <= 64 else DIRECT_TILES
    # Matrices of the output's shape are read by the TMA, into what it stores.
    direct = extra < written and launch.tiles(128, 256 // together) <= FEW_WAVES * hw.num_sms
    for block_m, block_n in TILES + (others if direct else ()):
        stages = max(2, min(16, 200_000 // ((block_m + block_n) * LINE_BYTES)))
        staged = (block_m, block_n) in TILES and stored
        tile = GemmTile(block_m, block_n, stages, staged, staged, 16 if m >= LARGE_ROWS else 8)
        time = gemm_time(work, tile, hw)
        yield LaunchTime("hopper", time.seconds, time.terms)
        if staged and launch.siblings and block_n <= 128:
            for split in (2, 4):
                time = gemm_time(work, replace(tile, split=split, deferred=False), hw)
                yield LaunchTime("hopper", time.seconds, time.terms)


def _mma(launch: GemmGroup, hw: HardwareProfile, policy: Policy) -> Iterator[LaunchTime]:
    from .cuda.gemm_simt_cost import rounded_waves

    dtype, rate = _tensor_dtype(launch, hw, policy)
    if dtype is None or hw.arch < "sm_80" or rate not in hw.tensor_flop_per_s:
        return
    flops = hw.tensor_flop_per_s[rate] * MMA_SHARE[hw.arch.startswith("sm_9")]
    depth = max(sum(depths) for *_, depths in launch.segments)
    cycle_s = 1 / (hw.clock_ghz * 1e9 * hw.num_sms)
    a, b = (cells * cycle_s for cells in _loading_cycles(launch))
    for block_m, block_n in MMA_TILES:
        waves = rounded_waves(launch.tiles(block_m, block_n) / hw.num_sms, hw)
        step = 2.0 * block_m * block_n * depth * hw.num_sms / flops
        moved = (block_m + block_n) * depth * dtype_bytes(dtype)
        body = waves * max(step, moved * hw.num_sms / hw.l2_bytes_per_s)
        runs = launch.runs(block_m, block_n)
        body += a * runs[0] + b * runs[1]
        yield _other(launch, hw, "mma", "tensor", body, MMA_START_SECONDS, runs)


def _loading_cycles(launch: GemmGroup) -> tuple[float, float]:
    """Cycles of one multiprocessor that bringing in all of A and of B once takes, beyond copies of
    16 bytes.
    """
    found = [0.0, 0.0]
    for product in launch.products:
        cells = (product.batch * product.m * product.k, product.batch * product.k * product.n)
        for side, pitch in enumerate(launch.pitches(product)):
            each = COMPUTED_CYCLES if launch.computed(side) else 0.0
            if not each and pitch % 16:
                each = SHORT_COPY_CYCLES if pitch % 4 == 0 else NO_COPY_CYCLES
            found[side] += each * cells[side]
    return found[0], found[1]


def _wgmma_takes(launch: GemmGroup, dtype: str | None) -> bool:
    """Whether wgmma multiplies such operands: of 16 bits in any order, others along their terms."""
    if dtype is None or dtype in HALF_DTYPES:
        return dtype is not None
    along_terms = all(map(launch.along_terms, launch.products))
    return along_terms and (dtype == "float32" or dtype.startswith("float8"))


def _skinny(launch: GemmGroup, hw: HardwareProfile, policy: Policy) -> Iterator[LaunchTime]:
    few = launch.equal_sizes and all(m <= SKINNY_ROWS for _, m, *_ in launch.segments)
    if hw.arch < "sm_80" or not few or not all(map(_is_static, launch.products)):
        return
    halves = all(dtype in HALF_DTYPES for dtype in launch.dtypes)
    each = [(b * n * sum(depths), m) for b, m, n, depths in launch.segments]
    a, b = SKINNY_INSTRUCTIONS
    terms = sum(weights * (a + b * m if halves else m) for weights, m in each)
    body = terms / (hw.fma_per_s_f32 / 2 * SKINNY_SHARE)
    columns = sum(n for _, _, n, _ in launch.segments)
    runs = -(-columns // SKINNY_COLUMNS), 1
    yield _other(launch, hw, "skinny", "fma", body, SKINNY_START_SECONDS, runs, SKINNY_EXPONENT)


def _simt(launch: GemmGroup, hw: HardwareProfile, policy: Policy) -> Iterator[LaunchTime]:
    from .cuda.gemm_simt import CONFIGS
    from .cuda.gemm_simt_cost import START_SECONDS, simt_seconds

    for config in CONFIGS:
        body = simt_seconds(launch.segments, config, hw, 0.0) - START_SECONDS
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
) -> LaunchTime:
    """A form whose products and operations take turns, and overlap with its loads."""
    operand, other, written, resident = launch.moved
    hbm = (operand + other + written - resident) / hw.hbm_bytes_per_s
    on_a, on_b, after = launch.operation_s
    work = runs[0] * on_a + runs[1] * on_b + after
    terms = {term: body, "hbm": hbm, "operations": work, "start": start}
    busy = max(body + work, hbm)
    busy *= ((min(body + work, hbm) / busy) ** exponent + 1) ** (1 / exponent)
    return LaunchTime(form, start + busy, terms, runs)


def _tensor_dtype(
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


def _is_addressable(launch: GemmGroup, product: Product) -> bool:
    """Whether the TMA reaches both operands, whose columns and terms are known."""
    axes = [*product.block.reduced, *product.columns]
    static = all(isinstance(product.block.axes[i].extent, int) for i in axes)
    return static and all(pitch % TMA_PITCH_BYTES == 0 for pitch in launch.pitches(product))
