"""Factorizations of matrices, and what is computed with them, beside PyTorch."""

import pytest
import torch

import tvm_fusion
from tests.support.frontend_tools import Function, check

torch.manual_seed(3)
A = torch.randn(2, 5, 5)
POSITIVE = A @ A.mT + torch.eye(5)


def test_triangles_and_what_is_solved_with_them():
    def function(a, positive, b):
        lu, pivots = torch.linalg.lu_factor(a)
        return (
            lu, pivots, *torch.linalg.lu(a[:, :, :3]), *torch.linalg.lu(a[:, :3]),
            torch.linalg.solve(a, b), torch.linalg.solve(a, b.mT, left=False),
            torch.linalg.solve(a[0], b[0, :, 0]),
            torch.linalg.lu_solve(lu, pivots, b, adjoint=True),
            torch.linalg.inv(a), torch.linalg.det(a), *torch.linalg.slogdet(a),
            torch.linalg.cholesky(positive), torch.linalg.cholesky(positive, upper=True),
            torch.cholesky_inverse(torch.linalg.cholesky(positive[0])),
            torch.linalg.solve_triangular(a.triu(), b, upper=True),
            torch.linalg.solve_triangular(a.tril(), b.mT, upper=False, left=False),
            torch.linalg.matrix_exp(a),
        )  # fmt: skip

    check(function, A, POSITIVE, torch.randn(2, 5, 4))


def test_reflections_and_rotations():
    def function(a, positive):
        values, vectors = torch.linalg.eigh(positive)
        u, s, vh = torch.linalg.svd(a[:, :3], full_matrices=False)
        return (
            *torch.linalg.qr(a[:, :, :3]), *torch.linalg.qr(a[:, :3]), *torch.geqrf(a[0]),
            *torch.linalg.qr(a[:, :, :3], mode="complete"), torch.linalg.svdvals(a),
            values, vectors @ torch.diag_embed(values) @ vectors.mT, vectors.abs(),
            u @ torch.diag_embed(s) @ vh, s, vh.abs(), torch.linalg.pinv(a[:, :3]),
            torch.linalg.pinv(a, hermitian=True), torch.linalg.pinv(a[:, :0]),
            torch.linalg.tensorinv(a[0].reshape(5, 1, 5), 1),
        )  # fmt: skip

    check(function, A, POSITIVE)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("size", [1, 7])
def test_factors_of_indefinite_matrices_have_lapacks_pivots(size):
    symmetric = torch.randn(3, size, size, dtype=torch.float64)
    symmetric = symmetric + symmetric.mT
    if size > 1:
        symmetric[0].fill_diagonal_(0)  # blocks of two rows
    symmetric[1] += size * torch.eye(size)

    def function(a, b):
        factors, pivots = torch.linalg.ldl_factor(a)
        solve = torch.linalg.ldl_solve
        return factors, pivots, solve(factors, pivots, b), solve(factors[0], pivots[0], b)

    assert (torch.linalg.ldl_factor(symmetric)[1] < 0).any() == (size > 1)
    check(function, symmetric, torch.randn(3, size, 2, dtype=torch.float64))
    check(torch.linalg.ldl_factor_ex, torch.zeros(size, size))


def test_eigenvalues_of_any_real_matrix():
    """Their order is not determined, nor the signs of the vectors: what both make is."""

    def function(a, defective):
        values, vectors = torch.linalg.eig(a)
        others = torch.linalg.eigvals(defective)
        residual = a.to(vectors.dtype) @ vectors - vectors * values.unsqueeze(-2)
        largest = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
        return (
            residual.abs() + 1, vectors[0].abs().square().sum(-2), largest.imag[0] + 1,
            values.real.sort(-1)[0], values.imag.sort(-1)[0], others.abs(),
            ((values.imag > 0)[..., :-1] == (values.imag < 0)[..., 1:]).sum(-1),
        )  # fmt: skip

    cycle = torch.eye(6).roll(1, 0)  # on which steps without other shifts go in circles
    turn = torch.block_diag(torch.tensor([[0.0, -2.0], [2.0, 0.0]]), torch.randn(4, 4).triu())
    matrices = torch.stack([torch.randn(6, 6), cycle, turn, torch.randn(6, 6).tril()])
    check(function, matrices.double(), torch.ones(5, 5).triu(1))
    check(torch.linalg.eig, torch.zeros(0, 0))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "function",
    [
        lambda a: torch.linalg.eigvals(a).abs().sort()[0],
        lambda a: torch.linalg.ldl_factor_ex(a + a.T)[0],
    ],
)
def test_lapack_is_asked_nothing_of_what_is_no_number(function):
    """The default check compares special values otherwise, and LAPACK may end the process there."""
    a = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    compiled = tvm_fusion.compile(Function(function), "llvm", example_inputs=(a,))
    torch.testing.assert_close(compiled(a), function(a), atol=1e-4, rtol=1e-3)
