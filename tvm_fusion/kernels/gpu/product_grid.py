"""Tiles of a grid: which batch, segment, row tile and column tile a block works on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from ..contraction.reader import Extent
from ..program.expr import constant, convert
from .product_frame import ceil_div


@dataclass(frozen=True, slots=True)
class Tile:
    """Coordinates of a tile: batch, row tile, column tile (over all segments, or one's own).

    `segment` is its segment's number where the coordinates do not tell.
    """

    batch: Expr
    m: Expr
    n: Expr
    segment: Expr | None = None


class Grid:
    """All tiles of a contraction, in the order in which blocks take them.

    Parameters
    ----------
    dtype : integer dtype of the coordinates.
    batch, rows, columns : sizes of the batch, of M, and of N of each segment.
    block_m, block_n : a tile's rows and columns.
    group_m : row tiles that neighbouring blocks share a column tile over: what is in flight
        together then reads about as many rows of A as columns of B, and both stay in the L2.
    """

    def __init__(
        self,
        dtype: str,
        batch: Extent,
        rows: Extent,
        columns: Sequence[Extent],
        block_m: int,
        block_n: int,
        group_m: int = 8,
    ):
        self.dtype, self.group_m = dtype, group_m
        self.rows = ceil_div(rows, block_m)
        self.columns = [ceil_div(n, block_n) for n in columns]
        self.all_columns = sum(self.columns[1:], self.columns[0])
        self.per_batch = self.rows * self.all_columns
        self.tiles = self.per_batch * batch
        self.batched = not (isinstance(batch, int) and batch == 1)

    def tile(self, number: Expr) -> Tile:
        """The tile with this number, its `n` over all segments."""
        size = self._size
        number = convert(number, self.dtype)
        batch, rest = constant(0, self.dtype), number
        if self.batched:
            batch = T.Bind(number // size(self.per_batch))
            rest = T.Bind(number % size(self.per_batch))
        stripe = size(self.all_columns) * self.group_m
        group, place = T.Bind(rest // stripe), T.Bind(rest % stripe)
        height = self.group_m
        if not (isinstance(self.rows, int) and self.rows % self.group_m == 0):
            left = size(self.rows) - group * self.group_m
            height = T.Bind(tirx.Min(left, constant(self.group_m, self.dtype)))
        return Tile(batch, T.Bind(group * self.group_m + place % height), T.Bind(place // height))

    def _size(self, extent: Extent) -> Expr | int:
        return extent if isinstance(extent, int) else convert(extent, self.dtype)

    def each_segment(self, tile: Tile) -> Iterator[tuple[int, Tile]]:
        """Number and own tile of each segment; what is emitted runs where the tile is its own."""
        yield from self._branch(tile, tile.n, 0)

    def _branch(self, tile: Tile, n: Expr, number: int) -> Iterator[tuple[int, Tile]]:
        own = Tile(tile.batch, tile.m, n)
        if number == len(self.columns) - 1:
            yield number, own
            return
        width = self._size(self.columns[number])
        with T.If(n < width):
            with T.Then():
                yield number, own
            with T.Else():
                yield from self._branch(tile, n - width, number + 1)
