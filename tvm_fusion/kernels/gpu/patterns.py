"""Shapes of expressions that are special functions written out.

    a + a * tanh(u)                     sigmoid(2 u), twice a
    x * (a + a * erf(x * sqrt(1/2)))    gelu(x), twice a
    1 / (1 + exp(-u))                   sigmoid(u)
    clip(round(u), -128, 127)           clip(u, -128, 127), rounded by its conversion to integers

`look` opens what stands for another expression (a temporary); by default nothing does.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.ir import Call, Expr

from ..program.expr import number, same

SQRT_HALF = 0.7071067811865476

# How far a constant may be from sqrt(1/2): the rounding of a half.
CONSTANT_TOLERANCE = 3e-4

Look = Callable[[Expr], Expr]


def as_is(expr: Expr) -> Expr:
    """`expr`: nothing stands for another expression."""
    return expr


def call_of(expr: Expr, function: str) -> Expr | None:
    """``function(u)`` -> u."""
    named = isinstance(expr, Call) and expr.op.name == function
    return expr.args[0] if named else None


def factors_of(expr: Expr, look: Look = as_is) -> list[Expr]:
    """Factors of a product."""
    opened = look(expr)
    if isinstance(opened, tirx.Mul):
        return [*factors_of(opened.a, look), *factors_of(opened.b, look)]
    return [expr]


def product_of(factors: list[Expr]) -> Expr | None:
    """The product, in the order of the factors; None of none."""
    result = None
    for factor in factors:
        result = factor if result is None else result * factor
    return result


def match_affine(expr: Expr, function: str, look: Look = as_is) -> tuple[float, Expr] | None:
    """``a + a * function(u)`` in any order -> a, u."""
    expr = look(expr)
    if not isinstance(expr, tirx.Add):
        return None
    for shift, term in ((expr.a, expr.b), (expr.b, expr.a)):
        a = number(shift)
        if a is None:
            continue
        scale, rest = split_constant(factors_of(term, look))
        if len(rest) == 1 and abs(scale - a) <= 1e-6 * abs(a):
            argument = call_of(look(rest[0]), function)
            if argument is not None:
                return float(a), argument
    return None


def split_constant(factors: list[Expr]) -> tuple[float, list[Expr]]:
    """The product of the numbers among some factors, and the other factors."""
    scale, rest = 1.0, []
    for factor in factors:
        value = number(factor)
        if value is None:
            rest.append(factor)
        else:
            scale *= value
    return scale, rest


def scaled_by(expr: Expr, scale: float, look: Look = as_is) -> Expr | None:
    """``x * scale`` or ``x / (1 / scale)`` -> x."""
    expr = look(expr)
    if isinstance(expr, tirx.Mul):
        for x, factor in ((expr.a, expr.b), (expr.b, expr.a)):
            if number(factor) is not None and _near(number(factor), scale):
                return x
    if isinstance(expr, tirx.Div) and number(expr.b) is not None:
        return expr.a if _near(number(expr.b), 1 / scale) else None
    return None


def take_gelu(factors: list[Expr], look: Look = as_is) -> tuple[Expr, float, list[Expr]] | None:
    """``x * (a + a * erf(x * sqrt(1/2))) * rest`` -> x, 2 a, rest: ``gelu(x) * 2 a * rest``."""
    for i, factor in enumerate(factors):
        affine = match_affine(factor, "tirx.erf", look)
        x = None if affine is None else scaled_by(affine[1], SQRT_HALF, look)
        if x is None:
            continue
        for j, other in enumerate(factors):
            if j != i and (same(other, x) or same(look(other), look(x))):
                rest = [f for k, f in enumerate(factors) if k not in (i, j)]
                return x, 2.0 * affine[0], rest
    return None


def match_logistic(expr: Expr, look: Look = as_is) -> Expr | None:
    """``1 + exp(-u)``, the denominator of a sigmoid -> u."""
    expr = look(expr)
    if not isinstance(expr, tirx.Add):
        return None
    for one, term in ((expr.a, expr.b), (expr.b, expr.a)):
        argument = call_of(look(term), "tirx.exp") if number(one) == 1 else None
        if argument is not None:
            return negated(argument, look)
    return None


def match_rounded(expr: Expr, look: Look = as_is) -> Expr | None:
    """``clip(round(u), a, b)`` for whole a and b -> ``clip(u, a, b)``, to be rounded later.

    Only rounding to even is what the conversion to integers does.
    """
    opened = look(expr)
    if isinstance(opened, tirx.Max | tirx.Min):
        for inner, bound in ((opened.a, opened.b), (opened.b, opened.a)):
            limit = number(bound)
            found = None if limit is None or limit != int(limit) else match_rounded(inner, look)
            if found is not None:
                return type(opened)(found, bound)
    return call_of(opened, "tirx.nearbyint")


def negated(expr: Expr, look: Look = as_is) -> Expr | None:
    """``-u`` -> u, written as ``0 - u`` or ``u * -1``."""
    opened = look(expr)
    if isinstance(opened, tirx.Sub) and number(opened.a) == 0:
        return opened.b
    scale, rest = split_constant(factors_of(expr, look))
    return rest[0] if scale == -1 and len(rest) == 1 else None


def _near(value: float, wanted: float) -> bool:
    return abs(value - wanted) <= CONSTANT_TOLERANCE * wanted
