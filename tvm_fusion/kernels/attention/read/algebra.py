"""Reads expressions of an attention as sums and products, so that what is the same cancels.

A sum is opened only where it holds the score, a reduction over the keys or the result: a mask such
as (1 - m) * -10000 stays as it is, since taken apart it would lose the digits of the score.
"""

from __future__ import annotations

import math

from tvm import tirx
from tvm.ir import Expr, Var

from ...program.expr import constant, dtype_of, same
from ...program.program import ReduceKind
from .space import Space
from .terms import (
    BASES,
    FLOAT,
    LOG_BASES,
    Linear,
    Power,
    choice,
    is_call,
    is_minus_infinity,
    value_of,
)

TINY = 1e-6
"""Coefficients that differ by less, relative to the larger one, are equal: roundings of float32."""


class Algebra:
    """Reads expressions of a space as products and sums."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self._maxima: dict[Var, tuple[Var, float, Linear]] = {}
        self._units: list[tuple[Var, Linear]] = []

    # ---- products

    def power(self, expr: Expr) -> Power:
        """An expression as a product."""
        found = Power()
        self._multiply(expr, 1, found)
        return found

    def _multiply(self, expr: Expr, sign: int, found: Power) -> None:
        value = value_of(expr)
        if value:
            found.coefficient *= value**sign
            return
        expr = self._behind_guard(self.space.open(expr))
        if isinstance(expr, tirx.Mul):
            self._multiply(expr.a, sign, found)
            self._multiply(expr.b, sign, found)
        elif isinstance(expr, tirx.Div):
            self._multiply(expr.a, sign, found)
            self._multiply(expr.b, -sign, found)
        elif isinstance(expr, tirx.Cast) and dtype_of(expr.value) == "bool" and sign > 0:
            found.conditions.append(expr.value)
        elif self._exponential(expr) is not None:
            inner, factor = self._exponential(expr)
            self._add(inner, sign * factor, found.exponent)
        elif not (sign > 0 and self._conditional(expr, found)):
            found.factors.append((expr, sign))

    def _exponential(self, expr: Expr) -> tuple[Expr, float] | None:
        """What is raised, and the logarithm of the base."""
        if is_call(expr, *BASES):
            return expr.args[0], math.log(BASES[expr.op.name])
        if is_call(expr, "tirx.pow"):
            base = value_of(expr.args[0])
            if base is not None and base > 0:
                return expr.args[1], math.log(base)
        return None

    def _conditional(self, expr: Expr, found: Power) -> bool:
        """``where(c, x, 0)``: x under a condition."""
        parts = choice(expr)
        if parts is None:
            return False
        condition, yes, no = parts
        if value_of(no) == 0:
            found.conditions.append(condition)
            self._multiply(yes, 1, found)
            return True
        if value_of(yes) == 0:
            found.conditions.append(tirx.Not(condition))
            self._multiply(no, 1, found)
            return True
        return False

    def _behind_guard(self, expr: Expr) -> Expr:
        """``where(x == c, other, x)`` -> x, for reductions x and what they are in a row without
        keys: there the result is 0 whatever x is.
        """
        parts = choice(expr)
        if parts is None:
            return expr
        condition, yes, no = parts
        condition = self.space.open(condition)
        if isinstance(condition, tirx.Not):
            condition, yes, no = self.space.open(condition.a), no, yes
        if isinstance(condition, tirx.NE | tirx.GT):
            yes, no = no, yes
        elif not isinstance(condition, tirx.EQ):
            return expr
        guarded = self._row_of(no)
        if guarded is None or not same(self.space.open(condition.a), guarded):
            return expr
        if value_of(yes) is None:
            return expr
        empty = value_of(condition.b)
        kind = self.space.rows[guarded].kind
        if kind is ReduceKind.SUM and empty == 0:
            return guarded
        return guarded if kind is ReduceKind.MAX and is_minus_infinity(condition.b) else expr

    def _is_maximum(self, expr: Expr) -> bool:
        row = self._row_of(expr)
        return row is not None and self.space.rows[row].kind is ReduceKind.MAX

    def _row_of(self, expr: Expr) -> Var | None:
        expr = self.space.open(expr)
        return expr if isinstance(expr, Var) and expr in self.space.rows else None

    # ---- sums

    def linear(self, expr: Expr) -> Linear:
        """An expression as a sum."""
        found = Linear()
        self._add(expr, 1.0, found)
        return found

    def _add(self, expr: Expr, factor: float, found: Linear) -> None:
        value = value_of(expr)
        if value is not None:
            found.constant += factor * value
            return
        inner = self._behind_guard(self.space.open(expr))
        space = self.space
        if not (space.score in space.leaves(inner) or space.has_rows(inner)):
            self.include(found, expr, factor)
        elif self._is_maximum(inner):
            self._add_maximum(inner, factor, found)
        elif isinstance(inner, tirx.Add | tirx.Sub):
            self._add(inner.a, factor, found)
            self._add(inner.b, factor if isinstance(inner, tirx.Add) else -factor, found)
        elif not (self._scaled(inner, factor, found) or self._logarithm(inner, factor, found)):
            self.include(found, inner, factor)

    def _scaled(self, expr: Expr, factor: float, found: Linear) -> bool:
        """``c * x`` and ``x / c``; of another factor too where x mixes keys and rows."""
        if not isinstance(expr, tirx.Mul | tirx.Div):
            return False
        a, b = value_of(expr.a), value_of(expr.b)
        if isinstance(expr, tirx.Div) and b:
            self._add(expr.a, factor / b, found)
        elif isinstance(expr, tirx.Mul) and (a is not None or b is not None):
            self._add(expr.b if b is None else expr.a, factor * (a if b is None else b), found)
        else:
            return self._distributed(expr, factor, found)
        return True

    def _distributed(self, expr: Expr, factor: float, found: Linear) -> bool:
        mixed, other = expr.a, expr.b
        if isinstance(expr, tirx.Mul) and self.space.has_rows(other):
            mixed, other = other, mixed
        space = self.space
        if not (space.has_rows(mixed) and space.at_keys(mixed)) or space.has_rows(other):
            return False
        inside = self.linear(mixed)
        if len(inside.terms) < 2:
            return False
        if inside.constant:
            inside.terms.append((constant(inside.constant, FLOAT), 1.0))
        for term, coefficient in inside.terms:
            self.include(found, type(expr)(term, other), factor * coefficient)
        return True

    def _logarithm(self, expr: Expr, factor: float, found: Linear) -> bool:
        if not is_call(expr, *LOG_BASES):
            return False
        product = self.power(expr.args[0])
        if product.conditions or product.coefficient <= 0:
            return False
        factor /= math.log(LOG_BASES[expr.op.name])
        found.constant += factor * (math.log(product.coefficient) + product.exponent.constant)
        for term, coefficient in product.exponent.terms:
            self.include(found, term, factor * coefficient)
        for part, sign in product.factors:
            self.include(found, tirx.log(part), factor * sign)
        return True

    def _add_maximum(self, row: Var, factor: float, found: Linear) -> None:
        """``max(c * x + r)`` is ``c * max(x) + r``; maxima of the same x are one variable."""
        if row not in self._maxima:
            self._maxima[row] = self._canonical(row)
        same_row, scale, rest = self._maxima[row]
        self.include(found, same_row, factor * scale)
        found.constant += factor * rest.constant
        for term, coefficient in rest.terms:
            self.include(found, term, factor * coefficient)

    def _canonical(self, row: Var) -> tuple[Var, float, Linear]:
        body = self.linear(self.space.rows[row].body)
        inside = [(e, c) for e, c in body.terms if self.space.at_keys(e)]
        rest = Linear([(e, c) for e, c in body.terms if not self.space.at_keys(e)], body.constant)
        scale = abs(inside[0][1]) if inside else 1.0
        unit = Linear([(e, c / scale) for e, c in inside])
        for other, known in self._units:
            if not self.plus(unit, known, -1.0).terms:
                return other, scale, rest
        self._units.append((row, unit))
        return row, scale, rest

    def include(self, found: Linear, expr: Expr, factor: float) -> None:
        """Adds a term; equal ones meet, and vanish where they cancel."""
        for i, (term, coefficient) in enumerate(found.terms):
            if self.space.equal(term, expr):
                total = coefficient + factor
                if abs(total) <= TINY * max(abs(coefficient), abs(factor)):
                    del found.terms[i]
                else:
                    found.terms[i] = (term, total)
                return
        found.terms.append((expr, factor))

    def plus(self, a: Linear, b: Linear, factor: float = 1.0) -> Linear:
        """``a + factor * b``."""
        found = Linear(list(a.terms), a.constant + factor * b.constant)
        for term, coefficient in b.terms:
            self.include(found, term, factor * coefficient)
        return found

    def times(self, a: Power, b: Power, sign: int = 1) -> Power:
        """``a * b^sign``; the conditions of a divisor are dropped: they hold where it is not 0."""
        factors = list(a.factors)
        for part, power in b.factors:
            self._include_factor(factors, part, sign * power)
        return Power(
            a.coefficient * b.coefficient**sign,
            factors,
            self.plus(a.exponent, b.exponent, sign),
            [*a.conditions, *(b.conditions if sign > 0 else [])],
        )

    def _include_factor(self, factors: list[tuple[Expr, int]], part: Expr, power: int) -> None:
        for i, (known, before) in enumerate(factors):
            if self.space.equal(known, part):
                if before + power == 0:
                    del factors[i]
                else:
                    factors[i] = (known, before + power)
                return
        factors.append((part, power))
