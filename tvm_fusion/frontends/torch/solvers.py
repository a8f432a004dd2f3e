"""What is computed from factorizations of matrices (`linalg`): solutions, determinants,
inverses, exponentials.

    det(A)       ->  LU = lu_factor(A);  the product of the diagonal, by the sign of the pivots
    pinv(A)      ->  U, S, Vh = svd(A);  Vh^T (U / S)^T of the singular values that count

What PyTorch checks of values, and raises where a matrix is singular, is not checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .composites import known
from .eigenvalues import eig

_aten = torch.ops.aten
Tensor = torch.Tensor


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(-2, -1)


def _expanded(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices of one batch."""
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])


def _eye(like: Tensor) -> Tensor:
    size = like.shape[-1]
    return torch.eye(size, dtype=like.dtype, device=like.device).expand(like.shape)


def _solve_triangular(
    a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Any:
    """Batches that have to be broadcast are expanded."""
    if a.shape[:-2] == b.shape[:-2]:
        return NotImplemented
    a, b = _expanded(a, b)
    options = {"upper": upper, "left": left, "unitriangular": unitriangular}
    return _aten.linalg_solve_triangular(a, b, **options)


def _triangular_solve(
    b: Tensor, a: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Tensor, Tensor]:
    factor = _transposed(a) if transpose else a
    options = {"upper": upper != transpose, "unitriangular": unitriangular}
    solution = _aten.linalg_solve_triangular(factor, b, **options)
    return solution, a.expand(*solution.shape[:-2], *a.shape[-2:]).clone()


def _lu_unpack(
    lu: Tensor, pivots: Tensor, unpack_data: bool = True, unpack_pivots: bool = True
) -> Any:
    """The permutation is a converter's, the triangles are cut out."""
    if not unpack_data:
        return NotImplemented if unpack_pivots else (lu.new_empty(0),) * 3
    rows, columns = lu.shape[-2:]
    least = min(rows, columns)
    empty = lu.new_empty(0)
    p = _aten.lu_unpack(lu, pivots, False, True)[0] if unpack_pivots else empty
    lower, upper = lu[..., :least].tril(-1), lu[..., :least, :].triu()
    ones = torch.eye(rows, least, dtype=lu.dtype, device=lu.device)
    return p, lower + ones, upper


def _lu(a: Tensor, *, pivot: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    lu, pivots, _ = _aten.linalg_lu_factor_ex(a, pivot=pivot)
    p, lower, upper = _aten.lu_unpack(lu, pivots)
    return (p if pivot else a.new_empty(0)), lower, upper


def _lu_factor(a: Tensor, *, pivot: bool = True) -> tuple[Tensor, Tensor]:
    lu, pivots, _ = _aten.linalg_lu_factor_ex(a, pivot=pivot)
    return lu, pivots


def _lu_solve(
    lu: Tensor, pivots: Tensor, b: Tensor, *, left: bool = True, adjoint: bool = False
) -> Tensor:
    if not left:
        turned = _aten.linalg_lu_solve(lu, pivots, _transposed(b), adjoint=not adjoint)
        return _transposed(turned)
    p = _aten.lu_unpack(lu, pivots, False, True)[0]
    lu, b = _expanded(lu, b)
    solve = _aten.linalg_solve_triangular
    if adjoint:
        lu = _transposed(lu)
        b = solve(lu, b, upper=False)
        return p @ solve(lu, b, upper=True, unitriangular=True)
    b = solve(lu, _transposed(p) @ b, upper=False, unitriangular=True)
    return solve(lu, b, upper=True)


def _old_lu_solve(b: Tensor, lu: Tensor, pivots: Tensor) -> Tensor:
    return _aten.linalg_lu_solve(lu, pivots, b)


def _solve_ex(
    a: Tensor, b: Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lu, pivots, info = _aten.linalg_lu_factor_ex(a)
    is_vector = b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1])
    b = b.unsqueeze(-1) if is_vector else b
    x = _aten.linalg_lu_solve(lu, pivots, b, left=left)
    return (x.squeeze(-1) if is_vector else x), lu, pivots, info


def _solve(a: Tensor, b: Tensor, *, left: bool = True) -> Tensor:
    return _aten._linalg_solve_ex(a, b, left=left)[0]


def _inverse_ex(a: Tensor, *, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    x, _, _, info = _aten._linalg_solve_ex(a, _eye(a))
    return x, info


def _inverse(a: Tensor) -> Tensor:
    return _aten.linalg_inv_ex(a)[0]


def _tensor_inverse(a: Tensor, ind: int = 2) -> Tensor:
    rows, columns = a.shape[:ind], a.shape[ind:]
    inverse = _aten.linalg_inv_ex(a.reshape(math.prod(rows), math.prod(columns)))[0]
    return inverse.reshape(*columns, *rows)


def _ldl_factor(a: Tensor, *, hermitian: bool = False) -> tuple[Tensor, Tensor]:
    """Without the check, which would need a token."""
    return _aten.linalg_ldl_factor_ex(a, hermitian=hermitian)[:2]


def _ldl_solve(ld: Tensor, pivots: Tensor, b: Tensor, *, hermitian: bool = False) -> Any:
    if ld.shape[:-2] == b.shape[:-2]:
        return NotImplemented
    ld, b = _expanded(ld, b)
    return _aten.linalg_ldl_solve(ld, pivots.expand(ld.shape[:-1]), b, hermitian=hermitian)


def _determinant(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    lu, pivots, _ = _aten.linalg_lu_factor_ex(a)
    return _sign_of(pivots, a) * lu.diagonal(0, -2, -1).prod(-1), lu, pivots


def _sign_of(pivots: Tensor, like: Tensor) -> Tensor:
    """The determinant of the permutation."""
    own = torch.arange(1, pivots.shape[-1] + 1, device=pivots.device)
    return torch.where(pivots == own, 1.0, -1.0).to(like.dtype).prod(-1)


def _slogdet(a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lu, pivots, _ = _aten.linalg_lu_factor_ex(a)
    diagonal = lu.diagonal(0, -2, -1)
    sign = _sign_of(pivots, a) * torch.sign(diagonal).prod(-1)
    return sign, torch.log(diagonal.abs()).sum(-1), lu, pivots


def _cholesky(a: Tensor, *, upper: bool = False) -> Tensor:
    return _aten.linalg_cholesky_ex(a, upper=upper)[0]


def _old_cholesky(a: Tensor, upper: bool = False) -> Tensor:
    return _cholesky(a, upper=upper)


def _cholesky_solve(b: Tensor, factor: Tensor, upper: bool = False) -> Tensor:
    lower = _transposed(factor) if upper else factor
    lower, b = _expanded(lower, b)
    solve = _aten.linalg_solve_triangular
    return solve(_transposed(lower), solve(lower, b, upper=False), upper=True)


def _cholesky_inverse(factor: Tensor, upper: bool = False) -> Tensor:
    return _aten.cholesky_solve(_eye(factor), factor, upper)


def _qr(a: Tensor, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    rows, columns = a.shape[-2:]
    least = min(rows, columns)
    reflected, tau = _aten.geqrf(a)
    if mode == "r":
        return a.new_empty(0), reflected[..., :least, :].triu()
    wanted = rows if mode == "complete" else least
    q = _aten.linalg_householder_product(_with_columns(reflected, wanted), tau)
    return q, reflected[..., :wanted, :].triu()


def _with_columns(x: Tensor, count: int) -> Tensor:
    """The first columns of a matrix, with zeros behind them."""
    if count <= x.shape[-1]:
        return x[..., :count]
    return torch.nn.functional.pad(x, (0, count - x.shape[-1]))


def _ormqr(
    a: Tensor, tau: Tensor, other: Tensor, left: bool = True, transpose: bool = False
) -> Tensor:
    q = _aten.linalg_householder_product(_with_columns(a, a.shape[-2]), tau)
    q = _transposed(q) if transpose else q
    return q @ other if left else other @ q


def _pinv(
    a: Tensor, *, atol: Tensor | None = None, rtol: Tensor | None = None, hermitian: bool = False
) -> Tensor:
    if 0 in a.shape:
        return a.new_zeros(_transposed(a).shape)
    if hermitian:  # the lower triangle is all that counts
        a = a.tril() + _transposed(a.tril(-1))
    u, s, vh = _aten._linalg_svd(a, False)
    if rtol is None:
        least = max(a.shape[-2:]) * torch.finfo(a.dtype).eps
        rtol = torch.full((), least, dtype=s.dtype, device=s.device)
        rtol = rtol if atol is None else torch.where(atol > 0, 0.0, least)
    bound = rtol.unsqueeze(-1) * s.amax(-1, keepdim=True)
    bound = bound if atol is None else torch.maximum(atol.unsqueeze(-1), bound)
    inverse = torch.where(s > bound, 1 / s, 0.0)
    return _transposed(vh) @ (inverse.unsqueeze(-1) * _transposed(u))


def _polar(a: Tensor) -> tuple[Tensor, Tensor]:
    u, s, vh = _aten._linalg_svd(a, False)
    return u @ vh, _transposed(vh) @ (s.unsqueeze(-1) * vh)


def _matrix_sqrth(a: Tensor) -> Tensor:
    values, vectors = _aten._linalg_eigh(a)
    return (vectors * torch.sqrt(values).unsqueeze(-2)) @ _transposed(vectors)


def least_squares(
    a: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The least solution by singular values. Of a matrix that lacks columns of its rank, residuals
    are NaN, of which eager execution gives none.
    """
    empty, rows, columns = a.new_empty(0), *a.shape[-2:]
    is_vector = b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1])
    right = b.unsqueeze(-1) if is_vector else b
    u, s, vh = _aten._linalg_svd(a, False)
    if rcond is None:
        rcond = max(rows, columns) * torch.finfo(a.dtype).eps
    counts = s > rcond * s.amax(-1, keepdim=True)
    inverse = torch.where(counts, 1 / s, 0.0).unsqueeze(-1)
    solution = _transposed(vh) @ (inverse * (_transposed(u) @ right))
    rank = counts.sum(-1)
    residuals = empty
    if rows > columns and driver not in (None, "gelsy"):
        residuals = ((a @ solution - right) ** 2).sum(-2)
        residuals = torch.where((rank == columns).unsqueeze(-1), residuals, math.nan)
    rank = rank if driver != "gels" else torch.empty(0, dtype=torch.int64, device=a.device)
    values = s if driver in ("gelsd", "gelss") else empty
    return solution.squeeze(-1) if is_vector else solution, residuals, rank, values


def _matrix_exp(a: Tensor) -> Tensor:
    """Of a matrix halved until it is small by Taylor, squared as often."""
    wide = a.to(torch.complex128 if a.is_complex() else torch.float64)
    norm = wide.abs().sum(-2).amax(-1)
    halvings = torch.ceil(torch.log2(norm.clamp(min=0.25)) + 2).clamp(0, _HALVINGS)
    small = wide * torch.exp2(-halvings)[..., None, None]
    term = result = _eye(small)
    for k in range(1, 13):
        term = term @ small / k
        result = result + term
    for step in range(_HALVINGS):
        squared = result @ result
        result = torch.where((halvings > step)[..., None, None], squared, result)
    return result.to(a.dtype)


_HALVINGS = 12  # of norms up to 1024, beyond which float32 overflows


SOLVERS: dict[Any, Callable[..., Any]] = {
    _aten._linalg_det.default: _determinant,
    _aten._linalg_slogdet.default: _slogdet,
    _aten._linalg_solve_ex.default: _solve_ex,
    **known(_aten, "cholesky", _old_cholesky),
    _aten.cholesky_inverse.default: _cholesky_inverse,
    _aten.cholesky_solve.default: _cholesky_solve,
    _aten.linalg_cholesky.default: _cholesky,
    _aten.linalg_eig.default: eig,
    _aten.linalg_inv.default: _inverse,
    _aten.linalg_inv_ex.default: _inverse_ex,
    _aten.linalg_ldl_factor.default: _ldl_factor,
    _aten.linalg_ldl_solve.default: _ldl_solve,
    _aten.linalg_lu.default: _lu,
    _aten.linalg_lu_factor.default: _lu_factor,
    _aten.linalg_lu_solve.default: _lu_solve,
    **known(_aten, "linalg_matrix_sqrth", _matrix_sqrth),
    **known(_aten, "linalg_polar", _polar),
    _aten.linalg_matrix_exp.default: _matrix_exp,
    _aten.linalg_pinv.atol_rtol_tensor: _pinv,
    _aten.linalg_qr.default: _qr,
    _aten.linalg_solve.default: _solve,
    _aten.linalg_solve_triangular.default: _solve_triangular,
    _aten.linalg_tensorinv.default: _tensor_inverse,
    _aten.lu_solve.default: _old_lu_solve,
    _aten.lu_unpack.default: _lu_unpack,
    _aten.ormqr.default: _ormqr,
    _aten.triangular_solve.default: _triangular_solve,
}
