"""The epilogue of the CUDA-core GEMM: a thread's accumulators -> its elements of the outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...contraction.reader import Output, Segment
from ...gpu.access import AffineAccess, affine_access
from ...gpu.product_frame import Frame, Tile, coordinates, evaluate
from ...program.expr import bytes_of, convert
from ...program.program import Extent
from ..epilogue import partner_vars, values_by_part

# Rows or columns a thread owns side by side: four float32 are one 16-byte access.
GROUP = 4


class Share:
    """A thread's rows (or columns) of the `block` of a tile: groups of up to `width` neighbours.

    Groups lie evenly spread, so that neighbouring threads access neighbouring vectors.
    """

    def __init__(self, position: Expr, block: int, each: int, width: int = GROUP):
        self.position, self.block = position, block
        self.width = min(width, each)
        count = each // self.width
        self.starts = [g * (block // count) + position * self.width for g in range(count)]

    @property
    def each(self) -> int:
        """Rows (or columns) of the thread."""
        return self.width * len(self.starts)

    def place(self, number: int) -> int:
        """Where the thread's row (or column) lies, as far as it is the same for all threads."""
        group, rest = divmod(number, self.width)
        return group * (self.block // len(self.starts)) + rest

    def number(self, place: int) -> int:
        """The thread's row (or column) at such a place."""
        group, rest = divmod(place, self.block // len(self.starts))
        return group * self.width + rest

    def ragged(self, extent: Extent) -> bool:
        """Whether the last tile reaches beyond the matrix."""
        return not (isinstance(extent, int) and extent % self.block == 0)


def is_scattered(frame: Frame, segment: Segment) -> bool:
    """Whether columns that are neighbours in an output are stored one by one, so that the threads
    of a warp, with a group each, fill a quarter of every sector: rows start anywhere.
    """
    if segment.partners is not None:
        return False
    accesses = [_access(frame, segment, output) for output in segment.outputs]
    along = [a for a in accesses if a is not None and a.contiguous("n")]
    return any(not a.aligned(GROUP, "n") for a in along)


def spread(
    sums: Sequence[Expr], rows: Share, columns: Share, patch: Expr, wait: Callable[[], Expr]
) -> Share:
    """Exchanges sums among the threads of a row, so that neighbouring threads hold neighbours; a
    thread's new columns. `patch` is shared memory: a row of the tile for each place across the
    rows; `wait` is what the threads of one place wait with for each other.
    """
    apart = Share(columns.position, columns.block, columns.each, 1)
    for registers in sums:
        for row in range(rows.each):
            start = row * columns.each
            for number, first in enumerate(columns.starts):
                with T.vectorized(columns.width) as v:
                    value = registers[start + number * columns.width + v]
                    T.buffer_store(patch, value, [rows.position, first + v])
            T.evaluate(wait())
            for number, column in enumerate(apart.starts):
                T.buffer_store(registers, patch[rows.position, column], [start + number])
            T.evaluate(wait())
    return apart


def emit_epilogue(
    frame: Frame,
    segment: Segment,
    tile: Tile,
    rows: Share,
    columns: Share,
    sums: Mapping[Var, Expr],
) -> None:
    """Emits the outputs of a tile; `sums` are the registers of each accumulator, row by row."""
    writers = [_Writer(frame, segment, output) for output in segment.outputs]
    M = segment.M
    batch = coordinates(segment.batch, tile.batch, frame)
    for number, first in enumerate(rows.starts):
        with T.serial(rows.width, unroll=True) as i:
            row = T.Bind(tile.m * rows.block + first + i)
            with _guard(row < frame.size(M) if rows.ragged(M) else None):
                env = batch | coordinates(segment.m, row, frame)
                start = (number * rows.width + i) * columns.each
                _row(frame, segment, tile, columns, sums, writers, env, start)


def _row(
    frame: Frame,
    segment: Segment,
    tile: Tile,
    columns: Share,
    sums: Mapping[Var, Expr],
    writers: list[_Writer],
    env: Mapping[Var, Expr],
    start: Expr,
) -> None:
    """One row of a thread: its groups of columns, whole vectors where all outputs take them."""
    vector = columns.width == GROUP and all(w.vector for w in writers)
    ragged = columns.ragged(segment.N)
    partners = segment.partners
    others = dict(zip(sums, partner_vars(partners, len(sums)), strict=True))
    by_part = values_by_part(partners, segment.bindings, segment.outputs)

    def inside(column: Expr) -> Expr | None:
        return column < frame.size(segment.N) if ragged else None

    def point(column: Expr) -> dict[Var, Expr]:
        return {**env, **coordinates(segment.n, column, frame)}

    for number, first in enumerate(columns.starts):
        column = T.Bind(tile.n * columns.block + first)
        # A vector is inside as a whole: N is a multiple of its width.
        with _guard(inside(column) if vector else None):
            for v in range(columns.width):
                with _guard(None if vector else inside(column + v)):
                    at = point(column + v)
                    at |= {acc: s[start + number * columns.width + v] for acc, s in sums.items()}
                    part = 0
                    if partners is not None:
                        place = columns.place(number * columns.width + v)
                        part = partners.part_of(place)
                        pair = start + columns.number(partners.partner_of(place))
                        known = ((others[acc], s) for acc, s in sums.items())
                        at |= {other: s[pair] for other, s in known if other is not None}
                    values = evaluate(
                        frame,
                        *by_part[part],
                        at,
                        all(bytes_of(output.dtype) == 2 for output in segment.outputs),
                    )
                    for writer, value in zip(writers, values, strict=True):
                        writer.put(value, at, v, vector)
            if vector:
                for writer in writers:
                    writer.flush(point(column))


@contextmanager
def _guard(condition: Expr | None) -> Iterator[None]:
    if condition is None:
        yield
        return
    with T.If(condition), T.Then():
        yield


def _access(frame: Frame, segment: Segment, output: Output) -> AffineAccess | None:
    """How an output lies in memory, if that is affine in the product's axes."""
    shape = frame.contraction.params[output.param].shape
    return affine_access(output.indices, shape, segment.groups)


class _Writer:
    """Stores one output, four neighbouring columns at a time where they lie side by side."""

    def __init__(self, frame: Frame, segment: Segment, output: Output):
        self.frame, self.output = frame, output
        access = _access(frame, segment, output)
        self.vector = access is not None and access.aligned(GROUP, "n")
        self.stage = T.alloc_local((GROUP,), output.dtype)

    def put(self, value: Expr, at: Mapping[Var, Expr], v: int, vector: bool) -> None:
        """Stores element `v` of a group, or keeps it for `flush`."""
        value = convert(value, self.output.dtype)
        if vector:
            T.buffer_store(self.stage, value, [v])
        else:
            target = self.frame.output(self.output.param)
            T.buffer_store(target, value, self.frame.place(self.output.indices, at))

    def flush(self, at: Mapping[Var, Expr]) -> None:
        """Stores the kept group."""
        target = self.frame.output(self.output.param)
        *lead, last = self.frame.place(self.output.indices, at)
        with T.vectorized(GROUP) as v:
            T.buffer_store(target, self.stage[v], [*lead, last + v])
