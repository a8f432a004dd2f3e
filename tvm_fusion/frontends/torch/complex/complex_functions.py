"""Functions of complex numbers as real and imaginary parts, of real operators.

    sqrt(a + ib)  ->  t = sqrt(hypot(a, b) / 2 + |a| / 2),  t + ib / 2t where a is positive

Inverse functions and powers are computed in float64, where a formula in the type itself would lose
digits: near a branch point, or of numbers close to one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor
Z = tuple[Tensor, Tensor]
"""Real and imaginary part."""

_aten = torch.ops.aten


def _is_negative(x: Tensor) -> Tensor:
    """Its sign, that of -0 too; not by its bits, as results are checked in another type."""
    return (x < 0) | ((x == 0) & (1 / x < 0))


def _with_sign(x: Tensor, of: Tensor) -> Tensor:
    return torch.where(_is_negative(of), -x.abs(), x.abs())


def product(x: Z, y: Z) -> Z:
    """x y."""
    return x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]


def quotient(x: Z, y: Z) -> Z:
    """x / y, scaled so that squares of large and small divisors are numbers (Smith 1962)."""
    scale = torch.maximum(y[0].abs(), y[1].abs())
    scale = torch.where((scale == 0) | torch.isinf(scale), 1.0, scale)
    a, b, c, d = (part / scale for part in (*x, *y))
    norm = c * c + d * d
    return (a * c + b * d) / norm, (b * c - a * d) / norm


def magnitude(x: Z) -> Tensor:
    """|x|."""
    return torch.hypot(*x)


def angle(x: Z) -> Tensor:
    """Its angle, between -pi and pi."""
    return torch.atan2(x[1], x[0])


def times(factor: float | Tensor, x: Z) -> Z:
    """A real number times x."""
    return factor * x[0], factor * x[1]


def plus(x: Z, real: float) -> Z:
    """x and a real number."""
    return x[0] + real, x[1]


def reciprocal(x: Z) -> Z:
    """1 / x."""
    return quotient((torch.ones_like(x[0]), torch.zeros_like(x[0])), x)


def square(x: Z) -> Z:
    """x x."""
    return (x[0] - x[1]) * (x[0] + x[1]), 2 * x[0] * x[1]


def exp(x: Z) -> Z:
    """A real exponential, turned."""
    return polar(torch.exp(x[0]), x[1])


def polar(size: Tensor, turned: Tensor) -> Z:
    """A size and an angle as parts."""
    return size * torch.cos(turned), size * torch.sin(turned)


def expm1(x: Z) -> Z:
    """exp(x) - 1 = expm1(a) cos(b) - 2 sin(b / 2)^2 + i exp(a) sin(b)."""
    half = torch.sin(x[1] / 2)
    real = torch.expm1(x[0]) * torch.cos(x[1]) - 2 * half * half
    return real, torch.exp(x[0]) * torch.sin(x[1])


def log(x: Z) -> Z:
    """The principal value."""
    return torch.log(magnitude(x)), angle(x)


def log1p(x: Z) -> Z:
    """log(1 + x), by log1p(2 a + |x|^2) / 2."""
    real = torch.log1p(2 * x[0] + x[0] * x[0] + x[1] * x[1]) / 2
    return real, torch.atan2(x[1], 1 + x[0])


def log_to(base: float) -> Callable[[Z], Z]:
    """Logarithms to a base."""
    return lambda x: times(1 / math.log(base), log(x))


def sqrt(x: Z) -> Z:
    """The root whose real part is not negative."""
    large = torch.sqrt(magnitude(x) / 2 + x[0].abs() / 2)
    small = torch.where(large == 0, 0.0, x[1].abs() / (2 * large))
    right = x[0] >= 0
    return torch.where(right, large, small), _with_sign(torch.where(right, small, large), x[1])


def rsqrt(x: Z) -> Z:
    """1 / sqrt(x)."""
    return reciprocal(sqrt(x))


def sgn(x: Z) -> Z:
    """x / |x|, and 0 of 0."""
    size = magnitude(x)
    size = torch.where(size == 0, 1.0, size)
    return x[0] / size, x[1] / size


def sinh(x: Z) -> Z:
    """sinh(a) cos(b) + i cosh(a) sin(b)."""
    return torch.sinh(x[0]) * torch.cos(x[1]), torch.cosh(x[0]) * torch.sin(x[1])


def cosh(x: Z) -> Z:
    """cosh(a) cos(b) + i sinh(a) sin(b)."""
    return torch.cosh(x[0]) * torch.cos(x[1]), torch.sinh(x[0]) * torch.sin(x[1])


def tanh(x: Z) -> Z:
    """(t + i sin(b) cos(b) / cosh(a)^2) / (t^2 sin(b)^2 + cos(b)^2) of t = tanh(a), where
    1 / cosh(a)^2 = 4 e / (1 + e)^2 of e = exp(-2 |a|), which does not overflow.
    """
    t, e = torch.tanh(x[0]), torch.exp(-2 * x[0].abs())
    sine, cosine = torch.sin(x[1]), torch.cos(x[1])
    norm = (t * sine) ** 2 + cosine * cosine
    return t / norm, sine * cosine * (4 * e / (1 + e) ** 2) / norm


def sigmoid(x: Z) -> Z:
    """1 / (1 + exp(-x)), or exp(x) / (1 + exp(x)) where Re x is negative."""
    right = x[0] >= 0
    e = exp((-x[0].abs(), torch.where(right, -x[1], x[1])))
    found = reciprocal(plus(e, 1))
    left = product(e, found)
    return torch.where(right, found[0], left[0]), torch.where(right, found[1], left[1])


def silu(x: Z) -> Z:
    """x sigmoid(x)."""
    return product(x, sigmoid(x))


def asinh(x: Z) -> Z:
    """By the part where Re x is not negative: log(x + sqrt(x^2 + 1)), its sign put back."""
    away = x[0].abs(), torch.where(_is_negative(x[0]), -x[1], x[1])
    # sqrt(x - i) sqrt(x + i) has no overflow, and its signs are those of the branch cuts
    root = product(sqrt((away[0], away[1] - 1)), sqrt((away[0], away[1] + 1)))
    found = log((away[0] + root[0], away[1] + root[1]))
    return _with_sign(found[0].abs(), x[0]), _with_sign(found[1], x[1])


def asin(x: Z) -> Z:
    """-i asinh(i x)."""
    real, imag = asinh((-x[1], x[0]))
    return imag, -real


def acos(x: Z) -> Z:
    """pi / 2 - asin(x)."""
    real, imag = asin(x)
    return math.pi / 2 - real, -imag


def acosh(x: Z) -> Z:
    """i acos(x) or -i acos(x), that whose real part is not negative."""
    real, imag = acos(x)
    return imag.abs(), _with_sign(real, x[1])


def atanh(x: Z) -> Z:
    """log((1 + x) / (1 - x)) / 2, its real part by log1p (Kahan 1987)."""
    a, b = x
    real = torch.log1p(4 * a.abs() / ((1 - a.abs()) ** 2 + b * b)) / 4
    imag = torch.atan2(2 * b, (1 - a) * (1 + a) - b * b) / 2
    return _with_sign(real, a), imag


def atan(x: Z) -> Z:
    """-i atanh(i x)."""
    real, imag = atanh((-x[1], x[0]))
    return imag, -real


def sin(x: Z) -> Z:
    """-i sinh(i x)."""
    real, imag = sinh((-x[1], x[0]))
    return imag, -real


def cos(x: Z) -> Z:
    """cosh(i x)."""
    return cosh((-x[1], x[0]))


def tan(x: Z) -> Z:
    """-i tanh(i x)."""
    real, imag = tanh((-x[1], x[0]))
    return imag, -real


def power(x: Z, y: Z) -> Z:
    """exp(y log x); 1 where y is 0, and 0 where x alone is."""
    found = exp(product(y, log(x)))
    zero, none = (x[0] == 0) & (x[1] == 0), (y[0] == 0) & (y[1] == 0)
    real, imag = (torch.where(zero & ~none, 0.0, part) for part in found)
    return torch.where(none, 1.0, real), torch.where(none, 0.0, imag)


_PRODUCTS: dict[float, Callable[[Z], Z]] = {
    1: lambda x: x,
    2: square,
    3: lambda x: product(square(x), x),
    0.5: sqrt,
    -0.5: rsqrt,
    -1: reciprocal,
    -2: lambda x: reciprocal(square(x)),
}


def product_for(exponent: Any) -> Callable[[Z], Z] | None:
    """What computes the powers of an exponent by products and roots; None where it does not."""
    return _PRODUCTS.get(exponent) if isinstance(exponent, int | float) else None


def in_float64(function: Callable[..., Z]) -> Callable[..., Z]:
    """A function computed in float64, rounded to the type of its first operand."""

    def wide(*given: Z) -> Z:
        dtype = given[0][0].dtype
        real, imag = function(*((x.double(), y.double()) for x, y in given))
        return real.to(dtype), imag.to(dtype)

    return wide


FUNCTIONS: dict[Any, Callable[[Z], Z]] = {
    _aten.reciprocal.default: reciprocal,
    _aten.square.default: square,
    _aten.exp.default: exp,
    _aten.exp2.default: lambda x: exp(times(math.log(2), x)),
    _aten.expm1.default: in_float64(expm1),
    _aten.log.default: log,
    _aten.log2.default: log_to(2),
    _aten.log10.default: log_to(10),
    _aten.log1p.default: in_float64(log1p),
    _aten.sqrt.default: sqrt,
    _aten.rsqrt.default: rsqrt,
    _aten.sgn.default: sgn,
    _aten.sin.default: sin,
    _aten.cos.default: cos,
    _aten.tan.default: tan,
    _aten.sinh.default: sinh,
    _aten.cosh.default: cosh,
    _aten.tanh.default: tanh,
    _aten.sigmoid.default: sigmoid,
    _aten.silu.default: silu,
    _aten.asin.default: in_float64(asin),
    _aten.acos.default: in_float64(acos),
    _aten.atan.default: in_float64(atan),
    _aten.asinh.default: in_float64(asinh),
    _aten.acosh.default: in_float64(acosh),
    _aten.atanh.default: in_float64(atanh),
}
