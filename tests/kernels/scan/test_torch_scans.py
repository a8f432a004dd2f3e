"""PyTorch's scans that TVM has no operators for, on a GPU: kernels of scans, beside PyTorch."""

import math

import numpy as np
import pytest
import torch

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.flow.planned import Planned
from tvm_fusion.frontends import load

from ...support.frontend_tools import Function
from ...support.module_on_cpu import EmulatedModule

H200 = load_profile("nvidia_h200")


def planned(function, *inputs):
    return Planned.of(load(Function(function), inputs), H200.to_target(), H200, load_policy(None))


def values_of_halves(x):
    return torch.cummax(torch.sigmoid(x), 1).values * x


def places_of_both(x):
    return (*torch.cummax(x, 1), *torch.cummin(x, 1))


def logarithms(x):
    return torch.logcumsumexp(x * 2, 0).tanh()


def drawn(shape, dtype=torch.float32):
    torch.manual_seed(3)
    return torch.randint(-3, 4, shape).to(dtype)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("function", "x", "launches"),
    [
        (values_of_halves, drawn((5, 60, 3), torch.float16), 1),
        (places_of_both, drawn((4, 90)), 1),
        (lambda x: torch.cummin(x, -1), drawn((4, 30), torch.int64), 1),
        (logarithms, drawn((130, 6)), 1),
        (lambda x: torch.cummax(x, 1), drawn((2, 5000)), None),
        (lambda x: torch.logcumsumexp(x, 1), drawn((1, 4099)) / 4, None),
        (lambda x: torch.cummin(x, 1), drawn((1, 4099), torch.int64), None),
    ],
    ids=[
        "values",
        "places",
        "integers",
        "logarithms",
        "largest in parts",
        "logarithms in parts",
        "integers in parts",
    ],
)
def test_they_are_kernels_of_scans(function, x, launches):
    if x.is_floating_point() and x.dim() == 2 and launches:
        x[1, 2], x[0, 0], x[2, 1], x[3, :4] = math.nan, -math.inf, math.inf, -math.inf
    plan = planned(function, x)
    classes = [group.kernel_class for group in plan.plan.groups]
    assert "scan" in classes
    assert "opaque" not in classes
    assert launches in (None, len(classes))
    written = EmulatedModule.of(plan)
    assert not written.cuts
    expected = function(x.double() if x.is_floating_point() else x)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for got, wanted in zip(written([x.numpy()]), expected, strict=True):
        tolerance = 2e-3 if x.dtype == torch.float16 else 2e-6
        assert got.dtype == (np.int64 if wanted.dtype == torch.int64 else x.numpy().dtype)
        np.testing.assert_allclose(got, wanted.numpy(), rtol=tolerance, atol=tolerance)


def test_the_scan_of_a_number_is_the_number():
    x = torch.tensor(3.5)
    (got,) = EmulatedModule.of(planned(lambda x: torch.cumsum(x, 0) + 1, x))([x.numpy()])
    assert got == 4.5
