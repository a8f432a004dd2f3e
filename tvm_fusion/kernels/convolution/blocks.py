"""Which blocks are convolutions, and which before them only tell where data lies, by access maps.

resize2d(x) -> pad(x) -> convolution        x[n, (y + r - 1) // 2, (x + s - 1) // 2, c], or 0
concat(x, y) -> convolution                 x[..., c] for c < 64, y[..., c - 64] from there on
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...ir.access import Access, Affine, Block, Index, Irregular, derived
from ...ir.graph import FusionGraph, Op
from ...plan.group_view import GroupView


@derived
def is_convolution(block: Block) -> bool:
    """Whether a block sums products of data that is read at windows with weights."""
    if not block.is_contraction or len(block.reads) != 2:
        return False
    return [_has_window(block, read) for read in block.reads].count(True) == 1


def data_and_weights(block: Block) -> tuple[Access, Access]:
    """The reads of a convolution's block: the one that has windows, and the other one."""
    first, second = block.reads
    return (first, second) if _has_window(block, first) else (second, first)


def _has_window(block: Block, read: Access) -> bool:
    spatial, reduced = set(block.spatial), set(block.reduced)
    return any(
        isinstance(i, Affine) and i.axes & spatial and len(i.axes & reduced) == 1
        for i in read.index
    )


def sums_known_sizes(block: Block) -> bool:
    """Whether a convolution's sizes are known but for those of its positions."""
    _, weights = data_and_weights(block)
    symbolic = {n for n, axis in enumerate(block.axes) if not isinstance(axis.extent, int)}
    return symbolic <= set(block.spatial) - weights.axes


MOST_PARTS = 4
"""Parts of a concatenation that a kernel has code for."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some of the channels of a convolution's data, in a tensor of their own; `repeats` elements of
    the data, side by side, are one of that.
    """

    channels: int
    repeats: int


def moved_before(
    group: GroupView, anchor: Op, repeats: Callable[[int | None], bool]
) -> frozenset[int]:
    """The tensors between a convolution's operator and its data that hold nothing but the data:
    padded with zeros, cut, enlarged by repeating elements along windows, or parts of it one behind
    the other along the channels. `repeats` says whether enlarged data is taken: a part of so many
    channels, or with None the whole of it.
    """
    convolution = next(filter(is_convolution, anchor.blocks), None)
    if convolution is None or not sums_known_sizes(convolution):
        return frozenset()
    data, weights = data_and_weights(convolution)
    strides = _strides(convolution, data, weights)
    own = {id(block) for block in anchor.blocks}
    found: set[int] = set()

    def walk(tensor: int, channels: int | None) -> None:
        block = group.writer_of.get(tensor)
        if block is None:
            return
        divides = any(isinstance(i, Irregular) for read in block.reads for i in read.index)
        is_own = id(block) in own
        if len(block.reads) == 1 and (not is_own or not divides):
            taken = is_own or (
                (not divides or repeats(channels))
                and _only_moves(group, block, block.reads[0], strides)
            )
            if taken:
                found.update(() if is_own else (tensor,))
                walk(block.reads[0].tensor, channels)
        elif channels is None and not is_own:
            parts = _parts(group, block, _channel_dim(convolution, data, weights))
            found.update([tensor] if parts else ())
            for part, size in parts:
                walk(part, size)

    walk(data.tensor, None)
    return frozenset(found) - set(group.outputs)


def parts_of(group: GroupView, block: Block) -> tuple[Part, ...]:
    """The parts of a concatenation that a convolution's data is within its group; none where it is
    no concatenation.
    """
    data, weights = data_and_weights(block)
    tensor, repeats = source_of(group, data.tensor)
    joined = group.writer_of.get(tensor)
    parts = () if joined is None else _parts(group, joined, _channel_dim(block, data, weights))
    return tuple(Part(size, repeats * source_of(group, part)[1]) for part, size in parts)


def source_of(group: GroupView, tensor: int) -> tuple[int, int]:
    """What a tensor is made of by blocks of one read each, and how many elements of it, side by
    side, are one there.
    """
    repeats = 1
    while (block := group.writer_of.get(tensor)) is not None and len(block.reads) == 1:
        (read,) = block.reads
        for index in read.index:
            if isinstance(index, Irregular) and not read.guarded:
                repeats *= index.repeats
        tensor = read.tensor
    return tensor, repeats


def _channel_dim(block: Block, data: Access, weights: Access) -> int | None:
    """The dimension of the data that holds the channels, where all filters read all of them."""
    slides, reduced = set(block.spatial), set(block.reduced)
    if data.axes & weights.axes & slides:
        return None
    plain = [
        dim
        for dim, index in enumerate(data.index)
        if isinstance(index, Affine) and index.single_axis in reduced
    ]
    return plain[0] if len(plain) == 1 else None


def _parts(group: GroupView, block: Block, dim: int | None) -> tuple[tuple[int, int], ...]:
    """The tensors, with their sizes, that a block puts one behind the other along a dimension;
    nothing where it does anything else.

    Each point reads one of them under a condition. They are as long together as the result, and one
    begins where another one ends, so that no point can read any other.
    """
    if dim is None or not block.moves or not 1 < len(block.reads) <= MOST_PARTS:
        return ()
    at = block.writes[0].index
    found, start = [], 0
    for read in sorted(block.reads, key=lambda read: -_shift(read.index[dim : dim + 1])):
        shape = group.graph.tensors[read.tensor].shape
        if len(read.index) != len(at) or not isinstance(shape[dim], int):
            return ()
        if shape[dim] == 1:
            return ()  # no axis
        index, here = read.index[dim], at[dim]
        shifted = isinstance(index, Affine) and isinstance(here, Affine) and read.guarded
        if not shifted or (index.coefficients, -index.constant) != (here.coefficients, start):
            return ()
        if any(i != j for d, (i, j) in enumerate(zip(read.index, at, strict=True)) if d != dim):
            return ()
        found.append((read.tensor, shape[dim]))
        start += shape[dim]
    whole = group.graph.tensors[block.writes[0].tensor].shape
    return tuple(found) if start == whole[dim] else ()


def _shift(index: tuple[Index, ...]) -> int:
    return index[0].constant if index and isinstance(index[0], Affine) else 0


def enlarged_cores(graph: FusionGraph, least_filters: int) -> Iterator[tuple[int, ...]]:
    """Convolutions of so many filters or more that read a join, with the join and what moves its
    parts before it, where one of them is enlarged.

    Reading parts apart gains nothing over a join, and enlarging a part on its way does only where
    they are read apart: no step on the way to both gains.
    """
    for op in graph.ops:
        block = next(filter(is_convolution, op.blocks), None)
        if block is None or not sums_known_sizes(block):
            continue
        _, weights = data_and_weights(block)
        filters = block.extents(tuple(weights.axes & set(block.spatial)))
        joins = [graph.ops[p] for p in graph.producers(op.id) if graph.ops[p].is_join]
        if math.prod(filters) < least_filters or len(joins) != 1:
            continue
        moved = _moving(graph, joins[0])
        reads = [read for i in moved for b in graph.ops[i].blocks for read in b.reads]
        repeats = any(isinstance(i, Irregular) and i.repeats > 1 for r in reads for i in r.index)
        if repeats and graph.consumers(joins[0].id) == (op.id,):
            yield tuple(sorted((*moved, joins[0].id, op.id)))


def _moving(graph: FusionGraph, join: Op) -> list[int]:
    """The operators before a join that move its parts, and nothing but these."""
    found, waiting = [], [join.id]
    while waiting:
        op = waiting.pop()
        for producer in graph.producers(op):
            blocks = graph.ops[producer].blocks
            moves = len(blocks) == 1 and blocks[0].moves and len(blocks[0].reads) == 1
            if moves and graph.consumers(producer) == (op,):
                found.append(producer)
                waiting.append(producer)
    return found


def _strides(block: Block, data: Access, weights: Access) -> dict[int, int]:
    """The dimensions of the data along which a filter of several taps slides, its windows over each
    other, and how far. (Where they are apart, ``(2 i + r) // 2`` is ``i``, whatever the tap, and
    ``2 i + r >= 2`` is ``i >= 1``: no reader finds a window there.)
    """
    slides, reduced = set(block.spatial) - weights.axes, set(block.reduced)
    found = {}
    for dim, index in enumerate(data.index):
        axes, taps = index.axes & slides, index.axes & reduced
        if not isinstance(index, Affine) or len(axes) != 1 or len(taps) != 1:
            continue
        (axis,), (tap,) = axes, taps
        stride, dilation = (index.coefficients[i] for i in (axis, tap))
        if 0 < stride <= dilation * (int(block.axes[tap].extent) - 1):
            found[dim] = stride
    return found


def _only_moves(group: GroupView, block: Block, read: Access, strides: dict[int, int]) -> bool:
    """Whether a block moves elements along windows only, each dimension by itself."""
    source, target = (group.graph.tensors[a.tensor].shape for a in (read, block.writes[0]))
    if not block.moves or not len(source) == len(target) == len(block.axes):
        return False
    if any(isinstance(i, Irregular) for i in read.index) and read.guarded:
        return False
    pairs = zip(read.index, block.writes[0].index, strict=True)
    return all(
        (index == at and source[dim] == target[dim])
        or (source[dim] != 1 and _slides(index, at, strides.get(dim)))
        for dim, (index, at) in enumerate(pairs)
    )


def _slides(index: Index, at: Index, stride: int | None) -> bool:
    """Whether an index is an axis and a constant, or that axis over a number, where windows slide
    (element by element).
    """
    if isinstance(index, Irregular):
        return stride == 1 and index.repeats > 1 and index.axes == at.axes
    return stride is not None and isinstance(at, Affine) and index.coefficients == at.coefficients
