"""A compiled model is held against PyTorch: another function is found, choices are none."""

import pytest

import tvm_fusion
from tvm_fusion.check import source
from tvm_fusion.errors import VerificationError
from tvm_fusion.frontends.pytorch import CONVERTERS

from ..support.frontend_tools import Function

torch = pytest.importorskip("torch")
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def wrong_tanh(monkeypatch):
    """An import of `tanh` that is another function of the same shape and dtype."""
    from tvm import relax

    def convert(importer, node):
        return importer.emit(relax.op.sigmoid(importer.value_of(node.args[0])))

    monkeypatch.setitem(CONVERTERS, "tanh.default", convert)


def model(function):
    """A function with its example input."""
    return Function(function), (X,)


def test_another_function_is_an_error(wrong_tanh):
    with pytest.raises(VerificationError, match="another function than PyTorch runs: output 0"):
        tvm_fusion.compile(model(lambda x: torch.tanh(x) + 1), "llvm")


def test_another_function_is_told_where_only_that_is_wished_for(wrong_tanh):
    compiled = tvm_fusion.compile(model(torch.tanh), "llvm", verify="report")
    assert not compiled.report.verify.passed
    assert "another function" in str(compiled.report)


def test_the_error_beside_pytorch_is_in_the_report():
    compiled = tvm_fusion.compile(model(lambda x: torch.softmax(x @ x.T, -1)), "llvm")
    assert 0 <= compiled.report.verify.source_error < 1e-5
    assert "beside PyTorch" in str(compiled.report)


def test_what_agrees_in_float64_is_no_other_function(monkeypatch):
    """Where an output differs by more than roundings are taken to make, float64 decides."""
    monkeypatch.setattr(source, "ROUNDINGS", {"float32": 0.0})
    compiled = tvm_fusion.compile(model(lambda x: torch.softmax(x @ x.T, -1)), "llvm")
    assert compiled.report.verify.source_error > 0


def test_float64_decides_against_another_function_too(monkeypatch, wrong_tanh):
    monkeypatch.setattr(source, "ROUNDINGS", {"float32": 0.0})
    with pytest.raises(VerificationError, match="another function"):
        tvm_fusion.compile(model(torch.tanh), "llvm")


def test_the_model_and_its_inputs_stay_as_they_were():
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x):
            return x + self.count

    counting, x = Counting(), X.clone()
    tvm_fusion.compile((counting, (x,)), "llvm")
    assert counting.count.item() == 0
    torch.testing.assert_close(x, X, rtol=0, atol=0)


def test_nothing_is_compared_where_nothing_is_checked(wrong_tanh):
    compiled = tvm_fusion.compile(model(torch.tanh), "llvm", verify=False)
    assert compiled.report.verify is None
