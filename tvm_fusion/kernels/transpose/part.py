"""One transposing pointwise program within a kernel: a tile of rows along p x columns a block.

    1. every thread loads vectors along p of the strided inputs, all before the first is used
    2. and the vectors along the columns of the plain inputs
    3. writes what is strided into shared memory; barrier
    4. reads `width` columns of `stack` rows at a time from there, evaluates, stores 16-byte vectors

Threads beyond the end of an axis repeat its last vector and store nothing, so that only the stores
are under a condition; those beyond the tile load nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ..gpu.frame import Frame
from ..gpu.memory import copy_in, copy_words
from ..gpu.scope import RowScope
from ..gpu.transfer import load_element, load_tile, places, store_vector
from ..gpu.vectors import piece_bytes, vector_elements
from ..program.expr import bytes_of, constant, convert, substitute
from ..program.program import Access, Extent, Program
from .config import TransposeConfig
from .layout import LANES, row_values, when
from .plan import Staged, staged_elements


@dataclass(frozen=True, slots=True, eq=False)
class _Tile:
    """Where a block's tile begins, and the row axes it does not run along (in `env`)."""

    row: Expr
    column: Expr
    env: dict[Var, Expr]


@dataclass(frozen=True, slots=True, eq=False)
class _Area:
    """What a thread computes at once: `stack` rows of one vector.

    `row`, `column` and `block` (the number of the vector) count within the tile; `first_row` and
    `first_column` are where they are in the program, perhaps beyond its end.
    """

    row: Expr
    column: Expr
    block: Expr
    first_row: Expr
    first_column: Expr


class TransposePart:
    """Emits the code of `blocks` blocks that compute `program`.

    `memory` is the shared memory of the kernel, of at least `shared_bytes`; set it before `emit`.
    """

    def __init__(self, program: Program, config: TransposeConfig) -> None:
        config.check(program)
        self.program, self.config = program, config
        self.index = program.index_dtype
        self.analyzer = program.analyzer()
        self.extent = program.rows[config.axis]
        self.staged = list(staged_elements(program, config.axis, config.width).values())
        self.shared_bytes = config.shared_bytes(self.staged)
        vectors = vector_elements(program, config.width)
        moved = {item.element.var for item in self.staged}
        self.elements = {var: item for var, item in vectors.items() if var not in moved}
        self.tiles = (
            self._tiles_of(self.extent, config.rows),
            self._tiles_of(program.columns, config.columns),
        )
        self.others = [axis for axis in range(len(program.rows)) if axis != config.axis]
        outer = math.prod(program.rows[axis] for axis in self.others)
        self.blocks = outer * (self.tiles[0] * self.tiles[1])
        self.memory: Var | None = None

    def emit(self, frame: Frame, block: Expr) -> None:
        """The work of block number `block` of this part."""
        block, thread = (convert(x, self.index) for x in (block, frame.thread))
        # a grid has a block even where there is no row
        with when(None if isinstance(self.blocks, int) else block < self.blocks):
            self._emit(frame, block, thread)

    def _emit(self, frame: Frame, block: Expr, thread: Expr) -> None:
        tile = self._tile(frame, block)
        write = [self._fetch(frame, tile, item, thread) for item in self.staged]
        areas = list(self._areas(tile, thread))
        work = [_AreaWork(self, frame, tile, area) for area in areas]
        if self.config.early:
            for item in work:
                item.load()
        start = 0
        for item, put in zip(self.staged, write, strict=True):
            put(start)
            start += self.config.layout(bytes_of(item.element.dtype)).nbytes
        T.evaluate(T.cuda.cta_sync())
        for item in work:
            if not self.config.early:
                item.load()
            item.compute()

    def _size(self, value: Extent) -> Expr:
        return constant(value, self.index) if isinstance(value, int) else value

    # ---- which tile

    def _tile(self, frame: Frame, block: Expr) -> _Tile:
        """Blocks walk along the columns, `group` tiles along p at a time."""
        down, across = self.tiles
        group = self.config.group
        inside = T.Bind(T.truncmod(block, down * across))
        column_tile = T.Bind(T.truncdiv(T.truncmod(inside, group * across), group))
        row_tile = T.truncdiv(inside, group * across) * group + T.truncmod(inside, group)
        scope = RowScope(self.program, frame)
        scope.set_row(T.Bind(T.truncdiv(block, down * across)), self.others)
        row = T.Bind(row_tile * self.config.rows)
        return _Tile(row, T.Bind(column_tile * self.config.columns), scope.env)

    def _tiles_of(self, extent: Extent, size: int) -> Extent:
        if isinstance(extent, int):
            return math.ceil(extent / size)
        return tirx.FloorDiv(extent + (size - 1), self._size(size))

    def row_in_range(self, row: Expr) -> Expr | None:
        """The condition under which a row of a tile exists; None if it always does."""
        return _in_range(row, self.extent, self.config.rows)

    def column_in_range(self, column: Expr) -> Expr | None:
        """The same of a column."""
        return _in_range(column, self.program.columns, self.config.columns)

    def clamped_row(self, row: Expr, vector: int = 1) -> Expr:
        """The row itself, or the start of the axis's last vector."""
        if self.row_in_range(row) is None:
            return T.Bind(row)
        return T.Bind(tirx.Min(row, self._size(self.extent - vector)))

    def clamped_column(self, column: Expr, vector: int = 1) -> Expr:
        """The column itself, or the start of the last vector."""
        if self.column_in_range(column) is None:
            return T.Bind(column)
        return T.Bind(tirx.Min(column, self._size(self.program.columns - vector)))

    # ---- first phase

    def _fetch(
        self, frame: Frame, tile: _Tile, item: Staged, thread: Expr
    ) -> Callable[[int], None]:
        """Loads a tile into registers; what is returned writes it to shared memory at a byte."""
        config, element = self.config, item.element
        size, per_line = bytes_of(element.dtype), config.rows // item.vector
        count = per_line * config.columns
        turns = math.ceil(count / config.threads)
        layout = config.layout(size)
        registers = T.alloc_local((turns * item.vector,), element.dtype)
        numbers = [T.Bind(thread + turn * config.threads) for turn in range(turns)]
        lines = [T.Bind(T.truncdiv(number, per_line)) for number in numbers]
        rows = [T.Bind(T.truncmod(number, per_line) * item.vector) for number in numbers]
        own = [
            number < count if (turn + 1) * config.threads > count else None
            for turn, number in enumerate(numbers)
        ]
        for turn in range(turns):
            env = dict(tile.env)
            env[self.program.row_vars[config.axis]] = self.clamped_row(
                tile.row + rows[turn], item.vector
            )
            env[self.program.column_var] = self.clamped_column(tile.column + lines[turn])
            guard = None if element.guard is None else substitute(element.guard, env)
            with when(own[turn], guard):
                start = substitute(element.offset, env)
                source = places(frame.buffers[element.param], start, size)
                target = places(registers, turn * item.vector, size)
                copy_in(target, source, item.vector * size, item.piece)

        def write(start: int) -> None:
            piece = layout.piece(item.vector * size)
            step = max(piece, size)
            for turn in range(turns):
                with when(own[turn]):
                    block = T.truncdiv(lines[turn], config.width)
                    place = T.Bind(layout.place(rows[turn], lines[turn], block) + start)
                    for part in range(0, item.vector * size, step):
                        target = places(self.memory, place + part, 1)
                        source = places(registers, turn * item.vector + part // size, size)
                        copy_words(target, source, step, piece)

        return write

    # ---- second phase

    def _areas(self, tile: _Tile, thread: Expr) -> Iterator[_Area]:
        """The areas of a thread: its place in the warp's area, and the warp's areas."""
        config = self.config
        height, breadth = config.area
        warps, across = config.threads // LANES, config.columns // breadth
        warp, lane = (T.Bind(f(thread, LANES)) for f in (T.truncdiv, T.truncmod))
        lane_block = T.Bind(T.truncmod(lane, config.lanes))
        lane_row = T.Bind(T.truncdiv(lane, config.lanes) * config.stack)
        for turn in range(config.rows // height * across // warps):
            if warps % across == 0:
                area_column = T.truncmod(warp, across)
                area_row = T.truncdiv(warp, across) + turn * (warps // across)
            else:
                number = warp + turn * warps
                area_column, area_row = T.truncmod(number, across), T.truncdiv(number, across)
            block = T.Bind(area_column * config.lanes + lane_block)
            row, column = T.Bind(area_row * height + lane_row), T.Bind(block * config.width)
            yield _Area(row, column, block, T.Bind(tile.row + row), T.Bind(tile.column + column))


def _in_range(place: Expr, extent: Extent, size: int) -> Expr | None:
    """The condition under which a place in a tile of so many exists; None if it always does."""
    whole = isinstance(extent, int) and extent % size == 0
    return None if whole else place < extent


class _AreaWork:
    """The code of one area."""

    def __init__(self, part: TransposePart, frame: Frame, tile: _Tile, area: _Area) -> None:
        self.part, self.frame, self.tile, self.area = part, frame, tile, area
        self.scopes: list[RowScope] = []
        self.loaded: list[dict[Var, Var]] = []

    def load(self) -> None:
        """Scalars, plain tiles and vector elements of each row."""
        part, program, config = self.part, self.part.program, self.part.config
        self.column = part.clamped_column(self.area.first_column, config.width)
        for step in range(config.stack):
            scope = RowScope(program, self.frame)
            scope.env.update(self.tile.env)
            row = part.clamped_row(self.area.first_row + step)
            scope.env[program.row_vars[config.axis]] = row
            scope.load_scalars()
            self.scopes.append(scope)
            self.loaded.append(self._plain(scope, self.loaded[0] if step else {}))

    def _plain(self, scope: RowScope, first: dict[Var, Var]) -> dict[Var, Var]:
        """Register arrays of a row; those that are the same for all rows are the `first` row's."""
        part, width = self.part, self.part.config.width
        loaded: dict[Var, Var] = {}
        for tile in part.program.tiles:
            if first and not tile.per_row:
                loaded[tile.var] = first[tile.var]
                continue
            buffer = loaded[tile.var] = T.alloc_local((width,), tile.dtype)
            load_tile(scope, tile, self.column, (buffer, 0), width, self._piece(tile))
        for var, vector in part.elements.items():
            buffer = loaded[var] = T.alloc_local((width,), vector.element.dtype)
            load_element(scope, vector, self.column, (buffer, 0), width)
        return loaded

    def _piece(self, access: Access) -> int:
        part = self.part
        return piece_bytes(access.offset, access.dtype, part.config.width, part.analyzer)

    def _staged(self) -> dict[Var, Var]:
        """Register arrays [width][stack] of what lies in shared memory."""
        part, config, area = self.part, self.part.config, self.area
        found: dict[Var, Var] = {}
        start = 0
        for item in part.staged:
            element, size = item.element, bytes_of(item.element.dtype)
            layout = config.layout(size)
            buffer = T.alloc_local((config.width * config.stack,), element.dtype)
            place = T.Bind(layout.place(area.row, area.column, area.block) + start)
            piece = layout.piece(config.stack * size)
            step = max(piece, size)
            for line in range(config.width):
                for offset in range(0, config.stack * size, step):
                    source = places(part.memory, place + (line * layout.pitch + offset), 1)
                    target = places(buffer, line * config.stack + offset // size, size)
                    copy_words(target, source, step, piece)
            found[element.var] = buffer
            start += layout.nbytes
        return found

    def compute(self) -> None:
        """Evaluates and stores."""
        part, config = self.part, self.part.config
        outputs = part.program.outputs
        staged = self._staged()
        for step, (scope, loaded) in enumerate(zip(self.scopes, self.loaded, strict=True)):

            def registers(lane: int, loaded=loaded, step=step) -> dict[Var, Expr]:
                found = {var: buffer[lane] for var, buffer in loaded.items()}
                return found | {
                    var: buffer[lane * config.stack + step] for var, buffer in staged.items()
                }

            results = row_values(scope, self.column, config.width, registers)
            exists = (
                part.row_in_range(self.area.first_row + step),
                part.column_in_range(self.area.first_column),
            )
            with when(*exists):
                for output, lanes in zip(outputs, results, strict=True):
                    store_vector(scope, output, self.column, lanes, self._piece(output))
