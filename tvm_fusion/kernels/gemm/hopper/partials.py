"""Reductions of runs of columns and of rows in the epilogue of a GEMM (that of `mma`, too).

    p[m, n // width] = sum over the run of value[m, n]
    p[m // 16, n]    = sum over the run of value[m, n]

Columns: a thread combines its own ones of a run, piece by piece, for each of its two rows; behind
the last piece the four threads of a quad, which hold the columns of one row, meet in two shuffles,
and the first of them stores. Rows: the 16 of a warp are a run. Of a piece a thread has two rows of
four columns; the eight threads that hold the same columns halve what each of them goes on with, in
four shuffles, and every other thread stores one column.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from ...contraction.model import ColumnPartial
from ...contraction.reader import Output
from ...gpu.product_frame import Frame, Tile
from ...program.expr import conjunction, constant, convert
from ...program.program import COMBINE, ReduceKind
from .layout import Layout
from .model import HopperSegment
from .plan import CHUNK

QUAD = 4
WARP = 32
NEUTRAL = {"sum": 0.0, "max": float("-inf")}

Place = tuple[int, int, int]
"""Piece, group of 8 columns in it, and half: the first row of a thread, or the second."""


class Partials:
    """What a thread has of the present run of each partial output."""

    def __init__(self, frame: Frame, layout: Layout):
        self.kept: Mapping[tuple[int, int], _Run] = {
            (number, position): (_Rows if isinstance(output.partial, ColumnPartial) else _Columns)(
                frame, layout, output
            )
            for number, segment in enumerate(layout.problem.segments)
            for position, output in enumerate(segment.outputs)
            if output.partial is not None
        }

    def add(
        self, number: int, position: int, tile: Tile, place: Place, pair: tuple[Expr, Expr]
    ) -> None:
        """Takes in two neighbouring columns of a row; the first of a run start it afresh."""
        run = self.kept[number, position]
        run.add(run.layout.problem.segments[number], tile, place, pair)

    def close(self, number: int, segment: HopperSegment, tile: Tile, chunk: int) -> None:
        """Stores the runs that end with a piece."""
        for position in range(len(segment.outputs)):
            run = self.kept.get((number, position))
            if run is not None and run.ends(chunk):
                run.store(segment, tile, chunk)


class _Run:
    """A partial output; `sums` are what a thread has of it."""

    size: int

    def __init__(self, frame: Frame, layout: Layout, output: Output):
        self.frame, self.layout, self.output = frame, layout, output
        self.combine = COMBINE[ReduceKind(output.partial.kind)]
        self.sums = T.alloc_local((self.size,), "float32")

    def put(self, at: int, value: Expr) -> None:
        """Combines a sum with another one."""
        T.buffer_store(self.sums, self.combine(self.sums[at], value), [at])

    def write(
        self, segment: HopperSegment, tile: Tile, point: tuple[Expr, Expr], value: Expr
    ) -> None:
        """Stores a run's result; any row and column of the run have its place."""
        at = self.frame.place(self.output.indices, self.layout.point(segment, tile, *point))
        target = self.frame.output(self.output.param)
        T.buffer_store(target, convert(value, self.output.dtype), at)


def _shuffled(value: Expr, distance: int) -> Expr:
    """What the thread `distance` away has."""
    return T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), value, distance, WARP, WARP)


class _Columns(_Run):
    """Runs of columns: a sum for each of two rows."""

    size = 2

    def add(
        self, segment: HopperSegment, tile: Tile, place: Place, pair: tuple[Expr, Expr]
    ) -> None:
        """See `Partials.add`."""
        chunk, group, half = place
        value = self.combine(*pair)
        if chunk * CHUNK % self.output.partial.width or group:
            value = self.combine(self.sums[half], value)
        T.buffer_store(self.sums, value, [half])

    def ends(self, chunk: int) -> bool:
        """Whether a run ends with a piece."""
        return (chunk + 1) * CHUNK % self.output.partial.width == 0

    def store(self, segment: HopperSegment, tile: Tile, chunk: int) -> None:
        """Stores both rows of the run."""
        layout = self.layout
        first = chunk + 1 - self.output.partial.width // CHUNK
        column = T.Bind(layout.column(tile, first, 0))  # any of the run has the same place
        for half in range(2):
            for step in range(1, QUAD.bit_length()):
                self.put(half, _shuffled(self.sums[half], step))
            row = layout.row(tile, half)
            inside = conjunction(
                tirx.EQ(layout.lane % QUAD, 0),
                layout.exists(segment, row),
                column < segment.N if layout.ragged_columns(segment) else None,
            )
            with T.If(inside), T.Then():
                self.write(segment, tile, (row, column), self.sums[half])


class _Rows(_Run):
    """The run of a warp's rows: a sum for each of four columns, two of each group."""

    size = 4

    def __init__(self, frame: Frame, layout: Layout, output: Output):
        super().__init__(frame, layout, output)
        self.neutral = constant(NEUTRAL[output.partial.kind], "float32")

    def add(
        self, segment: HopperSegment, tile: Tile, place: Place, pair: tuple[Expr, Expr]
    ) -> None:
        """See `Partials.add`. A row that does not exist adds nothing."""
        _, group, half = place
        exists = self.layout.exists(segment, self.layout.row(tile, half))
        for v, value in enumerate(pair):
            at = group * 2 + v
            value = value if exists is None else T.Select(exists, value, self.neutral)
            T.buffer_store(self.sums, self.combine(self.sums[at], value) if half else value, [at])

    def ends(self, chunk: int) -> bool:
        """Each piece has columns of its own."""
        return True

    def store(self, segment: HopperSegment, tile: Tile, chunk: int) -> None:
        """Stores a column a thread, by half of the threads."""
        layout, sums = self.layout, self.sums
        groups = len(layout.groups(chunk))
        for at in range(2 * groups, self.size):
            T.buffer_store(sums, self.neutral, [at])
        upper = [T.Bind(tirx.EQ(layout.lane // bit % 2, 1)) for bit in (16, 8)]
        for kept, (is_upper, distance) in zip(
            (2, 1), zip(upper, (16, 8), strict=True), strict=True
        ):
            for at, (mine, given) in enumerate(self._halves(is_upper, kept)):
                T.buffer_store(sums, self.combine(mine, _shuffled(given, distance)), [at])
        self.put(0, _shuffled(sums[0], 4))
        group, v = (T.Select(is_upper, T.int32(1), T.int32(0)) for is_upper in upper)
        column = T.Bind(layout.column(tile, chunk, 0) + group * 8 + v)
        row = T.Bind(layout.row(tile, 0) - layout.lane // QUAD)
        inside = conjunction(
            tirx.EQ(layout.lane // QUAD % 2, 0),
            layout.exists(segment, row),
            column < segment.N if layout.ragged_columns(segment) else None,
            tirx.EQ(group, 0) if groups == 1 else None,
        )
        with T.If(inside), T.Then():
            self.write(segment, tile, (row, column), sums[0])

    def _halves(self, is_upper: Expr, kept: int) -> Iterator[tuple[Expr, Expr]]:
        """Of twice as many sums as are kept: those of this thread, and those it gives away."""
        sums = [T.Bind(self.sums[at]) for at in range(2 * kept)]
        for low, high in zip(sums[:kept], sums[kept:], strict=True):
            yield T.Select(is_upper, high, low), T.Select(is_upper, low, high)
