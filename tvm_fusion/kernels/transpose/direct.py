"""Transposing programs with a short axis (colour channels): a thread holds all of it in registers.

    y[c, j] = x[j * 3 + c]     3 rows: 8 columns of all rows a thread, 3 vectors in, 3 out
    y[i, c] = x[c * N + i]     3 columns: 8 rows of all columns a thread, the same

No shared memory: what a thread loads are whole vectors, and so is what it stores. Where the columns
are the short axis, the rows of a thread are one run in memory. Long axes can be cut into the same
blocks (8 x 8 halves), with the lanes of a warp spread over both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import tvm
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...errors import Unsupported
from ..gpu.frame import Frame
from ..gpu.memory import copy_in
from ..gpu.scope import RowScope
from ..gpu.transfer import load_element, load_tile, places, store_vector
from ..gpu.vectors import piece_bytes, vector_elements
from ..program.expr import bytes_of, constant, convert, linear_form, number, substitute
from ..program.program import Access, Element, Output, Program, Tile
from .layout import LANES, row_values, when
from .plan import Staged, staged_elements

SHORT = 4
"""Longest axis that a thread holds: what it loads is within a few lines of the cache."""

MOST_ELEMENTS = 64
"""Elements of a thread's block: what fits its registers beside the other inputs."""


@dataclass(frozen=True, slots=True)
class DirectConfig:
    """How many rows and columns a thread holds.

    Attributes
    ----------
    axis : number of the row axis p along which strided loads are consecutive.
    threads : threads a block.
    width : columns of a thread.
    stack : rows of a thread.
    lanes : threads of a warp along the columns; the others lie along p.
    """

    axis: int
    threads: int
    width: int
    stack: int
    lanes: int = LANES


def direct_config(program: Program, axis: int, width: int) -> DirectConfig | None:
    """The configuration of a program with a short axis; None for others."""
    rows, columns = program.rows[axis], program.columns
    if rows <= SHORT or rows * columns <= MOST_ELEMENTS:
        return DirectConfig(axis, 256, width, rows)
    if columns <= SHORT:
        staged = staged_elements(program, axis, 1).values()
        return DirectConfig(axis, 256, columns, max(item.vector for item in staged))
    return None


def block_config(program: Program, axis: int, width: int) -> DirectConfig | None:
    """The configuration that cuts long axes into register blocks; None where they do not divide."""
    stack = max(item.vector for item in staged_elements(program, axis, width).values())
    lanes = LANES // 4
    rows, columns = LANES // lanes * stack, lanes * width
    if stack * width > MOST_ELEMENTS or program.rows[axis] % rows or program.columns % columns:
        return None
    return DirectConfig(axis, 128, width, stack, lanes)


class DirectPart:
    """Emits the code of `blocks` blocks that compute `program`."""

    def __init__(self, program: Program, config: DirectConfig) -> None:
        self.program, self.config = program, config
        self.index = program.index_dtype
        self.analyzer = program.analyzer()
        self.rows, self.columns = program.rows[config.axis], program.columns
        if not (isinstance(self.rows, int) and isinstance(self.columns, int)):
            raise Unsupported("the extents of the axes are not known")
        if self.rows % config.stack or self.columns % config.width:
            raise Unsupported(f"{config.stack} x {config.width} do not divide the axes")
        self.lanes = LANES // config.lanes, config.lanes
        self.across = self.columns // config.width
        self.down = self.rows // config.stack
        spread = config.lanes != LANES
        if spread and (self.down % self.lanes[0] or self.across % self.lanes[1]):
            raise Unsupported(f"warps of {self.lanes} threads do not divide the axes")
        self.staged = list(staged_elements(program, config.axis, config.width).values())
        moved = {item.element.var for item in self.staged}
        vectors = vector_elements(program, config.width)
        self.elements = {var: item for var, item in vectors.items() if var not in moved}
        self.others = [axis for axis in range(len(program.rows)) if axis != config.axis]
        outer = math.prod(program.rows[axis] for axis in self.others)
        self.jobs = outer * (self.down * self.across)
        threads = config.threads
        self.blocks = (self.jobs + (threads - 1)) // threads

    def emit(self, frame: Frame, block: Expr) -> None:
        """The work of block number `block` of this part."""
        config = self.config
        block, thread = (convert(x, self.index) for x in (block, frame.thread))
        job = T.Bind(block * config.threads + thread)
        whole = isinstance(self.jobs, int) and self.jobs % config.threads == 0
        with when(None if whole else job < self.jobs):
            self._emit(frame, job)

    def _emit(self, frame: Frame, job: Expr) -> None:
        config = self.config
        place, column = self._place_of(job)
        column = T.Bind(column * config.width)
        row = T.Bind(place * config.stack)
        base = RowScope(self.program, frame)
        base.set_row(T.Bind(T.truncdiv(job, self.across * self.down)), self.others)
        scopes = [self._scope(frame, base, T.Bind(row + step)) for step in range(config.stack)]
        staged = {item.element.var: self._load(scopes, item, column) for item in self.staged}
        runs = {tile.var: self._load_run(scopes[0], tile) for tile in self._run_tiles()}
        plain = [self._plain(scope, column, runs) for scope in scopes]
        values = [
            self._values(scope, column, step, (staged, runs, plain[step]))
            for step, scope in enumerate(scopes)
        ]
        for position, output in enumerate(self.program.outputs):
            lanes = [rows[position] for rows in values]
            if self._is_run(output):
                flat = [value for row_lanes in lanes for value in row_lanes]
                store_vector(scopes[0], output, column, flat, self._run_piece(output))
                continue
            for scope, row_lanes in zip(scopes, lanes, strict=True):
                piece = piece_bytes(output.offset, output.dtype, config.width, self.analyzer)
                store_vector(scope, output, column, row_lanes, piece)

    def _place_of(self, job: Expr) -> tuple[Expr, Expr]:
        """The numbers of a thread's block along p and along the columns."""
        if self.config.lanes == LANES:
            row = T.truncmod(T.truncdiv(job, self.across), self.down)
            return row, T.truncmod(job, self.across)
        down, across = self.lanes
        warp, lane = (T.Bind(f(job, LANES)) for f in (T.truncdiv, T.truncmod))
        warps_across = self.across // across
        row = T.truncmod(T.truncdiv(warp, warps_across), self.down // down)
        column = T.truncmod(warp, warps_across)
        return row * down + T.truncdiv(lane, across), column * across + T.truncmod(lane, across)

    def _scope(self, frame: Frame, base: RowScope, row: Expr) -> RowScope:
        scope = RowScope(self.program, frame)
        scope.env.update(base.env)
        scope.env[self.program.row_vars[self.config.axis]] = row
        scope.load_scalars()
        return scope

    def _plain(self, scope: RowScope, column: Expr, runs: dict[Var, Var]) -> dict[Var, Var]:
        """Register arrays of a row's plain tiles and vector elements."""
        width = self.config.width
        loaded: dict[Var, Var] = {}
        for tile in self.program.tiles:
            if tile.var not in runs:
                buffer = loaded[tile.var] = T.alloc_local((width,), tile.dtype)
                piece = piece_bytes(tile.offset, tile.dtype, width, self.analyzer)
                load_tile(scope, tile, column, (buffer, 0), width, piece)
        for var, vector in self.elements.items():
            buffer = loaded[var] = T.alloc_local((width,), vector.element.dtype)
            load_element(scope, vector, column, (buffer, 0), width)
        return loaded

    def _values(
        self, scope: RowScope, column: Expr, step: int, arrays: Sequence[dict[Var, Var]]
    ) -> list[list[Expr]]:
        """The columns of one row, of each output; `arrays` are strided, in runs, and plain."""
        width, stack = self.config.width, self.config.stack
        staged, runs, loaded = arrays

        def registers(lane: int) -> dict[Var, Expr]:
            found = {var: buffer[lane] for var, buffer in loaded.items()}
            found |= {var: buffer[step * width + lane] for var, buffer in runs.items()}
            return found | {var: buffer[lane * stack + step] for var, buffer in staged.items()}

        return row_values(scope, column, width, registers)

    # ---- strided loads

    def _load(self, scopes: list[RowScope], item: Staged, column: Expr) -> Var:
        """Register array [width][stack] of a strided load."""
        width, stack, element = self.config.width, self.config.stack, item.element
        size = bytes_of(element.dtype)
        buffer = T.alloc_local((width * stack,), element.dtype)
        piece = self._block_piece(element)
        if piece is not None:
            source = self._place(scopes[0], element, column)
            copy_in(places(buffer, 0, size), source, width * stack * size, piece)
            return buffer
        for line in range(width):
            for step in range(0, stack, item.vector):
                scope, here = scopes[step], column + line
                env = {**scope.env, self.program.column_var: here}
                guard = None if element.guard is None else substitute(element.guard, env)
                with when(guard):
                    target = places(buffer, line * stack + step, size)
                    source = self._place(scope, element, here)
                    copy_in(target, source, item.vector * size, item.piece)
        return buffer

    def _place(self, scope: RowScope, element: Element, column: Expr):
        env = {**scope.env, self.program.column_var: column}
        start = substitute(element.offset, env)
        return places(scope.frame.buffers[element.param], start, bytes_of(element.dtype))

    def _block_piece(self, element: Element) -> int | None:
        """Bytes of an access where all lines of a thread are one run; None where they are not."""
        stack, width = self.config.stack, self.config.width
        form = linear_form(element.offset, (*self.program.row_vars, self.program.column_var))
        if element.guard is not None or form is None or stack != self.rows:
            return None
        if number(form[0][-1]) != stack:
            return None
        vector = Var("q", tvm.ir.PrimType(self.index))
        self.analyzer.bind(vector, tvm.ir.Range(0, self.columns // width))
        zero = constant(0, self.index)
        env = {
            self.program.column_var: vector * width,
            self.program.row_vars[self.config.axis]: zero,
        }
        start = self.analyzer.simplify(substitute(element.offset, env))
        return piece_bytes(start, element.dtype, stack * width, self.analyzer)

    # ---- rows that are one run

    def _is_run(self, access: Tile | Output) -> bool:
        """Whether the rows of a thread follow each other in memory."""
        if self.config.width != self.columns:
            return False
        form = linear_form(access.offset, self.program.row_vars)
        return form is not None and number(form[0][self.config.axis]) == self.columns

    def _run_tiles(self) -> list[Tile]:
        return [tile for tile in self.program.tiles if self._is_run(tile)]

    def _run_piece(self, access: Access) -> int:
        """Bytes of one access of all rows of a thread."""
        group = Var("q", tvm.ir.PrimType(self.index))
        stack = self.config.stack
        self.analyzer.bind(group, tvm.ir.Range(0, self.rows // stack))
        env = {self.program.row_vars[self.config.axis]: group * stack}
        start = self.analyzer.simplify(substitute(access.offset, env))
        return piece_bytes(start, access.dtype, stack * self.config.width, self.analyzer)

    def _load_run(self, scope: RowScope, tile: Tile) -> Var:
        count = self.config.stack * self.config.width
        buffer = T.alloc_local((count,), tile.dtype)
        zero = constant(0, self.index)
        load_tile(scope, tile, zero, (buffer, 0), count, self._run_piece(tile))
        return buffer
