"""One pointwise program within a kernel: its blocks, its threads, its vectors.

Along the columns, neighbouring threads take neighbouring vectors of a row:

    q = block * threads + thread;  row, column = q // (N / width), q % (N / width) * width

Across, the lanes of a warp take neighbouring rows (of the axis in which strided loads are
consecutive), so that a transposed read of a warp is consecutive in memory, and each thread still
writes whole vectors:

    block = 32 rows x (threads / 32) vectors;  row = 32 * block_row + lane
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tvm_ffi
from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...errors import Unsupported
from ..gpu.frame import Frame, held, then
from ..gpu.scope import Local, Point, RowScope
from ..gpu.transfer import load_element, load_tile, load_values, store_values, store_vector
from ..gpu.vectors import combs, divides, flat_tiles, flat_width, piece_bytes, vector_elements
from ..program.expr import bounds, constant, convert, dtype_of, number, substitute
from ..program.program import Access, Extent, Output, Program

# Vectors that cross the ends of rows: rows of 1001 columns are accessed 16 bytes at a time.
#
# Tensors in the linear order of the space are flat. The elements of one vector lie in two rows at
# most (where rows are no shorter than a vector), so the row is found by one division:
#
#     row, column = start / N, start % N
#     lane l:  column + l < N ? (row, column + l) : (row + 1, column + l - N)
#
# What is broadcast (a bias, a factor a row) is read at the row and column of each lane; a row's
# scalars are loaded for both rows.
#
# The coordinates are held in registers, which no pass looks through: TVM's simplifier would put
# their
# selections and quotients into every offset, and be at it for a minute. It cannot tell their signs
# either, so what is divided here are coordinates of known range, as on the device.


class FlatScope(RowScope):
    """A scope in which the coordinates of the row and its scalars change with the element too."""

    def __init__(self, program: Program, frame: Frame) -> None:
        super().__init__(program, frame)
        self.per_element |= {*program.row_vars, *self.definitions}
        self.analyzer = program.analyzer()
        self.forget()

    def row(self, expr: Expr) -> Expr:
        """`expr` with what is known of the row put in, and quotients that the device has."""
        divisions = [(tirx.FloorDiv, self._truncated), (tirx.FloorMod, self._truncated)]
        return super().row(tvm_ffi.structural_map(expr, divisions))

    def _truncated(self, division: tirx.FloorDiv | tirx.FloorMod) -> Expr:
        """Rounded towards zero, where that is the same."""
        divisor = number(division.b)
        if not divisor or divisor < 0 or bounds(division.a, self.analyzer)[0] < 0:
            return division
        same = T.truncdiv if isinstance(division, tirx.FloorDiv) else T.truncmod
        return same(division.a, division.b)


class FlatLanes:
    """Coordinates and row scalars of the elements of one vector.

    Parameters
    ----------
    start : linear number of the vector's first element.
    width : elements of the vector.
    """

    def __init__(self, program: Program, frame: Frame, start: Expr, width: int) -> None:
        self.program, self.frame, self.start = program, frame, start
        self.scope = FlatScope(program, frame)
        self.two_rows = program.columns >= width
        if self.two_rows:
            row = held(T.truncdiv(start, program.columns))
            self.column = held(start - row * program.columns)
            self.here = self._row(row)
            self.next = self._row(held(tirx.Min(row + 1, program.row_count - 1)))

    def _row(self, row: Expr) -> dict[Var, Expr]:
        """Coordinates and scalars of a row."""
        scope = RowScope(self.program, self.frame)
        scope.set_row(row)
        scope.load_scalars()
        return scope.env

    def point(self, lane: int, registers: Callable[[Var], Expr | None]) -> Point:
        """Element number `lane`; `registers` gives what is loaded in vectors."""
        column, row_level = self._lane(lane)

        def local(var: Var) -> Expr | None:
            loaded = registers(var)
            return row_level(var) if loaded is None else loaded

        return Point(self.scope, column, local)

    def _lane(self, lane: int) -> tuple[Expr, Callable[[Var], Expr | None]]:
        columns = self.program.columns
        if not self.two_rows:
            row = held(T.truncdiv(self.start + lane, columns))
            return held(self.start + lane - row * columns), self._row(row).get
        if lane == 0:
            return self.column, self.here.get
        wrapped = T.Bind(self.column + lane >= columns)
        coordinates: dict[Var, Expr] = {}
        column = held(self.column + lane - tirx.Select(wrapped, columns, 0))

        def row_level(var: Var) -> Expr | None:
            here = self.here.get(var)
            if here is None:
                return None
            chosen = tirx.if_then_else(wrapped, self.next[var], here)
            if var not in self.program.row_vars:
                return chosen
            if var not in coordinates:
                coordinates[var] = held(chosen)
            return coordinates[var]

        return column, row_level


LANES = 32

Loaded = dict[Var, tuple[Var, int, int]]
"""Placeholder -> register array, elements of it a lane, and which of those."""


@dataclass(frozen=True, slots=True)
class PointwiseConfig:
    """How a program is split over threads.

    Attributes
    ----------
    threads : threads a block.
    width : columns of one vector.
    unroll : vectors a thread.
    across : number of the row axis that the lanes of a warp walk along; None: they walk along the
        columns.
    flat : vectors cross the ends of rows (see `flat`).
    """

    threads: int = 256
    width: int = 8
    unroll: int = 1
    across: int | None = None
    flat: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One vector whose loads are on their way: how to compute a lane and to store an output."""

    scope: RowScope
    point: Callable[[int], Point]
    store: Callable[[Output, list[Expr]], None]


class PointwisePart:
    """Emits the code of `blocks` blocks that compute `program`."""

    def __init__(self, program: Program, config: PointwiseConfig) -> None:
        self.program, self.config = program, config
        self.index = program.index_dtype
        self.analyzer = program.analyzer()
        width = config.width
        if config.flat:
            self._check_flat()
        self.run = program.row_count * program.columns if config.flat else program.columns
        self.tail = not divides(width, self.run, self.analyzer)
        if self.tail and program.rows and not config.flat:
            raise Unsupported(f"vectors of {width} cross the end of rows of {program.columns}")
        self.per_row = self._quotient(self.run, width)
        self.elements = {} if config.flat else vector_elements(program, width)
        self.combs = [] if config.flat else combs(program, width)
        if config.across is None:
            rows = 1 if config.flat else program.row_count
            self.vectors = rows * self.per_row
            jobs = self.vectors + (1 if self.tail else 0)
            self.blocks = self._ceil(jobs, config.threads * config.unroll)
        else:
            self._check_across()
            rows = program.rows[config.across]
            self.tiles = self._ceil(rows, LANES), self._ceil(self.per_row, config.threads // LANES)
            self.blocks = program.row_count // rows * self.tiles[0] * self.tiles[1]

    def _check_flat(self) -> None:
        widest = flat_width(self.program)
        if widest is None or self.config.across is not None:
            raise Unsupported("an output is not in the linear order of rows and columns")
        if self.config.width > widest:
            raise Unsupported(f"flat vectors of {self.config.width} elements")

    def _check_across(self) -> None:
        config = self.config
        if config.across >= len(self.program.rows):
            raise Unsupported(f"there is no row axis {config.across}")
        if not self.program.is_static:
            raise Unsupported("rows of unknown number are not walked across")
        if config.unroll != 1 or config.threads % LANES:
            raise Unsupported("lanes across rows take one vector each")

    def _quotient(self, extent: Extent, divisor: int) -> Extent:
        if isinstance(extent, int):
            return extent // divisor
        return self.analyzer.simplify(tirx.FloorDiv(extent, constant(divisor, dtype_of(extent))))

    def _ceil(self, extent: Extent, divisor: int) -> Extent:
        return self._quotient(extent + (divisor - 1), divisor)

    def _size(self, extent: Extent) -> Expr:
        return constant(extent, self.index) if isinstance(extent, int) else extent

    def emit(self, frame: Frame, block: Expr) -> None:
        """The work of block number `block` of this part."""
        block, thread = (convert(x, self.index) for x in (block, frame.thread))
        if self.config.across is None:
            self._emit_along(frame, block, thread)
        else:
            self._emit_across(frame, block, thread)

    # ---- which vector

    def _emit_along(self, frame: Frame, block: Expr, thread: Expr) -> None:
        config = self.config
        first = T.Bind(block * (config.threads * config.unroll) + thread)
        steps = range(1, config.unroll)
        numbers = [first, *(T.Bind(first + step * config.threads) for step in steps)]
        if self._full_blocks():
            self._vectors(frame, numbers)
            return
        if not isinstance(self.vectors, int) or self.vectors:
            with T.If(numbers[-1] < self.vectors):
                with T.Then():
                    self._vectors(frame, numbers)
                if config.unroll > 1:
                    with T.Else():
                        for number in numbers[:-1]:
                            with then(number < self.vectors):
                                self._vectors(frame, [number])
        if self.tail:
            for number in numbers:
                with then(tirx.EQ(number, self._size(self.vectors))):
                    self._rest(frame)

    def _full_blocks(self) -> bool:
        """Whether every thread is known to have all its vectors."""
        each = self.config.threads * self.config.unroll
        return not self.tail and isinstance(self.vectors, int) and self.vectors % each == 0

    def _vectors(self, frame: Frame, numbers: list[Expr]) -> None:
        """Vectors by their numbers; all are loaded before the first is computed."""
        jobs = [self._numbered(frame, number) for number in numbers]
        for job in jobs:
            self._finish(job)

    def _numbered(self, frame: Frame, number: Expr) -> Job:
        """Vector `number` of the program, loaded."""
        if self.config.flat:
            return self._load_flat(frame, T.Bind(number * self.config.width))
        scope = RowScope(self.program, frame)
        if self.program.rows:
            per_row = self._size(self.per_row)
            scope.set_row(T.Bind(T.truncdiv(number, per_row)))
            number = T.truncmod(number, per_row)
        return self._start(scope, T.Bind(number * self.config.width))

    def _emit_across(self, frame: Frame, block: Expr, thread: Expr) -> None:
        config, program = self.config, self.program
        row_tiles, vector_tiles = self.tiles
        warps = config.threads // LANES
        vector = T.Bind(T.truncmod(block, vector_tiles) * warps + T.truncdiv(thread, LANES))
        block = T.Bind(T.truncdiv(block, vector_tiles))
        row = T.Bind(T.truncmod(block, row_tiles) * LANES + T.truncmod(thread, LANES))
        block = T.Bind(T.truncdiv(block, row_tiles))
        scope = RowScope(program, frame)
        others = [axis for axis in range(len(program.rows)) if axis != config.across]
        scope.set_row(block, others)
        scope.env[program.row_vars[config.across]] = row
        exists = tirx.And(row < program.rows[config.across], vector < self.per_row)
        with then(exists):
            self._finish(self._start(scope, T.Bind(vector * config.width)))

    # ---- one vector

    def _start(self, scope: RowScope, column: Expr) -> Job:
        """The columns from `column` on of the row that `scope` knows, loaded."""
        scope.load_scalars()
        loaded = self._load(scope, column)

        def point(lane: int) -> Point:
            return Point(scope, column + lane, _lane_of(loaded, lane))

        def store(output: Output, values: list[Expr]) -> None:
            store_vector(scope, output, column, values, self._piece(output))

        return Job(scope, point, store)

    def _load_flat(self, frame: Frame, start: Expr) -> Job:
        """The elements from number `start` of the space on, loaded."""
        width, zero = self.config.width, constant(0, self.index)
        lanes = FlatLanes(self.program, frame, start, width)
        loaded: Loaded = {}
        for tile in flat_tiles(self.program):
            buffer = T.alloc_local((width,), tile.dtype)
            loaded[tile.var] = buffer, 1, 0
            piece = piece_bytes(zero, tile.dtype, width, self.analyzer)
            load_values(lanes.scope, tile.param, start, tile.dtype, (buffer, 0), width, piece)

        def store(output: Output, values: list[Expr]) -> None:
            piece = piece_bytes(zero, output.dtype, width, self.analyzer)
            store_values(frame.buffers[output.param], start, values, output.dtype, piece)

        return Job(lanes.scope, lambda lane: lanes.point(lane, _lane_of(loaded, lane)), store)

    def _finish(self, job: Job) -> None:
        """Computes and stores a vector."""
        prepared = self._prepare(job.scope)
        results: list[list[Expr]] = [[] for _ in prepared]
        for lane in range(self.config.width):
            point = job.point(lane)
            for values, expr in zip(results, prepared, strict=True):
                values.append(T.Bind(point.evaluate(expr)))
        for output, values in zip(self.program.outputs, results, strict=True):
            job.store(output, values)

    def _prepare(self, scope: RowScope) -> list[Expr]:
        values = [output.value for output in self.program.outputs]
        scope.prepare_values(values)
        return [scope.prepare(value) for value in values]

    def _piece(self, access: Access) -> int:
        return piece_bytes(access.offset, access.dtype, self.config.width, self.analyzer)

    def _load(self, scope: RowScope, column: Expr) -> Loaded:
        """Register arrays of the tiles, vector elements and combs, by placeholder."""
        width = self.config.width
        loaded: Loaded = {}
        for tile in self.program.tiles:
            buffer = T.alloc_local((width,), tile.dtype)
            loaded[tile.var] = buffer, 1, 0
            load_tile(scope, tile, column, (buffer, 0), width, self._piece(tile))
        for var, vector in self.elements.items():
            buffer = T.alloc_local((width,), vector.element.dtype)
            loaded[var] = buffer, 1, 0
            load_element(scope, vector, column, (buffer, 0), width)
        for comb in self.combs:
            run = comb.stride * width
            buffer = T.alloc_local((run,), comb.dtype)
            loaded |= {var: (buffer, comb.stride, tooth) for var, tooth in comb.teeth.items()}
            start = substitute(scope.row(comb.offset), {self.program.column_var: column})
            load_values(scope, comb.param, start, comb.dtype, (buffer, 0), run, comb.piece)
        return loaded

    def _rest(self, frame: Frame) -> None:
        """The elements behind the last whole vector, one after the other."""
        program = self.program
        start = self._size(self.vectors) * self.config.width
        count = convert(self._size(self.run) - start, "int32")
        with T.serial(count, unroll=False) as step:
            scope = RowScope(program, frame)
            column = T.Bind(start + convert(step, self.index))
            if program.rows:
                row = T.Bind(T.truncdiv(column, self._size(program.columns)))
                scope.set_row(row)
                column = T.Bind(column - row * self._size(program.columns))
            scope.load_scalars()
            prepared = self._prepare(scope)
            point = Point(scope, column)
            for output, expr in zip(program.outputs, prepared, strict=True):
                place = scope.row(output.offset) + column
                store_values(
                    frame.buffers[output.param], place, [point.evaluate(expr)], output.dtype, 1
                )


def _lane_of(loaded: Loaded, lane: int) -> Local:
    """Element number `lane` of what is loaded in vectors."""

    def local(var: Var) -> Expr | None:
        if var not in loaded:
            return None
        buffer, stride, start = loaded[var]
        return buffer[lane * stride + start]

    return local
