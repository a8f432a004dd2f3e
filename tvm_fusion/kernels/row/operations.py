"""Operations of each sweep over a row, counted in the expressions of a program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Call, Expr, Var

from ...ir.reader import children
from ..program.expr import HALF_DTYPES, bytes_of, dtype_of, is_integer, variables
from ..program.program import Element, Level, Program, Tile, Value

_DIVISIONS = (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod)
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
        if isinstance(expr, _DIVISIONS):
            return DIVISION_OPERATIONS, 0.0
        return (0.0 if isinstance(expr, Var) or not children(expr) else 1.0), 0.0
