"""Pairs of columns behind a matrix product, on access maps: what a rotary embedding reads.

    x = reshape(T)           [.., 16, 128]   all of T, in runs of 128 columns
    a = x[.., :64]           [.., 64]        columns 0 ... 63 of each run
    b = x[.., 64:]           [.., 64]        columns 64 ... 127
    r = concat(-b, a)        [.., 128]       all again: column t is made of t + 64, or of t - 64

A tensor behind a product holds all of its elements, or some of each run of its innermost columns.
What has come together to all elements again may be made of two columns at one distance.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...ir.access import Access, Affine, Block, Extent, Index, Irregular
from ...ir.extents import assumed_product, product_key
from ...plan.group_view import GroupView

MAX_WIDTH = 1024  # columns of a run

Space = tuple[int, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Whole:
    """All elements of a product that has `space`, along whose columns the dimensions `columns` lie,
    outermost first. Where elements are made of pairs, these are `distance` apart in runs of
    `width`.
    """

    space: Space
    columns: tuple[int, ...] = ()
    width: int = 0
    distance: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Some elements of each run of `width` columns: those over the dimensions `dims`, with their
    extents. `sources` has the columns within the run that each is made of.
    """

    space: Space
    dims: tuple[tuple[int, int], ...]
    width: int
    sources: tuple[frozenset[int], ...]


State = Whole | Piece
Columns = Mapping[int, frozenset[int]]
"""The axes of columns of each product, by the `id` of its block."""


def columns_behind(group: GroupView, columns: Columns) -> dict[int, State]:
    """What the tensors behind products hold, where one of them holds some elements only; one of
    which that is not known is left out. Nothing where each block runs over all elements.
    """
    if not _takes_apart(group, columns):
        return {}
    return group.once("columns behind", lambda: _columns_behind(group, columns))


def is_part(group: GroupView, behind: Mapping[int, State], tensor: int) -> bool:
    """Whether a tensor holds a product's elements, or some of them for others of the group."""
    state = behind.get(tensor)
    return isinstance(state, Whole) or (state is not None and tensor not in group.outputs)


def _takes_apart(group: GroupView, columns: Columns) -> bool:
    """Whether a block behind a product runs over some of its elements only."""
    sizes: dict[int, Space] = {}
    for block in group.blocks:
        written = block.writes[0].tensor
        if id(block) in columns:
            sizes[written] = product_key(block.extents(block.spatial))
            continue
        found = [sizes[a.tensor] for a in block.reads if a.tensor in sizes]
        if found and block.reduction is None:
            if any(size != product_key(a.extent for a in block.axes) for size in found):
                return True
            sizes[written] = found[0]
    return False


def _columns_behind(group: GroupView, columns: Columns) -> dict[int, State]:
    states: dict[int, State] = {}
    for block in group.blocks:
        write = block.writes[0]
        if id(block) in columns:
            dims = tuple(d for d, i in enumerate(write.index) if i.axes & columns[id(block)])
            states[write.tensor] = Whole(product_key(block.extents(block.spatial)), dims)
            continue
        reads = [a for a in block.reads if a.tensor in states]
        if reads and block.reduction is None and len(block.writes) == 1:
            state = _after(group, block, reads, [states[a.tensor] for a in reads])
            if state is not None:
                states[write.tensor] = state
    return states


def pairs_of(states: Mapping[int, State]) -> frozenset[tuple[int, int]]:
    """Widths of runs, and distances, of the pairs that tensors are made of."""
    whole = [s for s in states.values() if isinstance(s, Whole)]
    return frozenset((s.width, s.distance) for s in whole if s.distance)


def paired_elements(group: GroupView, states: Mapping[int, State]) -> float:
    """Elements of outputs that are made of two columns."""
    made = (t for t in group.outputs if isinstance(s := states.get(t), Whole) and s.distance)
    return float(sum(assumed_product(group.graph.tensors[t].shape) for t in made))


def _after(
    group: GroupView, block: Block, reads: Sequence[Access], states: Sequence[State]
) -> State | None:
    """What a block writes; None where that is not known."""
    shapes = [group.graph.tensors[a.tensor].shape for a in reads]
    space = states[0].space
    if any(s.space != space for s in states):
        return None
    if id(block) in group.views:
        written = group.graph.tensors[block.writes[0].tensor].shape
        return _view(states[0], shapes[0], written)
    complete = space == product_key(axis.extent for axis in block.axes)
    if complete and len(reads) == 1 and isinstance(states[0], Whole) and _rearranges(block):
        return Whole(space, (), states[0].width, states[0].distance)
    plain = all(_is_plain(block, a) for a in reads)
    if complete and plain and all(isinstance(s, Whole) for s in states):
        return _pointwise(block, reads, states)
    pieces = [_piece(block, *each) for each in zip(reads, states, shapes, strict=True)]
    if any(p is None or p.width != pieces[0].width for p in pieces):
        return None
    return _together(block, reads, pieces, complete)


def _rearranges(block: Block) -> bool:
    """Whether a block is a reshape that is no view here, since its result leaves the graph."""
    (read, *others) = block.reads
    irregular = any(isinstance(index, Irregular) for index in read.index)
    return irregular and not (others or read.guarded or read.data_dependent or block.operations())


def _view(state: State, old: Sequence[Extent], new: Sequence[Extent]) -> State | None:
    """A reshape: the innermost dimensions that hold columns, of old and new shape."""
    dims = state.columns if isinstance(state, Whole) else tuple(d for d, _ in state.dims)
    known = [old[d] for d in dims]
    size = math.prod(known) if all(isinstance(n, int) for n in known) else 0
    found = _innermost(new, size) if dims == _innermost(old, size) else None
    if isinstance(state, Whole):
        return Whole(state.space, found or (), state.width, state.distance)
    if size == 1:
        found = ()
    if found is None:
        return None
    return Piece(state.space, tuple((d, new[d]) for d in found), state.width, state.sources)


def _innermost(shape: Sequence[Extent], size: int) -> tuple[int, ...] | None:
    """The fewest last dimensions that have so many points."""
    count = 1
    for d in range(len(shape) - 1, -1, -1):
        if not isinstance(shape[d], int):
            return None
        count *= shape[d]
        if count == size:
            return tuple(range(d, len(shape)))
    return None


def _pointwise(block: Block, reads: Sequence[Access], states: Sequence[Whole]) -> Whole | None:
    """All elements, made of tensors that hold all, each read at its own point."""
    pairs = {(s.width, s.distance) for s in states if s.distance}
    if len(pairs) > 1:
        return None
    places, found = _places(block), set()
    for access, state in zip(reads, states, strict=True):
        axes = [_axis(block, access.index[d]) for d in state.columns]
        found.add(tuple(places[a] for a in axes if a in places))
    columns = found.pop() if len(found) == 1 else ()
    return Whole(states[0].space, columns, *(pairs.pop() if pairs else (0, 0)))


def _is_plain(block: Block, access: Access) -> bool:
    return not access.guarded and all(_axis(block, index) is not None for index in access.index)


def _axis(block: Block, index: Index) -> int | None:
    """The axis that an index is, -1 where it is 0; None for any other index."""
    if not isinstance(index, Affine):
        return None
    if index.constant == 0 and all(block.axes[a].extent == 1 for a in index.axes):
        return -1
    return index.single_axis


def _places(block: Block) -> dict[int, int]:
    """The dimension of what is written along each axis."""
    write = block.writes[0]
    return {i.single_axis: d for d, i in enumerate(write.index) if i.single_axis is not None}


def _piece(block: Block, access: Access, state: State, shape: Sequence[Extent]) -> Piece | None:
    """What is read as a piece, over all dimensions that are read in part."""
    parts = []
    for d, index in enumerate(access.index):
        axis = _axis(block, index)
        extent = 1 if axis == -1 else None if axis is None else block.axes[axis].extent
        if extent != shape[d] or (access.guarded and axis == -1):
            parts.append(d)
    if isinstance(state, Whole):
        if state.distance or len(parts) != 1 or parts[0] not in state.columns:
            return None
        inner = state.columns[state.columns.index(parts[0]) :]
        if not all(isinstance(shape[d], int) for d in inner):
            return None
        width = math.prod(shape[d] for d in inner)
        if width > MAX_WIDTH:
            return None
        sources = tuple(frozenset({column}) for column in range(width))
        return Piece(state.space, tuple((d, shape[d]) for d in inner), width, sources)
    known = {d for d, _ in state.dims}
    more = [d for d in parts if d not in known]
    if any(shape[d] != 1 for d in more):
        return None
    return Piece(state.space, (*state.dims, *((d, 1) for d in more)), state.width, state.sources)


def _together(
    block: Block, reads: Sequence[Access], pieces: Sequence[Piece], complete: bool
) -> State | None:
    """What a block makes of pieces: one of them, moved or computed on, or all of them, joined."""
    places, axes = _places(block), set()
    for access, piece in zip(reads, pieces, strict=True):
        indices = [access.index[d] for d, _ in piece.dims]
        if not all(isinstance(i, Affine) and i.axes <= places.keys() for i in indices):
            return None
        axes |= {a for i in indices for a in i.axes}
    stacked = _stacked(block, reads)
    if stacked is not None:
        axes.add(stacked)
    order = sorted(axes, key=places.__getitem__)
    extents = [block.axes[a].extent for a in order]
    if not all(isinstance(n, int) for n in extents) or math.prod(extents) > MAX_WIDTH:
        return None
    found = []
    for point in itertools.product(*map(range, extents)):
        at, made = dict(zip(order, point, strict=True)), frozenset()
        for i, (access, piece) in enumerate(zip(reads, pieces, strict=True)):
            number = _number(access, piece, at)
            if stacked is not None and at[stacked] != len(reads) - 1 - i:
                continue
            if number is not None:
                made |= piece.sources[number]
            elif not access.guarded:
                return None
        found.append(made)
    first = pieces[0]
    if not complete:
        dims = tuple((places[a], n) for a, n in zip(order, extents, strict=True))
        return Piece(first.space, dims, first.width, tuple(found))
    return _joined(first.space, found, first.width)


def _stacked(block: Block, reads: Sequence[Access]) -> int | None:
    """The axis along which tensors are stacked, each read under a condition on it alone: TVM's
    `stack` asks for the last one first.
    """
    used = {a for access in reads for a in access.axes}
    new = [a for a in block.spatial if a not in used and block.axes[a].extent != 1]
    guarded = len(reads) == len(block.reads) and all(access.guarded for access in reads)
    if guarded and len(new) == 1 and block.axes[new[0]].extent == len(reads):
        return new[0]
    return None


def _number(access: Access, piece: Piece, at: Mapping[int, int]) -> int | None:
    """Which element of a piece is read at a point; None where it has none there."""
    number = 0
    for d, extent in piece.dims:
        index = access.index[d]
        place = index.constant + sum(index.coefficients[a] * at[a] for a in index.axes)
        if not 0 <= place < extent:
            return None
        number = number * extent + place
    return number


def _joined(space: Space, sources: Sequence[frozenset[int]], width: int) -> Whole | None:
    """All elements again, if each is made of one column or of both of a pair, where columns t and
    t + distance, for all t < distance, of each run of some width are pairs.
    """
    if len(sources) != width or not all(0 < len(made) <= 2 for made in sources):
        return None
    pairs = {(min(made), max(made)) for made in sources if len(made) == 2}
    if not pairs:  # partners only
        pairs = {(min(t, *made), max(t, *made)) for t, made in enumerate(sources) if {t} != made}
    distance = next((high - low for low, high in sorted(pairs)), 0)
    for run in (2 * distance, width) if distance else ():
        starts = range(0, width, run) if width % run == 0 else ()
        if pairs == {(t + i, t + i + distance) for t in starts for i in range(distance)}:
            return Whole(space, (), run, distance)
    return None
