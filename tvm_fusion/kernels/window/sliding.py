"""Axes along which windows slide.

    y[h, w] = max over a < 3, b < 3 of x[2 * h + a, 2 * w + b]

Result h looks at the places 2 * h + a of its axis. What neighbouring results look at overlaps, and
a run of results looks at a run of places:

    results 0..3      places 0 1 2 | 2 3 4 | 4 5 6 | 6 7 8      9 places, not 12
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ...ir.access import Affine, Block, Reduction
from ...ir.extents import assumed
from ..program.program import Extent

MOST_TAPS = 4096
"""Elements of a window; more are a reduction that many threads share."""


@dataclass(frozen=True, slots=True)
class Sliding:
    """An axis of results: `extent` of them, each looking at `taps` places, `dilation` apart; the
    next result looks `stride` places further. Where no window slides there is one tap, its own
    place.
    """

    extent: Extent
    taps: int = 1
    stride: int = 1
    dilation: int = 1

    @property
    def slides(self) -> bool:
        return self.taps > 1

    def run(self, results: Extent) -> Extent:
        """Places from the first to the last that neighbouring results look at."""
        return self.stride * (results - 1) + self.dilation * (self.taps - 1) + 1

    def needed(self, results: int) -> tuple[int, ...]:
        """The places of such a run that any of them looks at."""
        return _needed(results, self.taps, self.stride, self.dilation)

    def seen(self, results: int) -> int:
        """How many these are."""
        if self.dilation > 1:
            return len(self.needed(results))
        return min(self.stride, self.taps) * (results - 1) + self.taps

    def place(self, result: int, tap: int) -> int:
        """Where the tap of a result lies."""
        return self.stride * result + self.dilation * tap


@lru_cache(maxsize=1024)  # each configuration asks 20 times
def _needed(results: int, taps: int, stride: int, dilation: int) -> tuple[int, ...]:
    found = {stride * n + dilation * tap for n in range(results) for tap in range(taps)}
    return tuple(sorted(found))


def window_of(block: Block) -> tuple[Sliding, ...] | None:
    """The axes of a block that reduces a window, one for each axis of its result, as the planner
    sees it, symbolic sizes at those that are assumed; None where it reduces anything else.
    """
    kinds = (Reduction.SUM, Reduction.PRODUCT, Reduction.MAX, Reduction.MIN)
    if block.reduction not in kinds or block.is_contraction or not block.reads:
        return None
    if not all(isinstance(extent, int) for extent in block.extents(block.reduced)):
        return None
    extents = [assumed(axis.extent) for axis in block.axes]
    if min(extents) < 1:
        return None
    order = _written(block)
    if order is None or any(access.guarded for access in block.reads):
        return None
    indices = [index for access in block.reads for index in access.index]
    forms = [i.coefficients if isinstance(i, Affine) else None for i in indices]
    touched = [index.axes for index in indices]
    reduced = [axis for axis in block.reduced if extents[axis] != 1]
    pairs = paired(order, reduced, forms, touched)
    if pairs is None:
        return None
    return axes_of([extents[axis] for axis in order], extents, order, pairs)


def _written(block: Block) -> list[int] | None:
    """The axes of a block in the order of its result; None where it writes anything else."""
    if len(block.writes) != 1:
        return None
    found = []
    for index in block.writes[0].index:
        axis = index.single_axis if isinstance(index, Affine) else None
        if axis is None:
            return None
        found.append(axis)
    return found if sorted(found) == sorted(block.spatial) else None


Pairs = dict[int, tuple[int, int, int]]
"""By an axis of the result: the reduced axis beside it in indices, stride and dilation."""


def paired(
    spatial: Sequence[int],
    reduced: Sequence[int],
    forms: Sequence[Sequence[int] | None],
    touched: Sequence[frozenset[int]],
) -> Pairs | None:
    """Which reduced axis stands beside which axis of the result in each index, always with the same
    steps; None where one stands anywhere else.

    Parameters
    ----------
    spatial, reduced : numbers of axes, the second without those of one element.
    forms : of each index, its steps by axis; None where it is not linear.
    touched : of each index, the axes that it depends on.
    """
    pairs: Pairs = {}
    for form, axes in zip(forms, touched, strict=True):
        own = [axis for axis in reduced if axis in axes]
        if not own:
            continue
        kept = [axis for axis in spatial if axis in axes]
        if form is None or len(own) != 1 or len(kept) != 1:
            return None
        steps = own[0], int(form[kept[0]]), int(form[own[0]])
        if min(steps[1:]) < 1 or pairs.setdefault(kept[0], steps) != steps:
            return None
    if sorted(pair[0] for pair in pairs.values()) != sorted(reduced) or not pairs:
        return None
    for form, axes in zip(forms, touched, strict=True):
        for axis, (other, stride, dilation) in pairs.items():
            whole = form is not None and (form[axis], form[other]) == (stride, dilation)
            if axis in axes and not whole:
                return None
    return pairs


def axes_of(
    sizes: Sequence[Extent], extents: Sequence[int], order: Sequence[int], pairs: Pairs
) -> tuple[Sliding, ...]:
    """The axes of a result of these sizes."""
    found = []
    for size, axis in zip(sizes, order, strict=True):
        if axis in pairs:
            other, stride, dilation = pairs[axis]
            found.append(Sliding(size, extents[other], stride, dilation))
        else:
            found.append(Sliding(size))
    return tuple(found)
