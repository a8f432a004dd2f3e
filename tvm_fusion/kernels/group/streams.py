"""How the threads of a launch meet memory: what each input and output of a group is to neighbouring
threads.

Lanes of a warp take neighbouring points of the axis along which the kernel reads or writes. What
that axis is to a tensor follows from the index maps between: the same element for all lanes, their
neighbours, or elements a step apart.

    y[i, j] = x[j, i] + b[j] + s[i]     lanes along j: x steps a row, b one element, s stays
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ...config import HardwareProfile
from ...ir.access import Access, Affine, Block, Irregular
from ...ir.extents import assumed, assumed_product
from ...ir.graph import FusionGraph
from ...plan.group_view import GroupView, dtype_bytes
from .footprint import footprint_bytes, index_of

# How neighbouring lanes walk the tensors of a group: along which dimension, by how many elements,
# and how far they come before memory jumps.
#
#     s[i] = sum over (j, k) of x[i, j, g, k]     lanes along k: runs of K elements, G * K apart
#     p[i] = x[i, label[i]]                       lanes along i: each in a row of its own


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
    gathered: bool
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
        gathered = alone or (access.data_dependent and abs(pitch) != 1)
        reads.append(
            LaneRead(
                access.tensor,
                moved and Walk(moved[0], moved[1] * by.step, alone, run),
                *_sizes(graph, access.tensor, pitch),
                access.guarded,
                gathered=pitch != 0 and gathered,
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


LANES = 32
LINE_BYTES = 128
WIDEST_ACCESS = 16
SHORTEST_STEPS = 4
STORED = 1.45
"""What the L2 takes for a sector that is written, beside one that is read: 4.8 TB/s of writes where
reads reach 7 and more (H200, 2026-11-20)."""
SCATTERED = 2.3
"""Passes that a line takes of which a warp asks for one piece only, beside one in which its lanes
lie side by side: what a multiprocessor has under way is counted in lines, so that pieces keep far
fewer bytes in flight. From three kernels on an H200: 4096 gathers by one block in 10 us, and sums
of rows made of runs of 10 elements, 42 million in 63 us (float32) and about 70 us (float16)."""


class Stream(NamedTuple):
    """One read or write of memory.

    Attributes
    ----------
    tensor : int
    size : bytes of an element
    count : elements that the launch asks for
    step : elements between what neighbouring lanes ask for; 0 where they share one
    own : as large as the space that the kernel runs over, so that every point has its own element
    stored : a write
    gathered : the place is found in another tensor (a gather)
    alone : so is the one in each row: no two points lie in one line
    run : elements that lie side by side before the next ones are elsewhere; 0 where all do
    """

    tensor: int
    size: int
    count: float
    step: int
    own: bool
    stored: bool = False
    gathered: bool = False
    alone: bool = False
    run: int = 0

    @property
    def along(self) -> bool:
        """Lanes read neighbours, or every second to fourth element: such reads come in groups that
        share their vectors (windows, interleaved parts).
        """
        return 1 <= abs(self.step) <= SHORTEST_STEPS and not self.gathered

    def sector_bytes(self, width: int, sector: int) -> float:
        """Bytes of the sectors that are asked for by vectors of `width` points. Vectors of more
        than one access write each sector in parts, one after the other.
        """
        if self.step == 0:
            return self.count / width
        if self.along:
            wide = width * self.size
            parts = min(2, max(1, wide // WIDEST_ACCESS)) if self.stored else 1
            parts *= STORED if self.stored else 1.0
            return self.count * self.size * parts * self._touched(self.run, sector)
        apart = sector if self.gathered else min(sector, abs(self.step) * self.size)
        return self.count * max(self.size, apart)

    def wavefronts(self, width: int, piece: int) -> float:
        """Passes of a warp through the load/store units; `piece`: widest access of its vectors."""
        if self.step == 0:
            return self.count / (width * LANES)
        if self.along:
            wide = max(self.size, min(piece, width * self.size))
            lines = max(1.0, min(float(LANES), width * self.size * LANES / LINE_BYTES))
            if self.run:
                lines += SCATTERED * max(0.0, self._lines(width) - lines)
            return self.count * self.size / wide * lines / LANES
        if self.alone:
            return self.count * SCATTERED
        lines = LANES * width * abs(self.step) * self.size / LINE_BYTES
        return self.count * min(float(LANES), max(1.0, lines)) / LANES

    def _touched(self, run: int, unit: int) -> float:
        """Bytes of the sectors or lines that runs lie in, over those of the runs; `unit` of one."""
        if not run:
            return 1.0
        size = run * self.size
        return (size + unit - math.gcd(size, unit)) / size

    def _lines(self, width: int) -> float:
        """Lines in which a warp's vectors lie, `width` points each."""
        points = LANES * width
        run = min(self.run, points)
        return points * self.size / LINE_BYTES * self._touched(run, LINE_BYTES)

    def accesses(self, width: int, piece: int) -> float:
        """Instructions a thread executes for it, over all threads."""
        if self.step == 0:
            return self.count / width
        if self.along:
            return self.count * self.size / max(self.size, min(piece, width * self.size))
        return self.count


def streams(
    group: GroupView, counts: tuple[float, ...], space: float, in_rows: bool = False
) -> tuple[Stream, ...]:
    """All reads of inputs and writes of outputs.

    Parameters
    ----------
    group : GroupView
    counts : tuple of float
        How often each block runs, in points (`Fit.evaluations`).
    space : float
        Points of the space that the kernel runs over.
    in_rows : bool
        Whether lanes walk along the reduced axes, in their order: the rows may be made of runs.
    """
    graph, found = group.graph, []
    index, outputs = index_of(group), frozenset(group.outputs)
    facts, made = index.facts, index.made
    moving: dict[int, Walk | None] = {}
    for k in range(len(counts) - 1, -1, -1):
        count, own = counts[k], facts[k]
        if not count:
            continue
        if own.reduces:  # lanes come to it from none of its results
            way = in_rows
        elif own.tensor is not None:
            way = moving.get(own.tensor, LOOSE)
        else:
            way = _way(own.tensors, moving)
        lanes = own.lanes.get(way)
        if lanes is None:
            known = LOOSE if own.reduces else _way(own.tensors, moving)
            lanes = own.lanes[way] = lanes_of(graph, group.blocks[k], known, in_rows)
        for t, size, pitch, elements in lanes.writes:
            if t in outputs:
                found.append(Stream(t, size, elements, pitch, elements >= space, True))
        for t, walk, size, pitch, elements, guarded, gathered, alone, run in lanes.reads:
            if t in made:
                before = moving.setdefault(t, walk)
                if before and before.alone and walk and not walk.alone:
                    moving[t] = walk  # picks are few beside the points that others read
                continue
            asked = count
            if guarded:  # a part of a concatenation is read where it stands, no more
                asked = min(count, elements * max(1.0, count / own.points))
            whole = pitch != 0 and elements >= min(count, space)
            found.append(Stream(t, size, asked, pitch, whole, False, gathered, alone, run))
    return tuple(found)


def _way(tensors: tuple[int, ...], moving: dict[int, Walk | None]) -> Way:
    """How lanes walk the first of these tensors that a block behind reads."""
    for number, t in enumerate(tensors):
        if t in moving:
            return Way(number, moving[t])
    return LOOSE


def bytes_a_point(found: tuple[Stream, ...], space: float) -> float:
    """Bytes that a point of the space loads of its own."""
    return sum([s.size * min(1.0, s.count / space) for s in found if s.own and not s.stored])


def element_sizes(found: tuple[Stream, ...], space: float) -> list[int]:
    """Bytes of the elements of what most points have of their own."""
    return [s.size for s in found if s.own and (s.stored or 2 * s.count >= space)]


def requested_bytes(
    group: GroupView, found: tuple[Stream, ...], width: int, hw: HardwareProfile
) -> float:
    """Bytes of sectors that the load/store units ask the L2 for.

    What is read again, by the same multiprocessor and soon, comes out of its first-level cache: a
    tensor that fits there is fetched once by each of them.
    """
    total = 0.0
    cache = hw.smem_per_sm_bytes
    asked: dict[int, tuple[float, float, bool]] = {}
    for stream in found:
        size = stream.sector_bytes(width, hw.sector_bytes)
        if stream.stored:
            total += size
        else:
            before = asked.get(stream.tensor, (0.0, 0.0, True))
            near = before[2] and abs(stream.step) <= SHORTEST_STEPS and not stream.gathered
            asked[stream.tensor] = before[0] + size, max(before[1], size), near
    for tensor, (size, largest, near) in asked.items():
        once = footprint_bytes(group, tensor)
        if near:  # the reads of one tensor by one block lie in the same lines
            size = min(size, max(once, largest))
        if size > once:
            missed = max(0.0, 1.0 - cache / once) if once else 0.0
            size = min(size, once * hw.num_sms + missed * max(once, largest))
        total += size
    return total


def loads_and_stores(found: Sequence[Stream]) -> tuple[Stream, ...]:
    """The reads and writes of one sweep: what several blocks read at a point is loaded once."""
    once: dict[tuple, Stream] = {}
    for number, stream in enumerate(found):
        key: tuple = stream.tensor, stream.step, stream.stored
        key = key if stream.own else (*key, number)
        if key not in once or stream.count > once[key].count:
            once[key] = stream
    return tuple(once.values())
