"""Reads expressions of an attention as sums and products, so that what is the same cancels.

A sum is opened only where it holds the score, a reduction over the keys or the result: a mask such
as (1 - m) * -10000 stays as it is, since taken apart it would lose the digits of the score.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tvm import tirx
from tvm.ir import Call, Expr, TensorLoad, Var

from ...program.expr import constant, dtype_of, is_if_then_else, number, rebuild, same
from ...program.program import ReduceKind
from .space import Space

# Sums and products of expressions, taken apart and written down again.
#
# exp(s - r) * 2 / l     coefficient 2, factors l^-1, exponent s - r

FLOAT = "float32"
_FUNCTIONS = {
    "tirx.exp": math.exp,
    "tirx.log": math.log,
    "tirx.sqrt": math.sqrt,
    "tirx.rsqrt": lambda x: x**-0.5,
    "tirx.exp2": lambda x: 2.0**x,
    "prim.log2": math.log2,
    "tirx.pow": lambda x, y: x**y,
}
BASES = {"tirx.exp": math.e, "tirx.exp2": 2.0, "tirx.exp10": 10.0}
"""Exponential functions with their bases."""

LOG_BASES = {"tirx.log": math.e, "prim.log2": 2.0, "tirx.log10": 10.0}
"""Logarithms with their bases."""


@dataclass(slots=True, eq=False)
class Linear:
    """``constant + sum of coefficient * expression``."""

    terms: list[tuple[Expr, float]] = field(default_factory=list)
    constant: float = 0.0


@dataclass(slots=True, eq=False)
class Power:
    """``coefficient * product of factor^power * exp(exponent)`` where all `conditions` hold, else
    0.
    """

    coefficient: float = 1.0
    factors: list[tuple[Expr, int]] = field(default_factory=list)
    exponent: Linear = field(default_factory=Linear)
    conditions: list[Expr] = field(default_factory=list)


def is_call(expr: Expr, *names: str) -> bool:
    """Whether an expression calls one of the functions."""
    return isinstance(expr, Call) and getattr(expr.op, "name", "") in names


def value_of(expr: Expr) -> float | None:
    """The number that an expression of constants is."""
    known = number(expr)
    if known is not None:
        return float(known)
    if isinstance(expr, tirx.Cast):
        return value_of(expr.value)
    if isinstance(expr, tirx.Add | tirx.Sub | tirx.Mul | tirx.Div):
        a, b = value_of(expr.a), value_of(expr.b)
        if a is None or b is None or (isinstance(expr, tirx.Div) and b == 0):
            return None
        if isinstance(expr, tirx.Add):
            return a + b
        if isinstance(expr, tirx.Sub):
            return a - b
        return a * b if isinstance(expr, tirx.Mul) else a / b
    if isinstance(expr, Call) and getattr(expr.op, "name", "") in _FUNCTIONS:
        values = [value_of(arg) for arg in expr.args]
        try:
            return None if None in values else _FUNCTIONS[expr.op.name](*values)
        except (ValueError, OverflowError, ZeroDivisionError):
            return None
    return None


def choice(expr: Expr) -> tuple[Expr, Expr, Expr] | None:
    """Condition and both sides of a conditional."""
    if isinstance(expr, tirx.Select):
        return expr.condition, expr.true_value, expr.false_value
    return tuple(expr.args) if is_if_then_else(expr) else None


def is_minus_infinity(expr: Expr) -> bool:
    """Whether an expression is the number -inf, or the least of float32 or below."""
    value = value_of(expr)
    return value is not None and value <= -3.4e38


def product_of(factors: Iterable[Expr]) -> Expr:
    """All factors multiplied; 1 for none."""
    result = None
    for part in factors:
        result = part if result is None else tirx.Mul(result, part)
    return constant(1, FLOAT) if result is None else result


def folded(expr: Expr) -> Expr:
    """An expression whose products of several constants have one: ``x * 2 / 8`` -> ``x * 0.25``."""
    if isinstance(expr, TensorLoad | Var):
        return expr
    expr = rebuild(expr, folded)
    if not isinstance(expr, tirx.Mul | tirx.Div) or dtype_of(expr) != FLOAT:
        return expr
    a, b = value_of(expr.a), value_of(expr.b)
    if isinstance(expr, tirx.Div):
        if not b:
            return expr
        part, factor = expr.a, 1 / b
    elif a is None and b is None:
        return expr
    else:
        part, factor = (expr.a, b) if a is None else (expr.b, a)
    if isinstance(part, tirx.Mul) and number(part.b) is not None:
        part, factor = part.a, factor * number(part.b)
    return part if factor == 1 else tirx.Mul(part, constant(factor, FLOAT))


def write_linear(sum_: Linear) -> Expr:
    """A sum as an expression."""
    result = None
    for term, coefficient in sum_.terms:
        sign = coefficient < 0
        scale = abs(coefficient) if result is not None else coefficient
        part = term if scale == 1.0 else tirx.Mul(term, constant(scale, FLOAT))
        if result is None:
            result = part
        else:
            result = tirx.Sub(result, part) if sign else tirx.Add(result, part)
    if sum_.constant or result is None:
        number_ = constant(sum_.constant, FLOAT)
        result = number_ if result is None else tirx.Add(result, number_)
    return result


def write_power(power: Power, first: Sequence[Expr] = ()) -> Expr:
    """A product as an expression, without its conditions."""
    above = [*first, *(part for part, p in power.factors for _ in range(p))]
    below = [part for part, p in power.factors for _ in range(-p)]
    if power.exponent.terms or power.exponent.constant:
        above.append(tirx.exp(write_linear(power.exponent)))
    if power.coefficient != 1.0 or not above:
        above.append(constant(power.coefficient, FLOAT))
    result = product_of(above)
    return tirx.Div(result, product_of(below)) if below else result


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
