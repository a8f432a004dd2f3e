"""How the epilogue of a GEMM is computed on the device: exact formulas -> fast forms.

    x * (0.5 + 0.5 * erf(x / sqrt 2))   ->  gelu(x) = x / (1 + 2^(-x R(x^2))), R of degree 6
    0.5 + 0.5 * tanh(u)                 ->  sigmoid(2 u)
    sigmoid(x)                          ->  1 / (1 + 2^(-x log2 e))
    exp(x)                              ->  2^(x log2 e)

gelu has no branch and a relative error of 6e-5 (0.1 units in the last place of float16), so it
serves outputs in half precision only; the others are off by a few units in the last place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm import tirx
from tvm.ir import Call, Expr, StringImm, TensorLoad, Var
from tvm.script import tirx as T

from ..contraction_inline import Binding
from ..expr import constant, dtype_of, is_if_then_else, number, rebuild, same
from . import intrinsics as device
from .arithmetic import FUNCTIONS, LOG2E
from .gemm_frame import Frame

SQRT_HALF = 0.7071067811865476

# How far a constant may be from sqrt(1/2): the rounding of a half.
CONSTANT_TOLERANCE = 3e-4

# Minimax fit of log2((1 + e) / (1 - e)) / x, e = erf(x / sqrt 2), in x^2, lowest degree first.
GELU_COEFFICIENTS = (
    2.3018540657542177,
    0.10534541133116695,
    -0.00031728820807734424,
    -0.0001171199308870714,
    7.539071860478272e-06,
    -2.130761453189925e-07,
    2.3558325012995596e-09,
)


def f32(value: float) -> Expr:
    """A float32 immediate."""
    return constant(value, "float32")


def evaluate(
    frame: Frame,
    bindings: Sequence[Binding],
    values: Sequence[Expr],
    env: Mapping[Var, Expr],
    half: bool,
) -> list[Expr]:
    """Emits the temporaries of some expressions; their values, in the frame's terms.

    With exact rounding the formulas stay as they are.
    """
    env = dict(env)

    def value(expr: Expr) -> Expr:
        found = frame.rewrite(expr, env)
        return found if frame.contraction.exact else lower(found, half)

    for binding in bindings:
        env[binding.var] = T.Bind(value(binding.value))
    return [value(v) for v in values]


def lower(expr: Expr, half: bool) -> Expr:
    """`expr` with its functions in the fast forms; `half`: the result is rounded to half precision.

    Emits the temporaries of the fast forms; none in front of what is evaluated under a condition.
    """
    if isinstance(expr, Var | TensorLoad | StringImm) or number(expr) is not None:
        return expr
    if is_if_then_else(expr):
        branches = [lower(branch, False) for branch in expr.args[1:]]
        return tirx.if_then_else(lower(expr.args[0], half), *branches)
    if dtype_of(expr) != "float32":
        return rebuild(expr, lambda e: lower(e, half))
    if half and isinstance(expr, tirx.Mul):
        found = _match_gelu(expr)
        if found is not None:
            x, rest = found
            value = gelu(lower(x, half))
            return value if rest is None else value * lower(rest, half)
    if isinstance(expr, tirx.Add):
        found = _match_tanh(expr)
        if found is not None:
            scale, u = found
            return FUNCTIONS["tirx.sigmoid"](lower(u, half) * f32(2.0)) * f32(2.0 * scale)
    if isinstance(expr, Call) and expr.op.name == "tirx.exp":
        return device.ex2(lower(expr.args[0], half) * f32(LOG2E))
    if isinstance(expr, Call) and expr.op.name == "tirx.pow":
        return _power(*(lower(arg, half) for arg in expr.args))
    if isinstance(expr, Call) and expr.op.name in FUNCTIONS:
        return FUNCTIONS[expr.op.name](lower(expr.args[0], half))
    return rebuild(expr, lambda e: lower(e, half))


def gelu(x: Expr) -> Expr:
    """Gelu by the error function, of a float32."""
    x = x if isinstance(x, Var) else T.Bind(x)
    square = T.Bind(x * x)
    *rest, last = GELU_COEFFICIENTS
    power = f32(-last)
    for coefficient in reversed(rest):
        power = device.fma(power, square, f32(-coefficient))
    return x * device.rcp(device.ex2(x * power) + f32(1.0))


def _power(x: Expr, y: Expr) -> Expr:
    if isinstance(x, Var) and number(y) in (2, 3):
        return x * x if number(y) == 2 else x * x * x
    return device.power(x, y)


def _factors(expr: Expr) -> list[Expr]:
    if isinstance(expr, tirx.Mul):
        return [*_factors(expr.a), *_factors(expr.b)]
    return [expr]


def _product(factors: list[Expr]) -> Expr | None:
    result = None
    for factor in factors:
        result = factor if result is None else result * factor
    return result


def _match_gelu(expr: tirx.Mul) -> tuple[Expr, Expr | None] | None:
    """``x * (a + a * erf(x * sqrt(1/2))) * rest`` -> x, 2 a * rest (None for 1)."""
    factors = _factors(expr)
    for i, factor in enumerate(factors):
        found = _match_affine(factor, "tirx.erf")
        if found is None:
            continue
        scale, argument = found
        x = _scaled_by(argument, SQRT_HALF)
        if x is None:
            continue
        for j, other in enumerate(factors):
            if j != i and same(other, x):
                rest = [f for k, f in enumerate(factors) if k not in (i, j)]
                numbers = [number(f) for f in rest if number(f) is not None]
                for value in numbers:
                    scale *= value
                rest = [f for f in rest if number(f) is None]
                if abs(2 * scale - 1) > 1e-6:
                    rest.append(f32(2 * scale))
                return x, _product(rest)
    return None


def _match_tanh(expr: tirx.Add) -> tuple[float, Expr] | None:
    """``a + a * tanh(u)`` -> a, u."""
    return _match_affine(expr, "tirx.tanh")


def _match_affine(expr: Expr, function: str) -> tuple[float, Expr] | None:
    """``a + a * function(u)`` in any order -> a, u."""
    if not isinstance(expr, tirx.Add):
        return None
    for shift, term in ((expr.a, expr.b), (expr.b, expr.a)):
        a = number(shift)
        if a is None:
            continue
        scale, calls = 1.0, []
        for factor in _factors(term):
            if number(factor) is None:
                calls.append(factor)
            else:
                scale *= number(factor)
        matches = len(calls) == 1 and isinstance(calls[0], Call) and calls[0].op.name == function
        if matches and abs(scale - a) <= 1e-6 * abs(a):
            return float(a), calls[0].args[0]
    return None


def _scaled_by(expr: Expr, scale: float) -> Expr | None:
    """``x * scale`` or ``x / (1 / scale)`` -> x."""
    if isinstance(expr, tirx.Mul):
        for x, factor in ((expr.a, expr.b), (expr.b, expr.a)):
            if number(factor) is not None and _near(number(factor), scale):
                return x
    if isinstance(expr, tirx.Div) and number(expr.b) is not None:
        return expr.a if _near(number(expr.b), 1 / scale) else None
    return None


def _near(value: float, wanted: float) -> bool:
    return abs(value - wanted) <= CONSTANT_TOLERANCE * wanted
