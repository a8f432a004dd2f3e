"""Models that refuse random inputs are checked on their example inputs, and the report says so."""

import ml_dtypes
import numpy as np
import torch

import tvm_fusion
from tests.support.frontend_tools import Function
from tvm_fusion.check import compiled as compiled_check
from tvm_fusion.check.example_inputs import example_inputs
from tvm_fusion.check.source import Original
from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.flow.planned import Planned
from tvm_fusion.frontends.torch.model import from_module

X = torch.arange(12.0).reshape(3, 4)


class Share(torch.nn.Module):
    """Rows by a share of their count, which random numbers are none of, and of a counter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x, share):
        self.calls += 1
        return x[(share * 1000).long() - 500] * self.calls


SHARE = torch.tensor([0.5005, 0.5025])


def test_examples_are_taken_where_random_numbers_are_refused(monkeypatch):
    monkeypatch.setattr(compiled_check, "MOST_DRAWS", 8)
    compiled = tvm_fusion.compile(Share(), "llvm", example_inputs=(X, SHARE), verify="groups")
    found = compiled.report.verify
    assert found.passed
    assert found.on_examples
    assert "on the example inputs, as random ones are refused" in str(compiled.report)
    np.testing.assert_array_equal(compiled(X, SHARE), Share()(X, SHARE))


def planned(model: torch.nn.Module, *inputs: torch.Tensor) -> Planned:
    hw = load_profile("llvm")
    mod = from_module(model, inputs, keep_convention=True)
    return Planned.of(mod, hw.to_target(), hw, load_policy(None))


def taken(model: torch.nn.Module, *inputs: torch.Tensor) -> list | None:
    return example_inputs(planned(model, *inputs), Original(model, inputs))


def test_examples_are_as_main_takes_them():
    given = taken(Share(), X, SHARE)
    assert sorted((x.shape, str(x.dtype)) for x in given) == [
        ((), "int64"),
        ((2,), "float32"),
        ((3, 4), "float32"),
    ]
    z = torch.complex(X, X + 1)
    pairs, halves = taken(Function(lambda z, x: (z * 2, x + 1)), z, X.bfloat16())
    np.testing.assert_array_equal(pairs, torch.view_as_real(z))
    assert halves.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(halves.astype("float32"), X)


def test_examples_that_do_not_fit_are_none():
    negative = Function(torch.neg)
    for original in (None, Original(negative, (X[:2],)), Original(negative, (X.int(),))):
        assert example_inputs(planned(negative, X), original) is None
    assert example_inputs(planned(negative, X), Original(negative, (X,))) is not None
