"""Fourier transforms as products with constant matrices.

    n <= 128          one product with the matrix exp(-2 pi i jk / n)
    n = a b           products of a and of b, and factors between them (Cooley and Tukey 1965)
    a large prime     a convolution with exp(pi i j^2 / n), by transforms of a power of 2
                      (Bluestein 1970)

Of an axis of n elements, with j = b s + t and k = p + a q (s, p < a; t, q < b):

    X[p + a q] = sum_t w_n^(t p) w_b^(t q) sum_s w_a^(s p) x[b s + t]

Matrices and factors are computed in float64 from exact integers, by nodes that depend on no input
and so become constants. Errors are about as those of PyTorch in float32: below 1e-6 of the norm.
Does not handle: axes of symbolic size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ....errors import FrontendError
from .complex_functions import Tensor, Z, product
from .complex_numbers import joined, parts

_aten = torch.ops.aten
DENSE = 128  # elements of an axis that one product transforms
# Above, a convolution costs less than a product with the matrix of a prime, a large constant.
LARGEST_PRIME = 512
Pair = tuple[Tensor, Tensor | None]  # real and imaginary part, None where that is 0


# ---- One axis, the last one.


def _turned(numbers: Tensor, n: int, sign: int, like: Tensor) -> Z:
    """exp(sign 2 pi i numbers / n), of integers."""
    angles = (numbers % n).double() * (2 * math.pi / n)
    return torch.cos(angles).to(like.dtype), sign * torch.sin(angles).to(like.dtype)


def _counted(n: int, like: Tensor) -> Tensor:
    return torch.arange(n, dtype=torch.int64, device=like.device)


def _matrix(n: int, sign: int, like: Tensor, columns: int | None = None) -> Z:
    """[n, columns]; the first of n columns."""
    rows = _counted(n, like)
    return _turned(rows[:, None] * rows[: columns or n], n, sign, like)


def _multiplied(x: Pair, factors: Z, multiply: Callable[[Tensor, Tensor], Tensor]) -> Z:
    """Products of numbers that may be real."""
    (real, imag), (c, d) = x, factors
    if imag is None:
        return multiply(real, c), multiply(real, d)
    return (
        multiply(real, c) - multiply(imag, d),
        multiply(real, d) + multiply(imag, c),
    )


def _transformed(x: Pair, sign: int) -> Z:
    """The transform along the last axis, without a factor."""
    n = x[0].shape[-1]
    first = _factor(n)
    if first == n:
        whole = n <= LARGEST_PRIME
        return _multiplied(x, _matrix(n, sign, x[0]), torch.matmul) if whole else _chirped(x, sign)
    return _in_order(_stages(x, first, first, sign))


def _stages(x: Pair, a: int, rows: int, sign: int) -> Z:
    """[..., rows, b]: element [p, q] is that of p + a q, for p < rows.

    Matrices are right operands: kernels take transposed left ones, and put factors behind them.
    """
    n = x[0].shape[-1]
    b = n // a
    x = tuple(None if part is None else part.unflatten(-1, (a, b)).mT for part in x)
    inner = _multiplied(x, _matrix(a, sign, x[0], rows), torch.matmul)
    place = _counted(b, x[0])[:, None] * _counted(rows, x[0])
    inner = product(inner, _turned(place, n, sign, x[0]))
    return _transformed(tuple(part.mT for part in inner), sign)


def _in_order(x: Z) -> Z:
    return tuple(part.mT.flatten(-2) for part in x)


def _of_real(x: Tensor, count: int, sign: int) -> Z:
    """The first elements of the transform of real numbers, of which half is computed: that of n - k
    is the conjugate of that of k.
    """
    n = x.shape[-1]
    a = _factor(n)
    if a == n and n <= LARGEST_PRIME:
        return _multiplied((x, None), _matrix(n, sign, x, count), torch.matmul)
    if a == n:
        found = _transformed((x, None), sign)
    else:
        real, imag = _stages((x, None), a, a // 2 + 1, sign)
        mirrored = slice(1, (a + 1) // 2)
        real = torch.cat([real, real[..., mirrored, :].flip(-1, -2)], -2)
        imag = torch.cat([imag, -imag[..., mirrored, :].flip(-1, -2)], -2)
        found = _in_order((real, imag))
    return tuple(part[..., :count] for part in found)


def _to_real(x: Z, n: int, sign: int) -> Tensor:
    """The real numbers whose transform begins with x, n // 2 + 1 elements."""
    count = n // 2 + 1
    if n <= DENSE:
        doubled = torch.full((count, 1), 2.0, dtype=x[0].dtype, device=x[0].device)
        numbers = _counted(count, x[0])[:, None]
        single = (numbers == 0) | (2 * numbers == n)
        c, d = _turned(numbers * _counted(n, x[0]), n, sign, x[0])
        c, d = (torch.where(single, 1.0, doubled) * part for part in (c, d))
        # the imaginary parts of its first and middle element do not count
        d = torch.where(single, 0.0, d)
        return torch.matmul(x[0], c) - torch.matmul(x[1], d)
    ends = [0, n // 2] if n % 2 == 0 else [0]
    kept = torch.ones(count, dtype=x[0].dtype, device=x[0].device)
    place = _counted(count, x[0])
    for end in ends:
        kept = torch.where(place == end, 0.0, kept)
    real, imag = x[0], x[1] * kept
    mirrored = slice(1, (n + 1) // 2)
    real = torch.cat([real, real[..., mirrored].flip(-1)], -1)
    imag = torch.cat([imag, -imag[..., mirrored].flip(-1)], -1)
    return _transformed((real, imag), sign)[0]


def _chirped(x: Pair, sign: int) -> Z:
    """A transform as a convolution: jk = (j^2 + k^2 - (k - j)^2) / 2."""
    n = x[0].shape[-1]
    size = 1 << (2 * n - 2).bit_length()
    places = _counted(n, x[0])
    chirp = _turned(places * places, 2 * n, sign, x[0])
    given = _multiplied(x, chirp, torch.mul)
    given = tuple(torch.nn.functional.pad(part, (0, size - n)) for part in given)
    around = _counted(size, x[0])
    around = torch.minimum(around, size - around)
    inside = around < n
    inverse = _turned(around * around, 2 * n, -sign, x[0])
    inverse = tuple(torch.where(inside, part, 0.0) for part in inverse)
    spectrum = product(_transformed(given, -1), _transformed(inverse, -1))
    found = tuple(part[..., :n] / size for part in _transformed(spectrum, 1))
    return product(found, chirp)


def _factor(n: int) -> int:
    """The first of the factors that an axis is transformed by: n where it is small or prime."""
    if n <= DENSE:
        return n
    stages = math.ceil(math.log(n) / math.log(DENSE))
    wanted = n ** (1 / stages)
    divisors = [d for d in range(2, DENSE + 1) if n % d == 0]
    return min(divisors, key=lambda d: abs(math.log(d / wanted)), default=n)


# ---- Axes of a tensor.


def _along(axis: int, transform: Callable[..., Any], x: Pair, *options: Any) -> Any:
    """A transform along an axis, moved to be the last one and back."""
    size = x[0].shape[axis]
    if not isinstance(size, int):
        raise FrontendError(
            "a Fourier transform along an axis of symbolic size: give that size as a number"
        )
    moved = tuple(None if part is None else part.movedim(axis, -1) for part in x)
    found = transform(moved, *options)
    if isinstance(found, torch.Tensor):
        return found.movedim(-1, axis)
    return tuple(part.movedim(-1, axis) for part in found)


def _factor_of(norm: int, sizes: Sequence[int]) -> float:
    """What a transform is multiplied by: norm is 0 for 1, 1 for 1 / sqrt(n), 2 for 1 / n."""
    return (1.0, math.prod(sizes) ** -0.5, 1.0 / math.prod(sizes))[norm]


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


def _c2c(x: Tensor, dim: Sequence[int], normalization: int, forward: bool) -> Tensor:
    sizes = [x.shape[axis] for axis in dim]
    found = parts(x)
    for axis in reversed(dim):
        found = _along(axis, _transformed, found, -1 if forward else 1)
    factor = _factor_of(normalization, sizes)
    return joined(*(_scaled(part, factor) for part in found))


def _r2c(x: Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> Tensor:
    sizes = [x.shape[axis] for axis in dim]
    *others, last = dim
    count = sizes[-1] // 2 + 1 if onesided else sizes[-1]
    found = _along(last, lambda pair: _of_real(pair[0], count, -1), (x, None))
    for axis in reversed(others):
        found = _along(axis, _transformed, found, -1)
    factor = _factor_of(normalization, sizes)
    return joined(*(_scaled(part, factor) for part in found))


def _c2r(x: Tensor, dim: Sequence[int], normalization: int, last_dim_size: int) -> Tensor:
    *others, last = dim
    sizes = [*(x.shape[axis] for axis in others), last_dim_size]
    found = parts(x.narrow(last, 0, last_dim_size // 2 + 1))
    for axis in reversed(others):
        found = _along(axis, _transformed, found, 1)
    real = _along(last, _to_real, found, last_dim_size, 1)
    return _scaled(real, _factor_of(normalization, sizes))


# ---- Transforms of real numbers, which PyTorch makes complex ones first.

_FORWARD = {None: 0, "backward": 0, "ortho": 1, "forward": 2}
_INVERSE = {None: 2, "backward": 2, "ortho": 1, "forward": 0}


def _real_fft(inverse: bool, axes: Sequence[int] | None) -> Callable[..., Any]:
    """`fft`, `fft2` or `fftn` of real numbers: all of `_fft_r2c`."""

    def rule(x: Tensor, s: Any = None, dim: Any = axes, norm: str | None = None) -> Any:
        if x.is_complex() or norm not in _FORWARD:
            return NotImplemented
        sizes = None if s is None else ([s] if isinstance(s, int | torch.SymInt) else list(s))
        if dim is None:
            dim = range(-len(sizes), 0) if sizes is not None else range(x.ndim)
        dim = [axis % x.ndim for axis in ([dim] if isinstance(dim, int) else dim)]
        if not dim:
            return NotImplemented
        x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
        for axis, size in zip(dim, sizes or (), strict=False):
            x = x if size == -1 else _resized(x, axis, size)
        found = _r2c(x, dim, (_INVERSE if inverse else _FORWARD)[norm], False)
        return found.conj() if inverse else found

    return rule


def _resized(x: Tensor, axis: int, size: int) -> Tensor:
    """Its first elements along an axis, or zeros behind them."""
    if size <= x.shape[axis]:
        return x.narrow(axis, 0, size)
    behind = [0, 0] * (x.ndim - axis - 1) + [0, size - x.shape[axis]]
    return torch.nn.functional.pad(x, behind)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    _aten._fft_c2c.default: _c2c,
    _aten._fft_c2r.default: _c2r,
    _aten._fft_r2c.default: _r2c,
    _aten.fft_fft.default: _real_fft(False, -1),
    _aten.fft_fft2.default: _real_fft(False, (-2, -1)),
    _aten.fft_fftn.default: _real_fft(False, None),
    _aten.fft_ifft.default: _real_fft(True, -1),
    _aten.fft_ifft2.default: _real_fft(True, (-2, -1)),
    _aten.fft_ifftn.default: _real_fft(True, None),
}
