"""Pointwise kernels: each thread computes one vector (or a few) of consecutive columns of one row.

    q = block * threads + thread                     number of the vector in the grid
    row, column = q // (N / width), q % (N / width) * width
    load the tiles, 16 bytes an access -> compute in registers -> store, 16 bytes an access

A program of one long row (all accesses contiguous) may end in the middle of a vector: the last
thread then handles the rest element by element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...errors import Unsupported
from ..expr import constant, convert, dtype_of
from ..narrow import narrow_indices
from ..program import Extent, Program
from .frame import Frame, kernel_frame, then
from .scope import Point, RowScope
from .transfer import load_element, load_tile, store_vector
from .vectors import divides, piece_bytes, vector_elements, vector_width

if TYPE_CHECKING:
    from ...config import HardwareProfile


@dataclass(frozen=True, slots=True)
class PointwiseConfig:
    """How a program is split over threads: `unroll` vectors of `width` columns a thread."""

    threads: int = 256
    width: int = 8
    unroll: int = 1


def pointwise_config(program: Program, hw: HardwareProfile) -> PointwiseConfig:
    """Blocks of 256 threads; smaller ones where that leaves multiprocessors without work."""
    width = vector_width(program, tail=not program.rows)
    threads = 256
    if program.is_static:
        vectors = -(-program.row_count * program.columns // width)
        while threads > 64 and vectors < threads * hw.num_sms:
            threads //= 2
    return PointwiseConfig(min(threads, hw.max_threads_per_block), width)


def emit_pointwise(
    program: Program, hw: HardwareProfile, config: PointwiseConfig | None = None
) -> tirx.PrimFunc:
    """The TIRx kernel of a program without reductions.

    Raises
    ------
    Unsupported
        For reductions, and for grids beyond 2**31 - 1 blocks.
    """
    if program.phases:
        raise Unsupported("the program reduces")
    if program.is_static and not program.row_count * program.columns:
        raise Unsupported("the outputs are empty")
    program = narrow_indices(program)
    return _PointwiseKernel(program, config or pointwise_config(program, hw)).emit()


class _PointwiseKernel:
    def __init__(self, program: Program, config: PointwiseConfig) -> None:
        self.program, self.config = program, config
        self.index = program.index_dtype
        self.analyzer = program.analyzer()
        width = config.width
        self.tail = not divides(width, program.columns, self.analyzer)
        if self.tail and program.rows:
            raise Unsupported(f"vectors of {width} cross the end of rows of {program.columns}")
        self.per_row = self._quotient(program.columns, width)
        self.vectors = program.row_count * self.per_row
        self.elements = vector_elements(program, width)

    def _quotient(self, extent: Extent, divisor: int) -> Extent:
        if isinstance(extent, int):
            return extent // divisor
        return self.analyzer.simplify(tirx.FloorDiv(extent, constant(divisor, dtype_of(extent))))

    def emit(self) -> tirx.PrimFunc:
        """The kernel."""
        config = self.config
        per_block = config.threads * config.unroll
        jobs = self.vectors + (1 if self.tail else 0)
        grid = self._quotient(jobs + (per_block - 1), per_block)
        if not isinstance(grid, int):
            grid = tirx.Max(grid, constant(1, dtype_of(grid)))
        with kernel_frame(self.program, grid, config.threads) as frame:
            first = self._number(frame)
            for step in range(config.unroll):
                number = first if step == 0 else T.Bind(first + step * config.threads)
                self._guarded(frame, number)
        return frame.func

    def _number(self, frame: Frame) -> Expr:
        """Number of a thread's first vector."""
        block, thread = (convert(x, self.index) for x in (frame.block, frame.thread))
        return T.Bind(block * (self.config.threads * self.config.unroll) + thread)

    def _guarded(self, frame: Frame, number: Expr) -> None:
        if not isinstance(self.vectors, int) or self.vectors:
            with then(number < self.vectors):
                self._vector(frame, number)
        if self.tail:
            with then(tirx.EQ(number, self._size(self.vectors))):
                self._rest(frame)

    def _size(self, extent: Extent) -> Expr:
        return constant(extent, self.index) if isinstance(extent, int) else extent

    def _vector(self, frame: Frame, number: Expr) -> None:
        """One vector of one row."""
        program, width = self.program, self.config.width
        scope = RowScope(program, frame)
        if program.rows:
            per_row = self._size(self.per_row)
            scope.set_row(T.Bind(T.truncdiv(number, per_row)))
            number = T.truncmod(number, per_row)
        column = T.Bind(number * width)
        scope.load_scalars()
        loaded = self._load(scope, column)
        prepared = self._prepare(scope)

        results: list[list[Expr]] = [[] for _ in prepared]
        for lane in range(width):
            registers = {var: buffer[lane] for var, buffer in loaded.items()}
            point = Point(scope, column + lane, registers.get)
            for values, expr in zip(results, prepared, strict=True):
                values.append(T.Bind(point.evaluate(expr)))
        for output, values in zip(program.outputs, results, strict=True):
            store_vector(scope, output, column, values, self._piece(output))

    def _prepare(self, scope: RowScope) -> list[Expr]:
        values = [output.value for output in self.program.outputs]
        scope.prepare_values(values)
        return [scope.prepare(value) for value in values]

    def _piece(self, access) -> int:
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
        program, width = self.program, self.config.width
        start = self._size(self.vectors) * width
        with T.serial(convert(self._size(program.columns) - start, "int32"), unroll=False) as step:
            scope = RowScope(program, frame)
            scope.load_scalars()
            prepared = self._prepare(scope)
            column = T.Bind(start + convert(step, self.index))
            point = Point(scope, column)
            for output, expr in zip(program.outputs, prepared, strict=True):
                value = convert(point.evaluate(expr), output.dtype)
                buffer = frame.buffers[output.param]
                T.buffer_store(buffer, value, [scope.row(output.offset) + column])
