"""Which accesses of a row program can be vectors, and how wide.

A vector is `width` consecutive columns that start at a multiple of `width`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import tvm
from tvm import tirx
from tvm.ir import Expr, Var

from ..program.expr import (
    bytes_of,
    constant,
    dtype_of,
    is_integer,
    known_factor,
    number,
    rebuild,
    same,
    substitute,
    uses_any,
    variables,
)
from ..program.program import Element, Program, Tile
from .memory import WIDEST

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
    found = {}
    for element in program.elements:
        vector = _vector(program, element, width)
        if vector is not None:
            found[element.var] = vector
    return found


def _vector(program: Program, element: Element, width: int) -> VectorElement | None:
    parts = [element.offset] if element.guard is None else [element.offset, element.guard]
    column, dtype = program.column_var, program.index_dtype
    others = (item.var for item in program.tiles + program.elements + program.values)
    blocked = set(others)
    if any(var in blocked for var in variables(*parts)):
        return None
    index, lane = (Var(name, tvm.ir.PrimType(dtype)) for name in ("q", "l"))
    analyzer = program.analyzer()
    count = program.columns // width if isinstance(program.columns, int) else program.columns
    analyzer.bind(index, tvm.ir.Range(0, count))
    analyzer.bind(lane, tvm.ir.Range(0, width))
    start = index * constant(width, dtype)
    first = [substitute(part, {column: start}) for part in parts]
    later = [substitute(part, {column: start + lane}) for part in parts]
    if not analyzer.can_prove_equal(later[0] - first[0], lane.astype(str(later[0].ty.dtype))):
        return None
    if element.guard is not None:
        guards = (_below(guard, analyzer) for guard in (first[1], later[1]))
        if not same(*guards):
            return None
    piece = piece_bytes(analyzer.simplify(first[0]), element.dtype, width, analyzer)
    if piece <= bytes_of(element.dtype):
        return None
    return VectorElement(element, piece)


def _below(guard: Expr, analyzer: tvm.sym.Analyzer) -> Expr:
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
