"""Loads that step over memory, and together leave little of it out: a pooling window, [::2] slices.

    y[j] = max(x[2 * j], x[2 * j + 1])      vectors of 8: one run of 16 elements, not 16 loads

A comb is what several element loads of one parameter read: `stride` elements a column, of which
each load takes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from tvm.ir import Expr, Var

from ..program.expr import bytes_of, constant, linear_form, number, substitute, uses_any
from ..program.program import Element, Program
from .vectors import piece_bytes, vector_elements

LARGEST_STRIDE = 4
"""Elements a column; with more, too little of what is read is used."""


@dataclass(frozen=True, slots=True, eq=False)
class Comb:
    """Runs of ``stride * width`` elements from `offset` on (of column 0 of a vector).

    `teeth` says which of a column's elements each placeholder is; `piece` is the number of bytes
    of one access.
    """

    param: int
    dtype: str
    offset: Expr
    stride: int
    teeth: Mapping[Var, int]
    piece: int


@lru_cache(maxsize=64)  # as `vector_elements`
def combs(program: Program, width: int) -> tuple[Comb, ...]:
    """The combs of a program in vectors of `width`; only loads that are no vectors by themselves.

    Every element of a run is one that a load of the program reads, so that no run leaves the
    parameter.
    """
    vectors = vector_elements(program, width)
    groups: list[tuple[int, list[tuple[int, Element]]]] = []
    for element in program.elements:
        stride = None if element.var in vectors else _stride(program, element)
        if stride is None or not 2 <= stride <= LARGEST_STRIDE:
            continue
        for known, members in groups:
            place = _place(program, element, members[0][1])
            if known == stride and place is not None and _near(place, members, stride):
                members.append((place, element))
                break
        else:
            groups.append((stride, [(0, element)]))
    found = (_comb(program, width, stride, members) for stride, members in groups)
    return tuple(comb for comb in found if comb is not None)


def _stride(program: Program, element: Element) -> int | None:
    """Elements between neighbouring columns of an unguarded load that the row and column place."""
    data = (item.var for item in (*program.tiles, *program.elements, *program.values))
    if element.guard is not None or uses_any(element.offset, set(data)):
        return None
    form = linear_form(element.offset, [program.column_var])
    step = None if form is None else number(form[0][0])
    return None if step is None else int(step)


def _place(program: Program, element: Element, first: Element) -> int | None:
    """Elements from what `first` reads to what `element` does, where that is one number."""
    if element.param != first.param:
        return None
    apart = number(program.analyzer().simplify(element.offset - first.offset))
    return None if apart is None else int(apart)


def _near(place: int, members: list[tuple[int, Element]], stride: int) -> bool:
    """Whether all lie within one column's elements."""
    places = [place, *(other for other, _ in members)]
    return max(places) - min(places) < stride


def _comb(
    program: Program, width: int, stride: int, members: list[tuple[int, Element]]
) -> Comb | None:
    lowest, first = min(members, key=lambda member: member[0])
    teeth = {element.var: place - lowest for place, element in members}
    if set(teeth.values()) != set(range(stride)):
        return None
    column = program.column_var
    start = substitute(first.offset, {column: column * constant(width, program.index_dtype)})
    analyzer = program.analyzer()
    piece = piece_bytes(analyzer.simplify(start), first.dtype, width * stride, analyzer)
    if piece <= bytes_of(first.dtype):
        return None
    return Comb(first.param, first.dtype, first.offset, stride, teeth, piece)
