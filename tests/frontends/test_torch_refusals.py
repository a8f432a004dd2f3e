"""A PyTorch model that is refused says all that stands in the way, where, and what to do."""

import pytest
import torch
import tvm
from torch import nn
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_fusion
from tvm_fusion.errors import FrontendError
from tvm_fusion.flow.unlowered import operators_named
from tvm_fusion.frontends import load
from tvm_fusion.frontends.torch.refusals import ADVICE

from ..support.frontend_tools import Function, check
from ..support.unknown_operators import other_unknown, unknown

X = torch.arange(12.0).reshape(4, 3)
INTEGERS = torch.tensor([1, 2, 3])


class Factors(nn.Module):
    def forward(self, x):
        return other_unknown(x @ x.T)  # no converter


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([Factors(), Factors()])

    def forward(self, x):
        y = unknown(x)  # no converter
        y = y + torch.rand(3)  # random
        return y.sum() + self.heads[0](y) + self.heads[1](y)


def line_of(text: str) -> int:
    """The line of this file that ends with a comment."""
    lines = open(__file__).read().split("\n")  # noqa: SIM115
    return next(i for i, line in enumerate(lines, 1) if line.endswith(text))


def message(model, *inputs) -> str:
    with pytest.raises(FrontendError) as error:
        load(model, inputs)
    return str(error.value)


def test_all_operators_that_are_refused_are_told_at_once_with_their_places():
    said, file = message(Net(), X), "test_torch_refusals.py"
    assert "cannot be converted to Relax at 3 operators:" in said
    first = line_of("@ x.T)  # no converter")
    assert f"tests.other_unknown.default ({file}:{first}, in heads.0, and 1 more): " in said
    assert f"tests.unknown.default ({file}:{line_of(' unknown(x)  # no converter')}): " in said
    assert f"aten.rand.default ({file}:{line_of('# random')}): it draws random numbers" in said
    assert said.endswith(ADVICE)


def test_errors_of_tvm_are_told_with_their_operator(monkeypatch):
    from tvm_fusion.frontends.torch.model import CONVERTERS

    def convert(importer, node):
        raise tvm.error.InternalError("int32 vs. int64")

    monkeypatch.setitem(CONVERTERS, "tanh.default", convert)
    said = message(Function(lambda x: torch.tanh(x) + torch.tanh(2 * x)), X)
    assert "at aten.tanh.default (frontend_tools.py:" in said
    assert "this form of it is not converted (TVM: int32 vs. int64)" in said


def test_results_of_a_wrong_shape_are_refused_those_of_several_too(monkeypatch):
    from tvm import relax

    from tvm_fusion.frontends.torch.model import CONVERTERS

    def convert(importer, node):
        x = importer.value_of(node.args[0])
        return importer.emit(relax.op.topk(x, 2, ret_type="both"))

    monkeypatch.setitem(CONVERTERS, "topk.default", convert)
    said = message(Function(lambda x: x.topk(1)), X)
    assert "at aten.topk.default (" in said
    assert "its result would have the shape (4, 2), PyTorch's is (4, 1)" in said


@pytest.mark.parametrize("function", [torch.nonzero, lambda x: x[x > 2].sum(), torch.unique])
def test_sizes_that_depend_on_values_are_refused(function):
    assert "the size of its result depends on values" in message(Function(function), X)


def test_operators_that_tvm_cannot_lower_are_named():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((3,), "int64")):
            y = R.add(x, x)
            z = R.power(y, x)
            return z

    with pytest.raises(FrontendError, match=r"relax\.power of R\.Tensor.*write that line"):
        tvm_fusion.compile(Module, "llvm")  # an error of no operator stays as it is:
    with pytest.raises(KeyError), operators_named(load(nn.ReLU(), (X,)), tvm.target.Target("llvm")):
        raise KeyError


def test_what_was_an_error_of_tvm_works():
    check(
        lambda a: (
            2**a,
            a**-1.0,
            a**2.5,
            a.int() + a,
            torch.cat([a.int(), a]),
            a[-100:2],
            a[1:100],
        ),
        INTEGERS,
    )


# ---- What stops torch.export.


class Stopped(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.kept = torch.zeros(3)

    def forward(self, x):
        if self.how == "branch" and x.sum() > 0:  # branch
            x = x + 1
        if self.how == "numpy":
            x = torch.from_numpy(x.numpy() * 2)  # numpy
        if self.how == "shape":
            x = x @ x  # shape
        return x


@pytest.mark.parametrize(
    ("how", "remedy"),
    [
        ("branch", "use torch.where, torch.cond"),
        ("numpy", "use operators of torch there"),
        ("shape", "give other example inputs"),
    ],
)
def test_the_line_that_stops_torch_export_is_told_and_what_to_change(how, remedy, capfd):
    said = message(Stopped(how), X)
    assert f"torch.export stops at test_torch_refusals.py:{line_of(f'# {how}')} (" in said
    assert remedy in said
    assert "\n" not in said
    assert capfd.readouterr().err == ""  # what torch prints of it is in the message


def test_example_inputs_that_do_not_fit_say_so():
    said = message(Stopped(""), X, X)
    assert "torch.export cannot trace it" in said
    assert "give as many example inputs as `forward` takes" in said


def test_a_dynamic_dimension_that_is_none_says_so():
    with pytest.raises(FrontendError, match="leave it out of dynamic_shapes"):
        load(
            Function(lambda x: x.reshape(4, -1).sum(1) + torch.ones(4) * x.shape[0]),
            (torch.ones(8, 2),),
            dynamic_shapes=(({0: torch.export.Dim("n", min=2)},),),
        )
