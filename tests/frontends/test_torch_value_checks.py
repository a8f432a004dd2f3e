"""Functions that read values while they run, traced without that, beside PyTorch."""

import pytest
import torch
from torch.nn import functional as F

from tests.support.frontend_tools import Function, check
from tvm_fusion.errors import FrontendError
from tvm_fusion.frontends import load
from tvm_fusion.frontends.torch.value_checks import FUNCTIONS

X = torch.randn(5, 7)


def test_covariances_losses_and_slices_at_a_tensor():
    def function(x, counts, weights, variance, start):
        return (
            torch.cov(x),
            x.cov(correction=0, fweights=counts, aweights=weights),
            torch.cov(x[0], aweights=weights),
            x.corrcoef(),
            torch.corrcoef(x[0]),
            F.gaussian_nll_loss(x, x + 1, variance, full=True),
            F.gaussian_nll_loss(x, x + 1, variance[:, 0], reduction="none"),
            torch.narrow(x, 1, start, 2),
            x.narrow(0, 1, 2),
        )

    counts, weights = torch.randint(1, 9, (7,)), torch.rand(7)
    check(function, X, counts, weights, torch.rand(5, 7), torch.tensor(-3))


@pytest.mark.parametrize("q", [0.3, torch.tensor(1.0), torch.tensor([0.0, 0.31, 0.77])])
def test_quantiles_between_neighbours(q):
    nan = torch.where(X > 0.9, torch.nan, X)
    nan[2] = torch.nan
    for own, name in ((False, "quantile"), (True, "nanquantile")):
        expected, found = getattr(torch, name), FUNCTIONS[getattr(torch, name)]
        for x in (X, nan) if own else (X, X + nan[:, :1] * 0):
            for dim in (None, 0, -1):
                for kind in ("linear", "midpoint", "lower", "higher", "nearest"):
                    options = {"dim": dim, "keepdim": dim == 0, "interpolation": kind}
                    torch.testing.assert_close(
                        found(x, q, **options), expected(x, q, **options), equal_nan=True
                    )


def test_combinations_are_those_of_places():
    for options in ({}, {"r": 3}, {"r": 2, "with_replacement": True}, {"r": 9}):
        found = FUNCTIONS[torch.combinations](X[0], **options)
        assert torch.equal(found, torch.combinations(X[0], **options))


def test_what_reads_values_in_older_versions_is_traced():
    def function(x):
        return torch.quantile(x, 0.3), x.nanquantile(0.4, dim=1), torch.combinations(x[0])

    check(function, X)


def test_least_squares():
    tall, wide, right = torch.randn(2, 6, 3), torch.randn(3, 6), torch.randn(2, 6, 2)
    deficient = torch.cat([X[:, :2], X[:, :1]], 1)

    def function(tall, wide, right, deficient):
        return (
            *torch.linalg.lstsq(tall, right, driver="gelsd")[:2],
            torch.linalg.lstsq(tall, right)[2],
            torch.linalg.lstsq(wide, right[0, :3]).solution,
            torch.linalg.lstsq(deficient, right[0, :5]).solution,
        )

    check(function, tall, wide, right, deficient)


def test_the_loss_of_temporal_classification():
    scores = torch.randn(9, 3, 5).log_softmax(-1)
    targets = torch.tensor([[1, 3, 3, 2], [4, 1, 2, 2], [4, 4, 4, 1]])

    def function(scores, targets, inputs, lengths, row):
        return (
            F.ctc_loss(scores, targets, inputs, lengths, reduction="none"),
            F.ctc_loss(scores, targets, (9, 5, 0), (0, 3, 0)),
            F.ctc_loss(scores, row, inputs, lengths, 4, "sum", zero_infinity=True),
            F.ctc_loss(scores[:, 0], row[:3], inputs[0], lengths[0], reduction="none"),
        )

    lengths = torch.tensor([3, 2, 4])  # the last has no path: its loss is infinite
    row = torch.tensor([1, 3, 3, 0, 2, 1, 0, 0, 2])
    check(function, scores, targets, torch.tensor([9, 7, 4]), lengths, row)


def test_what_stops_the_model_itself_is_told():
    def function(x):
        covariance = torch.cov(x)
        return covariance if x.sum() > 0 else x

    with pytest.raises(FrontendError, match=r"stops at .*torch\.cond"):
        load(Function(function), (X,))
