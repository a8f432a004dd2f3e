"""How a reduction is taken apart where one kernel would leave most of the device idle: the steps,
and in how many pieces.

    [16384, 1024] over 0          [16, 1024, 1024] over 1, then [16, 1024] over 0
    [32, 64, 64, 32, 10] over 1,2,4   over 1,2, then [32, 32, 10] over 2
    [32, 256, 56, 56] over 0,2,3  over 2,3, then [32, 256] over 0
    [304, 13816] over 0,1         over 1, then [304], where rows are reduced, too

Dependent reductions (the statistics of a normalisation, a softmax) stay together where one column
kernel, which reads the data twice, is sooner done than the kernels of all stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...config import HardwareProfile

COLUMNS_A_BLOCK = 64
"""Columns that one block of a column kernel takes: 128 bytes of a half type."""
COLUMN_BLOCKS_A_SM = 2
ROWS_A_BLOCK = 32
"""Rows that a piece of a column reduction has at least, so that its result is small beside it."""
CLUSTER = 8
"""Blocks that a row kernel spreads one row over."""
SHORT_PIECE = 4096
"""Elements that a piece of a row has at least."""
ROW_PIECES_A_SM = 16
INNER_FIRST = 64
"""From so many contiguous elements on, a row kernel reduces them before the outer axes."""
MIXED_COLUMNS_A_THREAD = 8
MIXED_THREADS_A_SM = 1024
MIXED_BLOCKS_A_SM = (2, 8)
MIXED_ROWS_A_BLOCK = 8
LANES_A_BLOCK = 32
"""Columns of a block that does dependent reductions, at least: 64 bytes of a half type."""
PLANE_RATE = 0.75
"""Of the bandwidth, what one kernel with dependent reductions over planes reaches: 12.0 us of 15.4
for [16, 256, 56, 56] on an H200; side by side along the rows, columns reach nearly all of it."""
BYTES = 2
"""Bytes an element is taken to have in memory (what is widened is computed on the way)."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Reduce `axes` of a tensor viewed as `view`; its `axes` (one) may first grow by `padding`.

    With `pieces` the axis is then split into (pieces, rest), and `rest` is what is reduced. `homes`
    are the axes of the original tensor that `axes` come from.
    """

    view: tuple[int, ...]
    axes: tuple[int, ...]
    homes: tuple[int, ...]
    pieces: int = 1
    padding: int = 0

    @property
    def split_view(self) -> tuple[int, ...]:
        """The view once the axis is split."""
        if self.pieces == 1:
            return self.view
        (axis,) = self.axes
        rest = (self.view[axis] + self.padding) // self.pieces
        return (*self.view[:axis], self.pieces, rest, *self.view[axis + 1 :])

    @property
    def reduced(self) -> tuple[int, ...]:
        """The axes of `split_view` that are reduced."""
        return self.axes if self.pieces == 1 else (self.axes[0] + 1,)


@dataclass(frozen=True, slots=True)
class Setting:
    """What stands around a reduction.

    Attributes
    ----------
    rows : (rows, columns) of the reductions over rows on the same data: sums over their rows can
        join them in a `mixed` kernel.
    chain : reductions over the same rows, all of which a row kernel does at one reading.
    levels : reductions over the same axes that wait for one another, where all that is reduced is
        computed with afterwards (softmax: 2, its maximum and its sum); 0 where it is not.
    """

    rows: frozenset[tuple[int, int]] = frozenset()
    chain: int = 1
    levels: int = 0


ALONE = Setting()


@dataclass(frozen=True, slots=True)
class _Axis:
    """An axis of what is left to reduce, and the original one; a piece comes of a split."""

    size: int
    reduced: bool
    home: int
    is_piece: bool = False


def stages(
    shape: Sequence[int], axes: Sequence[int], hw: HardwareProfile, setting: Setting = ALONE
) -> list[Stage]:
    """The steps of a reduction of a tensor of `shape`; a single one without pieces: leave it be."""
    pattern = [_Axis(size, axis in axes, axis) for axis, size in enumerate(shape) if size != 1]
    if setting.levels and _stay_together(pattern, hw, setting.levels):
        reduced = [place for place, axis in enumerate(pattern) if axis.reduced]
        sizes = tuple(axis.size for axis in pattern)
        return [Stage(sizes, tuple(reduced), tuple(pattern[place].home for place in reduced))]
    found = []
    while any(axis.reduced for axis in pattern):
        first, last = _next_run(pattern)
        run, sizes = pattern[first:last], [axis.size for axis in pattern]
        outer, inner, homes = sizes[:first], sizes[last:], tuple(axis.home for axis in run)
        length, pieces = math.prod(sizes[first:last]), 1
        if not any(axis.is_piece for axis in run):
            pieces = _pieces(math.prod(outer), length, math.prod(inner), hw, setting)
        if pieces == 1:
            found.append(Stage(tuple(sizes), tuple(range(first, last)), homes))
            pattern = [*pattern[:first], *pattern[last:]]
        else:
            view = (*outer, length, *inner)
            found.append(Stage(view, (first,), homes, pieces, -length % pieces))
            piece = _Axis(pieces, True, homes[0], is_piece=True)
            pattern = [*pattern[:first], piece, *pattern[last:]]
    return found


def first_axes(extents: Sequence[int | None], axes: Sequence[int]) -> tuple[int, ...] | None:
    """The axes that a full reduction with symbolic extents (None) goes over first, so that the
    device has rows to share out: [n, 1024] over 1, then [n] over 0; [64, n] over 1, then [64].
    None for any other reduction, and where there are no rows, or only short ones.
    """
    if any(extent != 1 and axis not in axes for axis, extent in enumerate(extents)):
        return None
    long = [axis for axis, extent in enumerate(extents) if extent != 1]
    if not long or all(extents[axis] is not None for axis in long):
        return None
    is_known = extents[long[-1]] is not None
    first = len(long)
    while first and (extents[long[first - 1]] is not None) == is_known:
        first -= 1
    known = long[first:] if is_known else [axis for axis in long if extents[axis] is not None]
    if not first or math.prod(extents[axis] for axis in known) < INNER_FIRST:
        return None
    return tuple(long[first:])


def _stay_together(pattern: list[_Axis], hw: HardwareProfile, levels: int) -> bool:
    """Whether one column kernel does dependent reductions, and what follows them, sooner than a
    kernel for each.

    It reads the data twice and writes them once. Apart, each level reads them, too, and has a
    kernel for its pieces and one for the rest; but all of these fill the device.
    """
    runs, sizes = list(_runs(pattern)), [axis.size for axis in pattern]
    if not runs:
        return False  # only axes of one element are reduced
    (start, stop), trails = runs[0], runs[-1][1] == len(pattern)
    if len(runs) != 1 + trails:
        return False  # whole rows, or an order that no column kernel walks in
    if trails and math.prod(sizes[slice(*runs[-1])]) >= INNER_FIRST:
        blocks, rate = math.prod(axis.size for axis in pattern if not axis.reduced), PLANE_RATE
    else:
        lanes = math.prod(sizes[stop:])
        blocks, rate = math.prod(sizes[:start]) * -(-lanes // LANES_A_BLOCK), 1.0
    seconds = BYTES * math.prod(sizes) / hw.hbm_bytes_per_s
    together = 3 * seconds / (rate * min(1.0, blocks / hw.num_sms))
    return together <= (2 + levels) * seconds + 2 * levels * hw.launch_us * 1e-6


def needs_stages(shape: Sequence[int], axes: Sequence[int], hw: HardwareProfile) -> bool:
    """Whether statistics over `axes` cannot be those of rows that stay on the chip: they are taken
    apart, not over the contiguous axes, or over too many elements.
    """
    pattern = [axis in axes for axis, size in enumerate(shape) if size != 1]
    if pattern != sorted(pattern):
        return True
    length = math.prod(shape[axis] for axis in axes)
    if length > on_chip_elements(hw):
        return True
    return len(stages(shape, axes, hw, Setting(chain=2))) > 1


def on_chip_elements(hw: HardwareProfile) -> int:
    """Elements of the longest row that the registers of the blocks of one row hold: half of them,
    one element each.
    """
    return _blocks_a_row(hw) * hw.registers_per_sm // 2


def _next_run(pattern: list[_Axis]) -> tuple[int, int]:
    """The reduced axes to start with: contiguous ones if they are long, else the most elements."""
    runs = list(_runs(pattern))
    sizes = {run: math.prod(axis.size for axis in pattern[slice(*run)]) for run in runs}
    if runs[-1][1] == len(pattern) and (len(runs) == 1 or sizes[runs[-1]] >= INNER_FIRST):
        return runs[-1]
    outer = [run for run in runs if run[1] < len(pattern)]
    return max(outer, key=lambda run: sizes[run])


def _runs(pattern: list[_Axis]) -> Iterator[tuple[int, int]]:
    start = None
    for place, axis in enumerate([*pattern, _Axis(1, False, 0)]):
        if axis.reduced and start is None:
            start = place
        elif not axis.reduced and start is not None:
            yield start, place
            start = None


def _pieces(outer: int, length: int, inner: int, hw: HardwareProfile, setting: Setting) -> int:
    """In how many pieces `length` elements are reduced, for `outer` x `inner` results."""
    if inner == 1:
        pieces = _row_pieces(outer, length, hw, setting.chain)
        return (_whole_rows(outer, length, hw, setting) or pieces) if pieces > 1 else 1
    if (outer * length, inner) in setting.rows:
        pieces = _mixed_pieces(outer, length, inner, hw)
        if pieces > 1:
            return pieces
    return _column_pieces(outer, length, inner, hw)


def _whole_rows(outer: int, length: int, hw: HardwareProfile, setting: Setting) -> int | None:
    """Pieces that are the rows of other reductions over the same data, whose kernel then does them
    on its way (the sum of all of a divergence, behind its softmaxes): the longest rows that are not
    taken apart themselves.
    """
    found = [
        rows // outer
        for rows, columns in setting.rows
        if rows > outer and rows % outer == 0 and rows * columns == outer * length
        if _row_pieces(rows, columns, hw, setting.chain) == 1
    ]
    return min(found, default=None)


def _column_pieces(outer: int, length: int, inner: int, hw: HardwareProfile) -> int:
    blocks = outer * -(-inner // COLUMNS_A_BLOCK)
    if not _starves(outer * length * inner, blocks, hw):
        return 1
    wanted = min(COLUMN_BLOCKS_A_SM * hw.num_sms / blocks, length // ROWS_A_BLOCK)
    return _divisor(length, wanted) or max(1, round(wanted))


def _row_pieces(rows: int, length: int, hw: HardwareProfile, chain: int) -> int:
    if not _starves(rows * length, rows * _blocks_a_row(hw), hw, chain):
        return 1
    wanted = min(ROW_PIECES_A_SM * hw.num_sms / rows, length // SHORT_PIECE)
    return _divisor(length, wanted) or max(1, round(wanted))


def _mixed_pieces(outer: int, length: int, inner: int, hw: HardwareProfile) -> int:
    """One piece for each block that is resident at once; whole rows only, so no padding."""
    threads = min(hw.max_threads_per_block, max(32, inner // MIXED_COLUMNS_A_THREAD))
    least, most = MIXED_BLOCKS_A_SM
    blocks = min(most, max(least, MIXED_THREADS_A_SM // threads))
    wanted = min(blocks * hw.num_sms / outer, length // MIXED_ROWS_A_BLOCK)
    return _divisor(length, wanted, above=1.0) or 1


def _starves(elements: int, blocks: int, hw: HardwareProfile, chain: int = 1) -> bool:
    """Whether `blocks` blocks lose more than the launch of a second kernel costs.

    Apart, each of `chain` reductions reads everything again.
    """
    share = min(1.0, blocks / hw.num_sms)
    seconds = BYTES * elements / hw.hbm_bytes_per_s
    return seconds / share > chain * (seconds + hw.launch_us * 1e-6)


def _blocks_a_row(hw: HardwareProfile) -> int:
    return CLUSTER if hw.has_clusters else 1


def _divisor(length: int, wanted: float, above: float = 1.5) -> int | None:
    """The divisor of `length` nearest to `wanted`, from half of it to `above` times."""
    low, high = max(2, math.ceil(wanted / 2)), math.floor(wanted * above)
    found = [d for d in range(low, high + 1) if length % d == 0]
    return min(found, key=lambda d: abs(math.log(d / wanted)), default=None)
