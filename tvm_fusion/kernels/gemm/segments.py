"""Tiles of segments with sizes of their own: which segment a block works on, and where in it.

segments of 3, 8 and 2 tiles:    tile number  0 1 2 | 3 4 5 6 7 8 9 10 | 11 12
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from tvm.ir import Expr
from tvm.script import tirx as T

from ..contraction.reader import Contraction, Segment, equal_sizes
from ..gpu.product_frame import Grid, Tile
from ..program.expr import constant, convert
from ..program.program import Extent

# Places in the registers of a tile.
BATCH, ROW, COLUMN, SEGMENT = range(4)


class SegmentGrid:
    """All tiles of a contraction, those of one segment after those of another.

    It stands in for `Grid` where segments differ in batch or rows. Segments are taken in the order
    of the terms of their sums: what takes longest starts first.
    """

    def __init__(
        self,
        dtype: str,
        segments: Sequence[Segment],
        block_m: int,
        block_n: int,
        group_m: int = 8,
    ):
        self.dtype = dtype
        self.grids = [Grid(dtype, s.B, s.M, [s.N], block_m, block_n, group_m) for s in segments]
        self.order = sorted(range(len(segments)), key=lambda i: (-_terms(segments[i]), i))
        *self.ends, self.tiles = accumulate(self.grids[i].tiles for i in self.order)

    def tile(self, number: Expr) -> Tile:
        """The tile with this number: its segment, and its place there."""
        number = T.Bind(convert(number, self.dtype))
        place = T.alloc_local((4,), self.dtype)
        self._locate(number, place, 0)
        batch, m, n, segment = (T.Bind(place[i]) for i in (BATCH, ROW, COLUMN, SEGMENT))
        return Tile(batch, m, n, segment)

    def _locate(self, number: Expr, place: Expr, position: int) -> None:
        if position == len(self.ends):
            self._place(number, place, position)
            return
        with T.If(number < self._size(self.ends[position])):
            with T.Then():
                self._place(number, place, position)
            with T.Else():
                self._locate(number, place, position + 1)

    def _place(self, number: Expr, place: Expr, position: int) -> None:
        segment = self.order[position]
        start = self._size(self.ends[position - 1]) if position else 0
        own = self.grids[segment].tile(number - start)
        found = (own.batch, own.m, own.n, constant(segment, self.dtype))
        for i, value in enumerate(found):
            T.buffer_store(place, value, [i])

    def _size(self, extent: Extent) -> Expr | int:
        return extent if isinstance(extent, int) else convert(extent, self.dtype)

    def each_segment(self, tile: Tile) -> Iterator[tuple[int, Tile]]:
        """Number and own tile of each segment; what is emitted runs where the tile is its own."""
        yield from self._branch(tile, 0)

    def _branch(self, tile: Tile, number: int) -> Iterator[tuple[int, Tile]]:
        if number == len(self.grids) - 1:
            yield number, tile
            return
        with T.If(tile.segment == constant(number, self.dtype)):
            with T.Then():
                yield number, tile
            with T.Else():
                yield from self._branch(tile, number + 1)


def grid_of(dtype: str, contraction: Contraction, block_m: int, block_n: int) -> Grid | SegmentGrid:
    """The tiles of a contraction."""
    segments = contraction.segments
    batch, rows = contraction.batch, contraction.M
    if all(equal_sizes(s.B, batch) and equal_sizes(s.M, rows) for s in segments):
        return Grid(dtype, batch, rows, [s.N for s in segments], block_m, block_n)
    return SegmentGrid(dtype, segments, block_m, block_n)


def _terms(segment: Segment) -> int:
    """Terms of a segment's sums; a symbolic number counts as none."""
    return sum(p.K for p in segment.products if isinstance(p.K, int))
