"""The parts of a row kernel: steps between exchanges, and chunks of a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Expr, Var

from ..gpu.vectors import VectorElement
from ..program.collapse import reachable
from ..program.expr import dtype_of, is_integer, number, variables
from ..program.online import depends_on, scaled_values
from ..program.program import Element, Level, Output, Program, Reduction, Tile, Value

# What a row kernel loads into registers ahead: tiles, and elements that need nothing but loads.
#
# An element whose columns are consecutive (a reduction over several axes with a gap, a slice, a
# part
# of a concatenation) is loaded in vectors, another one (strided, gathered) column by column; either
# way before the arithmetic that needs it starts, and once.

Load = Tile | Element


def loads_ahead(program: Program, wide: Mapping[Var, VectorElement]) -> list[Load]:
    """Tiles and elements that can be loaded ahead, each after what its offset needs."""
    definitions = program.placeholders()
    found: list[Load] = list(program.tiles)
    for element in program.elements:
        parts = [element.offset] if element.guard is None else [element.offset, element.guard]
        if element.guard is not None and element.var not in wide:
            continue
        if program.level(element.var) != Level.ELEMENT:
            continue
        needed = [item for part in parts for item in reachable(part, definitions)]
        if not any(isinstance(item, Reduction) for item in needed):
            found.append(element)
    return found


def needed_loads(
    exprs: Iterable[Expr], loads: list[Load], definitions: Mapping, ready: Iterable[Var]
) -> list[Load]:
    """Those of `loads` that evaluating `exprs` reads, in order; `ready` ones are there already."""
    ready, ahead = set(ready), {load.var for load in loads}
    found: dict[Var, None] = {}

    def visit(expr: Expr) -> None:
        for var in variables(expr):
            item = definitions.get(var)
            if var in ready or var in found or not isinstance(item, Tile | Value | Element):
                continue
            if var in ahead:
                found.setdefault(var)
            if not isinstance(item, Tile):
                for part in parts_of(item):
                    visit(part)

    for expr in exprs:
        visit(expr)
    return [load for load in loads if load.var in found]


def parts_of(item: Value | Element) -> list[Expr]:
    """The expressions that evaluating a value or an element evaluates."""
    if isinstance(item, Value):
        return [item.body]
    return [item.offset] if item.guard is None else [item.offset, item.guard]


def only_in_rows(program: Program) -> bool:
    """Whether evaluating the program outside its rows may fault: loads, integer divisions."""
    if any(program.level(element.var) == Level.ELEMENT for element in program.elements):
        return True
    bodies = [*(v.body for v in program.values), *(r.body for r in program.reductions)]
    divisions: list[Expr] = []
    kinds = (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod)
    for body in [*bodies, *(output.value for output in program.outputs)]:
        tvm_ffi.structural_walk(body, [(kind, divisions.append) for kind in kinds])
    return any(is_integer(dtype_of(d)) and number(d.b) is None for d in divisions)


# Which temporaries of a row stay in registers between sweeps, instead of being computed again.


def kept_values(program: Program) -> list[Var]:
    """Values and element loads that several sweeps need and that are costly to repeat.

    A value that depends on the maximum of an online sum is computed while that maximum is not
    final: it can only be kept if a factor corrects it afterwards.
    """
    scaled = scaled_values(program)
    tops = {r.online for r in program.reductions if r.online is not None}
    sweeps = _Sweeps(program)
    kept: list[Var] = []
    items = [*program.values, *(e for e in program.elements if e.guard is None)]
    position = {item.var: place for place, item in enumerate(items)}
    # consumers first: what only a kept value needs is needed once
    for item in sorted(items, key=lambda i: -sweeps.depth(i.var)):
        if len(sweeps.needing(item.var)) < 2 or not _is_costly(program, item):
            continue
        if item.var not in scaled and any(depends_on(program, item.var, top) for top in tops):
            continue
        kept.append(item.var)
        sweeps.keep(item.var)
    return sorted(kept, key=position.__getitem__)


def _is_costly(program: Program, item: Value | Element) -> bool:
    if isinstance(item, Element):
        return program.level(item.var) == Level.ELEMENT
    calls: list[Expr] = []
    tvm_ffi.structural_walk(item.body, [(Call, calls.append)])
    guarded = {e.var for e in program.elements if e.guard is not None}
    return bool(calls) or any(var in guarded for var in variables(item.body))


class _Sweeps:
    """In which sweeps (one a phase, and one for what runs along) each value is evaluated."""

    def __init__(self, program: Program) -> None:
        self.parts: dict[Var, list[Var]] = {v.var: variables(v.body) for v in program.values}
        for element in program.elements:
            exprs = [element.offset] + ([] if element.guard is None else [element.guard])
            self.parts[element.var] = variables(*exprs)
        self.roots = [
            *((variables(r.body), (r.phase, r.online is not None)) for r in program.reductions),
            *((variables(o.value), (o.phase, False)) for o in program.outputs),
        ]
        self.kept: set[Var] = set()
        # Several read one value, and it several others: each is asked once.
        self._depths: dict[Var, int] = {}
        self._needing: dict[Var, set[tuple[int, bool]]] = {}

    def keep(self, var: Var) -> None:
        self.kept.add(var)
        self._needing.clear()

    def depth(self, var: Var) -> int:
        """Length of the longest chain of values below `var`."""
        if var not in self._depths:
            below = (self.depth(v) for v in self.parts[var] if v in self.parts)
            self._depths[var] = 1 + max(below, default=0)
        return self._depths[var]

    def needing(self, var: Var) -> set[tuple[int, bool]]:
        """The sweeps in which `var` is evaluated or read."""
        if var not in self._needing:
            found = {sweep for used, sweep in self.roots if var in used}
            for consumer, used in self.parts.items():
                if var in used:
                    sweeps = self.needing(consumer)
                    found |= {min(sweeps)} if consumer in self.kept and sweeps else sweeps
            self._needing[var] = found
        return self._needing[var]


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """One vector of a thread: its number within the row, and its slot in the register arrays.

    `edge`: some of its lanes may lie outside of the row (see windows.py).
    """

    vector: Expr
    slot: Expr | int
    edge: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What is done between two exchanges: reductions of one phase, and outputs known before it."""

    plain: tuple[Reduction, ...]
    running: tuple[Reduction, ...]
    outputs: tuple[Output, ...]
    row_outputs: tuple[Output, ...]

    @property
    def swept(self) -> list[Expr]:
        """Expressions of the first sweep."""
        return [r.body for r in self.plain] + [o.value for o in self.outputs]


def steps_of(program: Program) -> list[Step]:
    """The sweeps of a program in order."""
    steps = []
    for phase in range(program.phases + 1):
        reductions = [r for r in program.reductions if r.phase == phase]
        outputs = [o for o in program.outputs if o.phase == phase]
        steps.append(
            Step(
                tuple(r for r in reductions if r.online is None),
                tuple(r for r in reductions if r.online is not None),
                tuple(o for o in outputs if o.full),
                tuple(o for o in outputs if not o.full),
            )
        )
    return steps
