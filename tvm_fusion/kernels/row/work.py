"""What the rows of a program cost whatever the configuration: bytes, operations, exchanges.

Numbers are per element (one column of one row) unless they say otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.ir import Call, Expr, Var

from ...ir.reader import children
from ..gpu.memory import WIDEST
from ..gpu.vectors import divides, piece_bytes, vector_elements
from ..gpu.windows import WORD, Windows, needs_windows
from ..program.expr import (
    DIVISIONS,
    HALF_DTYPES,
    bytes_of,
    dtype_of,
    is_integer,
    known_factor,
    uses_any,
    variables,
)
from ..program.online import merge_online
from ..program.program import Element, Extent, Level, Output, Program, Reduction, Tile, Value
from .steps import kept_values

# Operations of each sweep over a row, counted in the expressions of a program.

_FREE_CALLS = ("reinterpret", "likely")
CALL_OPERATIONS = 2.0
"""Instructions around a special function: scaling, range."""
DIVISION_OPERATIONS = 8.0
"""Instructions of an integer division by a number known when the kernel is written."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """One pass over a row and the exchange behind it.

    Attributes
    ----------
    arithmetic, special : operations, and slots of the special-function unit.
    streamed : bytes of inputs of its own that every row has.
    shared : bytes of inputs that all rows read (gamma, bias).
    stored : bytes of full outputs.
    reductions, running : reductions that it ends with, and those of them that run along.
    """

    arithmetic: float
    special: float
    streamed: int
    shared: int
    stored: int
    reductions: int
    running: int


def count_sweeps(
    program: Program, kept: Iterable[Var], slots: Mapping[str, float]
) -> tuple[Sweep, ...]:
    """The sweeps of a program, of which the values `kept` are evaluated once."""
    counter = _Counter(program, set(kept), slots)
    return tuple(counter.sweep(phase) for phase in range(program.phases + 1))


class _Counter:
    """Counts what each sweep evaluates; what is `kept` is evaluated once."""

    def __init__(self, program: Program, kept: set[Var], slots: Mapping[str, float]) -> None:
        self.program, self.kept, self.slots = program, kept, slots
        self.definitions = program.placeholders()
        self.ready: set[Var] = set()
        self.per_element = {program.column_var} | {
            var for var in self.definitions if program.level(var) == Level.ELEMENT
        }

    def sweep(self, phase: int) -> Sweep:
        program = self.program
        reductions = [r for r in program.reductions if r.phase == phase]
        running = [r for r in reductions if r.online is not None]
        plain = [r for r in reductions if r.online is None]
        outputs = [o for o in program.outputs if o.full and o.phase == phase]
        parts = [[r.body for r in plain] + [o.value for o in outputs], [r.body for r in running]]
        arithmetic, special, read = float(len(reductions)), 0.0, {}
        for exprs in filter(None, parts):
            more, slots = self._evaluate(exprs, read)
            arithmetic, special = arithmetic + more, special + slots
        arithmetic += sum(0.5 for o in outputs if o.dtype in HALF_DTYPES)
        tiles = [i for i in read.values() if isinstance(i, Tile | Element)]
        own = [t for t in tiles if not isinstance(t, Tile) or t.per_row or not program.rows]
        return Sweep(
            arithmetic,
            special,
            sum(bytes_of(t.dtype) for t in own),
            sum(bytes_of(t.dtype) for t in tiles if t not in own),
            sum(bytes_of(o.dtype) for o in outputs),
            len(reductions),
            len(running),
        )

    def _evaluate(self, exprs: list[Expr], read: dict[Var, Tile | Element]) -> tuple[float, float]:
        """Operations of one evaluation of `exprs`, values between them once."""
        arithmetic = special = 0.0
        seen: set[Var] = set()
        stack = list(exprs)
        while stack:
            expr = stack.pop()
            more, slots = self._count(expr)
            arithmetic, special = arithmetic + more, special + slots
            for var in variables(expr):
                item = self.definitions.get(var)
                if var in seen or var in self.ready:
                    continue
                seen.add(var)
                if isinstance(item, Value):
                    stack.append(item.body)
                elif isinstance(item, Tile | Element) and var in self.per_element:
                    read[var] = item
                    arithmetic += 1.0 if item.dtype in HALF_DTYPES else 0.0
        self.ready |= seen & self.kept
        return arithmetic, special

    def _count(self, expr: Expr) -> tuple[float, float]:
        """Operations and special slots of one expression, apart from what changes by row only."""
        if not self._is_per_element(expr):
            return 0.0, 0.0
        arithmetic, special = self._own_cost(expr)
        for child in children(expr):
            more, slots = self._count(child)
            arithmetic, special = arithmetic + more, special + slots
        return arithmetic, special

    def _is_per_element(self, expr: Expr) -> bool:
        if isinstance(expr, Var):
            return expr in self.per_element
        return any(self._is_per_element(child) for child in children(expr))

    def _own_cost(self, expr: Expr) -> tuple[float, float]:
        """Operations and special slots of the root of an expression."""
        if isinstance(expr, Call):
            name = getattr(expr.op, "name", "").removeprefix("tirx.")
            if name in self.slots:
                return CALL_OPERATIONS, self.slots[name]
            return (0.0 if name in _FREE_CALLS else CALL_OPERATIONS), 0.0
        if isinstance(expr, tirx.Div) and not is_integer(dtype_of(expr)):
            divides = self._is_per_element(expr.b)
            return 1.0, self.slots.get("divide", 1.0) if divides else 0.0
        if isinstance(expr, DIVISIONS):
            return DIVISION_OPERATIONS, 0.0
        return (0.0 if isinstance(expr, Var) or not children(expr) else 1.0), 0.0


ASSUMED_EXTENT = 8192
"""A symbolic number of rows counts as this: what is good for many rows is rarely bad for few."""
MOVES = 2.0
"""Instructions that move one word of two vectors by one power of two, and those that choose."""


@dataclass(frozen=True, slots=True)
class Accesses:
    """Instructions that move an element in vectors of one width, each with the bytes it moves.

    `loads` bring what every row has of its own, `shared` what all rows read. The rest is what
    windows cost: columns by which all vectors of a row may exceed it, instructions an element that
    move two vectors together, bytes of an element that are moved so, and accesses of single
    elements at the ends of a row.
    """

    shared: tuple[tuple[float, int], ...]
    loads: tuple[tuple[float, int], ...]
    stores: tuple[tuple[float, int], ...]
    slack: int = 0
    moves: float = 0.0
    moved: int = 0
    single: int = 0

    @property
    def count(self) -> float:
        """Instructions an element."""
        return sum(count for count, _ in (*self.shared, *self.loads, *self.stores))


@dataclass(frozen=True, slots=True)
class RowWork:
    """The work of a program's rows.

    Attributes
    ----------
    rows, columns : symbolic ones count as `ASSUMED_EXTENT`.
    streamed, shared, stored : bytes, each input and output once.
    reread : those of `streamed` that the caches have: of a row, or of a vector that all rows read,
        at another place.
    row_bytes : bytes of a row that do not depend on its length.
    kept : bytes of values that stay in registers between sweeps.
    merged, plain : sweeps with and without running sums, nothing but inputs kept in registers.
    merged_kept, plain_kept : the same with `kept_values` kept.
    lookups : loads a row that wait for one another before the row can start (labels, tokens).
    """

    rows: int
    columns: int
    streamed: int
    shared: int
    stored: int
    row_bytes: int
    kept: int
    merged: tuple[Sweep, ...]
    plain: tuple[Sweep, ...]
    merged_kept: tuple[Sweep, ...]
    plain_kept: tuple[Sweep, ...]
    accesses: Mapping[int, Accesses]
    lookups: int
    reread: int = 0

    def chunks(self, width: int, threads: int, columns: int = 0) -> int:
        """Vectors of `width` of a row, or of one of so many columns, for each of its threads."""
        vectors = -(-((columns or self.columns) + self.accesses[width].slack) // width)
        return -(-vectors // threads)

    def held_again(self, online: bool) -> bool:
        """Whether what one sweep read must stay in registers for another."""
        sweeps = self.sweeps(online, True)
        return (
            any(s.running for s in sweeps)
            or sum(bool(s.reductions or s.stored) for s in sweeps) > 1
        )

    def sweeps(self, online: bool, keeps: bool) -> tuple[Sweep, ...]:
        """The sweeps of a form."""
        if online:
            return self.merged_kept if keeps else self.merged
        return self.plain_kept if keeps else self.plain


def row_work(program: Program, widths: Iterable[int], slots: Mapping[str, float]) -> RowWork:
    """The work of `program`; `slots` are those of the special-function unit by function."""
    merged = merge_online(program)
    kept = kept_values(merged)
    elements = [e for e in program.elements if program.level(e.var) == Level.ELEMENT]
    row_elements = [e for e in program.elements if program.level(e.var) != Level.ELEMENT]
    per_row = [t for t in program.tiles if t.per_row or not program.rows]
    shared = [t for t in program.tiles if t not in per_row]
    loaded = sum(bytes_of(t.dtype) for t in [*per_row, *elements])
    full = [o for o in program.outputs if o.full]
    single = [*program.scalars, *row_elements, *(o for o in program.outputs if not o.full)]
    return RowWork(
        rows=_size(program.row_count),
        columns=_size(program.columns),
        streamed=loaded,
        shared=sum(bytes_of(t.dtype) for t in shared),
        stored=sum(bytes_of(o.dtype) for o in full),
        row_bytes=sum(bytes_of(item.dtype) for item in single),
        kept=4 * len(kept),
        merged=count_sweeps(merged, (), slots),
        plain=count_sweeps(program, (), slots),
        merged_kept=count_sweeps(merged, kept, slots),
        plain_kept=count_sweeps(program, kept_values(program), slots),
        accesses={width: _accesses(program, width) for width in dict.fromkeys(widths)},
        lookups=_lookups(program),
        reread=sum(bytes_of(e.dtype) for e in elements if _is_near(program, e)),
    )


def _is_near(program: Program, element: Element) -> bool:
    """Whether an element lies in what its row reads anyway, or in a vector that all rows read."""
    size = program.params[element.param].elements
    short = isinstance(size, int) and isinstance(program.columns, int) and size <= program.columns
    shared = short and not uses_any(element.offset, program.row_vars)
    return shared or any(tile.param == element.param for tile in program.tiles)


def _size(extent: Extent) -> int:
    """An extent as a number."""
    return extent if isinstance(extent, int) else ASSUMED_EXTENT


def _accesses(program: Program, width: int) -> Accesses:
    """Loads and stores of one element when vectors are `width` columns."""
    analyzer = program.analyzer()
    if needs_windows(program, width):
        return _window_accesses(program, width, analyzer)
    wide = vector_elements(program, width)

    def vector(item: Tile | Output) -> tuple[float, int]:
        return _access(item.dtype, width, piece_bytes(item.offset, item.dtype, width, analyzer))

    own = [t for t in program.tiles if t.per_row or not program.rows]
    shared = tuple(vector(t) for t in program.tiles if t not in own)
    loads = [vector(tile) for tile in own]
    for element in program.elements:
        if program.level(element.var) == Level.ELEMENT:
            piece = wide[element.var].piece if element.var in wide else bytes_of(element.dtype)
            loads.append(_access(element.dtype, width, piece))
    return Accesses(shared, tuple(loads), tuple(vector(o) for o in program.outputs if o.full))


def _access(dtype: str, width: int, piece: int) -> tuple[float, int]:
    return max(1.0, width * bytes_of(dtype) / piece) / width, piece


def _window_accesses(program: Program, width: int, analyzer: tvm.sym.Analyzer) -> Accesses:
    """The same for rows that start and end anywhere (windows.py).

    The first and the last vector of a row are stored element by element, and so is read what lies
    at the ends of a parameter. Of what starts elsewhere than the rows, two vectors are read.
    """
    windows = Windows(program, width)
    shared, loads, stores = [], [], []
    moves, moved, single = 0.0, 0, 0
    for tile in program.tiles:
        own = tile.per_row or not program.rows
        count, piece = _access(tile.dtype, width, min(WIDEST, width * bytes_of(tile.dtype)))
        if windows.skewed[tile.var]:
            words = max(1, width * bytes_of(tile.dtype) // WORD)
            moves += MOVES * words * max(1, words.bit_length()) / width
            moved += bytes_of(tile.dtype)
            count *= 2
            if not own and not divides(width, program.params[tile.param].elements, analyzer):
                single += 2 * width
        (loads if own else shared).append((count, piece))
    for element in program.elements:
        if program.level(element.var) == Level.ELEMENT:
            loads.append(_access(element.dtype, width, bytes_of(element.dtype)))
    for output in program.outputs:
        if output.full:
            stores.append(_access(output.dtype, width, windows.piece(output)))
            single += 2 * width
    slack = width - math.gcd(known_factor(windows.base, analyzer), width)
    return Accesses(tuple(shared), tuple(loads), tuple(stores), slack, moves, moved, single)


def _lookups(program: Program) -> int:
    """Length of the longest chain of loads that decides where a row lies."""
    definitions = program.placeholders()

    def depth(expr: Expr) -> int:
        found = 0
        for var in variables(expr):
            item = definitions.get(var)
            if item is not None and not isinstance(item, Value | Reduction | Tile):
                found = max(found, 1 + depth(item.offset))
        return found

    return max((depth(t.offset) for t in program.tiles), default=0)
