"""Booleans of an attention in one form: comparisons, loads, and, or, not at the leaves.

not (j > i)  ->  j <= i        1 - cast(mask) > 0  ->  not mask
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import tirx
from tvm.ir import Expr, Var
from tvm.ir.prim.expr import BitwiseAnd, BitwiseNot, BitwiseOr, CmpExpr

from ...contraction.model import INDEX
from ...program.expr import conjuncts, constant, convert, dtype_of, is_integer, number, same
from .algebra import Algebra, choice, value_of
from .space import Space

_NEGATED = {
    tirx.LT: tirx.GE,
    tirx.LE: tirx.GT,
    tirx.GT: tirx.LE,
    tirx.GE: tirx.LT,
    tirx.EQ: tirx.NE,
    tirx.NE: tirx.EQ,
}
_SWAPPED = {tirx.LT: tirx.GT, tirx.LE: tirx.GE, tirx.GT: tirx.LT, tirx.GE: tirx.LE}
_COMPARE: dict[type, Callable[[float, float], bool]] = {
    tirx.LT: lambda a, b: a < b,
    tirx.LE: lambda a, b: a <= b,
    tirx.GT: lambda a, b: a > b,
    tirx.GE: lambda a, b: a >= b,
    tirx.EQ: lambda a, b: a == b,
    tirx.NE: lambda a, b: a != b,
}
_ARITHMETIC: dict[type, Callable[[float, float], float]] = {
    tirx.Add: lambda a, b: a + b,
    tirx.Sub: lambda a, b: a - b,
    tirx.Mul: lambda a, b: a * b,
    tirx.Max: max,
    tirx.Min: min,
}


class Conditions:
    """Brings the booleans of a space into one form."""

    def __init__(self, space: Space, algebra: Algebra) -> None:
        self.space = space
        self.algebra = algebra

    # ---- booleans

    def conjuncts(self, condition: Expr) -> list[Expr]:
        """The conditions that hold together where `condition` does; none if it always does."""
        condition = self.boolean(condition)
        parts: list[Expr] = []
        for part in conjuncts(condition):
            if number(part) != 1 and not any(self.space.equal(part, p) for p in parts):
                parts.append(part)
        return parts

    def boolean(self, expr: Expr, negate: bool = False) -> Expr:
        """A condition of comparisons, loads, and, or, not; negations stand at the leaves."""
        expr = self.space.open(expr)
        if isinstance(expr, tirx.Not) or _is_complement(expr):
            return self.boolean(expr.a, not negate)
        if isinstance(expr, tirx.And | tirx.Or) or _is_bitwise(expr):
            both = isinstance(expr, tirx.And | BitwiseAnd) != negate
            a, b = self.boolean(expr.a, negate), self.boolean(expr.b, negate)
            return _both(a, b) if both else _either(a, b)
        if number(expr) is not None:
            return constant(bool(number(expr)) != negate, "bool")
        if isinstance(expr, tirx.Cast):
            zero = constant(0, dtype_of(expr.value))
            is_bool = dtype_of(expr.value) == "bool"
            inner = expr.value if is_bool else tirx.NE(expr.value, zero)
            return self.boolean(inner, negate)
        if type(expr) in _COMPARE:
            return self._comparison(expr, negate)
        two = self.two_valued(expr)
        if two is not None and not two[0].same_as(expr):
            return self._picked(two, [bool(v) != negate for v in two[1:]])
        return tirx.Not(expr) if negate else expr

    def _comparison(self, expr: Expr, negate: bool) -> Expr:
        expr = number_last(expr)
        kind = type(expr)
        value, two = value_of(expr.b), self.two_valued(expr.a)
        if value is not None and two is not None:
            return self._picked(two, [_COMPARE[kind](v, value) != negate for v in two[1:]])
        inside = None if negate else _absolute(self.space.expand(expr.a))
        if inside is not None and kind in (tirx.LT, tirx.LE):
            below = self.boolean(kind(inside, expr.b))
            return _both(below, self.boolean(kind(constant(0, dtype_of(inside)) - inside, expr.b)))
        a, b = (_as_index(self.space.expand(side)) for side in (expr.a, expr.b))
        if a is not None and b is not None:
            expr = kind(a, b)
        exact = is_integer(dtype_of(expr.a)) or kind in (tirx.EQ, tirx.NE)
        if negate and exact:
            return _NEGATED[kind](expr.a, expr.b)
        return tirx.Not(expr) if negate else expr

    def _picked(self, two: tuple[Expr, float, float], truth: list[bool]) -> Expr:
        """The condition that is `truth[0]` where the first value is meant, else `truth[1]`."""
        if truth[0] == truth[1]:
            return constant(truth[0], "bool")
        return self.boolean(two[0], negate=not truth[0])

    def two_valued(self, expr: Expr) -> tuple[Expr, float, float] | None:
        """``(c, x, y)`` of an expression that is the number x where c holds, else y."""
        expr = self.space.open(expr)
        parts = choice(expr)
        if parts is not None:
            values = value_of(parts[1]), value_of(parts[2])
            return None if None in values else (parts[0], *values)
        if dtype_of(expr) == "bool":
            return (expr, 1.0, 0.0) if number(expr) is None else None
        if isinstance(expr, tirx.Cast):
            return self.two_valued(expr.value)
        operation = _ARITHMETIC.get(type(expr))
        if operation is None:
            return None
        a, b = value_of(expr.a), value_of(expr.b)
        if (a is None) == (b is None):
            return None
        two = self.two_valued(expr.a if a is None else expr.b)
        if two is None:
            return None
        values = (operation(v, b) if a is None else operation(a, v) for v in two[1:])
        return (two[0], *values)


def number_last(comparison: Expr) -> Expr:
    """``0 < x`` -> ``x > 0``."""
    kind = type(comparison)
    if value_of(comparison.a) is None:
        return comparison
    return _SWAPPED.get(kind, kind)(comparison.b, comparison.a)


def _is_complement(expr: Expr) -> bool:
    """Whether an expression is ``~condition``."""
    return isinstance(expr, BitwiseNot) and dtype_of(expr) == "bool"


def _is_bitwise(expr: Expr) -> bool:
    """Whether an expression is ``a & b`` or ``a | b`` of conditions."""
    return isinstance(expr, BitwiseAnd | BitwiseOr) and dtype_of(expr) == "bool"


def _both(a: Expr, b: Expr) -> Expr:
    if number(a) is not None:
        return b if number(a) else a
    if number(b) is not None:
        return a if number(b) else b
    return tirx.And(a, b)


def _either(a: Expr, b: Expr) -> Expr:
    if number(a) is not None:
        return a if number(a) else b
    if number(b) is not None:
        return b if number(b) else a
    return a if same(a, b) else tirx.Or(a, b)


def _as_index(expr: Expr) -> Expr | None:
    """Arithmetic on indices as int64, also where it is done in floats: indices are far below the
    2^24 that float32 holds exactly. None for anything else.
    """
    value = number(expr)
    if value is not None:
        return constant(value, INDEX) if float(value).is_integer() else None
    if isinstance(expr, Var):
        return convert(expr, INDEX) if is_integer(dtype_of(expr)) else None
    if isinstance(expr, tirx.Cast):
        return _as_index(expr.value) if dtype_of(expr) != "bool" else None
    if not isinstance(expr, tirx.Add | tirx.Sub | tirx.Mul | tirx.FloorDiv | tirx.FloorMod):
        return None
    a, b = _as_index(expr.a), _as_index(expr.b)
    return None if a is None or b is None else type(expr)(a, b)


def _absolute(expr: Expr) -> Expr | None:
    """The x of ``abs(x)``, of integers."""
    parts = choice(expr)
    if parts is None or not is_integer(dtype_of(expr)) or not isinstance(parts[0], CmpExpr):
        return None
    condition, inside = number_last(parts[0]), parts[1]
    if not isinstance(condition, tirx.GE | tirx.GT) or number(condition.b) != 0:
        return None
    is_negated = tvm.sym.Analyzer().can_prove_equal(inside, constant(0, INDEX) - parts[2])
    return inside if is_negated and same(condition.a, inside) else None
