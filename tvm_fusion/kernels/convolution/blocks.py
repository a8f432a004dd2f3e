"""Which blocks are convolutions, and which before them only tell where data lies, by access maps.

resize2d(x) -> pad(x) -> convolution        x[n, (y + r - 1) // 2, (x + s - 1) // 2, c], or 0
"""

from __future__ import annotations

from collections.abc import Iterator

from ...ir.access import Access, Affine, Block, Index, Irregular
from ...ir.graph import Op
from ...plan.group_view import GroupView


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


def moved_before(group: GroupView, anchor: Op, repeats: bool) -> frozenset[int]:
    """The tensors between a convolution's operator and its data that hold nothing but the data:
    padded with zeros, cut, or (with `repeats`) enlarged by repeating elements along windows.
    """
    convolution = next(filter(is_convolution, anchor.blocks), None)
    if convolution is None or not _is_static(convolution):
        return frozenset()
    data, weights = data_and_weights(convolution)
    strides = _strides(convolution, data, weights)
    own = {id(block) for block in anchor.blocks}
    found = set()
    for tensor, block, read in _in_front(group, data.tensor):
        divides = any(isinstance(index, Irregular) for index in read.index)
        if id(block) in own:
            if divides:
                break  # a transposed convolution: zeros between elements
            continue
        if (divides and not repeats) or not _only_moves(group, block, read, strides):
            break
        found.add(tensor)
    return frozenset(found) - set(group.outputs)


def repeats_of(group: GroupView, tensor: int) -> int:
    """How many elements of a convolution's data are one in memory, side by side."""
    found = 1
    for *_, read in _in_front(group, tensor):
        for index in read.index:
            if isinstance(index, Irregular) and not read.guarded:
                found *= index.repeats
    return found


def _in_front(group: GroupView, tensor: int) -> Iterator[tuple[int, Block, Access]]:
    """The blocks of one read each that make a tensor, the last one first, with what they make."""
    while (block := group.writer_of.get(tensor)) is not None and len(block.reads) == 1:
        (read,) = block.reads
        yield tensor, block, read
        tensor = read.tensor


def _is_static(block: Block) -> bool:
    return all(isinstance(axis.extent, int) for axis in block.axes)


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
