"""Scans, recurrences and searches: loops of their own, beside PyTorch."""

import math

import torch

from tests.support.frontend_tools import check


def test_scans_keep_nan_and_the_last_of_equal_ones():
    x = torch.randint(0, 4, (4, 6)).float()
    x[1, 2], x[0, 0], x[2, 1] = math.nan, -math.inf, math.inf

    def function(x, i, number):
        scans = [*torch.cummax(x, 0), *torch.cummin(x, 1), *torch.cummax(i, -1)]
        return (*scans, x.logcumsumexp(1), x.bfloat16().logcumsumexp(0), *torch.cummin(number, 0))

    check(function, x, torch.randint(-2, 2, (3, 5)), torch.tensor(2.0))


def test_polynomials_and_searches():
    degrees = torch.tensor([-1, 0, 1, 2, 5, 9])
    x = torch.tensor([0.1, -0.5, 1, 3, 2, -2.0])

    def function(x, degrees, rows):
        polynomials = [
            getattr(torch.special, f"{name}_polynomial_{kind}")(x, degrees)
            for name, kinds in (
                ("chebyshev", "tuvw"), ("shifted_chebyshev", "tw"), ("laguerre", "l"),
                ("legendre", "p"), ("hermite", ("h", "he")),
            )
            for kind in kinds
        ]  # fmt: skip
        found = [
            torch.searchsorted(rows, x.expand(2, 6)),
            torch.searchsorted(rows[0], x, right=True, out_int32=True),
            torch.isin(degrees, degrees[2:4]),
        ]
        return [*polynomials, torch.special.hermite_polynomial_h(x, 4), *found]

    check(function, x, degrees, torch.tensor([[0.0, 1, 2], [-1, -0.5, 3]]))
