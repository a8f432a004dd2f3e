"""Sums and products of expressions, taken apart and written down again.

exp(s - r) * 2 / l     coefficient 2, factors l^-1, exponent s - r
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tvm import tirx
from tvm.ir import Call, Expr, TensorLoad, Var

from ...program.expr import constant, dtype_of, is_if_then_else, number, rebuild

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
