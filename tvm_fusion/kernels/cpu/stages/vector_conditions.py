"""Conditions as selections that TVM can turn into vectors.

    n <= m0 + v and ids[n] == 3   ->   Select(float(n) <= float(m0 + v), Select(.., x, y), y)

TVM's simplifier fails on vectors of logic and of integer comparisons; comparisons of floats are
fine, and the same where the integers are below 2^24.
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.ir import Expr
from tvm.ir.prim.expr import BitwiseAnd, BitwiseNot, BitwiseOr, CmpExpr

from ...program.expr import bounds, constant, convert, dtype_of, is_integer, number

# Integers up to this are float32 numbers.
EXACT = 1 << 24


def where(condition: Expr, yes: Expr, no: Expr, analyzer: tvm.sym.Analyzer) -> Expr:
    """`yes` where the condition holds, else `no`; both are evaluated."""
    if number(condition) is not None:
        return yes if number(condition) else no
    if isinstance(condition, tirx.And | BitwiseAnd):
        return where(condition.a, where(condition.b, yes, no, analyzer), no, analyzer)
    if isinstance(condition, tirx.Or | BitwiseOr):
        return where(condition.a, yes, where(condition.b, yes, no, analyzer), analyzer)
    if isinstance(condition, tirx.Not | BitwiseNot):
        return where(condition.a, no, yes, analyzer)
    return tirx.Select(_comparison(condition, analyzer), yes, no)


def _comparison(condition: Expr, analyzer: tvm.sym.Analyzer) -> Expr:
    """A comparison of floats, where the condition can be one."""
    if not isinstance(condition, CmpExpr):
        return tirx.NE(convert(condition, "float32"), constant(0, "float32"))
    sides = (condition.a, condition.b)
    if not all(is_integer(dtype_of(x)) for x in sides):
        return condition
    if all(_is_exact(x, analyzer) for x in sides):
        return type(condition)(*(tirx.Cast("float32", x) for x in sides))
    return condition


def _is_exact(value: Expr, analyzer: tvm.sym.Analyzer) -> bool:
    low, high = bounds(value, analyzer)
    return low >= -EXACT and high <= EXACT
