"""Rows that are worked on in pieces: a point is the element at one place of every piece, so that
what changes places with another piece stays in the thread that has it.

    rows x 2W:  r = sum of x[j]^2;             y[j] = (-x[j + W] if j < W else x[j - W]) * r
    rows x W:   r = sum of x0^2 + x1^2;        y[j] = -x1 * r;   y[W + j] = x0 * r
                                               x0 = x[j], x1 = x[j + W]

Rotary embedding, and gates that are half of a row.
"""

from __future__ import annotations

import dataclasses
import math

from tvm import tirx
from tvm.ir import Expr, Var

from ...errors import Unsupported
from ..program.analysis import analyze
from ..program.collapse import drop_unused
from ..program.expr import (
    constant,
    convert,
    is_if_then_else,
    linear_form,
    number,
    rebuild,
    substitute,
    uses_any,
    variables,
)
from ..program.program import Element, Level, Output, Program, Tile, Value
from ..program.window import combined
from .exchange import is_arg
from .planned import MOST_PIECES


def read_rows(func: tirx.PrimFunc, exact: bool = False) -> Program:
    """The row program of a fused PrimFunc, in pieces where that keeps elements in their threads.

    Raises
    ------
    Unsupported
        As `analyze`; where outputs have a part of the columns, and rows do not divide so.
    """
    return in_pieces(analyze(func, exact, parts=True))


def in_pieces(program: Program) -> Program:
    """The program over pieces of its rows; itself where nothing is read at a piece's distance."""
    count = _count(program)
    if count > 1:
        return _Pieces(program, count).program()
    if any(output.share > 1 for output in program.outputs):
        raise Unsupported("outputs of a part of the columns")
    return program


def _count(program: Program) -> int:
    """How many pieces a row has: the most that all distances and outputs allow."""
    columns = program.columns
    plain = not program.scans and not any(is_arg(r) for r in program.reductions)
    placed = any(output.place is not None for output in program.outputs)
    if not program.phases or not isinstance(columns, int) or not plain or placed:
        return 1
    distances = [columns // o.share for o in program.outputs if o.full and o.share > 1]
    unit = math.gcd(columns, *distances, *_distances(program))
    count = columns // unit if unit else 1
    return count if count <= MOST_PIECES else 1


def _distances(program: Program) -> list[int]:
    """How far from a tile's elements others of the same parameter are read."""
    analyzer, found = program.analyzer(), []
    starts: dict[int, Expr] = {}
    for tile in program.tiles:
        first = starts.setdefault(tile.param, tile.offset)
        found.append(number(analyzer.simplify(tile.offset - first)))
    for element in program.elements:
        if element.param in starts and program.level(element.var) == Level.ELEMENT:
            own = starts[element.param] + program.column_var
            found.append(number(analyzer.simplify(element.offset - own)))
    return [abs(int(distance)) for distance in found if distance]


class _Pieces:
    """A program, and what its placeholders are in each piece."""

    def __init__(self, program: Program, count: int) -> None:
        self.old, self.count = program, count
        self.width = program.columns // count
        self.narrow = dataclasses.replace(program, columns=self.width)
        self.analyzer = self.narrow.analyzer()
        self.known = program.placeholders()
        self.env: list[dict[Var, Expr]] = [self._at(piece) for piece in range(count)]
        self.tiles: list[Tile] = []
        self.elements: list[Element] = []
        self.values: list[Value] = []

    def _at(self, piece: int) -> dict[Var, Expr]:
        column = self.old.column_var
        return {column: column + constant(piece * self.width, self.old.index_dtype)}

    def program(self) -> Program:
        """The program over pieces."""
        old = self.old
        for tile in old.tiles:
            for piece in range(self.count):
                offset = self._simplified(tile.offset + self._start(piece))
                self._name(tile, piece, self._tile(tile, offset, tile.per_row))
        for item in _in_order(old):
            for piece in range(self.count):
                self._name(item, piece, self._item(item, piece))
        reductions = tuple(
            dataclasses.replace(
                r,
                body=combined(r.kind, [self._placed(r.body, p) for p in range(self.count)]),
            )
            for r in old.reductions
        )
        outputs = [part for output in old.outputs for part in self._outputs(output)]
        return drop_unused(
            dataclasses.replace(
                self.narrow,
                tiles=tuple(self.tiles),
                elements=tuple(self.elements),
                values=tuple(self.values),
                reductions=reductions,
                outputs=tuple(outputs),
            )
        )

    def _outputs(self, output: Output) -> list[Output]:
        if not output.full:
            return [output]
        return [
            dataclasses.replace(
                output,
                value=self._placed(output.value, piece),
                offset=self._simplified(output.offset + self._start(piece)),
                share=1,
            )
            for piece in range(self.count // output.share)
        ]

    # ---- placeholders

    def _name(self, item: Tile | Element | Value, piece: int, var: Var) -> None:
        self.env[piece][item.var] = var

    def _tile(self, like: Tile | Element, offset: Expr, per_row: bool) -> Var:
        """The tile at an offset; equal ones are one."""
        for known in self.tiles:
            same = known.param == like.param and known.per_row == per_row
            if same and self.analyzer.can_prove_equal(known.offset, offset):
                return known.var
        var = Var(f"x{len(self.tiles)}", like.var.ty)
        self.tiles.append(Tile(var, like.param, offset, like.dtype, per_row))
        return var

    def _item(self, item: Element | Value, piece: int) -> Var:
        if isinstance(item, Value):
            body = self._placed(item.body, piece)
            if isinstance(body, Var):
                return body
            var = Var(f"v{len(self.values)}", item.var.ty)
            self.values.append(dataclasses.replace(item, var=var, body=body))
            return var
        if self.old.level(item.var) != Level.ELEMENT:
            if piece == 0:
                self.elements.append(item)
            return item.var
        offset = self._simplified(self._placed(item.offset, piece))
        guard = None if item.guard is None else self._decided(self._placed(item.guard, piece))
        if guard is None or number(guard):
            base = self._base(offset)
            if base is not None:
                return self._tile(item, base, self.old.level(base) == Level.ROW)
            guard = None
        var = Var(f"e{len(self.elements)}", item.var.ty)
        self.elements.append(dataclasses.replace(item, var=var, offset=offset, guard=guard))
        return var

    def _base(self, offset: Expr) -> Expr | None:
        """The row's part of ``offset = base + column``, where nothing but loads ahead is in it."""
        form = linear_form(offset, [self.old.column_var])
        if form is None or number(form[0][0]) != 1:
            return None
        base = self._simplified(form[1])
        ahead = {scalar.var for scalar in self.old.scalars}
        late = {self.old.column_var, *self.known} - ahead
        return None if uses_any(base, late) else base

    # ---- expressions

    def _start(self, piece: int) -> Expr:
        return constant(piece * self.width, self.old.index_dtype)

    def _simplified(self, offset: Expr) -> Expr:
        return convert(self.analyzer.simplify(offset), self.old.index_dtype)

    def _placed(self, expr: Expr, piece: int) -> Expr:
        """`expr` at the element of a piece; of what is decided there, the side that counts."""
        return self._chosen(substitute(expr, self.env[piece]))

    def _chosen(self, expr: Expr) -> Expr:
        if isinstance(expr, tirx.Select) or is_if_then_else(expr):
            parts = (
                (expr.condition, expr.true_value, expr.false_value)
                if isinstance(expr, tirx.Select)
                else expr.args
            )
            condition = self._decided(parts[0])
            if number(condition) is not None:
                return self._chosen(parts[1] if number(condition) else parts[2])
        return rebuild(expr, self._chosen)

    def _decided(self, condition: Expr) -> Expr:
        """A condition, as a number where all columns of a piece agree."""
        simple = self.analyzer.simplify(condition)
        return simple if number(simple) is not None else condition


def _in_order(program: Program) -> list[Element | Value]:
    """Elements and values, each behind those that it is computed from."""
    items = {item.var: item for item in (*program.elements, *program.values)}
    found: dict[Var, Element | Value] = {}

    def visit(item: Element | Value) -> None:
        if item.var in found:
            return
        exprs = [item.body] if isinstance(item, Value) else [item.offset]
        if isinstance(item, Element) and item.guard is not None:
            exprs.append(item.guard)
        for var in variables(*exprs):
            if var in items:
                visit(items[var])
        found[item.var] = item

    for item in items.values():
        visit(item)
    return list(found.values())
