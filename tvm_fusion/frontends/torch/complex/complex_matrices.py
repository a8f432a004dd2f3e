"""Solutions, inverses and values of complex matrices, by those of real ones of twice the size.

    E(A) = [[re A, -im A], [im A, re A]]        E(A B) = E(A) E(B),  E(A^H) = E(A)^T

    solve(A, B)   ->  E(A) X = [re B; im B],  the halves of X are its parts
    svdvals(A)    ->  each twice among those of E(A)
    cholesky(A)   ->  that of E(A) with rows and columns of a number side by side, which has
                      triangles for triangles

Does not handle: vectors of eigenvalues and of singular values, which E has in pairs that are turned
among each other, and factors that are told by pivots or reflections (LU, QR, determinants).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..composites import known
from .complex_functions import Tensor, Z
from .complex_numbers import joined, operands, parts

_aten = torch.ops.aten


def _embedded(z: Z) -> Tensor:
    real, imag = z
    return torch.cat([torch.cat([real, -imag], -1), torch.cat([imag, real], -1)], -2)


def _of_column(x: Tensor) -> Tensor:
    """The matrix whose parts stand one above the other."""
    return joined(*x.chunk(2, -2))


def _first_column(x: Tensor) -> Tensor:
    """The matrix that E is of."""
    return _of_column(x[..., : x.shape[-1] // 2])


def _solved(a: Z, b: Z) -> Tensor:
    return _of_column(_aten.linalg_solve(_embedded(a), torch.cat(b, -2)))


def _turned(z: Z, conjugates: bool = False) -> Z:
    real, imag = (x.transpose(-2, -1) for x in z)
    return real, -imag if conjugates else imag


def _solve(a: Tensor, b: Tensor, *, left: bool = True) -> Tensor:
    is_vector = b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1])
    first, second = operands(a, b.unsqueeze(-1) if is_vector else b)
    if left:
        x = _solved(first, second)
    else:
        x = _solved(_turned(first), _turned(second)).transpose(-2, -1)
    return x.squeeze(-1) if is_vector else x


def _info(a: Tensor) -> Tensor:
    """That nothing failed; values are not checked."""
    return torch.zeros(a.shape[:-2], dtype=torch.int32, device=a.device)


def _solve_ex(
    a: Tensor, b: Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor]:
    return _solve(a, b, left=left), _info(a)


def _inverse(a: Tensor) -> Tensor:
    return _first_column(_aten.linalg_inv(_embedded(parts(a))))


def _inverse_ex(a: Tensor, *, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    return _inverse(a), _info(a)


def _tensor_inverse(a: Tensor, ind: int = 2) -> Tensor:
    rows, columns = a.shape[:ind], a.shape[ind:]
    inverse = _inverse(a.reshape(math.prod(rows), math.prod(columns)))
    return inverse.reshape(*columns, *rows)


def _triangle(z: Z, upper: bool, unit: bool = False) -> Z:
    real, imag = (torch.triu(x, int(unit)) if upper else torch.tril(x, -int(unit)) for x in z)
    if unit:
        real = real + torch.eye(real.shape[-1], dtype=real.dtype, device=real.device)
    return real, imag


def _solve_triangular(
    a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Tensor:
    first, second = operands(a, b)
    first = _triangle(first, upper, unitriangular)
    if left:
        return _solved(first, second)
    return _solved(_turned(first), _turned(second)).transpose(-2, -1)


def _triangular_solve(
    b: Tensor, a: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Tensor, Tensor]:
    first, second = operands(a, b)
    first = _triangle(first, upper, unitriangular)
    solution = _solved(_turned(first) if transpose else first, second)
    return solution, a.expand(*solution.shape[:-2], *a.shape[-2:]).clone()


def _cholesky(a: Tensor, *, upper: bool = False) -> Tensor:
    real, imag = _hermitian(parts(a), not upper)
    size = a.shape[-1]
    pairs = torch.stack([torch.stack([real, -imag], -1), torch.stack([imag, real], -1)], -2)
    side_by_side = pairs.transpose(-3, -2).reshape(*a.shape[:-2], 2 * size, 2 * size)
    lower = _aten.linalg_cholesky(side_by_side)
    z = lower[..., ::2, ::2], lower[..., 1::2, ::2]
    return joined(*(_turned(z, conjugates=True) if upper else z))


def _old_cholesky(a: Tensor, upper: bool = False) -> Tensor:
    return _cholesky(a, upper=upper)


def _cholesky_ex(
    a: Tensor, *, upper: bool = False, check_errors: bool = False
) -> tuple[Tensor, Tensor]:
    return _cholesky(a, upper=upper), _info(a)


def _cholesky_solve(b: Tensor, factor: Tensor, upper: bool = False) -> Tensor:
    first, second = operands(factor, b)
    first = _triangle(first, upper)
    lower = _turned(first, conjugates=True) if upper else first
    return _solved(_turned(lower, conjugates=True), parts(_solved(lower, second)))


def _cholesky_inverse(factor: Tensor, upper: bool = False) -> Tensor:
    size = factor.shape[-1]
    eye = torch.eye(size, dtype=parts(factor)[0].dtype, device=factor.device)
    return _cholesky_solve(eye.expand(*factor.shape), factor, upper)


def _hermitian(z: Z, lower: bool = True) -> Z:
    """A matrix of which one triangle is all that counts."""
    real, imag = z if lower else _turned(z, conjugates=True)
    real, imag = (torch.tril(real), torch.tril(real, -1)), torch.tril(imag, -1)
    return real[0] + real[1].transpose(-2, -1), imag - imag.transpose(-2, -1)


def _eigenvalues(a: Tensor, UPLO: str = "L") -> Tensor:
    z = _hermitian(parts(a), UPLO.upper() == "L")
    return _aten.linalg_eigvalsh(_embedded(z))[..., ::2]


def _singular_values(a: Tensor, *, driver: str | None = None) -> Tensor:
    return _aten.linalg_svdvals(_embedded(parts(a)))[..., ::2]


def _pinv(
    a: Tensor, *, atol: Tensor | None = None, rtol: Tensor | None = None, hermitian: bool = False
) -> Tensor:
    z = _hermitian(parts(a)) if hermitian else parts(a)
    if 0 in a.shape:
        return a.new_zeros(a.transpose(-2, -1).shape)
    embedded = _embedded(z)
    if atol is None and rtol is None:  # the embedding has twice the size
        least = torch.finfo(embedded.dtype).eps * max(a.shape[-2:])
        rtol = torch.full((), least, dtype=embedded.dtype, device=a.device)
    return _first_column(_aten.linalg_pinv.atol_rtol_tensor(embedded, atol=atol, rtol=rtol))


def _polar(a: Tensor) -> tuple[Tensor, ...]:
    return tuple(map(_first_column, _aten.linalg_polar(_embedded(parts(a)))))


def _matrix_sqrth(a: Tensor) -> Tensor:
    return _first_column(_aten.linalg_matrix_sqrth(_embedded(_hermitian(parts(a)))))


MATRICES: dict[Any, Callable[..., Any]] = {
    **known(_aten, "cholesky", _old_cholesky),
    _aten.cholesky_inverse.default: _cholesky_inverse,
    _aten.cholesky_solve.default: _cholesky_solve,
    _aten.linalg_cholesky.default: _cholesky,
    _aten.linalg_cholesky_ex.default: _cholesky_ex,
    _aten.linalg_eigvalsh.default: _eigenvalues,
    _aten.linalg_inv.default: _inverse,
    _aten.linalg_inv_ex.default: _inverse_ex,
    **known(_aten, "linalg_matrix_sqrth", _matrix_sqrth),
    _aten.linalg_pinv.atol_rtol_tensor: _pinv,
    **known(_aten, "linalg_polar", _polar),
    _aten.linalg_solve.default: _solve,
    _aten.linalg_solve_ex.default: _solve_ex,
    _aten.linalg_solve_triangular.default: _solve_triangular,
    _aten.linalg_svdvals.default: _singular_values,
    _aten.linalg_tensorinv.default: _tensor_inverse,
    _aten.triangular_solve.default: _triangular_solve,
}
