"""Simplifies indices whose sizes are symbolic: what is left of a reshape whose ranges are known.

(i * n + j) // n  ->  i        (i * n + j) % n  ->  j        for 0 <= j < n, n > 0
"""

from __future__ import annotations

from collections.abc import Iterable

import tvm
from tvm import tirx
from tvm.ir import Expr

from ..program.expr import constant, dtype_of, number, rebuild, variables
from .model import Axis

# Sizes are positive and far below the range of an index.
MAX_EXTENT = 1 << 40


class Simplifier:
    """Simplifies indices over axes with known ranges; symbolic sizes are positive."""

    def __init__(self, axes: Iterable[Axis]):
        axes = list(axes)
        self._analyzer = tvm.sym.Analyzer()
        extents = [axis.extent for axis in axes if not isinstance(axis.extent, int)]
        for size in variables(*extents):
            one, most = constant(1, dtype_of(size)), constant(MAX_EXTENT, dtype_of(size))
            self._analyzer.bind(size, tvm.ir.Range(one, most))
        for axis in axes:
            self._analyzer.bind(axis.var, tvm.ir.Range(0, axis.extent))

    def __call__(self, expr: Expr) -> Expr:
        """`expr`, simplified."""
        return self._analyzer.simplify(self._visit(self._analyzer.simplify(expr)))

    def most(self, expr: Expr) -> int | None:
        """What an expression is at most, or None."""
        bound = self._analyzer.const_int_bound(expr)
        known = bound.min_value >= 0 and bound.max_value < MAX_EXTENT
        return int(bound.max_value) if known else None

    def _visit(self, expr: Expr) -> Expr:
        if not isinstance(expr, tirx.Add | tirx.Sub | tirx.Mul | tirx.FloorDiv | tirx.FloorMod):
            return expr
        expr = rebuild(expr, self._visit)
        if not isinstance(expr, tirx.FloorDiv | tirx.FloorMod) or number(expr.b) is not None:
            return expr
        quotient = self._quotient(expr.a, expr.b)
        if quotient is None:
            return expr
        rest = self._analyzer.simplify(expr.a - quotient * expr.b)
        return quotient if isinstance(expr, tirx.FloorDiv) else rest

    def _quotient(self, a: Expr, b: Expr) -> Expr | None:
        """a // b without a division, or None."""
        zero = constant(0, dtype_of(a))
        if self._analyzer.can_prove(tirx.And(a >= zero, a < b)):
            return zero
        split = self._analyzer.simplify(tirx.FloorDiv(a, b))
        if isinstance(split, tirx.FloorDiv):
            return None
        split = self._analyzer.simplify(self._visit(split))
        return None if _divides(split) else split


def _divides(expr: Expr) -> bool:
    if isinstance(expr, tirx.FloorDiv | tirx.FloorMod):
        return True
    return isinstance(expr, tirx.Add | tirx.Sub | tirx.Mul) and (
        _divides(expr.a) or _divides(expr.b)
    )
