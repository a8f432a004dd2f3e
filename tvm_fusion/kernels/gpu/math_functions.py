"""Special functions on float32 for the device, without branches: two grades of accuracy.

Forms for half precision have an error far below the rounding of a result to half precision, of the
result's own size, however small it is:

    function   form                                              instructions   error (relative)
    gelu       x / (1 + 2^(-x R(x^2)))                           10 + 2 MUFU    6e-5 (float16)
    gelu       max(x, 0) - |x| 2^(-x^2 log2(e)/2) P(|x|)/Q(|x|)  15 + 2 MUFU    3e-5 (bfloat16)
    tanh       x P(x^2) / Q(x^2), |x| <= 6                       10 + 1 MUFU    2e-5
    erf        x P(x^2) / Q(x^2), |x| <= 3.1                     11 + 1 MUFU    1.4e-5
    sigmoid    1 / (1 + 2^(-x log2(e)))                           2 + 2 MUFU    1e-7 (1 + |x|)
    exp        2^(x log2(e))                                      1 + 1 MUFU    1e-7 (1 + |x|)

The others are off by a few units in the last place of float32. Results below 2^-126 become 0 (the
hardware flushes them), those of sigmoid below 2^-125 too.

The bodies are plain C: under fast math `exp2f` and `__fdividef` are one MUFU instruction each (and
a multiplication).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.ir import Call, Expr

from ..program.expr import constant, number, same
from .intrinsics import device_call

# Shapes of expressions that are special functions written out.
#
#     a + a * tanh(u)                     sigmoid(2 u), twice a
#     x * (a + a * erf(x * sqrt(1/2)))    gelu(x), twice a
#     1 / (1 + exp(-u))                   sigmoid(u)
#     clip(round(u), -128, 127)           clip(u, -128, 127), rounded by its conversion to integers
#
# `look` opens what stands for another expression (a temporary); by default nothing does.

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


# log2(Phi(x) / Phi(-x)) / x in x^2, Phi the normal distribution; minimax on |x| <= 5.8.
GELU_EXPONENT = (
    2.3018540657542177,
    0.10534541133116695,
    -0.00031728820807734424,
    -0.0001171199308870714,
    7.539071860478272e-06,
    -2.130761453189925e-07,
    2.3558325012995596e-09,
)

# Phi(-x) / 2^(-x^2 log2(e) / 2) = P(x) / Q(x) on 0 <= x <= 13.5, relative error 2.3e-5.
MILLS_P = (0.5000116716986714, 0.2774033186714063, 0.062154732914303026)
MILLS_Q = (1.0, 1.3534133075151655, 0.7005696012000779, 0.15561406144762086)
MILLS_END = 14.0
"""Beyond, the normal distribution is below the smallest float32."""

# tanh(x) = x P(x^2) / Q(x^2) on |x| <= 6, relative error 7.4e-6; 1 - tanh(6) is 1.2e-5.
TANH_P = (0.9999925681528858, 0.11480581607276849, 0.001512956051334693)
TANH_Q = (1.0, 0.4480883919024522, 0.017601684919872088, 5.616831530382412e-05)
TANH_END = 6.0

# erf(x) = x P(x^2) / Q(x^2) on |x| <= 3.1, relative error 1.6e-6; 1 - erf(3.1) is 1.2e-5.
ERF_P = (1.1283809704929546, 0.1539586543976706, 0.04328509229812346, 0.0007542735184376631)
ERF_Q = (1.0, 0.46981431326733486, 0.09481501127422974, 0.009330596714228019)
ERF_END = 3.1

# (tanh(x) / x - 1) / x^2 in x^2 on |x| <= 0.6; tanh is off by 3e-9 of its value.
TANH_NEAR = (
    -0.33333297510128657,
    0.13331915298813862,
    -0.053783293000328386,
    0.020794617710352764,
    -0.00589394530372402,
)

# 12582912 is 1.5 * 2^23: adding it rounds to a whole number, which then lies in the lowest bits.
_EXP = (
    "float k = fmaf(__saturatef(fmaf({x}, 0.005724980f, 0.5f)), 252.0f, 12582913.0f); "
    "float scale = __int_as_float(__float_as_int(k) << 23); k -= 12583039.0f; "
    "float f = fmaf({x}, 1.925963033500011e-8f, fmaf({x}, 1.4426950216293335f, -k)); "
    "float e = exp2f(f) * scale; "
)


def horner(coefficients: Sequence[float], var: str) -> str:
    """C code of a polynomial in `var`, lowest degree first."""
    code = f"{coefficients[-1]!r}f"
    for coefficient in reversed(coefficients[:-1]):
        code = f"fmaf({code}, {var}, {coefficient!r}f)"
    return code


def _function(name: str, body: str, x: Expr) -> Expr:
    return device_call("float32", name, "float x", body, x)


# ---- for results in half precision


def gelu(x: Expr, dtype: str) -> Expr:
    """Gelu by the error function, for a result in `dtype`.

    float16: relative error 6e-5 where the result is at least 6e-5 in size, absolute error 1e-8
    below. bfloat16: relative error 3e-5. gelu(-inf) is NaN as the formula's; the bfloat16 form
    turns -0 into 0.
    """
    if dtype == "float16":
        exponent = horner([-c for c in GELU_EXPONENT], "u")
        body = f"float u = x * x; return __fdividef(x, 1.0f + exp2f(x * ({exponent})));"
        return _function("gelu_f16", body, x)
    body = (
        f"float a = fminf(fabsf(x), {MILLS_END!r}f); "
        "float t = a * exp2f(-0.72134752044448171f * (a * a)); "
        f"t = __fdividef(t * ({horner(MILLS_P, 'a')}), {horner(MILLS_Q, 'a')}); "
        "float h = 0.5f * x; return (h + fabsf(h)) - t;"
    )
    return _function("gelu_bf16", body, x)


def clamp(x: Expr, bound: float) -> Expr:
    """`x` within plus and minus `bound`; NaN stays NaN, which `fminf` would not do."""
    body = (
        'float r; asm("{ .reg .f32 t; min.NaN.f32 t, %1, %2; max.NaN.f32 %0, t, %3; }" '
        ': "=f"(r) : "f"(x), "f"(bound), "f"(-bound)); return r;'
    )
    limit = constant(bound, "float32")
    return device_call("float32", "clamp", "float x, float bound", body, x, limit)


def tanh_parts(x: Expr) -> tuple[Expr, Expr]:
    """Numerator and denominator of the hyperbolic tangent, relative error 2e-5."""
    return _odd_parts("tanh", clamp(x, TANH_END), TANH_P, TANH_Q)


def erf_parts(x: Expr) -> tuple[Expr, Expr]:
    """Numerator and denominator of the error function, relative error 1.4e-5."""
    return _odd_parts("erf", clamp(x, ERF_END), ERF_P, ERF_Q)


def _odd_parts(name: str, x: Expr, p: Sequence[float], q: Sequence[float]) -> tuple[Expr, Expr]:
    above = f"float u = x * x; return x * ({horner(p, 'u')});"
    below = f"float u = x * x; return {horner(q, 'u')};"
    return _function(f"{name}_p", above, x), _function(f"{name}_q", below, x)


# ---- for results in float32


def exp(x: Expr) -> Expr:
    """Exponential function, 2 ulp.

    2^(x log2(e)) in two parts, the whole exponent by shifting: what `expf` becomes under fast math
    is off by |x| * 1e-7.
    """
    return _function("exp", _EXP.format(x="x") + "return e;", x)


def sigmoid(x: Expr) -> Expr:
    """Logistic function, 4 ulp."""
    return _function("sigmoid", _EXP.format(x="(-x)") + "return __fdividef(1.0f, 1.0f + e);", x)


def tanh(x: Expr) -> Expr:
    """Hyperbolic tangent, 4 ulp: a polynomial below 0.6, 1 - 2 / (1 + e^(2 |x|)) above.

    What `tanhf` becomes under fast math (tanh.approx.f32) is off by 5e-4.
    """
    body = (
        "float a = fabsf(x), u = x * x; "
        f"float p = {horner(TANH_NEAR, 'u')}; "
        "float near = fmaf(x * u, p, x); "
        "float far = 1.0f - __fdividef(2.0f, 1.0f + exp2f(2.8853900817779268f * a)); "
        "return a < 0.6f ? near : copysignf(far, x);"
    )
    return _function("tanh", body, x)
