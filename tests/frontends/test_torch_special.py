"""Special functions: those of float64 beside SciPy's, and some of each kind compiled."""

import numpy as np
import pytest
import torch
from scipy import special

from tests.support.frontend_tools import check
from tvm_fusion.frontends.torch.special.one_variable import SPECIAL

_aten = torch.ops.aten
REFERENCES = {
    "digamma": special.digamma,
    "lgamma": special.gammaln,
    "special_airy_ai": lambda x: special.airy(x)[0],
    "special_spherical_bessel_j0": lambda x: special.spherical_jn(0, x),
}
LINE = torch.cat([torch.linspace(-30, 30, 1201) + 1e-4, torch.tensor([0.0, 8.0, -8.0, 2.0, 0.5])])
SHARES = torch.linspace(0, 1, 1001)
TINY = torch.logspace(-30, 4, 300)


def arguments(name: str) -> torch.Tensor:
    """Where a function is looked at."""
    if name == "erfinv":
        return torch.cat([2 * SHARES - 1, 1 - TINY]).double()
    if name == "special_ndtri":
        return torch.cat([SHARES, TINY]).double()
    return torch.cat([LINE, TINY, -TINY, torch.tensor([float("nan")])]).double()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("operator", [op for op in SPECIAL if op is not _aten.polygamma.default])
def test_functions_have_the_values_of_others_implementations(operator):
    name = operator.__name__.removesuffix(".default")
    x = arguments(name)
    own = SPECIAL[operator](x).numpy()
    name = name.removeprefix("special_").replace("modified_bessel_", "").replace("bessel_", "")
    scaled = name.startswith("scaled_")
    name = name.removeprefix("scaled_") + ("e" if scaled else "")
    reference = REFERENCES.get(operator.__name__.removesuffix(".default"))
    wanted = (reference or getattr(special, name))(x.numpy())
    np.testing.assert_allclose(own, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("n", range(5))
def test_derivatives_of_digamma(n):
    x = torch.cat([torch.linspace(0.01, 30, 301), torch.linspace(-7.9, -0.05, 79)]).double()
    own = SPECIAL[_aten.polygamma.default](n, x)
    torch.testing.assert_close(own, torch.polygamma(n, x), rtol=1e-8, atol=0)


def test_functions_of_all_types_are_compiled():
    def function(x, half, i):
        return (
            torch.lgamma(x), torch.erfc(half), torch.special.bessel_j1(i), torch.erfinv(x - 1.5),
            torch.polygamma(2, half),
        )  # fmt: skip

    x = torch.rand(5) + 1
    check(function, x, x.bfloat16(), torch.arange(5))
