"""Solutions, inverses and values of complex matrices, beside PyTorch."""

import pytest
import torch

from ..support.frontend_tools import check

torch.manual_seed(0)
A, B = torch.randn(2, 4, 4, dtype=torch.complex64), torch.randn(2, 4, 3, dtype=torch.complex64)
H = A @ A.mH + torch.eye(4)
linalg = torch.linalg


def test_systems_and_inverses():
    def function(a, b, real):
        turned = b.mT.contiguous()
        return (
            linalg.solve(a, b),
            linalg.solve(a, turned, left=False),
            linalg.solve(a[0], b[0, :, 0]),
            linalg.inv(a),
            linalg.pinv(b),
            linalg.solve_triangular(a + 4 * real, b, upper=True),
            linalg.solve_triangular(a, b, upper=False, unitriangular=True),
            linalg.solve_triangular(a + 4 * real, turned, upper=False, left=False),
            linalg.tensorinv(a.reshape(2, 2, 2, 2, 2)[0]),
        )

    check(function, A, B, torch.eye(4))


# Always: systems, above; factors of real ones (`test_torch_linalg`).
@pytest.mark.nightly
def test_hermitian_matrices():
    def function(h, b, a):
        lower = linalg.cholesky(h)
        upper = linalg.cholesky(h, upper=True)
        return (
            lower,
            upper,
            torch.cholesky_solve(b, lower),
            torch.cholesky_solve(b, upper, upper=True),
            torch.cholesky_inverse(lower),
            linalg.eigvalsh(h),
            linalg.eigvalsh(a, UPLO="U"),  # one triangle is all that counts
            linalg.pinv(h, hermitian=True),
        )

    check(function, H, B, A)


def test_singular_values():
    def function(a, b):
        return (
            linalg.svdvals(b),
            linalg.cond(a),
            linalg.matrix_rank(b),
            linalg.matrix_norm(b, "nuc"),
        )

    check(function, A, B)
