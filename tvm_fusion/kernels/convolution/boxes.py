"""Boxes of 64 positions of a convolution's results, which a warpgroup computes together; runs of
positions that are reduced.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence

from ...errors import Unsupported
from ..contraction.model import RUN_ROWS, Output
from ..gemm.hopper.model import BOX
from ..gpu.tensor_map import MAX_BOX, MAX_STEP
from ..program.program import Extent
from .geometry import Convolution


def box_shape(
    sizes: Sequence[Extent],
    strides: Sequence[int],
    reach: Sequence[int],
    rims: bool = False,
    run: Sequence[int] | None = None,
    alone: Collection[int] = (),
    many: Sequence[Sequence[int]] = (),
) -> tuple[int, ...]:
    """Positions of a box of 64 along each window: the fewest boxes; of these, none that reaches
    beyond a window of one position, if that can be, and what reads the least data with all taps.
    Where sizes are symbolic, those in `many` count alike: each has a number for every window.
    With `run` a box holds whole blocks of so many positions, each of which lies in `RUN_ROWS` rows
    side by side. Along windows that are `alone` it has one position.

    Only waste counts: on an H200, 2026-11-23, boxes of 8 x 8, 4 x 4 x 4, 2 x 2 x 16 and 1 x 2 x 32
    take 155.4 to 155.9 us for 56 x 56 positions of 32 images, all without waste.

    Raises
    ------
    Unsupported
        Steps that the TMA does not take.
    """
    if max(strides) > MAX_STEP:
        raise Unsupported(f"steps of {max(strides)} elements")
    best, many = None, many or [[n if isinstance(n, int) else BOX for n in sizes]]
    for exponents in itertools.product(range(BOX.bit_length()), repeat=len(sizes)):
        if sum(exponents) != BOX.bit_length() - 1:
            continue
        shape = tuple(1 << e for e in exponents)
        if any(shape[i] > 1 for i in alone):
            continue
        if any(n * step > MAX_BOX for n, step in zip(shape, strides, strict=True)):
            continue
        if rims and not (shape[-1] == BOX or (shape[-1] == 8 and max(shape[:-1], default=0) == 8)):
            continue  # 8 positions side by side, and such groups at equal distances
        if run is not None and not holds_runs(shape, run):
            continue
        count = sum(_count(some, shape) * (math.prod(many[-1]) // math.prod(some)) for some in many)
        held = math.prod(
            (n - 1) * step + more + 1 for n, step, more in zip(shape, strides, reach, strict=True)
        )
        beyond = sum(n == 1 and size > 1 for n, size in zip(many[-1], shape, strict=True))
        if best is None or (count, beyond, held, shape) < best:
            best = count, beyond, held, shape
    if best is None:
        raise Unsupported("no box of these positions")
    return best[3]


def _count(sizes: Sequence[int], shape: Sequence[int]) -> int:
    """Boxes of a shape that hold so many positions."""
    return math.prod(-(-n // size) for n, size in zip(sizes, shape, strict=True))


def holds_runs(shape: Sequence[int], run: Sequence[int]) -> bool:
    """Whether blocks of `run` positions divide a box, each within `RUN_ROWS` positions side by side
    of it: in a box of 8 x 8, blocks of 2 x 2 lie in two lines.
    """
    if any(n % height for n, height in zip(shape, run, strict=True)):
        return False
    steps = (math.prod(shape[i + 1 :]) for i in range(len(shape)))
    pairs = zip(steps, run, strict=True)
    return all(height == 1 or step * height <= RUN_ROWS for step, height in pairs)


def boxes_of(sizes: Sequence[int], strides: Sequence[int], run: Sequence[int] | None = None) -> int:
    """The fewest boxes that hold positions of so many along each window.

    Raises
    ------
    Unsupported
        As `box_shape`.
    """
    shape = box_shape(sizes, strides, (0,) * len(sizes), run=run)
    return _count(sizes, shape)


def best_run(
    sizes: Sequence[int], strides: Sequence[int], reduced: Collection[int]
) -> tuple[int, ...] | None:
    """Positions along each window of a block of 16 over whose positions results are reduced: of
    those with the fewest boxes, that of which there are the fewest. None where there is no box.
    """
    found = []
    for exponents in itertools.product(range(RUN_ROWS.bit_length()), repeat=len(sizes)):
        run = tuple(1 << e for e in exponents)
        if math.prod(run) != RUN_ROWS or any(h > 1 and i not in reduced for i, h in enumerate(run)):
            continue
        try:
            boxes = boxes_of(sizes, strides, run)
        except Unsupported:
            continue
        blocks = _count(sizes, run)
        found.append((boxes, blocks, run))
    return min(found)[2] if found else None


def run_of(convolution: Convolution, reduced: Sequence[Output]) -> tuple[int, ...]:
    """Positions along each window that go to the same element of the outputs that are reduced.

    Raises
    ------
    Unsupported
        Outputs that are reduced over different positions, or over other axes.
    """
    axes = [None if w.axis is None else w.axis.var for w in convolution.windows]
    runs = {tuple(o.partial.heights.get(axis, 1) for axis in axes) for o in reduced}
    if len(runs) > 1 or math.prod(min(runs)) != reduced[0].partial.rows:
        raise Unsupported("reductions over different positions of results")
    return min(runs)


def row_bits(shape: Sequence[int], run: Sequence[int]) -> tuple[int, ...]:
    """The bits of a row's number in a box in which positions of a block of `run` differ."""
    found = []
    for i, height in enumerate(run):
        first = math.prod(shape[i + 1 :]).bit_length() - 1
        found += range(first, first + height.bit_length() - 1)
    return tuple(sorted(found))
