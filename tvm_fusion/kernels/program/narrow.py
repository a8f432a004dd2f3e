"""Rewrites a row program over int64 coordinates into one over int32, where nothing overflows.

    x[i0 * int64(4096) + j] (i0, j int64)   ->   x[i0 * 4096 + j] (i0, j int32)

Only arithmetic on coordinates and constants is narrowed, and only where every intermediate fits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Expr, Var

from ...ir.extents import Bounds
from .expr import Binary, Comparison, bounds, constant, convert, dtype_of, rebuild, variables
from .program import Extent, Program

INT32_LIMIT = 2**31
HEADROOM = 2
"""An int32 has to count a symbolic number this many times: rounding it up to whole blocks of
threads goes beyond it."""


def narrow_indices(
    program: Program,
    sizes: Mapping[Var, Bounds] | None = None,
    renamed: Mapping[Var, Var] | None = None,
) -> Program:
    """`program` over int32 coordinates; itself where a parameter is too large or symbolic, unless
    `sizes` has bounds that say otherwise. The int32 variables that sizes are `renamed` to stand in
    their place, but for the shapes of parameters.
    """
    if program.index_dtype == "int32" or (not program.is_static and not renamed):
        return program
    narrower = _Narrower(program, sizes or {}, renamed or {})
    counts = [program.row_count * program.columns, *(p.elements for p in program.params)]
    if not all(map(narrower.counts, counts if renamed else counts[1:])):
        return program
    visit, offset = narrower.visit, narrower.offset
    replace = dataclasses.replace
    return replace(
        program,
        rows=tuple(map(narrower.extent, program.rows)),
        columns=narrower.extent(program.columns),
        row_vars=tuple(narrower.env[var] for var in program.row_vars),
        column_var=narrower.env[program.column_var],
        tiles=tuple(replace(t, offset=offset(t.offset)) for t in program.tiles),
        scalars=tuple(replace(s, offset=offset(s.offset)) for s in program.scalars),
        elements=tuple(
            replace(e, offset=offset(e.offset), guard=None if e.guard is None else visit(e.guard))
            for e in program.elements
        ),
        reductions=tuple(
            replace(r, body=visit(r.body), index=None if r.index is None else offset(r.index))
            for r in program.reductions
        ),
        scans=tuple(replace(s, body=visit(s.body)) for s in program.scans),
        values=tuple(replace(v, body=visit(v.body)) for v in program.values),
        outputs=tuple(
            replace(
                o,
                value=visit(o.value),
                offset=offset(o.offset),
                place=None if o.place is None else offset(o.place),
            )
            for o in program.outputs
        ),
        accumulations=tuple(
            replace(a, body=visit(a.body), offset=offset(a.offset)) for a in program.accumulations
        ),
    )


class _Narrower:
    """Expressions of one program, with int32 variables in the place of its coordinates."""

    def __init__(
        self, program: Program, sizes: Mapping[Var, Bounds], renamed: Mapping[Var, Var]
    ) -> None:
        coordinates = (*program.row_vars, program.column_var)
        self.analyzer = program.analyzer(sizes)
        self.env: dict[Var, Expr] = {v: Var(v.name, tvm.ir.PrimType("int32")) for v in coordinates}
        self.env |= renamed

    def counts(self, extent: Extent) -> bool:
        """Whether an int32 counts so many, and a block of threads more."""
        if isinstance(extent, int):
            return extent < INT32_LIMIT
        return all(v in self.env for v in variables(extent)) and self.fits(extent * HEADROOM)

    def extent(self, extent: Extent) -> Extent:
        """A size in int32."""
        return extent if isinstance(extent, int) else self.shrink(extent)

    def offset(self, expr: Expr) -> Expr:
        """An offset, in int32 unless it depends on data."""
        return self.shrink(expr) if self.fits(expr) else self.visit(expr)

    def visit(self, expr: Expr) -> Expr:
        """`expr` with narrow arithmetic inside; of the same dtype as before."""
        if self.fits(expr):
            return convert(self.shrink(expr), "int64")
        if isinstance(expr, Var):
            return convert(self.env[expr], "int64") if expr in self.env else expr
        if isinstance(expr, Comparison) and self.fits(expr.a) and self.fits(expr.b):
            return type(expr)(self.shrink(expr.a), self.shrink(expr.b))
        if isinstance(expr, tirx.Cast) and self.fits(expr.value):
            return convert(self.shrink(expr.value), dtype_of(expr))
        return rebuild(expr, self.visit)

    def fits(self, expr: Expr) -> bool:
        """Whether `expr` is int64 arithmetic on coordinates within the range of int32."""
        if dtype_of(expr) != "int64" or isinstance(expr, tirx.Cast):
            return False
        used = variables(expr)
        if any(var not in self.env for var in used):
            return False
        parts: list[Expr] = []
        tvm_ffi.structural_walk(expr, [(Expr, parts.append)])
        arithmetic = (Binary, Var, tirx.IntImm)
        if not all(isinstance(part, arithmetic) for part in parts):
            return False
        low, high = zip(*(bounds(part, self.analyzer) for part in parts), strict=True)
        return min(low) > -INT32_LIMIT and max(high) < INT32_LIMIT

    def shrink(self, expr: Expr) -> Expr:
        """The same arithmetic in int32."""
        if isinstance(expr, Var):
            return self.env[expr]
        if isinstance(expr, tirx.IntImm):
            return constant(int(expr.value), "int32")
        return rebuild(expr, self.shrink)
