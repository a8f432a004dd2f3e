"""The points that a thread of a scan computes, in each of three layouts; loads and stores of them.

    along     width columns of one row, in vectors where they are whole
    across    width columns of `vector` neighbouring rows, in vectors over these
    staged    elements in the order in which they lie in memory, a warp side by side

Nothing is loaded beyond the ends: threads there read the last elements again, count as neutral, and
store nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ..gpu.frame import Frame, then
from ..gpu.scope import Point, RowScope
from ..gpu.transfer import load_element, load_tile, load_values, store_values, store_vector
from ..gpu.vectors import divides, piece_bytes, vector_elements
from ..program.expr import (
    bytes_of,
    constant,
    convert,
    dtype_of,
    linear_form,
    number,
    substitute,
    uses_any,
)
from ..program.program import Element, Output, Program
from .config import WARP, ScanConfig
from .exchange import Place, Staging


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """A point.

    Attributes
    ----------
    scope : number of the scope of its row.
    column : within the row.
    valid : whether the column is one; None: it is.
    """

    point: Point
    scope: int
    column: Expr
    valid: Expr | None


class Cells:
    """What the layouts share: where a thread stands, rows that exist, columns that do.

    Attributes
    ----------
    scopes : one for each row of which a thread computes points.
    """

    def __init__(self, program: Program, config: ScanConfig, frame: Frame) -> None:
        self.program, self.config, self.frame = program, config, frame
        self.analyzer = program.analyzer()
        self.turns = -(-program.columns // config.chunk)
        self.whole = self.turns * config.chunk == program.columns
        inner = config.threads if config.along else config.rows
        near, far = (T.Bind(f(frame.thread, inner)) for f in (T.truncmod, T.truncdiv))
        place, side = (near, far) if config.along else (far, near)
        self.at = Place(config, frame.thread, place, side, self.turns > 1)
        self.exists: Expr | None = None
        self.scopes = [self._scope(row) for row in self._rows()]

    def of_turn(self, turn: Expr) -> list[Cell]:
        """The cells of a turn, their rows one after the other."""
        raise NotImplementedError

    def store(self, output: Output, cells: list[Cell], values: list[Expr]) -> None:
        """What an output is at the cells."""
        target = self.frame.buffers[output.param]
        for cell, value in zip(cells, values, strict=True):
            with self.where(cell.valid):
                at = self.element(output, cell)
                store_values(target, at, [value], output.dtype, bytes_of(output.dtype))

    def element(self, output: Output, cell: Cell) -> Expr:
        """Where a cell's value of an output lies."""
        place = output.offset if output.place is None else output.place
        row = self.scopes[cell.scope].row(place)
        at = substitute(row, {self.program.column_var: cell.column})
        return at + cell.column if output.place is None else at

    @contextmanager
    def where(self, valid: Expr | None) -> Iterator[None]:
        """Where the row and the column are some."""
        conditions = [c for c in (self.exists, valid) if c is not None]
        both = tirx.And(*conditions) if len(conditions) == 2 else next(iter(conditions), None)
        with nullcontext() if both is None else then(both):
            yield

    def _rows(self) -> list[Expr]:
        """The rows of which a thread computes points; the last ones, where they do not exist."""
        size, index = self.config.vector, self.program.index_dtype
        block, side = (convert(x, index) for x in (self.frame.block, self.at.side))
        first = T.Bind((block * self.config.rows + side) * size)
        first = self._existing(first, self.config.rows * size, size)
        return [first + row for row in range(size)]

    def _existing(self, first: Expr, block: int, size: int) -> Expr:
        """The first of `size` rows, those that are last if these do not exist; `block` rows are
        a block's.
        """
        count = self.program.row_count
        if block == size or (isinstance(count, int) and count % block == 0):
            return first
        if isinstance(count, int):
            count = constant(count, self.program.index_dtype)
        self.exists = T.Bind(first < count)
        return T.Bind(tirx.Min(first, count - size))

    def _scope(self, row: Expr) -> RowScope:
        scope = RowScope(self.program, self.frame)
        scope.set_row(row)
        scope.load_scalars()
        return scope

    def _column(self, column: Expr) -> tuple[Expr, Expr | None]:
        """A column within the row, and whether it is one."""
        if self.whole:
            return T.Bind(column), None
        end = constant(self.program.columns - 1, self.program.index_dtype)
        return T.Bind(tirx.Min(column, end)), T.Bind(column <= end)

    def _first(self, turn: Expr) -> Expr:
        """A thread's first column."""
        turn, place = (convert(x, self.program.index_dtype) for x in (turn, self.at.place))
        return T.Bind((turn * self.config.threads + place) * self.config.width)


class Along(Cells):
    """See the module docstring."""

    def __init__(self, program: Program, config: ScanConfig, frame: Frame) -> None:
        super().__init__(program, config, frame)
        self.by_vectors = program.columns % config.width == 0
        self.elements = vector_elements(program, config.width) if self.by_vectors else {}

    def of_turn(self, turn: Expr) -> list[Cell]:
        """The cells of a turn."""
        columns, loaded = self._columns(self._first(turn)), {}
        if self.by_vectors:
            loaded = self._load(columns[0][0])

        def local(lane: int):
            return lambda var: loaded[var][lane] if var in loaded else None

        scope = self.scopes[0]
        return [
            Cell(Point(scope, column, local(lane)), 0, column, valid)
            for lane, (column, valid) in enumerate(columns)
        ]

    def _columns(self, first: Expr) -> list[tuple[Expr, Expr | None]]:
        lanes = range(self.config.width)
        if not self.by_vectors:
            return [self._column(first + lane) for lane in lanes]
        valid, last = None, self.program.columns - self.config.width
        if not self.whole:
            end = constant(last, self.program.index_dtype)
            valid, first = T.Bind(first <= end), T.Bind(tirx.Min(first, end))
        return [(first + lane, valid) for lane in lanes]

    def _load(self, start: Expr) -> dict[Var, Var]:
        """Vectors of what is read along the row."""
        loaded: dict[Var, Var] = {}
        scope, width = self.scopes[0], self.config.width
        for tile in self.program.tiles:
            buffer = loaded[tile.var] = T.alloc_local((width,), tile.dtype)
            piece = piece_bytes(tile.offset, tile.dtype, width, self.analyzer)
            load_tile(scope, tile, start, (buffer, 0), width, piece)
        for var, vector in self.elements.items():
            buffer = loaded[var] = T.alloc_local((width,), vector.element.dtype)
            load_element(scope, vector, start, (buffer, 0), width)
        return loaded

    def store(self, output: Output, cells: list[Cell], values: list[Expr]) -> None:
        """What an output is at the cells."""
        if not self.by_vectors or output.place is not None:
            super().store(output, cells, values)
            return
        piece = piece_bytes(output.offset, output.dtype, len(values), self.analyzer)
        with self.where(cells[0].valid):
            store_vector(self.scopes[0], output, cells[0].column, values, piece)


class Across(Cells):
    """See the module docstring."""

    def __init__(self, program: Program, config: ScanConfig, frame: Frame) -> None:
        super().__init__(program, config, frame)
        found = ((e, _row_piece(program, e, config.vector)) for e in program.elements)
        self.pieces = {element: piece for element, piece in found if piece is not None}

    def of_turn(self, turn: Expr) -> list[Cell]:
        """The cells of a turn, their rows one after the other."""
        first, width = self._first(turn), self.config.width
        columns = [self._column(first + k) for k in range(width)]
        loaded = [self._load(column) for column, _ in columns]

        def local(k: int, row: int):
            return lambda var: loaded[k][var][row] if var in loaded[k] else None

        return [
            Cell(Point(scope, column, local(k, row)), row, column, valid)
            for row, scope in enumerate(self.scopes)
            for k, (column, valid) in enumerate(columns)
        ]

    def _load(self, column: Expr) -> dict[Var, Var]:
        """Vectors over neighbouring rows of what is read at a column."""
        loaded: dict[Var, Var] = {}
        scope, size, here = self.scopes[0], self.config.vector, self.program.column_var
        for element, piece in self.pieces.items():
            start = substitute(scope.row(element.offset), {here: column})
            buffer = loaded[element.var] = T.alloc_local((size,), element.dtype)
            load_values(scope, element.param, start, element.dtype, (buffer, 0), size, piece)
        return loaded

    def store(self, output: Output, cells: list[Cell], values: list[Expr]) -> None:
        """What an output is at the cells."""
        size, width = self.config.vector, self.config.width
        piece = (
            None if output.place is None else _piece(self.program, output.place, output.dtype, size)
        )
        if piece is None:
            super().store(output, cells, values)
            return
        target = self.frame.buffers[output.param]
        for k in range(width):
            with self.where(cells[k].valid):
                at = self.element(output, cells[k])
                store_values(target, at, values[k::width], output.dtype, piece)


def _row_piece(program: Program, element: Element, size: int) -> int | None:
    """Bytes of an access to `size` neighbouring rows of an element; None where they are none."""
    data = (item.var for item in (*program.tiles, *program.elements, *program.values))
    held = {*data, *(scalar.var for scalar in program.scalars)}
    if element.guard is not None or uses_any(element.offset, held):
        return None
    return _piece(program, element.offset, element.dtype, size)


def _piece(program: Program, place: Expr, dtype: str, size: int) -> int | None:
    """Bytes of an access to `size` neighbouring rows at a place; None where these are apart."""
    if size == 1 or not program.rows or not divides(size, program.rows[-1], program.analyzer()):
        return None
    row = program.row_vars[-1]
    form = linear_form(place, (row,))
    if form is None or number(form[0][0]) != 1:
        return None
    index, analyzer = Var("q", tvm.ir.PrimType(program.index_dtype)), program.analyzer()
    extent = program.rows[-1]
    count = extent // size if isinstance(extent, int) else tirx.FloorDiv(extent, size)
    analyzer.bind(index, tvm.ir.Range(0, count))
    start = substitute(place, {row: index * constant(size, dtype_of(row))})
    piece = piece_bytes(analyzer.simplify(start), dtype, size, analyzer)
    return piece if piece > bytes_of(dtype) else None


class Staged(Cells):
    """See the module docstring."""

    def __init__(self, program: Program, config: ScanConfig, frame: Frame) -> None:
        super().__init__(program, config, frame)
        self.staging = Staging(self.at, {scan.dtype for scan in program.scans})

    def _rows(self) -> list[Expr]:
        """The rows of a thread's elements, which are the same in each turn."""
        config, index = self.config, self.program.index_dtype
        inner, span = config.staged, config.threads * config.staged
        group = T.Bind(T.truncdiv(self.frame.thread, span)) if config.rows > inner else 0
        near = T.Bind(T.truncmod(self.frame.thread, span))
        if inner == 1:  # a warp's elements are its own
            unit = min(WARP, config.threads)
            near = T.truncdiv(near, unit) * (unit * config.width) + T.truncmod(near, unit)
            near, span = T.Bind(near), unit
        self.within = [near + span * k for k in range(config.width)]
        self.group = group
        block = convert(self.frame.block, index) * config.rows
        first = T.Bind(block + convert(group, index) * inner if config.rows > inner else block)
        first = self._existing(first, config.rows, inner)
        if inner == 1:
            return [first]
        return [first + convert(T.truncmod(e, inner), index) for e in self.within]

    def of_turn(self, turn: Expr) -> list[Cell]:
        """The cells of a turn."""
        inner, cells = self.config.staged, []
        start = T.Bind(convert(turn, self.program.index_dtype) * self.config.chunk)
        for k, element in enumerate(self.within):
            place = element if inner == 1 else T.truncdiv(element, inner)
            column, valid = self._column(start + convert(place, self.program.index_dtype))
            number_ = 0 if inner == 1 else k
            point = Point(self.scopes[number_], column)
            cells.append(Cell(point, number_, column, valid))
        return cells

    def slots(self) -> list[Expr]:
        """Where a thread's elements lie in shared memory."""
        return [T.Bind(self.staging.slot(self.group, element)) for element in self.within]


def cells_of(program: Program, config: ScanConfig, frame: Frame) -> Cells:
    """The cells of a configuration."""
    if config.staged:
        return Staged(program, config, frame)
    return (Along if config.along else Across)(program, config, frame)
