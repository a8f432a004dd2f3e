"""Tidies a row program: unused placeholders go, axes that every access walks together become one.

   y[i0 * 24 + i1 * 8 + j] = exp(x[i0 * 24 + i1 * 8 + j])     rows [2, 3] x columns 8
-> y[j] = exp(x[j])                                           rows [] x columns 48
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tvm.ir import Expr, Var

from .expr import constant, convert, linear_form, substitute, uses_any, variables
from .program import (
    Access,
    Accumulation,
    Definition,
    Element,
    Extent,
    Level,
    Output,
    Program,
    Reduction,
    Scan,
    Tile,
    Value,
)


def reachable(expr: Expr, definitions: Mapping[Var, Definition]) -> list[Definition]:
    """Definitions of all placeholders that `expr` is computed from."""
    found: dict[Var, Definition] = {}
    pending = variables(expr)
    while pending:
        var = pending.pop()
        if var in definitions and var not in found:
            found[var] = definitions[var]
            pending.extend(variables(*_expressions(found[var])))
    return list(found.values())


def drop_unused(program: Program) -> Program:
    """The program without placeholders that no output needs."""
    definitions = program.placeholders()
    results = [o.value for o in program.outputs] + [a.body for a in program.accumulations]
    live = {x.var for result in results for x in reachable(result, definitions)}
    parts = ("tiles", "scalars", "elements", "reductions", "scans", "values")
    kept = {part: tuple(x for x in getattr(program, part) if x.var in live) for part in parts}
    return dataclasses.replace(program, **kept)


def collapse_axes(program: Program) -> Program:
    """The program with as few axes as its accesses allow; the column axis of reductions and of
    scans is kept.
    """
    axis = len(program.rows) - 1
    while axis >= 0:
        inner = program.column_var if axis == len(program.rows) - 1 else program.row_vars[axis + 1]
        if _collapsible(program, program.row_vars[axis], inner):
            program = _collapse(program, axis)
        axis -= 1
    return program


def _expressions(item: Access | Reduction | Scan | Value) -> list[Expr]:
    """The expressions an item holds."""
    if isinstance(item, Reduction | Scan | Value):
        return [item.body]
    if isinstance(item, Output):
        return [item.value, item.offset, *([] if item.place is None else [item.place])]
    guard = item.guard if isinstance(item, Element) else None
    return [item.offset] if guard is None else [item.offset, guard]


def _pinned(program: Program) -> list[Expr]:
    """Expressions in which a coordinate means itself, not a step through memory."""
    guards = [e.guard for e in program.elements if e.guard is not None]
    bodies = [item.body for item in program.reductions + program.scans + program.values]
    bodies += [item.body for item in program.accumulations]
    return guards + bodies + [output.value for output in program.outputs]


def _accesses(program: Program) -> list[Access | Accumulation]:
    reads = [*program.tiles, *program.scalars, *program.elements]
    return [*reads, *program.outputs, *program.accumulations]


def _collapsible(program: Program, outer: Var, inner: Var) -> bool:
    into_columns = inner.same_as(program.column_var)
    if into_columns and (program.phases or program.scans):
        return False
    if any(uses_any(expr, (outer, inner)) for expr in _pinned(program)):
        return False
    extent = _extent(program, inner)
    analyzer = program.analyzer()
    for access in _accesses(program):
        offset = access.offset
        if isinstance(access, Output) and access.place is not None:
            offset = access.place
        elif into_columns and isinstance(access, Tile | Output):
            offset = offset + inner
        form = linear_form(offset, (outer, inner))
        if form is None:
            return False
        step, unit = (convert(x, program.index_dtype) for x in form[0])
        if not analyzer.can_prove_equal(step, unit * extent):
            return False
    return True


def _extent(program: Program, var: Var) -> Expr:
    axes = zip(
        (*program.row_vars, program.column_var), (*program.rows, program.columns), strict=True
    )
    extent: Extent = next(extent for axis, extent in axes if axis.same_as(var))
    return constant(extent, program.index_dtype) if isinstance(extent, int) else extent


def _collapse(program: Program, axis: int) -> Program:
    """Row axis `axis` joins the next one, whose variable now counts through both."""
    outer, rows = program.row_vars[axis], list(program.rows)
    extent, columns = rows.pop(axis), program.columns
    if axis == len(rows):
        columns = extent * columns
    else:
        rows[axis] = extent * rows[axis]
    shape = dataclasses.replace(
        program,
        rows=tuple(rows),
        columns=columns,
        row_vars=(*program.row_vars[:axis], *program.row_vars[axis + 1 :]),
    )
    analyzer = shape.analyzer()
    zero = {outer: constant(0, program.index_dtype)}

    def moved(access: Access) -> Access:
        offset = analyzer.simplify(substitute(access.offset, zero))
        if isinstance(access, Output) and access.place is not None:
            place = analyzer.simplify(substitute(access.place, zero))
            return dataclasses.replace(access, offset=offset, place=place)
        return dataclasses.replace(access, offset=offset)

    tiles = tuple(moved(tile) for tile in program.tiles)
    return dataclasses.replace(
        shape,
        tiles=tuple(
            dataclasses.replace(tile, per_row=shape.level(tile.offset) == Level.ROW)
            for tile in tiles
        ),
        scalars=tuple(moved(scalar) for scalar in program.scalars),
        elements=tuple(moved(element) for element in program.elements),
        outputs=tuple(moved(output) for output in program.outputs),
    )
