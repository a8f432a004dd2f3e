"""The points that a thread of a scan computes, in each of three layouts; loads and stores of them.

    along     width columns of one row, in vectors where they are whole
    across    width columns of `vector` neighbouring rows, in vectors over these
    staged    elements in the order in which they lie in memory, a warp side by side

Nothing is loaded beyond the ends: threads there read the last elements again, and store nothing;
what they scan is before nothing that is stored.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
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
from ..program.program import Element, Extent, Output, Program, Tile
from .config import WARP, ScanConfig
from .exchange import Place, Staging


@dataclass(frozen=True, slots=True, eq=False)
class Spot:
    """Where a thread computes a point: the number of the scope of its row, the column, and whether
    that is one (None: it is).
    """

    scope: int
    column: Expr
    valid: Expr | None


@dataclass(frozen=True, slots=True, eq=False)
class Cell(Spot):
    """A point, of which what is loaded has come."""

    point: Point


class Cells:
    """What the layouts share: where a thread stands, rows that exist, columns that do.

    What can be loaded without knowing other data is loaded a turn ahead.

    Attributes
    ----------
    scopes : one for each row of which a thread computes points.
    """

    def __init__(self, program: Program, config: ScanConfig, frame: Frame) -> None:
        self.program, self.config, self.frame = program, config, frame
        self.analyzer = program.analyzer()
        self.turns = _turns(program, config)
        self.whole = (
            isinstance(program.columns, int) and self.turns * config.turn == program.columns
        )
        self.in_runs = _has_runs(program, config)
        inner = config.threads if config.along else config.rows
        near, far = (T.Bind(f(frame.thread, inner)) for f in (T.truncmod, T.truncdiv))
        place, side = (near, far) if config.along else (far, near)
        self.several = not isinstance(self.turns, int) or self.turns > 1
        self.at = Place(config, frame, place, side, self.several)
        self.exists: Expr | None = None
        self.scopes = [self._scope(row) for row in self._rows()]
        self.count = config.width * config.lines
        self.loads = self._loads()
        self.here = {var: T.alloc_local((self.count,), d) for var, d in self.loads.items()}
        self.ahead = self.here
        if self.several:
            self.ahead = {var: T.alloc_local((self.count,), d) for var, d in self.loads.items()}

    def start(self) -> None:
        """Loads what the first turn needs."""
        self._load(self._places(constant(0, "int32")))

    def of_turn(self, turn: Expr) -> list[Cell]:
        """The cells of a turn, their rows one after the other; loads of the next one start."""
        if self.several:
            for var, buffer in self.here.items():
                for n in range(self.count):
                    T.buffer_store(buffer, self.ahead[var][n], [n])
            with then(turn + 1 < self.turns):
                self._load(self._places(turn + 1))
        cells = []
        for n, place in enumerate(self._places(turn)):
            point = Point(self.scopes[place.scope], place.column, self._local(n))
            cells.append(Cell(place.scope, place.column, place.valid, point))
        return cells

    def _local(self, n: int):
        return lambda var: self.here[var][n] if var in self.here else None

    def _places(self, turn: Expr) -> list[Spot]:
        """The points of a turn, their rows one after the other."""
        raise NotImplementedError

    def _loads(self) -> dict[Var, str]:
        """What is loaded ahead, and its type in memory."""
        data = (i.var for i in (*self.program.tiles, *self.program.elements, *self.program.values))
        held = {*data, *(scan.var for scan in self.program.scans)}
        found = {tile.var: tile.dtype for tile in self.program.tiles}
        for element in self.program.elements:
            if element.guard is None and not uses_any(element.offset, held):
                found[element.var] = element.dtype
        return found

    def _load(self, places: list[Spot]) -> None:
        """Starts the loads of a turn."""
        for n, place in enumerate(places):
            for item in (*self.program.tiles, *self.program.elements):
                if item.var in self.loads and item.var not in self._vectors():
                    offset = self.scopes[place.scope].row(item.offset)
                    at = substitute(offset, {self.program.column_var: place.column})
                    if isinstance(item, Tile):
                        at = at + convert(place.column, dtype_of(at))
                    value = self.frame.buffers[item.param][at]
                    T.buffer_store(self.ahead[item.var], value, [n])

    def _vectors(self) -> Container[Var]:
        """What a layout loads in vectors by itself."""
        return ()

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
        end = self._last(1)
        return T.Bind(tirx.Min(column, end)), T.Bind(column <= end)

    def _last(self, width: int) -> Expr:
        """The first of the last `width` columns."""
        columns, index = self.program.columns, self.program.index_dtype
        return constant(columns - width, index) if isinstance(columns, int) else columns - width

    def _first_chunk(self, turn: Expr) -> Expr:
        """Of the block, in a turn; those of a row's blocks follow each other."""
        index = self.program.index_dtype
        number = convert(turn, index)
        if self.config.blocks > 1:
            number = number * self.config.blocks + convert(self.frame.rank, index)
        return number * self.config.runs

    def _run(self, chunk: Expr) -> list[tuple[Expr, Expr | None]]:
        """A thread's consecutive columns within the row, and whether each is one."""
        place = convert(self.at.place, self.program.index_dtype)
        first = T.Bind((chunk * self.config.threads + place) * self.config.width)
        width = self.config.width
        if not self.in_runs:
            return [self._column(first + k) for k in range(width)]
        valid = None
        if not self.whole:
            end = self._last(width)
            valid, first = T.Bind(first <= end), T.Bind(tirx.Min(first, end))
        return [(first + k, valid) for k in range(width)]


def _turns(program: Program, config: ScanConfig) -> Extent:
    """Turns in which the columns are gone through."""
    columns, turn = program.columns, config.turn
    if isinstance(columns, int):
        return -(-columns // turn)
    if 0 < config.most <= turn:
        return 1
    size = constant(turn, program.index_dtype)
    return tirx.FloorDiv(columns + (size - 1), size)


def _has_runs(program: Program, config: ScanConfig) -> bool:
    """Whether no thread is beyond the end of a row in part."""
    return divides(config.width, program.columns, program.analyzer())


class Along(Cells):
    """See the module docstring."""

    def __init__(self, program: Program, config: ScanConfig, frame: Frame) -> None:
        self.by_vectors = _has_runs(program, config)
        self.elements = vector_elements(program, config.width) if self.by_vectors else {}
        super().__init__(program, config, frame)

    def _places(self, turn: Expr) -> list[Spot]:
        first = self._first_chunk(turn)
        runs = [self._run(first + run) for run in range(self.config.runs)]
        return [Spot(0, column, valid) for run in runs for column, valid in run]

    def _loads(self) -> dict[Var, str]:
        vectors = {var: vector.element.dtype for var, vector in self.elements.items()}
        return {**super()._loads(), **vectors}

    def _vectors(self) -> Container[Var]:
        tiles = self.program.tiles if self.by_vectors else ()
        return {*self.elements, *(tile.var for tile in tiles)}

    def _load(self, places: list[Spot]) -> None:
        super()._load(places)
        scope, width = self.scopes[0], self.config.width
        for first in range(0, len(places), width):
            start = places[first].column
            for tile in self.program.tiles if self.by_vectors else ():
                piece = piece_bytes(tile.offset, tile.dtype, width, self.analyzer)
                load_tile(scope, tile, start, (self.ahead[tile.var], first), width, piece)
            for var, vector in self.elements.items():
                load_element(scope, vector, start, (self.ahead[var], first), width)

    def store(self, output: Output, cells: list[Cell], values: list[Expr]) -> None:
        """What an output is at the cells."""
        if not self.by_vectors or output.place is not None:
            super().store(output, cells, values)
            return
        width = self.config.width
        piece = piece_bytes(output.offset, output.dtype, width, self.analyzer)
        for first in range(0, len(cells), width):
            cell, part = cells[first], values[first : first + width]
            with self.where(cell.valid):
                store_vector(self.scopes[0], output, cell.column, part, piece)


class Across(Cells):
    """See the module docstring."""

    def __init__(self, program: Program, config: ScanConfig, frame: Frame) -> None:
        found = ((e, _row_piece(program, e, config.vector)) for e in program.elements)
        self.pieces = {element: piece for element, piece in found if piece is not None}
        super().__init__(program, config, frame)

    def _places(self, turn: Expr) -> list[Spot]:
        run = self._run(self._first_chunk(turn))
        return [Spot(row, *column) for row in range(self.config.vector) for column in run]

    def _vectors(self) -> Container[Var]:
        return {element.var for element in self.pieces}

    def _local(self, n: int):
        row, k = divmod(n, self.config.width)
        vectors, turned = self._vectors(), k * self.config.vector + row

        def local(var: Var) -> Expr | None:
            if var not in self.here:
                return None
            return self.here[var][turned if var in vectors else n]

        return local

    def _load(self, places: list[Spot]) -> None:
        super()._load(places)
        scope, size = self.scopes[0], self.config.vector
        for k, place in enumerate(places[: self.config.width]):
            here = {self.program.column_var: place.column}
            for element, piece in self.pieces.items():
                start = substitute(scope.row(element.offset), here)
                target = (self.ahead[element.var], k * size)
                load_values(scope, element.param, start, element.dtype, target, size, piece)

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

    def _places(self, turn: Expr) -> list[Spot]:
        inner, found = self.config.staged, []
        start = T.Bind(self._first_chunk(turn) * self.config.chunk)
        for k, element in enumerate(self.within):
            place = element if inner == 1 else T.truncdiv(element, inner)
            column = self._column(start + convert(place, self.program.index_dtype))
            found.append(Spot(0 if inner == 1 else k, *column))
        return found

    def slots(self) -> list[Expr]:
        """Where a thread's elements lie in shared memory."""
        return [T.Bind(self.staging.slot(self.group, element)) for element in self.within]


def cells_of(program: Program, config: ScanConfig, frame: Frame) -> Cells:
    """The cells of a configuration."""
    if config.staged:
        return Staged(program, config, frame)
    return (Along if config.along else Across)(program, config, frame)
