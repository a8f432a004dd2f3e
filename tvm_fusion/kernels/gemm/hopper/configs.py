"""Which configurations of the Hopper GEMM to try, the one with the least predicted time first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import cache, partial

from ....config import HardwareProfile
from ....errors import Unsupported
from ...contraction.model import ColumnPartial
from ...gpu.access import is_multiple
from ...gpu.product_frame import assumed, ceil_div
from ...program.expr import bytes_of
from ..epilogue import operation_s
from .config import SPLITS, HopperConfig
from .cost import (
    DIRECT_ROWS,
    FEW_WAVES,
    LINE_BYTES,
    STAGED_TILES,
    STEP_BYTES,
    WELL_FILLED,
    GemmTile,
    GemmWork,
    gemm_seconds,
    stripe,
)
from .model import BOX, HopperProblem, HopperSegment, OperandView
from .plan import (
    BARRIER_BYTES,
    BOX_BYTES,
    DATA_STAGES,
    DEFERRED_STEPS,
    make_plan,
    stores_by_rows,
)

MAX_STAGES = 16

SHARED = {f.name for f in fields(GemmTile)} & {f.name for f in fields(HopperConfig)}
"""What a tile has of its configuration."""

# Names of rates in the profile that are not those of the operands' dtype.
RATE_OF = {"float32": "tfloat32"}

# Tiles of windows with three or four consumers: positions are many, filters often few.
TALL_TILES = ((192, 128), (192, 64), (256, 128), (256, 64))

# Columns of tiles whose terms the blocks of a cluster share.
SPLIT_WIDTHS = (64, 96, 128, 160, 192, 224, 256)


def rank_configs(
    problems: Mapping[int, HopperProblem], hw: HardwareProfile
) -> list[tuple[float, HopperConfig]]:
    """Predicted seconds and the configurations that fit, the one with the least time first."""
    found: list[tuple[float, int, HopperConfig]] = []
    for batched, problem in problems.items():
        work_by_rows = cache(partial(hopper_work, problem, hw))
        for config in _candidates(problem, hw):
            config = replace(config, batched=batched, **problem.precision)
            try:
                plan = make_plan(problem, config, hw)
            except Unsupported:
                continue
            work = work_by_rows(1 if problem.shared else config.block_m)
            seconds = gemm_seconds(work, tile_of(config, plan.ahead, problem), hw)
            found.append((seconds, len(found), config))
    return [(time, config) for time, _, config in sorted(found, key=lambda item: item[:2])]


def hopper_work(problem: HopperProblem, hw: HardwareProfile, block_m: int = 1) -> GemmWork:
    """What the cost model sees of a problem; symbolic sizes are assumed.

    Segments of their own sizes count as one of as many tiles of `block_m` rows.
    """
    contraction = problem.contraction
    lefts = [view for s in problem.segments for view in s.views]
    rights = [view for s in problem.segments for view in s.b]
    operands = [*lefts, *rights]
    written = {output.param for s in problem.segments for output in s.outputs}
    moved = {True: 0.0, False: 0.0}
    for number, param in enumerate(contraction.params):
        if param.shape is None or any(param.var.same_as(view.param) for view in operands):
            continue
        size = math.prod(assumed(n) for n in param.shape)
        moved[number in written] += size * bytes_of(param.dtype)
    sizes, more = _sizes(problem, block_m)
    return GemmWork(
        *sizes,
        more_b_bytes=(more + _more_taps(problem)) * bytes_of(problem.dtype),
        dtype=RATE_OF.get(problem.dtype, problem.dtype),
        element_bytes=bytes_of(problem.dtype),
        products=2 if problem.dual else 1,
        a_whole_lines=all(map(_whole_lines, lefts)),
        b_whole_lines=all(map(_whole_lines, rights)),
        extra_bytes=moved[False],
        single_stores=any(n % 2 for n in problem.columns),
        written_bytes=moved[True],
        operation_s=operation_s(problem.segments, hw),
        residual=moved[False] >= moved[True] > 0,
        wide_stores=all(bytes_of(o.dtype) >= 4 for s in problem.segments for o in s.outputs),
        a_bytes=_bytes_of_data(problem),
        computed_s=0.0 if problem.prologue is None else problem.prologue.seconds(hw),
    )


def _more_taps(problem: HopperProblem) -> int:
    """Elements of B beyond those of one tap."""
    return (problem.taps - 1) * sum(s.N * s.K for s in problem.segments)


def _bytes_of_data(problem: HopperProblem) -> float | None:
    """Bytes of A where its rows lie over each other."""
    if not problem.has_windows:
        return None
    params, views = problem.contraction.params, problem.segments[0].views
    shapes = (next(p.shape for p in params if p.var.same_as(v.param)) for v in views)
    return float(sum(math.prod(map(assumed, shape)) for shape in shapes) * bytes_of(problem.dtype))


def _sizes(
    problem: HopperProblem, block_m: int
) -> tuple[tuple[int, int, tuple[int, ...], int], float]:
    """Batch, M, columns and K, and the elements of B that they do not account for.

    Of segments of their own: all rows under each other, and the mean of columns and terms.
    """
    if problem.shared:
        batch, rows = assumed(problem.batch), assumed(problem.M)
        return (batch, rows, tuple(problem.columns), problem.K), _shared_by_images(problem)
    parts = [
        (assumed(s.B) * ceil_div(assumed(s.M), block_m) * block_m, s) for s in problem.segments
    ]
    rows = sum(m for m, _ in parts)
    cells = sum(m * s.N for m, s in parts)
    columns = max(1, round(cells / rows))
    k = max(1, round(sum(m * s.N * s.K for m, s in parts) / cells))
    weights = sum(assumed(s.B) * s.N * s.K for s in problem.segments) - columns * k
    return (1, rows, (columns,), k), max(0, weights) * len(problem.segments[0].products)


def _shared_by_images(problem: HopperProblem) -> float:
    """Less than 0: elements of B of all batches but one, where rows are taken in batches for their
    reduction.
    """
    own = [o for s in problem.segments for o in s.outputs if isinstance(o.partial, ColumnPartial)]
    views = [view for s in problem.segments for view in s.b]
    if not own or any(view.access.digits["batch"] for view in views):
        return 0.0
    weights = sum(s.N * s.K * len(s.b) for s in problem.segments)
    return float((1 - assumed(problem.batch)) * weights)


def tile_of(
    config: HopperConfig, ahead: bool = False, problem: HopperProblem | None = None
) -> GemmTile:
    """What the cost model sees of a configuration; `ahead` is that of its plan."""
    tile = GemmTile(**{name: getattr(config, name) for name in SHARED}, ahead=ahead)
    if problem is None or problem.taps == 1:
        return tile
    rim = problem.box_bytes / (BOX * STEP_BYTES)
    return replace(tile, taps=problem.taps, rim=rim, streams=problem.streams)


def _whole_lines(view: OperandView) -> bool:
    """Whether rows of boxes start at multiples of a line, so far as strides tell."""
    unit = LINE_BYTES // bytes_of(view.dtype)
    digits = [d for group in view.access.digits.values() for d in group]
    contiguous = [d for d in digits if isinstance(d.stride, int) and d.stride == 1]
    strides = [d.stride for d in digits if d not in contiguous]
    return view.access.base % unit == 0 and all(is_multiple(size, unit) for size in strides)


def _candidates(problem: HopperProblem, hw: HardwareProfile) -> Iterator[HopperConfig]:
    """All configurations worth a look; the deepest ring that fits for each tile."""
    few_waves = _tiles(problem, 128, 256) <= FEW_WAVES * hw.num_sms
    shapes = [(m, n, True) for m, n in STAGED_TILES] if problem.staged else []
    if problem.has_windows and problem.staged:
        shapes += [(m, n, True) for m, n in TALL_TILES]
    elif problem.staged and problem.shared and few_waves and not problem.dual:
        shapes.append((*TALL_TILES[0], True))
    if problem.has_windows and not any(_whole(segment) for segment in problem.segments):
        shapes += [(m, n, False) for m, n in TALL_TILES]
    if problem.residual is None or not problem.shared:
        widths = range(16, 264, 8) if not problem.dual else range(32, 264, 16)
        wide = [n for n in widths if _narrow(problem, n) or (few_waves and n > 64)]
        if not problem.shared and assumed(problem.M) > 128:
            # Eight experts of 4096 tokens, gate and up in one launch (H200, 2026-11-20): the layer
            # took 116 us in tiles of 128 x 96, and 89 (other token counts) in 128 x 128.
            wide = [n for n in wide if n % (128 if problem.dual else BOX) == 0]
        shapes += [(m, n, False) for m in (64, 128) for n in wide]
    for block_m, block_n, staged in shapes:
        # With one tile a block there is no next one to hide an epilogue in: on a tie, no deferring.
        both = (True, False) if problem.residual is not None else (False, True)
        for deferred in both if staged else (False,):
            config = _deepest(problem, block_m, block_n, staged, deferred, hw)
            if config is not None:
                yield _ordered(problem, config)
                if block_m == 128 and _gains_by_sharing(problem, block_n):
                    yield _ordered(problem, replace(config, multicast=2))
    yield from _split(problem, hw)


def _whole(segment: HopperSegment) -> bool:
    """Whether a segment stores results that are not reduced."""
    return any(output.partial is None for output in segment.outputs)


def _split(problem: HopperProblem, hw: HardwareProfile) -> Iterator[HopperConfig]:
    """Tiles whose terms several blocks share, where whole ones leave multiprocessors idle."""
    if not problem.shared:
        return
    for block_m in (64, 128):
        for block_n in SPLIT_WIDTHS:
            out_n = block_n // 2 if problem.dual else block_n
            tiles = _tiles(problem, block_m, block_n)
            if tiles / (ceil_div(tiles, hw.num_sms) * hw.num_sms) > WELL_FILLED:
                continue
            for split in SPLITS[1:]:
                if out_n % (8 * split):
                    continue
                for staged in (True, False):
                    if staged and (not problem.staged or out_n // split % BOX):
                        continue
                    if not staged and problem.staged and problem.residual is not None:
                        continue  # 512x512x16384: 27.9 us, and 24.2 staged (H200, 2026-11-20)
                    config = _deepest(problem, block_m, block_n, staged, False, hw, split)
                    if config is not None:
                        yield _ordered(problem, config)


def _least_steps(problem: HopperProblem) -> int:
    return min(ceil_div(s.K, problem.block_k) for s in problem.segments)


def _tiles(problem: HopperProblem, block_m: int, block_n: int) -> int:
    rows = ceil_div(assumed(problem.M), block_m)
    return _columns(problem, block_n) * rows * assumed(problem.batch)


def _ordered(problem: HopperProblem, config: HopperConfig) -> HopperConfig:
    """The configuration in the order in which neighbouring blocks share most."""
    rows = ceil_div(assumed(problem.M), config.block_m)
    columns = _columns(problem, config.block_n)
    return replace(config, group_m=stripe(tile_of(config), rows, columns, problem.has_windows))


def _columns(problem: HopperProblem, block_n: int) -> int:
    out_n = block_n // 2 if problem.dual else block_n
    return sum(ceil_div(n, out_n) for n in problem.columns)


def _gains_by_sharing(problem: HopperProblem, block_n: int) -> bool:
    """Whether pairs of blocks with a tile of B in common are worth a look: they draw less power on
    the largest tiles, and ask for rows that straddle lines once. Pairs of 64 rows are slower (H200,
    2026-11-20).
    """
    straddling = not all(_whole_lines(view) for s in problem.segments for view in s.b)
    return problem.shared and assumed(problem.M) > 128 and (block_n == 256 or straddling)


def _narrow(problem: HopperProblem, block_n: int) -> bool:
    """Stores from registers are for few rows, narrow tiles, what the TMA cannot store, or what
    has so many tensor maps that no room is left for those of outputs.
    """
    few_maps = problem.staged and problem.shared
    return assumed(problem.M) <= DIRECT_ROWS or block_n <= 32 or not few_maps


def _deepest(
    problem: HopperProblem,
    block_m: int,
    block_n: int,
    staged: bool,
    deferred: bool,
    hw: HardwareProfile,
    split: int = 1,
) -> HopperConfig | None:
    boxes = 0
    if staged:
        count = (block_n // 2 if problem.dual else block_n) // BOX // split
        boxes = 2 if count % 2 == 0 else count
        if problem.residual is not None and not deferred:
            short = _least_steps(problem) < DEFERRED_STEPS
            boxes = 2 * count if short and split == 1 else count
    # A ring that leaves no box has rows off 4 bytes leave in pieces of 2: 1500 x 4099 x 256 takes
    # 33 us in tiles of 128 x 128 on an H200 then, not 16. Of few rows that is no loss: 64 x 5001 x
    # 768 takes 5.6, and 6.3 by way of a box.
    by_rows = not staged and assumed(problem.M) > DIRECT_ROWS and stores_by_rows(problem)
    room = block_m // BOX * (boxes or int(by_rows)) * BOX_BYTES
    free = hw.smem_per_block_bytes - BARRIER_BYTES - room
    data, stage = block_m // BOX * problem.box_bytes, block_n * problem.taps_of_stage * STEP_BYTES
    if problem.streams:
        free -= DATA_STAGES * data
    else:
        stage += data
    stages = min(MAX_STAGES, free // stage)
    if stages < 2:
        return None
    return HopperConfig(block_m, block_n, stages, staged, deferred, boxes, split=split)
