"""Float32 functions as polynomials, so that LLVM can compute a vector of them at a time.

LLVM turns `exp` of a vector into one library call a lane. These have errors of 1 to 2 units in the
last place, keep infinities and NaN, and contain neither branches nor tables.

Sources: exp, log and tanh follow S. L. Moshier's Cephes library (expf.c, logf.c, tanhf.c); the
error function is 1 - exp(-q), with a polynomial q that a minimax search fitted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.ir import Expr, PrimType, Var
from tvm.ir.prim.expr import Let

from ..program.expr import constant, dtype_of, number
from .stages.rewrite import call_name

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
# exp(2 x) + 1 with 1 - 2 / of it rounds to 1 from here on.
TANH_BOUND = 9.1

# q(t) = -ln(1 - erf(t)) = t + t * (these coefficients, of falling powers of t), up to where erf
# rounds to 1: 1 - exp(-q) is off by 4e-9 of erf at most, before rounding.
ERF_BOUND = 3.93
ERF_COEFFICIENTS = (
    -9.25879976e-06,
    1.17662647e-04,
    -6.32908370e-04,
    1.66714885e-03,
    -1.60507319e-04,
    -1.91530101e-02,
    1.02777816e-01,
    6.36619389e-01,
    1.28379166e-01,
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
    """A number that is not negative, with the sign of `x`."""
    sign = tirx.BitwiseAnd(_bits(x), _i32(-(2**31)))
    return _float(tirx.BitwiseOr(_bits(magnitude), sign))


def _reduced(x: Expr, body: Callable[[Expr, Expr], Expr]) -> Expr:
    """`body` of p and n: exp(x) = (1 + p) * 2 ** n, with p a polynomial of x - n ln 2."""

    def polynomial(r: Expr) -> Expr:
        return _horner(EXP_COEFFICIENTS, r) * (r * r) + r

    def split(n: Expr) -> Expr:
        r = x - n * f32(LN2_HIGH) - n * f32(LN2_LOW)
        number = tirx.Cast("int32", n)
        return _let(r, lambda v: _let(number, lambda i: body(polynomial(v), i)))

    return _let(tirx.floor(x * f32(1 / math.log(2.0)) + f32(0.5)), split)


def exp(x: Expr, scales: bool = False) -> Expr:
    """e ** x: x = n ln 2 + r, and a polynomial of r.

    The bounds stand first in Max and Min, which return their second operand where one is NaN.
    `scales` where the machine multiplies by a power of two in one instruction.
    """

    def scaled(p: Expr, n: Expr) -> Expr:
        if scales:
            return tirx.call_llvm_pure_intrin("float32", "llvm.ldexp", p + f32(1.0), n)
        half = tirx.RShift(n, _i32(1))
        return (p + f32(1.0)) * _power_of_two(half) * _power_of_two(n - half)

    bounded = tirx.Min(f32(EXP_HIGH), tirx.Max(f32(EXP_LOW), x))
    return _let(bounded, lambda c: _reduced(c, scaled))


def _plain_exp(x: Expr) -> Expr:
    """e ** x where neither it nor a power of two near it leaves the normal numbers."""
    return _reduced(x, lambda p, n: (p + f32(1.0)) * _power_of_two(n))


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
        # One condition after the other: vectors of logic are what TVM cannot simplify.
        positive = tirx.Select(tirx.LT(x, f32(math.inf)), r, f32(math.inf))
        special = tirx.Select(tirx.EQ(x, f32(0.0)), f32(-math.inf), f32(math.nan))
        return tirx.Select(tirx.GT(x, f32(0.0)), positive, special)

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
    """tanh x: an odd polynomial near 0, else 1 - 2 / (exp(2 |x|) + 1); with the sign of x."""

    def of(m: Expr) -> Expr:
        twice = tirx.Min(f32(2 * TANH_BOUND), m + m)
        large = f32(1.0) - f32(2.0) / (_let(twice, _plain_exp) + f32(1.0))
        small = _let(m * m, lambda z: _horner(TANH_COEFFICIENTS, z) * z * m + m)
        return tirx.Select(tirx.LT(m, f32(TANH_SPLIT)), small, large)

    def signed(x: Expr) -> Expr:
        return _let(_let(tirx.abs(x), of), lambda v: _with_sign(v, x))

    return _let(x, signed)


def sigmoid(x: Expr, scales: bool = False) -> Expr:
    """1 / (1 + exp(-x))."""
    return f32(1.0) / (f32(1.0) + exp(f32(0.0) - x, scales))


def erf(x: Expr) -> Expr:
    """Error function: 1 - exp(-q) with the sign of x, computed without a difference near 0."""

    def rest(p: Expr, n: Expr) -> Expr:
        return _let(_power_of_two(n), lambda s: (f32(1.0) - s) - s * p)

    def of(x: Expr) -> Expr:
        def exponent(t: Expr) -> Expr:
            return f32(0.0) - (_horner(ERF_COEFFICIENTS, t) * t + t)

        t = tirx.Min(f32(ERF_BOUND), tirx.abs(x))
        magnitude = _let(t, lambda t: _let(exponent(t), lambda q: _reduced(q, rest)))
        return _let(magnitude, lambda v: _with_sign(v, x))

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


SCALING = {"exp": exp, "sigmoid": sigmoid}
FUNCTIONS = {
    "log": log,
    "tanh": tanh,
    "erf": erf,
    "rsqrt": rsqrt,
}


def lower_call(expr: Expr, scales: bool = False) -> Expr:
    """`expr`, or what computes it without a library call; `scales` as in `exp`."""
    if dtype_of(expr) != "float32":
        return expr
    name = call_name(expr)
    if name in SCALING:
        return SCALING[name](expr.args[0], scales)
    if name in FUNCTIONS:
        return FUNCTIONS[name](expr.args[0])
    if name == "pow":
        lowered = power(*expr.args)
        return expr if lowered is None else lowered
    return expr
