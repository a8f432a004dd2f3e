"""Expressions inside a kernel: what is known of the row, and the values at one point."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ..program.expr import (
    FLOAT8_DTYPES,
    HALF_DTYPES,
    convert,
    dtype_of,
    occurrences,
    substitute,
    variables,
    widened,
)
from ..program.program import Element, Level, Program, Tile, Value
from .arithmetic import Arithmetic, Hoister
from .frame import MOST_REFERENCES, Frame, held

Local = Callable[[Var], Expr | None]
"""Where the value of a placeholder lies in registers; None if it does not."""


class RowScope:
    """Row-level knowledge of a kernel: coordinates, scalars, reductions, hoisted expressions.

    Attributes
    ----------
    env : row-level variables of the program -> what they are in the kernel.
    bodies : values and element loads -> their prepared body or offset.
    ready : values that are in registers already.
    factors : ready values -> the row-level factor they still lack.
    per_element : variables that change within a row.
    half_data : all data is of half precision or less; of a pointwise program the outputs too.
    """

    def __init__(self, program: Program, frame: Frame) -> None:
        self.program, self.frame = program, frame
        self.env: dict[Var, Expr] = dict(frame.numbers)
        self.definitions = program.placeholders()
        self.bodies: dict[Var, Expr] = {}
        self.ready: set[Var] = set()
        self.factors: dict[Var, Expr] = {}
        self.per_element = {program.column_var}
        for var in self.definitions:
            if program.level(var) == Level.ELEMENT:
                self.per_element.add(var)
        sources = [t.dtype for t in program.tiles] + [e.dtype for e in program.elements]
        if not program.phases:
            sources += [output.dtype for output in program.outputs]
        self._reads: dict[int, tuple[Expr, tuple[Var, ...]]] = {}
        coarse = HALF_DTYPES + FLOAT8_DTYPES
        self.half_data = all(d in coarse for d in sources if d.startswith(("float", "bf")))
        self.forget()

    def forget(self) -> None:
        """Starts a part of the kernel in which nothing is hoisted yet."""
        self.bodies = {}
        self.arithmetic = Arithmetic(
            self.per_element, Hoister(), self.program.exact, self.half_data
        )

    @contextmanager
    def fork(self) -> Iterator[None]:
        """A part of the kernel after which row-level knowledge is as it was before."""
        saved = dict(self.env), self.bodies, self.arithmetic
        self.forget()
        yield
        self.env, self.bodies, self.arithmetic = saved

    # ---- coordinates and scalars

    def set_row(self, row: Expr, axes: Sequence[int] | None = None) -> None:
        """Row coordinates from the linear number of the row, counted over `axes` (all of them)."""
        axes = list(range(len(self.program.rows)) if axes is None else axes)
        while axes:
            axis = axes.pop()
            var, extent = self.program.row_vars[axis], self.program.rows[axis]
            if not axes:
                self.env[var] = row
                break
            size = convert(extent, dtype_of(row)) if isinstance(extent, Expr) else extent
            self.env[var] = T.Bind(T.truncmod(row, size))
            row = T.Bind(T.truncdiv(row, size))

    def load_scalars(self) -> None:
        """Loads what is the same for the whole row."""
        for scalar in self.program.scalars:
            self.env[scalar.var] = T.Bind(
                self.load(scalar.param, self.row(scalar.offset), scalar.dtype)
            )

    def load(self, param: int, offset: Expr, dtype: str) -> Expr:
        """The element at `offset` of a parameter, widened."""
        return convert(self.frame.buffers[param][offset], widened(dtype))

    # ---- expressions

    def row(self, expr: Expr) -> Expr:
        """`expr` with what is known of the row put in; row-level element loads in place."""
        env = {}
        for var in variables(expr):
            item = self.definitions.get(var)
            if var in self.env:
                env[var] = self.env[var]
            elif var in self.factors:
                env[var] = tirx.Mul(var, self.factors[var])
            elif isinstance(item, Element) and var not in self.per_element:
                env[var] = self._row_element(item)
        return substitute(expr, env)

    def _row_element(self, item: Element) -> Expr:
        """A row-level element; 0 where it must not be read, which may be asked for ahead."""
        found = self.load(item.param, self.row(item.offset), item.dtype)
        if item.guard is None:
            return found
        return tirx.if_then_else(self.row(item.guard), found, tirx.const(0, dtype_of(found)))

    def prepare(self, expr: Expr) -> Expr:
        """`expr` as the device computes it; its row-level parts are bound here."""
        return self.arithmetic.prepare(self.row(expr))

    def prepare_values(self, exprs: Iterable[Expr]) -> None:
        """Prepares the bodies of all values and element offsets that `exprs` read."""
        for expr in exprs:
            for var in variables(expr):
                item = self.definitions.get(var)
                if var in self.bodies or var in self.ready:
                    continue
                if isinstance(item, Value):
                    self.prepare_values([item.body])
                    self.bodies[var] = self.prepare(item.body)
                elif isinstance(item, Element) and var in self.per_element:
                    self.prepare_values([item.offset])
                    self.bodies[var] = self.prepare(item.offset)

    def reads(self, prepared: Expr) -> tuple[Var, ...]:
        """The variables of a prepared expression that change within a row; looked for once, as each
        point asks.
        """
        known = self._reads.get(id(prepared))
        if known is None:
            found = tuple(v for v in variables(prepared) if v in self.per_element)
            known = self._reads[id(prepared)] = prepared, found  # which keeps the id its own
        return known[1]

    def address(self, param: int, offset: Expr) -> Expr:
        """Address of the element at `offset` of a parameter."""
        return self.frame.buffers[param].ptr_to([offset])


class Point:
    """The values at one point of the space; each is bound once, on first use.

    Parameters
    ----------
    scope : prepared for the expressions that will be asked for.
    column : the point's column.
    local : placeholders that are in registers already.
    keep : told of every value that is computed here.
    """

    def __init__(
        self,
        scope: RowScope,
        column: Expr,
        local: Local = lambda var: None,
        keep: Callable[[Var, Expr], None] = lambda var, value: None,
    ) -> None:
        self.scope, self.local, self.keep = scope, local, keep
        self.known: dict[Var, Expr] = {scope.program.column_var: column}
        self.references: dict[Var, int] = {}
        self.column = column

    def evaluate(self, prepared: Expr) -> Expr:
        """A prepared expression at this point."""
        env = {var: self._get(var) for var in self.scope.reads(prepared)}
        return substitute(prepared, env)

    def _get(self, var: Var) -> Expr:
        waiting = [var]
        while waiting:  # a loop, since chains are longer than Python's stack is deep
            first = waiting[-1]
            needs = [v for v in self._needs(first) if v not in self.known]
            if needs:
                waiting += reversed(needs)
                continue
            waiting.pop()
            if first not in self.known:
                self._find(first)
        return self.known[var]

    def _needs(self, var: Var) -> Iterator[Var]:
        """What has to be known before a placeholder can be computed."""
        item, scope = self.scope.definitions.get(var), self.scope
        if var in self.known or self.local(var) is not None:
            return iter(())
        if isinstance(item, Tile):
            return (v for v in variables(scope.row(item.offset)) if v in scope.per_element)
        return iter(scope.reads(scope.bodies[var]))

    def _find(self, var: Var) -> None:
        """Computes a placeholder of which all that it needs is known."""
        local, item = self.local(var), self.scope.definitions.get(var)
        if local is not None:
            self.known[var] = T.Bind(convert(local, dtype_of(var)))
        elif isinstance(item, Element) and item.guard is not None:
            self.known[var] = self._read(var)
        else:
            self.known[var] = self._bind(var)
            self.keep(var, self.known[var])

    def _bind(self, var: Var) -> Expr:
        """The value of a placeholder in a variable, or held, where it is too long."""
        value, item = self._read(var), self.scope.definitions[var]
        used = occurrences(self.scope.bodies[var]) if isinstance(item, Value) else {}
        count = sum(n * self.references.get(v, 1) for v, n in used.items())
        if count <= MOST_REFERENCES:
            self.references[var] = count
            return T.Bind(value)
        return held(value)

    def _read(self, var: Var) -> Expr:
        item, scope = self.scope.definitions[var], self.scope
        if isinstance(item, Value):
            return self.evaluate(scope.bodies[var])
        if isinstance(item, Tile):
            offset = self.evaluate(scope.row(item.offset))
            return scope.load(
                item.param, offset + convert(self.column, dtype_of(offset)), item.dtype
            )
        return scope.load(item.param, self.evaluate(scope.bodies[var]), item.dtype)
