"""Float32 functions as polynomials, so that LLVM can compute a vector of them at a time.

LLVM turns `exp` of a vector into one library call a lane. These have errors of 1 to 2 units in the
last place, keep infinities and NaN, and contain neither branches nor tables.

Sources: exp, log and tanh follow S. L. Moshier's Cephes library (expf.c, logf.c, tanhf.c); the
error function follows N. Juffa (https://stackoverflow.com/a/35148199), fitted by a minimax search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.ir import Expr, PrimType, Var
from tvm.ir.prim.expr import Let

from ..expr import constant, dtype_of, number
from .rewrite import call_name

EXP_LOW, EXP_HIGH = -104.0, 89.0
EXP_COEFFICIENTS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
LOG_COEFFICIENTS = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
TANH_COEFFICIENTS = (
    -5.70498872745e-3,
    2.06390887954e-2,
    -5.37397155531e-2,
    1.33314422036e-1,
    -3.33332819422e-1,
)
TANH_SPLIT = 0.625
ERF_SPLIT = 0.927734375
ERF_SMALL = (
    -5.96761703e-4,
    4.99119423e-3,
    -2.67681349e-2,
    1.12819925e-1,
    -3.76125336e-1,
    1.28379166e-1,
)
ERF_LARGE = (
    -1.72853470e-5,
    3.83197126e-4,
    -3.88396438e-3,
    2.42546219e-2,
    -1.06777877e-1,
    -6.34846687e-1,
    -1.28717512e-1,
)


def f32(value: float) -> Expr:
    """A float32 constant."""
    return constant(value, "float32")


def _i32(value: int) -> Expr:
    return constant(value, "int32")


def _let(value: Expr, body: Callable[[Var], Expr]) -> Expr:
    """`body` of a variable that holds `value`."""
    var = Var("t", PrimType(dtype_of(value)))
    return Let(var, value, body(var))


def _horner(coefficients: Sequence[float], x: Expr) -> Expr:
    total = f32(coefficients[0])
    for c in coefficients[1:]:
        total = total * x + f32(c)
    return total


def _bits(x: Expr) -> Expr:
    return tirx.reinterpret("int32", x)


def _float(bits: Expr) -> Expr:
    return tirx.reinterpret("float32", bits)


def _power_of_two(n: Expr) -> Expr:
    """2 ** n for an integer -126 <= n <= 127."""
    return _float(tirx.LShift(n + _i32(127), _i32(23)))


def _u32(value: int) -> Expr:
    return constant(value, "uint32")


def bfloat16_to_float32(x: Expr) -> Expr:
    """The same number: bfloat16 is the upper half of float32."""
    bits = tirx.Cast("uint32", tirx.reinterpret("uint16", x))
    return tirx.reinterpret("float32", tirx.LShift(bits, _u32(16)))


def round_to_bfloat16(x: Expr) -> Expr:
    """The float32 number `x`, a variable, rounded to the nearest bfloat16, ties to even."""
    bits = tirx.reinterpret("uint32", x)
    odd = tirx.BitwiseAnd(tirx.RShift(bits, _u32(16)), _u32(1))
    kept = tirx.BitwiseAnd(bits + odd + _u32(0x7FFF), _u32(0xFFFF0000))
    return tirx.reinterpret("float32", kept)


def _with_sign(magnitude: Expr, x: Expr) -> Expr:
    return tirx.Select(tirx.LT(x, f32(0.0)), f32(0.0) - magnitude, magnitude)


def exp(x: Expr) -> Expr:
    """e ** x: x = n ln 2 + r, and a polynomial of r.

    The bounds stand first in Max and Min, which return their second operand where one is NaN.
    """

    def scaled(r: Expr, n: Expr) -> Expr:
        poly = _horner(EXP_COEFFICIENTS, r) * r * r + r + f32(1.0)
        half = tirx.RShift(n, _i32(1))
        return poly * _power_of_two(half) * _power_of_two(n - half)

    def reduced(c: Expr, n: Expr) -> Expr:
        r = c - n * f32(LN2_HIGH) - n * f32(LN2_LOW)
        return _let(r, lambda v: _let(tirx.Cast("int32", n), lambda i: scaled(v, i)))

    def bounded(c: Expr) -> Expr:
        return _let(tirx.floor(c * f32(1 / math.log(2.0)) + f32(0.5)), lambda n: reduced(c, n))

    return _let(tirx.Min(f32(EXP_HIGH), tirx.Max(f32(EXP_LOW), x)), bounded)


def log(x: Expr) -> Expr:
    """ln x: x = m 2**e with m near 1, and a polynomial of m - 1."""

    def finish(m: Expr, e: Expr, x: Expr) -> Expr:
        r = _let(
            m * m,
            lambda z: (
                m
                + (m * z * _horner(LOG_COEFFICIENTS, m) + e * f32(LN2_LOW) - z * f32(0.5))
                + e * f32(LN2_HIGH)
            ),
        )
        infinite = f32(math.inf)
        special = tirx.Select(tirx.EQ(x, f32(0.0)), f32(-math.inf), f32(math.nan))
        special = tirx.Select(tirx.EQ(x, infinite), infinite, special)
        inside = tirx.And(tirx.GT(x, f32(0.0)), tirx.LT(x, infinite))
        return tirx.Select(inside, r, special)

    def split(y: Expr, shift: Expr, x: Expr) -> Expr:
        def mantissa(b: Expr) -> Expr:
            e = tirx.Cast("float32", tirx.RShift(b, _i32(23)) - _i32(126)) - shift
            m = _float(tirx.BitwiseOr(tirx.BitwiseAnd(b, _i32(0x7FFFFF)), _i32(0x3F000000)))
            return _let(m, lambda f: _let(e, lambda g: centred(f, g)))

        def centred(f: Expr, e: Expr) -> Expr:
            low = tirx.LT(f, f32(math.sqrt(0.5)))
            m = tirx.Select(low, f + f - f32(1.0), f - f32(1.0))
            return _let(
                m, lambda v: _let(tirx.Select(low, e - f32(1.0), e), lambda g: finish(v, g, x))
            )

        return _let(_bits(y), mantissa)

    def scaled(x: Expr) -> Expr:
        tiny = tirx.LT(x, f32(2.0**-126))
        y = tirx.Select(tiny, x * f32(2.0**24), x)
        shift = tirx.Select(tiny, f32(24.0), f32(0.0))
        return _let(y, lambda v: _let(shift, lambda s: split(v, s, x)))

    return _let(x, scaled)


def tanh(x: Expr) -> Expr:
    """tanh x: an odd polynomial near 0, else 1 - 2 / (exp(2 |x|) + 1) with the sign of x."""

    def of(x: Expr) -> Expr:
        magnitude = tirx.abs(x)
        large = f32(1.0) - f32(2.0) / (exp(magnitude + magnitude) + f32(1.0))
        small = _let(x * x, lambda z: _horner(TANH_COEFFICIENTS, z) * z * x + x)
        near = tirx.LT(magnitude, f32(TANH_SPLIT))
        return _let(large, lambda v: tirx.Select(near, small, _with_sign(v, x)))

    return _let(x, of)


def sigmoid(x: Expr) -> Expr:
    """1 / (1 + exp(-x))."""
    return f32(1.0) / (f32(1.0) + exp(f32(0.0) - x))


def erf(x: Expr) -> Expr:
    """Error function: an odd polynomial near 0, else 1 - exp(polynomial) with the sign of x."""

    def of(x: Expr) -> Expr:
        def large(t: Expr) -> Expr:
            return f32(1.0) - exp(_horner(ERF_LARGE, t) * t - t)

        tail = _let(tirx.abs(x), large)
        small = _let(x * x, lambda s: _horner(ERF_SMALL, s) * x + x)
        far = tirx.GT(tirx.abs(x), f32(ERF_SPLIT))
        return _let(tail, lambda v: tirx.Select(far, _with_sign(v, x), small))

    return _let(x, of)


def rsqrt(x: Expr) -> Expr:
    """1 / sqrt(x)."""
    return f32(1.0) / tirx.sqrt(x)


def power(x: Expr, y: Expr) -> Expr | None:
    """x ** y for a few constant exponents, else None."""
    exponent = number(y)
    if exponent == 1:
        return x
    if exponent == 2:
        return _let(x, lambda v: v * v)
    if exponent == 3:
        return _let(x, lambda v: v * v * v)
    if exponent == 4:
        return _let(x, lambda v: _let(v * v, lambda w: w * w))
    return None


FUNCTIONS = {
    "exp": exp,
    "log": log,
    "tanh": tanh,
    "sigmoid": sigmoid,
    "erf": erf,
    "rsqrt": rsqrt,
}


def lower_call(expr: Expr) -> Expr:
    """`expr`, or what computes it without a library call."""
    if dtype_of(expr) != "float32":
        return expr
    name = call_name(expr)
    if name in FUNCTIONS:
        return FUNCTIONS[name](expr.args[0])
    if name == "pow":
        lowered = power(*expr.args)
        return expr if lowered is None else lowered
    return expr
