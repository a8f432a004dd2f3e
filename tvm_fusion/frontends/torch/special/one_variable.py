"""Special functions of one variable, as polynomials that interpolate SciPy's values.

    erfc(x)    ->  exp(-x * x) * y * P(y),  y = 4 / (4 + |x|),  and 2 - that where x < 0
    lgamma(x)  ->  Stirling's series at x + 8, less the logarithm of x (x + 1) ... (x + 7)

A polynomial interpolates in the Chebyshev nodes of an interval, to the accuracy of float64, which
all is computed in. Where a function oscillates without end it is a modulus and a phase (DLMF
10.18), where it grows or vanishes its exponential stands before the polynomial.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.polynomial import chebyshev, polynomial

from ..composites import float_type

_aten = torch.ops.aten
Tensor = torch.Tensor
Function = Callable[[Tensor], Tensor]


# ---- Polynomials.


@cache
def _coefficients(function: Callable, low: float, high: float, degree: int) -> tuple[float, ...]:
    """Of the polynomial in t that interpolates function(x), low <= x <= high, -1 <= t <= 1."""
    middle, half = (low + high) / 2, (high - low) / 2
    fitted = chebyshev.chebinterpolate(lambda t: function(middle + half * t), degree)
    return tuple(chebyshev.cheb2poly(fitted).tolist())


def _fitted(function: Callable, low: float, high: float, degree: int, x: Tensor) -> Tensor:
    """function(x) where low <= x <= high; what it is at the nearer end elsewhere."""
    middle, half = (low + high) / 2, (high - low) / 2
    t = (x.clamp(low, high) - middle) / half
    return _horner(_coefficients(function, low, high, degree), t)


def _horner(coefficients: tuple[float, ...], t: Tensor) -> Tensor:
    """A polynomial, its coefficients from the lowest power on."""
    result = coefficients[-1] * t + coefficients[-2]
    for coefficient in reversed(coefficients[:-2]):
        result = result * t + coefficient
    return result


def _special(name: str) -> Callable[[np.ndarray], np.ndarray]:
    from scipy import special

    return getattr(special, name)


def _in_float64(function: Function) -> Callable[[Tensor], Tensor]:
    """A function of float64 as one of any type."""

    def convert(x: Tensor) -> Tensor:
        return function(x.double()).to(float_type(x))

    return convert


# ---- Error functions.


@cache
def _erfcx_over_y() -> Callable:
    return lambda y: _special("erfcx")(4 / y - 4) / y


def _erfcx_of_positive(x: Tensor) -> Tensor:
    y = 4 / (4 + x)
    return y * _fitted(_erfcx_over_y(), 1e-9, 1.0, 24, y)


def _erfc(x: Tensor) -> Tensor:
    size = x.abs().clamp(max=27.5)  # less than float64 has beyond
    tail = torch.exp(-size * size) * _erfcx_of_positive(size)
    return torch.where(torch.isnan(x), x, torch.where(x < 0, 2 - tail, tail))


def _erfcx(x: Tensor) -> Tensor:
    right = _erfcx_of_positive(x.abs())
    return torch.where(torch.isnan(x), x, torch.where(x < 0, 2 * torch.exp(x * x) - right, right))


@cache
def _erfinv_over_x() -> Callable:
    """As a function of sqrt(-log(1 - x * x)); of its limit at 0."""

    def value(s: np.ndarray) -> np.ndarray:
        s = np.maximum(s, 1e-6)
        lost = np.exp(-s * s)  # 1 - x * x
        x = np.sqrt(-np.expm1(-s * s))
        # 1 - x, which x near 1 has lost
        return np.where(s < 1, _special("erfinv")(x), _special("erfcinv")(lost / (1 + x))) / x

    return value


def _erfinv_by_loss(x: Tensor, lost: Tensor) -> Tensor:
    """erfinv(x) from 1 - x * x too, which small numbers have more exactly than x."""
    s = torch.sqrt(-torch.log(lost))
    value = _erfinv_over_x()
    inner, outer = (_fitted(value, *ends, 22, s) for ends in ((0.0, 2.6), (2.6, 6.2)))
    far = _fitted(value, 6.2, 26.6, 22, s)
    result = x * torch.where(s < 2.6, inner, torch.where(s < 6.2, outer, far))
    result = torch.where(lost == 0, torch.where(x < 0, -math.inf, math.inf), result)
    return torch.where(lost >= 0, result, math.nan)


def _erfinv(x: Tensor) -> Tensor:
    return _erfinv_by_loss(x, (1 - x) * (1 + x))


def _ndtri(p: Tensor) -> Tensor:
    return math.sqrt(2) * _erfinv_by_loss(2 * p - 1, 4 * p * (1 - p))


# ---- Gamma functions.

STIRLING = tuple(  # B_2k / (2k (2k - 1)), of 1 / x ** (2k - 1)
    b / (2 * k * (2 * k - 1))
    for k, b in enumerate(
        (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510), 1
    )
)
SHIFT = 8


def _lgamma_of_positive(x: Tensor) -> Tensor:
    """Of x >= 1/2: at x + 8, less the logarithm of x (x + 1) ... (x + 7)."""
    y = x.clamp(max=1e30)  # beyond, the product is nothing beside the rest
    y = y * (y + 7)
    product = y * (y + 6) * (y + 10) * (y + 12)  # (x + 1) (x + 6) is y + 6
    z = x + SHIFT
    inverse = 1 / z
    series = _horner(STIRLING, inverse * inverse) * inverse
    whole = (z - 0.5) * torch.log(z) - z + 0.5 * math.log(2 * math.pi) + series
    return whole - torch.log(product)


def _lgamma(x: Tensor) -> Tensor:
    """By reflection below 1/2: log(pi / |sin(pi x)|) - lgamma(1 - x)."""
    below = x < 0.5
    right = _lgamma_of_positive(torch.where(below, 1 - x, x))
    fraction = x - torch.round(x)
    left = math.log(math.pi) - torch.log(torch.sin(math.pi * fraction).abs()) - right
    result = torch.where(below, left, right)
    pole = (below & (fraction == 0)) | torch.isinf(x)
    return torch.where(torch.isnan(x), x, torch.where(pole, math.inf, result))


def _digamma(x: Tensor) -> Tensor:
    """By reflection below 1/2: digamma(1 - x) - pi / tan(pi x)."""
    below = x < 0.5
    y = torch.where(below, 1 - x, x)
    shifted, steps = y + SHIFT, 1 / y
    for k in range(1, SHIFT):
        steps = steps + 1 / (y + k)
    inverse = 1 / (shifted * shifted)
    bernoulli = tuple(-c * (2 * k - 1) for k, c in enumerate(STIRLING, 1))  # -B_2k / 2k
    series = _horner((0.0, *bernoulli), inverse)
    right = torch.log(shifted) - 0.5 / shifted + series - steps
    fraction = x - torch.round(x)
    result = torch.where(below, right - math.pi / torch.tan(math.pi * fraction), right)
    result = torch.where(below & (fraction == 0), math.nan, result)
    result = torch.where(x == 0, -1 / x, result)
    return torch.where(x == math.inf, x, result)


def _polygamma(n: int, x: Tensor) -> Tensor:
    """The nth derivative of digamma, n >= 1: n! sum (x + k)^-(n + 1) by Euler and Maclaurin, and by
    the derivatives of the cotangent below 1/2.
    """
    y = x.double()
    below = y < 0.5
    z = torch.where(below, 1 - y, y)
    total = torch.zeros_like(z)
    for k in range(SHIFT):
        total = total + (z + k) ** -(n + 1)
    w = z + SHIFT
    total = total + w**-n / n + 0.5 * w ** -(n + 1)
    factor = 1.0
    for k, c in enumerate(STIRLING, 1):
        # B_2k / (2k)! (n + 1) ... (n + 2k - 1)
        factor = math.prod(range(n + 1, n + 2 * k)) / math.factorial(2 * k)
        total = total + c * (2 * k) * (2 * k - 1) * factor * w ** -(n + 2 * k)
    right = (-1) ** (n + 1) * math.factorial(n) * total
    in_cotangent = np.array([0.0, 1.0])  # d/dx p(cot(pi x)) = -pi (1 + c^2) p'(c)
    for _ in range(n):
        derived = polynomial.polyder(in_cotangent)
        in_cotangent = polynomial.polymul([-math.pi, 0.0, -math.pi], derived)
    fraction = y - torch.round(y)
    cotangent = 1 / torch.tan(math.pi * fraction)
    left = (-1) ** n * right - math.pi * _horner(tuple(in_cotangent.tolist()), cotangent)
    result = torch.where(below, left, right)
    pole = below & (fraction == 0)
    result = torch.where(pole, math.inf if n % 2 else -math.inf, result)
    return result.to(float_type(x))


def _polygamma_of_any(n: int, x: Tensor) -> Tensor:
    return _polygamma(n, x) if n else _in_float64(_digamma)(x)


# ---- Bessel functions.

NEAR = 8.0  # the end of the first interval


def _modified(order: int, scaled: bool) -> Function:
    """I0 and I1, before exp(-|x|) where `scaled`."""
    kept = _kept(f"i{order}e")

    def compute(x: Tensor) -> Tensor:
        size = x.abs()
        near = _fitted(_special(f"i{order}e"), 0.0, NEAR, 30, size)
        far = _fitted(kept, 0.0, 1.0, 24, NEAR / size.clamp(min=NEAR)) / torch.sqrt(size)
        result = torch.where(size < NEAR, near, far)
        result = result if scaled else result * torch.exp(size)
        result = torch.where(x < 0, -result, result) if order else result
        return torch.where(torch.isnan(x), x, result)

    return compute


@cache
def _kept(name: str) -> Callable:
    """A scaled function times sqrt(x), of 8 / x."""
    return lambda t: (
        _special(name)(NEAR / np.maximum(t, 1e-8)) * np.sqrt(NEAR / np.maximum(t, 1e-8))
    )


def _modified_second(order: int, scaled: bool) -> Function:
    """K0 and K1, before exp(x) where `scaled`; by I0 and I1 and a logarithm below 2."""
    first = _modified(order, scaled=False)
    kept, rest = _kept(f"k{order}e"), _rest_of_second(order)

    def compute(x: Tensor) -> Tensor:
        sign = 1 if order else -1
        y = x.clamp(1e-300, 2.0)
        smooth = _fitted(rest, 0.0, 4.0, 14, y * y)
        near = sign * torch.log(y / 2) * first(y) + (smooth * y + 1 / y if order else smooth)
        near = near * torch.exp(y) if scaled else near
        z = x.clamp(min=2.0)
        far = _fitted(kept, 0.0, 4.0, 28, NEAR / z) / torch.sqrt(z)
        far = far if scaled else far * torch.exp(-z)
        result = torch.where(x < 2, near, far)
        return _on_positive(x, result, math.inf)

    return compute


@cache
def _rest_of_second(order: int) -> Callable:
    """What K0 and K1 / x are beside logarithm and pole, of x * x."""

    def value(square: np.ndarray) -> np.ndarray:
        x = np.sqrt(np.maximum(square, 1e-4 if order else 1e-12))
        sign = 1 if order else -1
        known = sign * np.log(x / 2) * _special(f"i{order}")(x) + (1 / x if order else 0)
        return (_special(f"k{order}")(x) - known) / (x if order else 1)

    return value


def _on_positive(x: Tensor, result: Tensor, at_zero: float) -> Tensor:
    """A function that has a pole at 0 and no values below."""
    result = torch.where(x == 0, at_zero, result)
    return torch.where((x < 0) | torch.isnan(x), math.nan, result)


def _bessel(order: int, second: bool) -> Function:
    """J0, J1, Y0 and Y1."""
    in_square, rest = _in_square(order), _rest_of_y(order)

    def first_near(x: Tensor) -> Tensor:
        value = _fitted(in_square, 0.0, NEAR * NEAR, 20, x * x)
        return value * x if order else value

    def compute(x: Tensor) -> Tensor:
        size = x.abs()
        y = size.clamp(1e-300, NEAR)
        near = first_near(y)
        if second:
            near = 2 / math.pi * (torch.log(y) * near - (1 / y if order else 0))
            smooth = _fitted(rest, 0.0, NEAR * NEAR, 20, y * y)
            near = near + (smooth * y if order else smooth)
        z = size.clamp(min=NEAR)
        t = NEAR / z
        modulus = [_fitted(_phase(order, part), 0.0, 1.0, 20, t * t) for part in (0, 1)]
        angle = z - math.pi * (0.25 + order / 2)
        sine, cosine = torch.sin(angle), torch.cos(angle)
        p, q = modulus[0], modulus[1] * t
        far = p * sine + q * cosine if second else p * cosine - q * sine
        far = far * torch.sqrt(2 / (math.pi * z))
        result = torch.where(size < NEAR, near, far)
        if second:
            return _on_positive(x, result, -math.inf)
        result = torch.where(torch.isinf(x), 0.0, result)
        return torch.where(x < 0, -result, result) if order else result

    return compute


@cache
def _in_square(order: int) -> Callable:
    def value(square: np.ndarray) -> np.ndarray:
        x = np.sqrt(np.maximum(square, 1e-12))
        return _special(f"j{order}")(x) / (x if order else 1)

    return value


@cache
def _rest_of_y(order: int) -> Callable:
    """What Y0 and Y1 / x are beside logarithm and pole, of x * x."""

    def value(square: np.ndarray) -> np.ndarray:
        x = np.sqrt(np.maximum(square, 1e-4 if order else 1e-12))
        known = np.log(x) * _special(f"j{order}")(x) - (1 / x if order else 0)
        return (_special(f"y{order}")(x) - 2 / np.pi * known) / (x if order else 1)

    return value


@cache
def _phase(order: int, part: int) -> Callable:
    """The factors of cosine (0) and of sine (1, by 8 / x) of J and Y, of (8 / x)^2."""

    def value(square: np.ndarray) -> np.ndarray:
        t = np.sqrt(np.maximum(square, 1e-6))
        x = NEAR / t
        angle = x - np.pi * (0.25 + order / 2)
        scale = np.sqrt(np.pi * x / 2)
        j, y = (_special(f"{kind}{order}")(x) * scale for kind in "jy")
        sine, cosine = np.sin(angle), np.cos(angle)
        return (y * cosine - j * sine) / t if part else j * cosine + y * sine

    return value


def _spherical_bessel(x: Tensor) -> Tensor:
    near = _horner((1.0, -1 / 6, 1 / 120, -1 / 5040, 1 / 362880, -1 / 39916800), x * x)
    far = torch.where(torch.isinf(x), 0.0, torch.sin(x) / x)
    return torch.where(x.abs() < 0.5, near, far)


# ---- Airy's function.

AIRY = 2.0  # beyond, it is a modulus and a phase, or what is left of an exponential


def _airy(x: Tensor) -> Tensor:
    """Ai; PyTorch gives none of infinity."""
    near = _fitted(_airy_near, -AIRY, AIRY, 24, x)
    size = x.abs().clamp(min=AIRY)
    root = torch.sqrt(size)
    zeta = 2 / 3 * size * root
    t = AIRY**1.5 / (size * root)
    scale = math.sqrt(math.pi) * torch.sqrt(root)
    right = torch.exp(-zeta) * _fitted(_airy_right, 0.0, 1.0, 24, t) / scale
    angle = zeta - math.pi / 4
    p, q = (_fitted(_airy_left(part), 0.0, 1.0, 20, t * t) for part in (0, 1))
    left = (p * torch.cos(angle) + q * t * torch.sin(angle)) / scale
    result = torch.where(x.abs() < AIRY, near, torch.where(x < 0, left, right))
    return torch.where(torch.isfinite(x), result, math.nan)


def _airy_near(x: np.ndarray) -> np.ndarray:
    return _special("airy")(x)[0]


def _airy_right(t: np.ndarray) -> np.ndarray:
    """Ai(x) exp(2/3 x^1.5) sqrt(pi) x^0.25, of (2 / x)^1.5."""
    x = AIRY / np.maximum(t, 1e-9) ** (2 / 3)
    return _special("airye")(x)[0] * np.sqrt(np.pi) * x**0.25


@cache
def _airy_left(part: int) -> Callable:
    """The factors of cosine (0) and of sine (1, by (2 / x)^1.5) of Ai(-x), of (2 / x)^3."""

    def value(square: np.ndarray) -> np.ndarray:
        t = np.sqrt(np.maximum(square, 1e-6))
        x = AIRY / t ** (2 / 3)
        angle = 2 / 3 * x**1.5 - np.pi / 4
        first, _, second, _ = (y * np.sqrt(np.pi) * x**0.25 for y in _special("airy")(-x))
        sine, cosine = np.sin(angle), np.cos(angle)
        return (first * sine + second * cosine) / t if part else first * cosine - second * sine

    return value


_FUNCTIONS: dict[str, Function] = {
    "digamma": _digamma,
    "erfc": _erfc,
    "erfinv": _erfinv,
    "i0": _modified(0, scaled=False),
    "lgamma": _lgamma,
    "special_airy_ai": _airy,
    "special_bessel_j0": _bessel(0, second=False),
    "special_bessel_j1": _bessel(1, second=False),
    "special_bessel_y0": _bessel(0, second=True),
    "special_bessel_y1": _bessel(1, second=True),
    "special_erfcx": _erfcx,
    "special_i0e": _modified(0, scaled=True),
    "special_i1": _modified(1, scaled=False),
    "special_i1e": _modified(1, scaled=True),
    "special_modified_bessel_i0": _modified(0, scaled=False),
    "special_modified_bessel_i1": _modified(1, scaled=False),
    "special_modified_bessel_k0": _modified_second(0, scaled=False),
    "special_modified_bessel_k1": _modified_second(1, scaled=False),
    "special_ndtri": _ndtri,
    "special_scaled_modified_bessel_k0": _modified_second(0, scaled=True),
    "special_scaled_modified_bessel_k1": _modified_second(1, scaled=True),
    "special_spherical_bessel_j0": _spherical_bessel,
}

SPECIAL: dict[Any, Callable[..., Any]] = {
    **{getattr(_aten, name).default: _in_float64(f) for name, f in _FUNCTIONS.items()},
    _aten.polygamma.default: _polygamma_of_any,
}
