"""Who holds what in the epilogue of the Hopper GEMM.

A thread holds rows `lane // 4` and 8 below of its warp's 16, and columns `2 * (lane % 4)` and the
next of every 8: the layout of wgmma's accumulators. A piece is 16 columns, two groups of 8: four
pairs of neighbouring columns a thread, which are the four words of a stmatrix.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...gpu.access import is_multiple
from ...gpu.product_frame import Tile, coordinates
from ...program.expr import conjunction, convert
from .model import BOX, HopperSegment, Windows
from .plan import CHUNK
from .state import Hopper


class Layout:
    """Coordinates of a thread of consumer warpgroup `number`."""

    def __init__(self, kernel: Hopper, number: Expr):
        self.kernel, self.plan, self.problem = kernel, kernel.plan, kernel.problem
        self.number = number
        self.thread = T.Bind(kernel.thread % 128)
        self.lane = T.Bind(kernel.thread % 32)
        self.warp_row = T.Bind(self.thread // 32 * 16)
        # The row whose address a thread gives to ldmatrix and stmatrix.
        self.matrix_row = T.Bind(self.warp_row + self.lane % 16)

    def matrix_offset(self, part: int) -> Expr:
        """Where in a swizzled box this thread's row of 8 of piece `part` starts."""
        column = T.bitwise_xor(part * 2 + self.lane // 16, self.matrix_row % 8)
        return self.matrix_row * BOX + column * 8

    def row(self, tile: Tile, half: int) -> Expr:
        """The first row a thread holds, or (`half` 1) the second."""
        first = tile.m * self.plan.config.block_m + self.number * BOX
        return first + self.warp_row + self.lane // 4 + half * 8

    def first_column(self, tile: Tile) -> Expr:
        """The first column that this block stores."""
        return tile.n * self.plan.out_n + self.kernel.first_column

    def column(self, tile: Tile, chunk: int, group: int) -> Expr:
        """The first of a thread's two columns in a group of a piece."""
        place = chunk * CHUNK + group * 8 + self.lane % 4 * 2
        return self.first_column(tile) + place

    def groups(self, chunk: int) -> range:
        """Groups of 8 columns in a piece; the last of a narrow tile may hold one."""
        return range(min(2, self.plan.share_n // 8 - 2 * chunk))

    def rows(self, segment: HopperSegment) -> Expr:
        """Number of rows of a segment's matrix."""
        M = segment.M
        return tirx.IntImm("int32", M) if isinstance(M, int) else convert(M, "int32")

    def ragged_rows(self, segment: HopperSegment) -> bool:
        """Whether the last row tile of a segment reaches beyond its matrix."""
        config = self.plan.config
        return not is_multiple(segment.M, config.block_m * config.multicast)

    def ragged_columns(self, segment: HopperSegment) -> bool:
        """Whether the last column tile of a segment reaches beyond its matrix."""
        return segment.N % self.plan.out_n != 0

    def exists(self, segment: HopperSegment, row: Expr) -> Expr | None:
        """Whether a row is one of the matrix; None where all are."""
        above = row < self.rows(segment) if self.ragged_rows(segment) else None
        windows = segment.windows
        if windows is None or not windows.is_ragged:
            return above
        return conjunction(above, windows.exists(row))

    def existing_row(self, segment: HopperSegment, row: Expr) -> Expr:
        """A row to read from: what is read for one beyond the matrix is never stored."""
        windows = segment.windows
        if windows is not None and windows.is_ragged:
            return T.Select(self.exists(segment, row), row, tirx.IntImm("int32", 0))
        return tirx.Min(row, self.rows(segment) - 1) if self.ragged_rows(segment) else row

    def existing_column(self, segment: HopperSegment, column: Expr, width: int) -> Expr:
        """A column to read `width` elements from."""
        ragged = self.ragged_columns(segment)
        last = tirx.IntImm("int32", segment.N - width)
        return tirx.Min(column, last) if ragged else column

    def point(self, segment: HopperSegment, tile: Tile, row: Expr, column: Expr) -> dict[Var, Expr]:
        """The axes of a segment at an element."""
        frame = self.kernel.frame
        env = coordinates(segment.batch, tile.batch, frame)
        env |= coordinates(segment.m, row, frame)
        return env | coordinates(segment.n, column, frame)

    def box_place(self, box: int, tile: Tile, windows: Windows | None) -> dict[str, Expr]:
        """Flat coordinates of box number `box` of this warpgroup's part of a tile."""
        row = tile.m * self.plan.config.block_m + self.number * BOX
        place = {"batch": tile.batch, "n": self.first_column(tile) + box * BOX}
        if windows is None:
            return place | {"m": row}
        return place | dict(zip(windows.names, windows.first(row // BOX), strict=True))
