"""Vectors that cross the ends of rows: rows of 1001 columns are accessed 16 bytes at a time.

Tensors in the linear order of the space are flat. The elements of one vector lie in two rows at
most (where rows are no shorter than a vector), so the row is found by one division:

    row, column = start / N, start % N
    lane l:  column + l < N ? (row, column + l) : (row + 1, column + l - N)

What is broadcast (a bias, a factor a row) is read at the row and column of each lane; a row's
scalars are loaded for both rows.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ..program import Program
from .frame import Frame
from .scope import Point, RowScope


class FlatScope(RowScope):
    """A scope in which the coordinates of the row and its scalars change with the element too."""

    def __init__(self, program: Program, frame: Frame) -> None:
        super().__init__(program, frame)
        self.per_element |= {*program.row_vars, *self.definitions}
        self.forget()


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
            row = T.Bind(T.truncdiv(start, program.columns))
            self.column = T.Bind(start - row * program.columns)
            self.here = self._row(row)
            self.next = self._row(T.Bind(tirx.Min(row + 1, program.row_count - 1)))

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
            row = T.Bind(T.truncdiv(self.start + lane, columns))
            return T.Bind(self.start + lane - row * columns), self._row(row).get
        if lane == 0:
            return self.column, self.here.get
        wrapped = T.Bind(self.column + lane >= columns)
        column = T.Bind(self.column + lane - tirx.Select(wrapped, columns, 0))

        def row_level(var: Var) -> Expr | None:
            here = self.here.get(var)
            return None if here is None else tirx.if_then_else(wrapped, self.next[var], here)

        return column, row_level
