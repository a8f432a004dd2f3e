"""How neighbouring lanes walk the tensors of a group: along which dimension, by how many elements,
and how far they come before memory jumps.

    s[i] = sum over (j, k) of x[i, j, g, k]     lanes along k: runs of K elements, G * K apart
    p[i] = x[i, label[i]]                       lanes along i: each in a row of its own
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.access import Access, Affine, Block, Irregular
from ..ir.extents import assumed
from ..ir.graph import FusionGraph


@dataclass(frozen=True, slots=True)
class Walk:
    """How lanes walk a tensor: the dimension that they move, by how many elements, and `alone` and
    `run` of `Stream`.
    """

    dimension: int
    step: int
    alone: bool = False
    run: int = 0


def lane_axis(block: Block, moving: dict[int, Walk | None]) -> tuple[int | None, Walk]:
    """The axis of the block along which lanes walk, and how."""
    for write in block.writes if block.reduction is None else ():
        if write.tensor in moving:
            walk = moving[write.tensor]
            if walk is None:
                return None, Walk(0, 0)
            at = walk.dimension
            index = write.index[at] if at < len(write.index) else None
            axis = index.single_axis if isinstance(index, Affine) else None
            return axis, walk
    known = block.derived.get("lanes")
    if known is None:
        anchor = block.writes[0]
        if block.reduction is not None and block.reads:
            anchor = max(block.reads, key=lambda read: len(read.axes))
        known = block.derived["lanes"] = _last_axis(block, anchor)
    return known, Walk(0, 1)


def is_pick(access: Access, axis: int | None) -> bool:
    """Whether each lane along the axis reads another row, where another tensor says."""
    if axis is None or not access.data_dependent:
        return False
    moved = [index for index in access.index if axis in index.axes]
    return len(moved) > 1 and isinstance(moved[-1], Irregular) and moved[-1].data_dependent


def run_length(graph: FusionGraph, block: Block, access: Access) -> int:
    """Elements that lie side by side while the reduced axes are walked over in order; 0 where all
    do, or where neighbours are elsewhere anyway.
    """
    known = access.derived.get("run")
    if known is None:
        known = access.derived["run"] = _find_run(graph, block, access)
    return known


def _find_run(graph: FusionGraph, block: Block, access: Access) -> int:
    run = 1
    for axis in reversed(block.reduced):
        extent = assumed(block.axes[axis].extent)
        if extent == 1:
            continue
        moved = [d for d, index in enumerate(access.index) if axis in index.axes]
        if len(moved) != 1 or not isinstance(access.index[moved[0]], Affine):
            return 0
        by = access.index[moved[0]].coefficients[axis]
        if pitch_of(graph, access.tensor, (moved[0], by), 1) != run:
            return run if run > 1 else 0
        run *= extent
    return 0


def _last_axis(block: Block, access: Access) -> int | None:
    """The axis that moves the last index."""
    for index in reversed(access.index):
        live = [i for i in sorted(index.axes) if assumed(block.axes[i].extent) > 1]
        if live:
            return live[-1]
    return None


def moved_dimension(access: Access, axis: int | None) -> tuple[int, int] | None:
    """The dimension of the tensor that moves with the axis, and by how many elements."""
    if axis is None:
        return None
    known = access.derived.get(axis, False)
    if known is False:
        known = None
        for number in range(len(access.index) - 1, -1, -1):
            index = access.index[number]
            if axis in index.axes:
                by = index.coefficients[axis] if isinstance(index, Affine) else 1
                known = number, by
                break
        access.derived[axis] = known
    return known


def pitch_of(graph: FusionGraph, tensor: int, moved: tuple[int, int] | None, step: int) -> int:
    """Elements between what neighbouring lanes access."""
    if moved is None:
        return 0
    pitch = moved[1] * step
    for extent in graph.tensors[tensor].shape[moved[0] + 1 :]:
        pitch *= extent if isinstance(extent, int) else assumed(extent)
    return pitch
