"""The first of a sort on a GPU: a kernel that finds the place of the least key, beside PyTorch."""

import math

import numpy as np
import pytest
import torch

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.flow.planned import Planned
from tvm_fusion.frontends import load
from tvm_fusion.transform.lower.first_of_sorts import FirstOfSorts

from ..support.frontend_tools import Function
from ..support.module_on_cpu import EmulatedModule

H200 = load_profile("nvidia_h200")


def least(x):
    values, order = torch.sort(x, dim=1, stable=True)
    return values.narrow(1, 0, 1), order.narrow(1, 0, 1)


def largest(x):
    values, order = torch.sort(x, dim=1, stable=True, descending=True)
    return values[:, 0], order[:, 0]


def odd_numbers(dtype):
    """Ties, both zeros, rows of NaN and infinities."""
    torch.manual_seed(0)
    x = torch.randint(-5, 5, (3, 40, 5)).to(dtype)
    if dtype.is_floating_point:
        x[1, 3:5], x[0, :, 2], x[0, 5] = math.nan, math.nan, -math.inf
        x[2, 0], x[2, 1:] = math.nan, math.inf
        x[0, :, 3] = 0
        x[0, 4, 3] = -0.0
    return x


@pytest.mark.one_in(6)
@pytest.mark.parametrize("function", [least, largest])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int32], ids=str)
def test_it_is_found_without_a_sort(function, dtype):
    x = odd_numbers(dtype)
    mod = load(Function(function), (x,))
    planned = Planned.of(mod, H200.to_target(), H200, load_policy(None))
    assert len(planned.plan.groups) == 1
    found = EmulatedModule.of(planned)([x.numpy()])
    for got, wanted in zip(found, function(x), strict=True):
        np.testing.assert_array_equal(got, wanted.numpy())


def test_the_least_of_a_top_1_is_found_too():
    x = odd_numbers(torch.float32)
    mod = load(Function(lambda x: torch.topk(x, 1, 1, largest=False).values), (x,))
    planned = Planned.of(mod, H200.to_target(), H200, load_policy(None))
    assert len(planned.plan.groups) == 1
    (found,) = EmulatedModule.of(planned)([x.numpy()])
    np.testing.assert_array_equal(found, least(x)[0].numpy())


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.sort(x, dim=1).values[:, 1],
        lambda x: torch.sort(x, dim=1).indices[:, -1],
        lambda x: torch.sort(x, dim=1).indices[0],
        lambda x: torch.topk(x, 2, 1).values,
        lambda x: torch.sort(x.double(), dim=1).values[:, 0],
    ],
    ids=["second", "last", "another axis", "top 2", "64 bits"],
)
def test_other_modules_stay_the_same(function):
    mod = load(Function(function), (torch.randn(3, 7),))
    assert FirstOfSorts()(mod).same_as(mod)
