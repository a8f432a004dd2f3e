"""Vectors that cross the ends of rows: rows of 1001 columns are accessed 16 bytes at a time.

Tensors in the linear order of the space are flat. The elements of one vector lie in two rows at
most (where rows are no shorter than a vector), so the row is found by one division:

    row, column = start / N, start % N
    lane l:  column + l < N ? (row, column + l) : (row + 1, column + l - N)

What is broadcast (a bias, a factor a row) is read at the row and column of each lane; a row's
scalars are loaded for both rows.

The coordinates are held in registers, which no pass looks through: TVM's simplifier would put their
selections and quotients into every offset, and be at it for a minute. It cannot tell their signs
either, so what is divided here are coordinates of known range, as on the device.
"""

from __future__ import annotations

from collections.abc import Callable

import tvm_ffi
from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ..gpu.frame import Frame, held
from ..gpu.scope import Point, RowScope
from ..program.expr import bounds, number
from ..program.program import Program


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
