"""Reductions of runs of columns and of rows in the epilogue of a GEMM (that of `mma`, too).

    p[m, n // width] = sum over the run of value[m, n]
    p[m // 16, n]    = sum over the run of value[m, n]

Columns: a thread combines its own ones of a run, piece by piece, for each of its two rows; behind
the last piece the four threads of a quad, which hold the columns of one row, meet in two shuffles,
and the first of them stores. Rows: the 16 of a warp are a run. Of a piece a thread has two rows of
four columns; the eight threads that hold the same columns halve what each of them goes on with, in
four shuffles, and every other thread stores one column. Runs of fewer rows lie within 16, and
threads do the same that differ in bits of the rows of a run: two for a window of 2 x 2 positions in
a box of 8 x 8, where the other bit is that of a thread's two rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...contraction.model import INDEX, ColumnPartial
from ...contraction.reader import Output
from ...gpu.access import affine_access, store_pair
from ...gpu.product_frame import Frame, Tile, evaluate
from ...program.expr import bytes_of, conjunction, constant, convert, substitute, variables
from ...program.program import COMBINE, ReduceKind
from .layout import Layout
from .model import HopperSegment
from .plan import CHUNK

QUAD = 4
WARP = 32
HALF_BIT = 3
"""The bit of a row's number that tells a thread's two rows apart."""
STORED_IN_PAIRS = ("float16", "bfloat16", "float32")
NEUTRAL = {"sum": 0.0, "max": float("-inf")}

Place = tuple[int, int, int]
"""Piece, group of 8 columns in it, and half: the first row of a thread, or the second."""


class Partials:
    """What a thread has of the present run of each partial output."""

    def __init__(self, frame: Frame, layout: Layout):
        self.kept: Mapping[tuple[int, int], Run] = {
            (number, position): (_Rows if isinstance(output.partial, ColumnPartial) else _Columns)(
                frame, layout, segment, output
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
        pair = tuple(convert(value, "float32") for value in pair)
        run.add(run.layout.problem.segments[number], tile, place, pair)

    def close(self, number: int, segment: HopperSegment, tile: Tile, chunk: int) -> None:
        """Stores the runs that end with a piece."""
        for position in range(len(segment.outputs)):
            run = self.kept.get((number, position))
            if run is not None and run.ends(chunk):
                run.store(segment, tile, chunk)


class Run:
    """A partial output; `sums` are what a thread has of it."""

    size: int

    def __init__(self, frame: Frame, layout: Layout, segment: HopperSegment, output: Output):
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
        env = self.layout.point(segment, tile, *point)
        target = self.frame.output(self.output.param)
        at = self.frame.place(self.output.indices, env)
        T.buffer_store(target, convert(self._finished(value, env), self.output.dtype), at)

    def write_pair(
        self,
        segment: HopperSegment,
        tile: Tile,
        point: tuple[Expr, Expr],
        values: Sequence[Expr],
    ) -> None:
        """Stores those of two neighbouring columns."""
        row, column = point
        envs = [self.layout.point(segment, tile, row, column + v) for v in range(2)]
        target = self.frame.output(self.output.param)
        place = target.ptr_to(self.frame.place(self.output.indices, envs[0]))
        pair = [self._finished(value, env) for value, env in zip(values, envs, strict=True)]
        T.evaluate(store_pair(self.output.dtype, place, *pair))

    def _finished(self, value: Expr, env: Mapping[Var, Expr]) -> Expr:
        """What is stored of a reduction."""
        finish = getattr(self.output.partial, "finish", None)
        if finish is None:
            return value
        half = bytes_of(self.output.dtype) == 2
        own = {**env, finish.reduced: T.Bind(value)}
        return evaluate(self.frame, finish.bindings, (finish.value,), own, half)[0]


def _shuffled(value: Expr, distance: int) -> Expr:
    """What the thread `distance` away has."""
    return T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), value, distance, WARP, WARP)


class _Columns(Run):
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


class _Rows(Run):
    """Runs of a warp's rows: a sum for each of four columns, two of each group, and of each of a
    thread's rows, where these are of different runs.
    """

    def __init__(self, frame: Frame, layout: Layout, segment: HopperSegment, output: Output):
        bits = output.partial.bits
        self.rows = 1 if HALF_BIT in bits else 2
        self.distances = [QUAD << bit for bit in reversed(bits) if bit != HALF_BIT]
        self.size = 4 * self.rows
        super().__init__(frame, layout, segment, output)
        self.neutral = constant(NEUTRAL[output.partial.kind], "float32")
        self.is_paired = _is_paired(frame, segment, output)

    def add(
        self, segment: HopperSegment, tile: Tile, place: Place, pair: tuple[Expr, Expr]
    ) -> None:
        """See `Partials.add`. A row that does not exist adds nothing."""
        _, group, half = place
        exists = None
        if not self.output.partial.whole:
            exists = self.layout.exists(segment, self.layout.row(tile, half))
        for at, value in enumerate(pair, (group * self.rows + half % self.rows) * 2):
            value = value if exists is None else T.Select(exists, value, self.neutral)
            value = self.combine(self.sums[at], value) if half >= self.rows else value
            T.buffer_store(self.sums, value, [at])

    def ends(self, chunk: int) -> bool:
        """Each piece has columns of its own."""
        return True

    def store(self, segment: HopperSegment, tile: Tile, chunk: int) -> None:
        """Of the threads that hold the same columns of a run each goes on with half of these, as
        long as there are two; of those that hold one column the first stores it.
        """
        layout, sums = self.layout, self.sums
        groups = len(layout.groups(chunk))
        for at in range(groups * 2 * self.rows, self.size):
            T.buffer_store(sums, self.neutral, [at])
        halving = self.distances[: self.size.bit_length() - 1]
        upper = [T.Bind(tirx.EQ(layout.lane // distance % 2, 1)) for distance in halving]
        for number, (is_upper, distance) in enumerate(zip(upper, halving, strict=True), 1):
            for at, (mine, given) in enumerate(self._halves(is_upper, self.size >> number)):
                T.buffer_store(sums, self.combine(mine, _shuffled(given, distance)), [at])
        alike = self.distances[len(halving) :]
        for distance in alike:
            self.put(0, _shuffled(sums[0], distance))
        first = [tirx.EQ(layout.lane // distance % 2, 0) for distance in alike]
        own = [T.Select(is_upper, T.int32(1), T.int32(0)) for is_upper in upper]
        for at, (group, half, columns) in enumerate(self._kept(own)):
            if isinstance(group, int) and group >= groups:
                continue
            column = T.Bind(layout.column(tile, chunk, 0) + group * 8 + columns[0])
            row = T.Bind(self._first_row(tile, half))
            inside = [*first, layout.exists(segment, row)]
            if groups == 1 and not isinstance(group, int):
                inside.append(tirx.EQ(group, 0))
            values = [sums[at * len(columns) + i] for i in range(len(columns))]
            self._store(segment, tile, (row, column), values, inside)

    def _kept(self, own: list[Expr]) -> list[tuple[Expr | int, Expr | int, Sequence[Expr | int]]]:
        """Groups, rows and columns that a thread goes on with; `own` are its choices so far."""
        sizes = (2, 2, 2) if self.rows == 2 else (2, 2)
        dims = [[choice] for choice in own] + [[*range(n)] for n in sizes[len(own) :]]
        groups, columns = dims[0], dims[-1]
        halves = dims[1] if self.rows == 2 else [0]
        return [(group, half, columns) for group in groups for half in halves]

    def _first_row(self, tile: Tile, half: Expr | int) -> Expr:
        """The first row of the run of one of a thread's rows."""
        layout, mask = self.layout, sum(self.distances) // QUAD
        row, place = layout.row(tile, half), layout.lane // QUAD
        if mask != WARP // QUAD - 1:
            place = T.bitwise_and(place, mask)
        return row - place if mask else row

    def _store(
        self,
        segment: HopperSegment,
        tile: Tile,
        at: tuple[Expr, Expr],
        values: Sequence[Expr],
        inside: Sequence[Expr | None],
    ) -> None:
        """Stores neighbouring columns of a run, those that exist."""
        layout, (row, column) = self.layout, at
        ragged, partial = layout.ragged_columns(segment), self.output.partial
        if partial.inside is not None:
            point = layout.point(segment, tile, row, column)
            inside = [*inside, self.frame.rewrite(partial.inside, point)]
        if len(values) == 2 and self.is_paired:
            with _when(*inside, column < segment.N if ragged else None):
                self.write_pair(segment, tile, at, values)
            return
        for v, value in enumerate(values):
            with _when(*inside, column + v < segment.N if ragged else None):
                self.write(segment, tile, (row, column + v), value)

    def _halves(self, is_upper: Expr, kept: int) -> Iterator[tuple[Expr, Expr]]:
        """Of twice as many sums as are kept: those of this thread, and those it gives away."""
        sums = [T.Bind(self.sums[at]) for at in range(2 * kept)]
        for low, high in zip(sums[:kept], sums[kept:], strict=True):
            yield T.Select(is_upper, high, low), T.Select(is_upper, low, high)


@contextmanager
def _when(*conditions: Expr | None) -> Iterator[None]:
    """What is emitted runs under all of these conditions."""
    inside = conjunction(*conditions)
    with T.If(tirx.IntImm("bool", 1) if inside is None else inside), T.Then():
        yield


def _is_paired(frame: Frame, segment: HopperSegment, output: Output) -> bool:
    """Whether columns 2 i and 2 i + 1 of a run are one aligned access: they lie side by side in
    rows of an even number of elements.
    """
    shape = frame.contraction.params[output.param].shape
    rows = {axis.var: constant(0, INDEX) for axis in segment.groups["m"]}
    alone = not set(variables(output.indices[-1])) & set(rows)
    access = affine_access([substitute(i, rows) for i in output.indices], shape, segment.groups)
    aligned = access is not None and access.aligned(2, "n")
    return alone and aligned and shape[-1] % 2 == 0 and output.dtype in STORED_IN_PAIRS
