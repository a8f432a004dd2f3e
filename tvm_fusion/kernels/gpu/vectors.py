"""Which accesses of a row program can be vectors, and how wide.

A vector is `width` consecutive columns that start at a multiple of `width`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Expr, Var

from ..program.expr import (
    bytes_of,
    conjuncts,
    constant,
    dtype_of,
    is_integer,
    known_factor,
    linear_form,
    number,
    rebuild,
    same,
    substitute,
    uses_any,
    variables,
)
from ..program.program import Element, Program, Tile
from .memory import WIDEST

# Loads that step over memory, and together leave little of it out: a pooling window, [::2] slices.
#
#     y[j] = max(x[2 * j], x[2 * j + 1])      vectors of 8: one run of 16 elements, not 16 loads
#
# A comb is what several element loads of one parameter read: `stride` elements a column, of which
# each load takes one.

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


WIDEST_VECTOR = 32
"""Bytes of a vector of the widest dtype: two accesses."""


def divides(width: int, extent: int | Expr, analyzer: tvm.sym.Analyzer) -> bool:
    """Whether `extent` is known to be a multiple of `width`."""
    return known_factor(extent, analyzer) % width == 0


def vector_width(program: Program, tail: bool = False) -> int:
    """Columns a thread handles together: 16 bytes of the narrowest dtype, at most 32 of the widest.

    With `tail` the columns need not be a multiple of it.
    """
    tiles = [bytes_of(t.dtype) for t in program.tiles if t.per_row or not program.rows]
    outputs = [bytes_of(o.dtype) for o in program.outputs if o.full]
    full = tiles + outputs
    widest = max(full + [bytes_of(t.dtype) for t in program.tiles], default=1)
    width = WIDEST // min(full, default=2)
    analyzer = program.analyzer()
    while width > 1:
        fits = tail or divides(width, program.columns, analyzer)
        if fits and width * widest <= WIDEST_VECTOR:
            break
        width //= 2
    return width


def flat_offset(program: Program) -> Expr:
    """The offset of a row of a tensor that holds all rows one after the other."""
    offset = constant(0, program.index_dtype)
    for var, extent in zip(program.row_vars, program.rows, strict=True):
        offset = offset * extent + var
    return offset * program.columns


def flat_tiles(program: Program) -> list[Tile]:
    """Tiles that are read in the linear order of the space."""
    analyzer, flat = program.analyzer(), flat_offset(program)
    return [t for t in program.tiles if analyzer.can_prove_equal(t.offset, flat)]


def flat_width(program: Program) -> int | None:
    """Elements of a vector that may cross the ends of rows; None where an output cannot.

    Such vectors lie in the linear order of rows and columns; what has another order is read element
    by element.
    """
    analyzer, flat = program.analyzer(), flat_offset(program)
    if not program.rows or not isinstance(program.columns, int):
        return None
    for output in program.outputs:
        linear = output.full and output.place is None
        if not linear or not analyzer.can_prove_equal(output.offset, flat):
            return None
    sizes = [bytes_of(item.dtype) for item in (*flat_tiles(program), *program.outputs)]
    return max(1, min(WIDEST // min(sizes), WIDEST_VECTOR // max(sizes)))


def piece_bytes(offset: Expr, dtype: str, width: int, analyzer: tvm.sym.Analyzer) -> int:
    """Bytes of one access of a vector at `offset` (of column 0 of the vector's row)."""
    size = bytes_of(dtype)
    aligned = math.gcd(known_factor(offset, analyzer), width) * size
    return min(WIDEST, aligned & -aligned)


def can_stream(program: Program, width: int) -> bool:
    """Whether bulk copies can bring all tiles: aligned, at places that the row alone decides."""
    scalars = {scalar.var for scalar in program.scalars}
    analyzer = program.analyzer()
    return all(
        piece_bytes(tile.offset, tile.dtype, width, analyzer) == WIDEST
        and not uses_any(tile.offset, scalars)
        for tile in program.tiles
        if tile.per_row
    )


@dataclass(frozen=True, slots=True, eq=False)
class VectorElement:
    """An element load whose `width` columns are consecutive in memory, under one guard.

    `piece` is the number of bytes of one access.
    """

    element: Element
    piece: int


@lru_cache(maxsize=64)  # a tensor of 140 pieces: 368 times, by the estimate of each configuration
def vector_elements(program: Program, width: int) -> Mapping[Var, VectorElement]:
    """The element loads that can be vector loads: slices, concatenations, merged and split axes.

    y[i, j] = if_then_else(64 <= j, x[i, j - 64], z[i, j])     vectors of 8: both loads are vectors
    """
    if width == 1:
        return {}
    items = (*program.tiles, *program.elements, *program.values)
    blocked, lanes = {item.var for item in items}, _Lanes.of(program, width)
    found = {}
    for element in program.elements:
        parts = [element.offset] if element.guard is None else [element.offset, element.guard]
        if not any(var in blocked for var in variables(*parts)):
            piece = lanes.piece(element)
            if piece > bytes_of(element.dtype):
                found[element.var] = VectorElement(element, piece)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Lanes:
    """The columns of any vector of a program: `start` and, of the lane `lane`, `start` + `lane`.
    `alike` has what `_is_one` found: the pieces of a concatenation have the same conditions.
    """

    column: Var
    width: int
    start: Expr
    lane: Var
    analyzer: tvm.sym.Analyzer
    alike: dict[tvm_ffi.StructuralKey, bool] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program, width: int) -> _Lanes:
        dtype, columns = program.index_dtype, program.columns
        index, lane = (Var(name, tvm.ir.PrimType(dtype)) for name in ("q", "l"))
        analyzer = program.analyzer()
        count = columns // width if isinstance(columns, int) else columns
        analyzer.bind(index, tvm.ir.Range(0, count))
        analyzer.bind(lane, tvm.ir.Range(0, width))
        return cls(program.column_var, width, index * constant(width, dtype), lane, analyzer)

    def piece(self, element: Element) -> int:
        """Bytes of one access where the columns are consecutive in memory and under one guard; else
        0.
        """
        first, later = self._of(element.offset)
        lane = self.lane.astype(str(later.ty.dtype))
        if not self.analyzer.can_prove_equal(later - first, lane):
            return 0
        if not all(map(self._is_one, conjuncts(element.guard))):
            return 0
        start = self.analyzer.simplify(first)
        return piece_bytes(start, element.dtype, self.width, self.analyzer)

    def _of(self, expr: Expr) -> tuple[Expr, Expr]:
        """An expression of the first column, and of any."""
        return (
            substitute(expr, {self.column: self.start}),
            substitute(expr, {self.column: self.start + self.lane}),
        )

    def _is_one(self, guard: Expr) -> bool:
        """Whether a condition is the same in all columns."""
        key = tvm_ffi.StructuralKey(guard)
        if key not in self.alike:
            self.alike[key] = not uses_any(guard, {self.column}) or same(
                *(below(each, self.analyzer) for each in self._of(guard))
            )
        return self.alike[key]


def below(guard: Expr, analyzer: tvm.sym.Analyzer) -> Expr:
    """`guard` with its integer comparisons as ``expression < bound`` or its negation, simplified.

    The analyzer drops the lane from ``8 * q + lane < 16``, but not from ``16 <= 8 * q + lane``.
    """

    def visit(expr: Expr) -> Expr:
        if isinstance(expr, tirx.GT | tirx.GE):
            swapped = tirx.LT if isinstance(expr, tirx.GT) else tirx.LE
            return visit(swapped(expr.b, expr.a))
        if isinstance(expr, tirx.LT | tirx.LE) and is_integer(dtype_of(expr.a)):
            a, b, strict = expr.a, expr.b, isinstance(expr, tirx.LT)
            if number(a) is None:
                return analyzer.simplify(a < (b if strict else b + 1))
            return tirx.Not(analyzer.simplify(b < (a + 1 if strict else a)))
        return rebuild(expr, visit)

    return visit(guard)
