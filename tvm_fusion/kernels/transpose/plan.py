"""Which loads of a pointwise program go through shared memory, and along which row axis.

y[i, j] = x[j * 4096 + i] + z[i * 512 + j]      x is consecutive along i, y and z along j
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from tvm.ir import Var

from ..gpu.memory import WIDEST
from ..gpu.vectors import divides, vector_elements
from ..program.expr import bytes_of, linear_form, number, variables
from ..program.program import Element, Extent, Program

MIN_EXTENT = 2
"""Extent from which on an axis is worth a tile: with less nothing is consecutive."""
LONG = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """A strided load that is read along the row axis, `vector` elements at once.

    `piece` is the number of bytes of one access to global memory.
    """

    element: Element
    vector: int
    piece: int


def staged_elements(program: Program, axis: int, width: int) -> dict[Var, Staged]:
    """The loads that are consecutive along row axis `axis` and strided along the columns."""
    extent, analyzer = program.rows[axis], program.analyzer()
    along_columns = vector_elements(program, width)
    transposed = _transposed(program, axis)
    vectors = {}
    for vector in (16, 8, 4, 2):
        if divides(vector, extent, analyzer):
            vectors[vector] = vector_elements(transposed, vector)
    found = {}
    for element in program.elements:
        if element.var in along_columns or not _from_coordinates(program, element):
            continue
        staged = _along(element, vectors)
        if staged is None and _steps(program, element, axis) == 1:
            staged = Staged(element, 1, bytes_of(element.dtype))
        if staged is not None and _steps(program, element, None) != 1:
            found[element.var] = staged
    return found


def taken(extent: Extent) -> int:
    """An extent as a number: symbolic ones are taken to be long."""
    return extent if isinstance(extent, int) else LONG


def tiled_axes(program: Program, width: int) -> list[int]:
    """Row axes along which a tile makes loads consecutive: most bytes first, then the longest."""
    if program.phases or taken(program.columns) < MIN_EXTENT:
        return []
    found = []
    for axis, extent in enumerate(program.rows):
        if taken(extent) < MIN_EXTENT:
            continue
        staged = staged_elements(program, axis, width).values()
        gain = sum(bytes_of(item.element.dtype) for item in staged)
        if gain:
            found.append((-gain, -taken(extent), axis))
    return [axis for *_, axis in sorted(found)]


def _transposed(program: Program, axis: int) -> Program:
    """The program with row axis `axis` and the columns in each other's place."""
    rows, row_vars = list(program.rows), list(program.row_vars)
    rows[axis], row_vars[axis] = program.columns, program.column_var
    return dataclasses.replace(
        program,
        rows=tuple(rows),
        columns=program.rows[axis],
        row_vars=tuple(row_vars),
        column_var=program.row_vars[axis],
    )


def _from_coordinates(program: Program, element: Element) -> bool:
    """Whether the coordinates alone (and sizes) say where the element is and if it is read."""
    parts = [element.offset] if element.guard is None else [element.offset, element.guard]
    placeholders = program.placeholders()
    return not any(var in placeholders for var in variables(*parts))


def _along(element: Element, vectors: dict[int, dict]) -> Staged | None:
    """The widest vector of `element` with at most 16 bytes."""
    for vector, found in vectors.items():
        if vector * bytes_of(element.dtype) <= WIDEST and element.var in found:
            return Staged(element, vector, found[element.var].piece)
    return None


def _steps(program: Program, element: Element, axis: int | None) -> int | float | None:
    """Elements from one coordinate of an axis (None: the columns) to the next, if that is fixed."""
    form = linear_form(element.offset, (*program.row_vars, program.column_var))
    return None if form is None else number(form[0][-1 if axis is None else axis])
