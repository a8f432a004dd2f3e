"""Special functions of two variables beside SciPy and, at their ends and poles, PyTorch."""

import math

import numpy as np
import torch
from scipy import special

from tests.support.frontend_tools import Function, check
from tests.support.models import run_unfused
from tvm_fusion.frontends import load

ENDS = torch.tensor([0.0, 1.0, -1.0, 2.5, 0.01, -3.5, math.inf, math.nan]).double()


def functions(a, x):
    return torch.igamma(a, x), torch.igammac(a, x), torch.special.zeta(a, x)


def test_shares_of_gamma_functions_and_zeta_have_the_values_of_scipy():
    rng = np.random.default_rng(0)
    a, x = rng.uniform(0.01, 30, 2000), rng.uniform(0, 40, 2000)
    a[:100] = rng.uniform(1, 5000, 100)
    x[:100] = a[:100] * rng.uniform(0.8, 1.2, 100)
    mod = load(Function(functions), (torch.from_numpy(a), torch.from_numpy(x)))
    below, above, zeta = run_unfused(mod, a, x)
    np.testing.assert_allclose(below, special.gammainc(a, x), rtol=1e-10)
    np.testing.assert_allclose(above, special.gammaincc(a, x), rtol=1e-10, atol=1e-280)
    usual = a < 30
    np.testing.assert_allclose(zeta[usual], special.zeta(a, x)[usual], rtol=1e-10)


def test_ends_and_poles_are_those_of_pytorch():
    a, x = (y.reshape(-1) for y in torch.meshgrid(ENDS, ENDS, indexing="ij"))
    results = run_unfused(load(Function(functions), (a, x)), a.numpy(), x.numpy())
    for own, wanted in zip(results, functions(a, x), strict=True):
        own = torch.from_numpy(own)
        same = torch.isclose(own, wanted, equal_nan=True) | ((a == math.inf) & (x > 1))
        assert same.all(), [(a[~same], x[~same], own[~same], wanted[~same])]


def test_numbers_and_halves_are_taken():
    x = torch.rand(3, 1) + 1
    check(lambda x, y: (torch.special.zeta(x, 2), torch.igamma(x.bfloat16(), y)), x, x.T.bfloat16())
