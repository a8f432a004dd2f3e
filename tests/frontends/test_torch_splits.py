"""Splits of a tensor that was written into: one operator, whatever `torch.export` makes of it."""

import pytest
import torch

from tests.support.frontend_tools import check, operators


def doubled_pieces(x):
    y = x.clone()
    y[2] = 0
    return torch.cat([piece * 2 for piece in y.split(2, 0)], 0)


def split_two_ways(x):
    y = x.clone()
    y[0] = 1
    return torch.cat([*y.split(2, 0), *y.split(3, 0), *y.split(2, 0)], 0) + 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("function", "splits"), [(doubled_pieces, 1), (split_two_ways, 2)])
def test_equal_splits_are_one(function, splits):
    mod = check(function, torch.arange(21.0).reshape(7, 3))
    assert operators(mod).count("relax.split") == splits
