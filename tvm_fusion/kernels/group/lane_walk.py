"""How neighbouring lanes walk the tensors of a group: along which dimension, by how many elements,
and how far they come before memory jumps.

    s[i] = sum over (j, k) of x[i, j, g, k]     lanes along k: runs of K elements, G * K apart
    p[i] = x[i, label[i]]                       lanes along i: each in a row of its own
"""

from __future__ import annotations

from typing import NamedTuple

from ...ir.access import Access, Affine, Block, Irregular
from ...ir.extents import assumed, assumed_product
from ...ir.graph import FusionGraph
from ...plan.group_view import dtype_bytes


class Walk(NamedTuple):
    """How lanes walk a tensor: the dimension that they move, by how many elements, and `alone` and
    `run` of `Stream`.
    """

    dimension: int
    step: int
    alone: bool = False
    run: int = 0


class LaneWrite(NamedTuple):
    """A write of a block: bytes of an element, elements between what neighbouring lanes write, and
    those of the tensor.
    """

    tensor: int
    size: int
    pitch: int
    elements: float


class LaneRead(NamedTuple):
    """A read of a block, in the words of `Stream`, and how lanes walk the tensor."""

    tensor: int
    walk: Walk | None
    size: int
    pitch: int
    elements: float
    guarded: bool
    chosen: bool
    alone: bool
    run: int


class Lanes(NamedTuple):
    """What a block is to neighbouring lanes."""

    writes: tuple[LaneWrite, ...]
    reads: tuple[LaneRead, ...]


class Way(NamedTuple):
    """From where lanes come to a block: they walk a result as `walk` says (None: they stay at one
    element); `number` is that of the write, -1 where nothing is known.
    """

    number: int
    walk: Walk | None


LOOSE = Way(-1, None)


def lanes_of(graph: FusionGraph, block: Block, way: Way, in_rows: bool) -> Lanes:
    """What a block's reads and writes are to lanes that come to it on a way; `in_rows` as in
    `streams`.
    """
    axis, by = _lane_axis(block, way)
    writes, reads = [], []
    for write in block.writes:
        pitch = pitch_of(graph, write.tensor, moved_dimension(write, axis), by.step)
        writes.append(LaneWrite(write.tensor, *_sizes(graph, write.tensor, pitch)))
    in_runs = in_rows and block.reduction is not None
    for access in block.reads:
        moved = moved_dimension(access, axis)
        alone = by.alone or is_pick(access, axis)
        run = run_length(graph, block, access) if in_runs else by.run
        pitch = pitch_of(graph, access.tensor, moved, by.step)
        chosen = alone or (access.data_dependent and abs(pitch) != 1)
        reads.append(
            LaneRead(
                access.tensor,
                moved and Walk(moved[0], moved[1] * by.step, alone, run),
                *_sizes(graph, access.tensor, pitch),
                access.guarded,
                chosen=pitch != 0 and chosen,
                alone=pitch != 0 and alone,
                run=run,
            )
        )
    return Lanes(tuple(writes), tuple(reads))


def _sizes(graph: FusionGraph, tensor: int, pitch: int) -> tuple[int, int, float]:
    """Bytes of an element, the pitch, elements of the tensor."""
    node = graph.tensors[tensor]
    return dtype_bytes(node.dtype), pitch, float(assumed_product(node.shape))


def _lane_axis(block: Block, way: Way) -> tuple[int | None, Walk]:
    """The axis of the block along which lanes walk, and how."""
    if way.number >= 0:
        if way.walk is None:
            return None, Walk(0, 0)
        indices, at = block.writes[way.number].index, way.walk.dimension
        index = indices[at] if at < len(indices) else None
        return index.single_axis if isinstance(index, Affine) else None, way.walk
    anchor = block.writes[0]
    if block.reduction is not None and block.reads:
        anchor = max(block.reads, key=lambda read: len(read.axes))
    return _last_axis(block, anchor), Walk(0, 1)


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
    for number in range(len(access.index) - 1, -1, -1):
        index = access.index[number]
        if axis in index.axes:
            return number, index.coefficients[axis] if isinstance(index, Affine) else 1
    return None


def pitch_of(graph: FusionGraph, tensor: int, moved: tuple[int, int] | None, step: int) -> int:
    """Elements between what neighbouring lanes access."""
    if moved is None:
        return 0
    pitch = moved[1] * step
    for extent in graph.tensors[tensor].shape[moved[0] + 1 :]:
        pitch *= extent if isinstance(extent, int) else assumed(extent)
    return pitch
