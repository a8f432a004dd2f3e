"""How often the temporaries of a program are used, and for what."""

from __future__ import annotations

from collections import Counter

from tvm.ir import Expr, Var

from ..program.expr import occurrences, variables
from ..program.program import Element, Program, Value

OTHER = "other"
"""Stands for every dtype in which nothing is stored, such as that of an index."""


def _reads(item: Element | Value) -> list[Expr]:
    """The expressions that a placeholder is computed from."""
    if isinstance(item, Value):
        return [item.body]
    return [item.offset] if item.guard is None else [item.offset, item.guard]


def uses_of(program: Program) -> Counter[Var]:
    """In how many expressions each placeholder stands; twice in one counts as two."""
    exprs = [e for item in program.elements + program.values for e in _reads(item)]
    exprs += [item.body for item in program.reductions + program.accumulations]
    exprs += [item.value for item in program.outputs]
    found: Counter[Var] = Counter()
    for expr in exprs:
        found.update(occurrences(expr))
    return found


def stored_dtypes(program: Program) -> dict[Var, set[str]]:
    """The dtypes of all that is computed from each value and reduction and stored."""
    found: dict[Var, set[str]] = {}

    def mark(expr: Expr, dtypes: set[str]) -> bool:
        grown = False
        for var in variables(expr):
            known = found.setdefault(var, set())
            grown |= not dtypes <= known
            known |= dtypes
        return grown

    for output in program.outputs:
        mark(output.value, {output.dtype})
    for item in program.accumulations:
        mark(item.body, {item.dtype})
    for element in program.elements:
        for expr in _reads(element):
            mark(expr, {OTHER})
    growing = True
    while growing:
        growing = False
        for item in (*reversed(program.values), *program.reductions):
            growing |= mark(item.body, found.get(item.var, set()))
    return found
