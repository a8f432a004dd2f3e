"""Tiles of a grid: which batch, segment, row tile and column tile a block works on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from ..contraction import Extent
from ..expr import constant, convert
from .gemm_frame import Frame, ceil_div


@dataclass(frozen=True, slots=True)
class Tile:
    """Coordinates of a tile: batch, row tile, column tile (over all segments, or one's own)."""

    batch: Expr
    m: Expr
    n: Expr


class Grid:
    """All tiles of a contraction, in the order in which blocks take them.

    Parameters
    ----------
    batch, rows, columns : sizes of the batch, of M, and of N of each segment.
    block_m, block_n : a tile's rows and columns.
    group_m : row tiles that neighbouring blocks share a column tile over: what is in flight
        together then reads about as many rows of A as columns of B, and both stay in the L2.
    """

    def __init__(
        self,
        frame: Frame,
        batch: Extent,
        rows: Extent,
        columns: Sequence[Extent],
        block_m: int,
        block_n: int,
        group_m: int = 8,
    ):
        self.frame, self.group_m = frame, group_m
        self.rows = ceil_div(rows, block_m)
        self.columns = [ceil_div(n, block_n) for n in columns]
        self.all_columns = sum(self.columns[1:], self.columns[0])
        self.per_batch = self.rows * self.all_columns
        self.tiles = self.per_batch * batch
        self.batched = not (isinstance(batch, int) and batch == 1)

    def tile(self, number: Expr) -> Tile:
        """The tile with this number, its `n` over all segments."""
        size = self.frame.size
        number = convert(number, self.frame.index)
        batch, rest = constant(0, self.frame.index), number
        if self.batched:
            batch = T.Bind(number // size(self.per_batch))
            rest = T.Bind(number % size(self.per_batch))
        stripe = size(self.all_columns) * self.group_m
        group, place = T.Bind(rest // stripe), T.Bind(rest % stripe)
        height = self.group_m
        if not (isinstance(self.rows, int) and self.rows % self.group_m == 0):
            left = size(self.rows) - group * self.group_m
            height = T.Bind(tirx.Min(left, constant(self.group_m, self.frame.index)))
        return Tile(batch, T.Bind(group * self.group_m + place % height), T.Bind(place // height))

    def each_segment(self, tile: Tile) -> Iterator[tuple[int, Tile]]:
        """Number and own tile of each segment; what is emitted runs where the tile is its own."""
        yield from self._branch(tile, tile.n, 0)

    def _branch(self, tile: Tile, n: Expr, number: int) -> Iterator[tuple[int, Tile]]:
        own = Tile(tile.batch, tile.m, n)
        if number == len(self.columns) - 1:
            yield number, own
            return
        width = self.frame.size(self.columns[number])
        with T.If(n < width):
            with T.Then():
                yield number, own
            with T.Else():
                yield from self._branch(tile, n - width, number + 1)
