"""One pointwise program within a kernel: its blocks, its threads, its vectors.

Along the columns, neighbouring threads take neighbouring vectors of a row:

    q = block * threads + thread;  row, column = q // (N / width), q % (N / width) * width

Across, the lanes of a warp take neighbouring rows (of the axis in which strided loads are
consecutive), so that a transposed read of a warp is consecutive in memory, and each thread still
writes whole vectors:

    block = 32 rows x (threads / 32) vectors;  row = 32 * block_row + lane
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...errors import Unsupported
from ..expr import constant, convert, dtype_of
from ..program import Access, Extent, Program
from .frame import Frame, then
from .scope import Point, RowScope
from .transfer import load_element, load_tile, store_vector
from .vectors import divides, piece_bytes, vector_elements

LANES = 32


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
    """

    threads: int = 256
    width: int = 8
    unroll: int = 1
    across: int | None = None


class PointwisePart:
    """Emits the code of `blocks` blocks that compute `program`."""

    def __init__(self, program: Program, config: PointwiseConfig) -> None:
        self.program, self.config = program, config
        self.index = program.index_dtype
        self.analyzer = program.analyzer()
        width = config.width
        self.tail = not divides(width, program.columns, self.analyzer)
        if self.tail and program.rows:
            raise Unsupported(f"vectors of {width} cross the end of rows of {program.columns}")
        self.per_row = self._quotient(program.columns, width)
        self.elements = vector_elements(program, width)
        if config.across is None:
            self.vectors = program.row_count * self.per_row
            jobs = self.vectors + (1 if self.tail else 0)
            self.blocks = self._ceil(jobs, config.threads * config.unroll)
        else:
            self._check_across()
            rows = program.rows[config.across]
            self.tiles = self._ceil(rows, LANES), self._ceil(self.per_row, config.threads // LANES)
            self.blocks = program.row_count // rows * self.tiles[0] * self.tiles[1]

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
        for step in range(config.unroll):
            number = first if step == 0 else T.Bind(first + step * config.threads)
            if not isinstance(self.vectors, int) or self.vectors:
                with then(number < self.vectors):
                    self._numbered(frame, number)
            if self.tail:
                with then(tirx.EQ(number, self._size(self.vectors))):
                    self._rest(frame)

    def _numbered(self, frame: Frame, number: Expr) -> None:
        """Vector `number` of the program."""
        scope = RowScope(self.program, frame)
        if self.program.rows:
            per_row = self._size(self.per_row)
            scope.set_row(T.Bind(T.truncdiv(number, per_row)))
            number = T.truncmod(number, per_row)
        self._vector(scope, T.Bind(number * self.config.width))

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
            self._vector(scope, T.Bind(vector * config.width))

    # ---- one vector

    def _vector(self, scope: RowScope, column: Expr) -> None:
        """The columns from `column` on of the row that `scope` knows."""
        scope.load_scalars()
        loaded = self._load(scope, column)
        prepared = self._prepare(scope)
        results: list[list[Expr]] = [[] for _ in prepared]
        for lane in range(self.config.width):
            registers = {var: buffer[lane] for var, buffer in loaded.items()}
            point = Point(scope, column + lane, registers.get)
            for values, expr in zip(results, prepared, strict=True):
                values.append(T.Bind(point.evaluate(expr)))
        for output, values in zip(self.program.outputs, results, strict=True):
            store_vector(scope, output, column, values, self._piece(output))

    def _prepare(self, scope: RowScope) -> list[Expr]:
        values = [output.value for output in self.program.outputs]
        scope.prepare_values(values)
        return [scope.prepare(value) for value in values]

    def _piece(self, access: Access) -> int:
        return piece_bytes(access.offset, access.dtype, self.config.width, self.analyzer)

    def _load(self, scope: RowScope, column: Expr) -> dict[Var, Var]:
        """Register arrays of the tiles and vector elements, by placeholder."""
        width = self.config.width
        loaded: dict[Var, Var] = {}
        for tile in self.program.tiles:
            buffer = loaded[tile.var] = T.alloc_local((width,), tile.dtype)
            load_tile(scope, tile, column, (buffer, 0), width, self._piece(tile))
        for var, vector in self.elements.items():
            buffer = loaded[var] = T.alloc_local((width,), vector.element.dtype)
            load_element(scope, vector, column, (buffer, 0), width)
        return loaded

    def _rest(self, frame: Frame) -> None:
        """The columns behind the last whole vector, one after the other."""
        program = self.program
        start = self._size(self.vectors) * self.config.width
        count = convert(self._size(program.columns) - start, "int32")
        with T.serial(count, unroll=False) as step:
            scope = RowScope(program, frame)
            scope.load_scalars()
            prepared = self._prepare(scope)
            column = T.Bind(start + convert(step, self.index))
            point = Point(scope, column)
            for output, expr in zip(program.outputs, prepared, strict=True):
                value = convert(point.evaluate(expr), output.dtype)
                buffer = frame.buffers[output.param]
                T.buffer_store(buffer, value, [scope.row(output.offset) + column])
