"""What a row kernel loads into registers ahead: tiles, and elements that need nothing but loads.

An element whose columns are consecutive (a reduction over several axes with a gap, a slice, a part
of a concatenation) is loaded in vectors, another one (strided, gathered) column by column; either
way before the arithmetic that needs it starts, and once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import tvm_ffi
from tvm import tirx
from tvm.ir import Expr, Var

from ..gpu.vectors import VectorElement
from ..program.collapse import reachable
from ..program.expr import dtype_of, is_integer, number, variables
from ..program.program import Element, Level, Program, Reduction, Tile, Value

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
