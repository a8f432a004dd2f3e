"""Which reductions of a matrix product's result its own kernel can take along: those of aligned
runs of columns that lie within a tile.

    h[m, n] = x @ W + r      p[m, t] = sum over c < 128 of h[m, 128 t + c]^2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...config import HardwareProfile
from ...ir.access import Block, Reduction
from ...plan.group_view import GroupView
from ...plan.refusal import Refusal, RefusalCode
from ..group.footprint import is_identity
from ..group.read_order import plain_axes

ARCHITECTURE = "sm_90a"

WIDTHS = (128, 64)
"""Columns of a run, the preferred one first: what divides the tiles that are fast."""
KINDS = (Reduction.SUM, Reduction.MAX)


def writes_partials(hw: HardwareProfile) -> bool:
    """Whether a kernel of the device reduces runs of columns in its epilogue."""
    return hw.kind == "cuda" and hw.arch == ARCHITECTURE


def refuse_partials(
    group: GroupView,
    columns: Mapping[int, frozenset[int]],
    blocks: Sequence[Block],
    hw: HardwareProfile,
) -> Refusal | None:
    """The refusal for the first of the reductions `blocks` that is none of a product's columns.

    `columns` are the axes of columns of each product, by the `id` of its block.
    """
    counts = _column_counts(group, columns)
    for block in blocks:
        why = _why_not(group, block, counts)
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
    if any(w.tensor in group.readers_of or w.tensor not in group.outputs for w in block.writes):
        return "is read within the kernel that holds only part of a row at a time"
    if not all(_is_reduced_further(group, w.tensor) for w in block.writes):
        return "is a statistic that a kernel with whole rows takes along when it applies it"
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
