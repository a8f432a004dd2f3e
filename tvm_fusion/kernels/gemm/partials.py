"""Which reductions of a matrix product's result its own kernel can take along: those of aligned
runs of columns that lie within a tile, and of runs of 16 rows.

    h[m, n] = x @ W + r      p[m, t] = sum over c < 128 of h[m, 128 t + c]^2
                             q[t, n] = sum over i < 16 of h[16 t + i, n]

Also aligned windows of a few columns, with what is pointwise in them (pooling, maxout):

    y[m, t] = max over c < 3 of h[m, 3 t + c]

Rows are those of a batch each: 49 of an image are 4 runs, and tiles start at each image.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ...config import HardwareProfile
from ...ir.access import Affine, AxisKind, Block, Index, Reduction
from ...ir.extents import product_key
from ...plan.group_view import GroupView
from ...plan.refusal import Refusal, RefusalCode
from ..contraction.model import RUN_ROWS
from ..contraction.row_runs import WINDOW_ROWS
from ..group.footprint import is_identity
from ..group.read_order import plain_axes
from ..program.expr import HALF_DTYPES

WIDTHS = (128, 64)
"""Columns of a run, the preferred one first: what divides the tiles that are fast."""
KINDS = (Reduction.SUM, Reduction.MAX)
WIDEST_WINDOW, WINDOW_COLUMNS = 16, 64
"""Most columns of a window that mma.sync reduces, and of the least part of a tile that holds whole
windows and whole vectors of 8: with more, much of a tile would be unused.
"""
RUN_DTYPES = ("float32", "int8")
"""What an epilogue reduces, in float32, which holds int8 exactly; halves are float32 there."""


def writes_partials(hw: HardwareProfile) -> bool:
    """Whether a kernel of the device reduces runs of columns in its epilogue."""
    return hw.architecture.has_wgmma


@dataclass(frozen=True, slots=True)
class RowRuns:
    """A reduction over blocks of `heights` elements of a tensor of this shape, a number for each
    dimension; those of the last one are columns of a product. Of `whole` runs none reaches beyond.
    """

    shape: tuple[int, ...]
    heights: tuple[int, ...]
    whole: bool = False

    @property
    def rows(self) -> int | None:
        """Rows of a batch, where runs are along the dimension before the columns; else None."""
        return self.shape[-2] if self.heights[-2] == RUN_ROWS else None


def row_runs(
    group: GroupView,
    columns: Mapping[int, frozenset[int]],
    blocks: Sequence[Block],
    windows: bool = False,
) -> dict[int, RowRuns]:
    """Those of the reductions `blocks` that are over runs of rows of products, by `id`; with
    `windows`, of whole runs of fewer rows, too.

    `columns` are the axes of columns of each product, by the `id` of its block.
    """
    found, counts = {}, _column_counts(group, columns) if blocks else {}
    for block in blocks:
        runs = _row_runs(group, block, counts, windows)
        if runs is not None:
            found[id(block)] = runs
    return found


def _row_runs(
    group: GroupView, block: Block, columns: Mapping[int, int], windows: bool
) -> RowRuns | None:
    kinds = KINDS if windows else (Reduction.SUM,)
    if block.reduction not in kinds or len(block.reads) != 1:
        return None
    (read,) = block.reads
    shape, extents = group.graph.tensors[read.tensor].shape, [a.extent for a in block.axes]
    if columns.get(read.tensor) != shape[-1] or len(shape) < 2:
        return None
    if not all(isinstance(n, int) for n in (*shape, *extents)):
        return None
    pairs = zip(read.index, shape, strict=True)
    heights = [_height(block, index, n, windows and not read.guarded) for index, n in pairs]
    if None in heights or heights[-1] != 1:
        return None
    if math.prod(heights) not in (WINDOW_ROWS if windows else (RUN_ROWS,)):
        return None
    return RowRuns(tuple(shape), tuple(heights), windows and not read.guarded)


def _height(block: Block, index: Index, size: int, cut: bool) -> int | None:
    """How many elements side by side a block reduces along a dimension; None if it does it in
    another way. Those behind the last whole run are left out (`cut`), or are a run, too.
    """
    if not isinstance(index, Affine) or index.constant:
        return None
    live = [i for i in index.axes if block.axes[i].extent != 1]
    inner = [i for i in live if block.axes[i].kind is AxisKind.REDUCE]
    outer = [i for i in live if i not in inner]
    if len(inner) > 1 or len(outer) > 1:
        return None
    height = block.axes[inner[0]].extent if inner else 1
    count = block.axes[outer[0]].extent if outer else 1
    steps = [index.coefficients[i] for i in (*outer, *inner)]
    expected = [height] * len(outer) + [1] * len(inner)
    counts = size // height if cut else -(-size // height)
    return height if steps == expected and count == counts else None


def column_windows(
    group: GroupView, columns: Mapping[int, frozenset[int]], blocks: Sequence[Block]
) -> tuple[int, frozenset[int]]:
    """Columns of the windows that the reductions `blocks` are over, of a product that a tile holds,
    and by `id` these blocks and those that are pointwise in one of them; 0 and none where anything
    else is an output, or follows.

    `columns` are the axes of columns of each product, by the `id` of its block.
    """
    nothing: tuple[int, frozenset[int]] = 0, frozenset()
    counts = _column_counts(group, columns) if blocks else {}
    widths = {_window(group, block, counts) for block in blocks}
    if len(widths) != 1:
        return nothing
    (width,) = widths
    found = {id(block) for block in blocks}
    origins = {w.tensor: id(block) for block in blocks for w in block.writes}
    for block in group.blocks:
        sources = {origins.get(a.tensor) for a in block.reads}
        if sources - {None}:
            if len(sources) > 1 or not _is_pointwise(group, block):
                return nothing
            found.add(id(block))
            origins.update((w.tensor, origins[block.reads[0].tensor]) for w in block.writes)
    if width is None or not origins.keys() >= set(group.outputs):
        return nothing
    return width, frozenset(found)


def _is_pointwise(group: GroupView, block: Block) -> bool:
    """Whether each element of a tensor that a block writes is made of the one at its place in what
    it reads, all of which it reads.
    """
    tensors, written = group.graph.tensors, block.writes[0].tensor
    sizes = {product_key(tensors[t].shape) for t in (written, *(a.tensor for a in block.reads))}
    in_place = all(is_identity(block, a) and not a.guarded for a in block.reads)
    return block.reduction is None and len(sizes) == 1 and (id(block) in group.reshapes or in_place)


def _window(group: GroupView, block: Block, counts: Mapping[int, int]) -> int | None:
    """Columns of the aligned windows that a block reduces, or None."""
    if block.reduction not in KINDS or len(block.reads) != 1 or block.reads[0].guarded:
        return None
    (read,), found = block.reads, group.graph.tensors[block.reads[0].tensor]
    extents = [*found.shape, *(a.extent for a in block.axes)]
    if not counts.get(read.tensor) or not all(isinstance(n, int) for n in extents):
        return None
    pairs = zip(read.index, found.shape, strict=True)
    *others, width = [_height(block, index, n, False) for index, n in pairs]
    if width is None or width < 2 or width in WIDTHS or not {*others} <= {1}:
        return None
    whole = found.shape[-1] % width == counts[read.tensor] % width == 0
    fits = (
        width <= WIDEST_WINDOW
        and math.lcm(width, 8) <= WINDOW_COLUMNS
        and found.dtype in ("float32", *HALF_DTYPES)
    )
    return width if whole and fits else None


def refuse_partials(
    group: GroupView,
    columns: Mapping[int, frozenset[int]],
    blocks: Sequence[Block],
    hw: HardwareProfile,
    rows: Collection[int] = (),
) -> Refusal | None:
    """The refusal for the first of the reductions `blocks` that no epilogue of a product does.

    `columns` are the axes of columns of each product, by the `id` of its block; `rows` those of the
    reductions that are over runs of rows.
    """
    counts = _column_counts(group, columns)
    for block in blocks:
        why = _why_read(group, block) if id(block) in rows else _why_not(group, block, counts)
        if why is None and not writes_partials(hw):
            why = "reduces a row, which no kernel for this device does behind a product"
        if why is not None:
            return group.refuse(RefusalCode.EPILOGUE, f"{block.name} {why}")
    return None


def _why_not(group: GroupView, block: Block, columns: Mapping[int, int]) -> str | None:
    live = [i for i, axis in enumerate(block.axes) if axis.extent != 1]
    reduced = [i for i in block.reduced if i in live]
    if len(block.reads) != 1 or len(reduced) != 1 or reduced[0] != live[-1]:
        return "reduces a row; a tile of a matrix product holds part of one"
    (read,), width = block.reads, block.axes[reduced[0]].extent
    if width not in WIDTHS or columns.get(read.tensor, 0) % width or read.tensor not in columns:
        return "reduces a row; a tile of a matrix product holds part of one"
    if block.reduction not in KINDS or plain_axes(block, read) != live:
        return "reduces a run of columns in another way than by sum or maximum"
    dtype = group.graph.tensors[read.tensor].dtype
    if dtype not in (*RUN_DTYPES, *HALF_DTYPES):
        return f"reduces a run of {dtype}; epilogues do it in float32"
    if dtype == "int8" and block.reduction is not Reduction.MAX:
        return "sums up integers; epilogues do it in float32"
    if why := _why_read(group, block):
        return why
    if not all(_is_reduced_further(group, w.tensor) for w in block.writes):
        return "is a statistic that a kernel with whole rows takes along when it applies it"
    return None


def _why_read(group: GroupView, block: Block) -> str | None:
    """Why no kernel of a product can have the readers of a reduction, or None."""
    if any(w.tensor in group.readers_of or w.tensor not in group.outputs for w in block.writes):
        return "is read within the kernel that holds only part of a row at a time"
    return None


def _is_reduced_further(group: GroupView, tensor: int) -> bool:
    """Whether a tensor of partial results goes into reductions only, or is a result itself.

    Rows that a statistic is applied to are read once more, and their statistic costs nothing then.
    """
    ops, found = group.graph.ops, group.graph.tensors[tensor]
    return all(any(b.reduction is not None for b in ops[op].blocks) for op in found.consumers)


def _column_counts(group: GroupView, columns: Mapping[int, frozenset[int]]) -> dict[int, int]:
    """The tensors that hold elements of a product in its own row-major order: how many columns
    each product's row has.
    """
    key = "column counts", *columns.items()
    return group.once(key, lambda: _counted(group, columns))


def _counted(group: GroupView, columns: Mapping[int, frozenset[int]]) -> dict[int, int]:
    found: dict[int, int] = {}
    for block in group.blocks:
        if id(block) in columns:
            count = _contiguous_columns(block, columns[id(block)])
        else:
            reads = [access for access in block.reads if access.tensor in found]
            in_order = id(block) in group.views or all(is_identity(block, a) for a in reads)
            count = min((found[a.tensor] for a in reads), default=0) if in_order else 0
        if count and (id(block) in columns or block.reduction is None):
            found.update((w.tensor, count) for w in block.writes)
    return found


def _contiguous_columns(block: Block, columns: frozenset[int]) -> int:
    """Extent of a product's last axis if that is one of columns and writes are in order, else 0."""
    live = [i for i in block.spatial if block.axes[i].extent != 1]
    if not live or live[-1] not in columns or plain_axes(block, block.writes[0]) != live:
        return 0
    extent = block.axes[live[-1]].extent
    return extent if isinstance(extent, int) else 0
