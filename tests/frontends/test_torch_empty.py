"""Tensors without elements: what PyTorch makes of them."""

import pytest

import tvm_fusion

from ..support.frontend_tools import Function, check

torch = pytest.importorskip("torch")


def test_what_is_made_of_no_elements_alone_is_a_constant():
    def reduced(x):
        ends = (x.sum(1), x.mean(1), x.prod(1), x.logsumexp(1), x.var(1))
        return (*ends, x.isnan().any(1), x.isnan().all(1), x.sum())

    check(reduced, torch.randn(3, 0))


def test_products_over_no_terms_are_zeros():
    def products(b, x, y):
        return torch.addmm(b, x, y), x @ y, torch.nn.functional.pad(x, (1, 1))

    inputs = torch.randn(10), torch.randn(5, 0), torch.randn(0, 10)
    compiled = tvm_fusion.compile((Function(products), inputs), "llvm", verify=False)
    for found, wanted in zip(compiled(*inputs), products(*inputs), strict=True):
        assert found.equal(wanted)
