"""Which temporaries of a row stay in registers between sweeps, instead of being computed again."""

from __future__ import annotations

import tvm_ffi
from tvm.ir import Call, Expr, Var

from ..program.expr import variables
from ..program.online import depends_on, scaled_values
from ..program.program import Element, Level, Program, Value


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
