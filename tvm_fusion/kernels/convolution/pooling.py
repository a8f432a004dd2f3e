"""Pooling behind a convolution: which windows of its results its own kernel can reduce.

    h = relu(conv2d(x, W))                                        # [N, 56, 56, C]
    p[n, y, x, c] = max over i, j < 2 of h[n, 2 y + i, 2 x + j, c]

Windows lie beside each other, so that each result is in one of them, and hold 2, 4, 8 or 16
positions: those lie within the 16 rows of a warp (`contraction.row_runs`). What is pointwise in the
reduction, such as the division of a mean, is computed where it is stored. All of it is told from
access maps: a reduction of what comes of the convolution at windows of its positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ...config import HardwareProfile
from ...ir.access import Access, Affine, Block
from ...ir.extents import assumed_product
from ...plan.group_view import GroupView
from ...plan.refusal import Refusal, RefusalCode
from ..contraction.row_runs import WINDOW_ROWS
from ..gemm.partials import KINDS, RowRuns, row_runs
from ..group.footprint import points
from ..group.read_order import plain_axes


def pools(hw: HardwareProfile) -> bool:
    """Whether a kernel of the device reduces windows of a convolution's results."""
    return hw.architecture.has_mma


def windows_of(
    group: GroupView, columns: Mapping[int, frozenset[int]], blocks: Sequence[Block]
) -> dict[int, RowRuns]:
    """Those of the reductions `blocks` that a kernel takes along, by `id`, with the blocks that are
    pointwise in one. `columns` are the axes of filters, by the `id` of the convolution's block.
    """
    found = row_runs(group, columns, blocks, windows=True)
    for block in blocks:
        if id(block) in found:
            behind, _ = _behind(group, block)
            found.update({id(other): found[id(block)] for other in behind})
    return found


def refuse_windows(
    group: GroupView, convolution: Block, hw: HardwareProfile, known: Mapping[int, RowRuns]
) -> Refusal | None:
    """The refusal for the first reduction of the convolution's results over windows that its kernel
    does not take along: none of `known`, or one with something else behind it. None where there are
    other products, for which the group is refused anyhow.
    """
    if sum(block.is_contraction for block in group.blocks) > 1:
        return None
    after = {w.tensor for w in convolution.writes}
    for block in group.blocks:
        if not any(read.tensor in after for read in block.reads):
            continue
        after |= {w.tensor for w in block.writes}
        if block.reduction is None:
            continue
        why = _behind(group, block)[1] if id(block) in known else _why_not(group, block, hw)
        if why is not None:
            return group.refuse(RefusalCode.EPILOGUE, f"{block.name} {why}")
    return None


def _why_not(group: GroupView, block: Block, hw: HardwareProfile) -> str | None:
    windows = _windows(block)
    if windows is None:
        return None
    sizes = [size for size, _ in windows]
    shown = " x ".join(map(str, sizes))
    if any(step < size for size, step in windows):
        return f"pools windows of {shown} that lie over each other: results would be computed twice"
    if not pools(hw):
        return "pools results, which no kernel for this device does behind a convolution"
    if any(step > size for size, step in windows):
        return f"pools windows of {shown} that lie apart"
    if math.prod(sizes) not in WINDOW_ROWS or any(n & n - 1 for n in sizes):
        few = ", ".join(map(str, WINDOW_ROWS))
        return f"pools windows of {shown} positions, and a warp holds those of {few}"
    if block.reduction not in KINDS:
        return "pools results by neither their sum nor their maximum"
    return "pools results whose filters do not lie side by side, or some of which are padding"


def _windows(block: Block) -> list[tuple[int, int]] | None:
    """Size and step of the windows that a block reduces along each dimension of what it reads where
    it has several elements; None where it is no reduction of windows.
    """
    if block.reduction is None or len(block.reads) != 1:
        return None
    found = []
    for index in block.reads[0].index:
        if not isinstance(index, Affine):
            return None
        live = [i for i in index.axes if block.axes[i].extent != 1]
        inner = [i for i in live if i in block.reduced]
        if not inner:
            continue
        outer = [i for i in live if i not in inner]
        sizes = [block.axes[i].extent for i in inner]
        if len(inner) > 1 or len(outer) != 1 or not isinstance(sizes[0], int):
            return None
        found.append((sizes[0], index.coefficients[outer[0]]))
    return found or None


def _behind(group: GroupView, block: Block) -> tuple[list[Block], str | None]:
    """The blocks of the group that are pointwise in a reduction; why that cannot be stored."""
    chain, found = {w.tensor for w in block.writes}, []
    size = assumed_product(block.extents(block.spatial))
    for other in group.blocks:
        if other is block or not any(read.tensor in chain for read in other.reads):
            continue
        if other.reduction is not None:
            return found, f"is reduced further, by {other.name}"
        if any(read.tensor not in chain for read in other.reads):
            return found, f"goes into {other.name} with other tensors"
        if points(other) != size or not all(_is_rearranged(group, other, r) for r in other.reads):
            return found, f"is read by {other.name} at other places than are stored"
        found.append(other)
        chain |= {w.tensor for w in other.writes}
    return found, None


def _is_rearranged(group: GroupView, block: Block, read: Access) -> bool:
    """Whether a block reads each element once."""
    live = {i for i, axis in enumerate(block.axes) if axis.extent != 1}
    found = plain_axes(block, read)
    return id(block) in group.views or (len(found) == len(live) and set(found) == live)
