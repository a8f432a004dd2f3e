"""A single operator whose kernel is wrong gets another kernel before it gets TVM's own code: faults
planted in one form of a class, or in all of it.
"""

from dataclasses import dataclass

import pytest
import torch
from tvm.relax import op

import tvm_fusion
from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.kernels.base import Fit, OnCPU, write_on_cpu
from tvm_fusion.kernels.forms import Form, Writer
from tvm_fusion.kernels.registry import register, unregister
from tvm_fusion.kernels.row.kernel_class import Row
from tvm_fusion.plan.refusal import RefusalCode
from tvm_fusion.tuning.session.choices import ranked_configs, text_of
from tvm_fusion.tuning.session.lookup import MOST_CONFIGURATIONS, OtherKernels

from ..planted import mutated
from ..right_programs import FunctionModule
from ..support.kernel_cases import fuse

POLICY = load_policy(None)


@dataclass(frozen=True)
class Lanes:
    """A configuration of `Lean`."""

    form: str
    width: int = 1


class Lean(Row):
    """Rows in configurations of which those of the forms `faulty` leave the last terms out."""

    name = "lean"

    def __init__(self, offered, faulty):
        self.offered, self.faulty, self.written = offered, faulty, []

    def accepts(self, group, hw, policy):
        found = super().accepts(group, hw, policy)
        if not isinstance(found, Fit):
            return found
        return Fit(self.name, found.rows, found.columns, found.evaluations)

    def writer(self, hw):
        return Writer("what is tested", OnCPU, (Form("lean", Lanes, self.rank, self.emit),))

    def rank(self, problem, hw, policy):
        return [(None, config) for config in self.offered]

    def emit(self, problem, hw, config):
        self.written.append(config)
        kernel = write_on_cpu(problem, hw)
        return mutated(kernel, "short loop", 1) if config.form in self.faulty else kernel


@pytest.fixture
def lean(request):
    cls = Lean(*request.param)
    register(cls, ("llvm",))
    yield cls
    unregister(cls.name)


def compiled(function, *shapes, verify=True):
    model = FunctionModule(function), tuple(torch.zeros(shape) for shape in shapes)
    return tvm_fusion.compile(model, "llvm", verify=verify)


def assert_right(module, function, *shapes):
    inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(3)) for shape in shapes]
    exact = function(*(x.double() for x in inputs))
    assert (module(*inputs).double() - exact).abs().max() < 1e-4


OFFERED = [Lanes("wide"), Lanes("wide", 2), Lanes("narrow")]
SUM = (lambda x: x.sum(-1), (33, 1037))


@pytest.mark.parametrize("lean", [(OFFERED, {"wide"})], indirect=True)
@pytest.mark.parametrize("verify", [True, "groups"])
def test_a_configuration_that_is_wrong_gives_way_to_one_of_another_form(lean, verify):
    module = compiled(*SUM, verify=verify)
    assert_right(module, *SUM)
    (group,) = module.report.groups
    assert group.kernel_class == "lean"
    assert group.fallback.startswith(RefusalCode.WRONG_NUMBERS.value)
    assert lean.written[-1] == Lanes("narrow")


@pytest.mark.parametrize(
    ("lean", "tried"),
    [
        (([Lanes("wide")], {"wide"}), 1),
        ((OFFERED, {"wide", "narrow"}), 3),
        (([Lanes("wide", n) for n in range(6)], {"wide"}), 1 + MOST_CONFIGURATIONS),
    ],
    indirect=["lean"],
)
def test_a_class_that_is_wrong_gives_way_to_the_fallback_class(lean, tried):
    module = compiled(*SUM)
    assert_right(module, *SUM)
    assert [g.kernel_class for g in module.report.groups] == ["fallback"]
    assert len(set(lean.written)) == tried


@pytest.mark.parametrize("lean", [(OFFERED, {"wide"})], indirect=True)
def test_equal_operators_give_way_together(lean):
    module = compiled(lambda x, y, z: (x.sum(-1), y.sum(-1), z.sum(-1)), *[(33, 1037)] * 3)
    assert {g.kernel_class for g in module.report.groups} == {"lean"}
    assert all(g.fallback for g in module.report.groups)
    inputs = [torch.full((33, 1037), n) for n in (1.0, 2.0, 3.0)]
    for x, found in zip(inputs, module(*inputs), strict=True):
        torch.testing.assert_close(found, x.sum(-1))


@pytest.mark.one_in(12)
@pytest.mark.parametrize("device", ["nvidia_h200", "nvidia_rtx4090"])
@pytest.mark.parametrize(
    ("name", "emit", "inputs"),
    [
        ("row", lambda bb, x: op.sum(x, -1), [((33, 1037), "float32")]),
        ("column", lambda bb, x: op.sum(x, 0), [((65, 37), "float32")]),
        ("gemm", lambda bb, x, w: op.matmul(x, w), [((33, 64), "float32"), ((64, 72), "float32")]),
        ("transpose", lambda bb, x: op.permute_dims(x), [((65, 37), "float32")]),
    ],
)
def test_what_a_class_offers_is_tried_in_turn(device, name, emit, inputs):
    hw, func = load_profile(device), fuse(emit, *inputs)
    (_, best), *_ = ranked_configs(func, name, hw, POLICY)
    others, texts = OtherKernels(None, hw, POLICY), []
    assert others.choice(func, name, POLICY) == ""
    while (text := others.reject(func, name)) is not None:
        texts.append(text)
        assert others.choice(func, name, POLICY) == f"class {text}"
        assert others.kernel(func, name, hw, POLICY) is not None
    assert len(set(texts)) == len(texts) == MOST_CONFIGURATIONS
    assert text_of(best) not in texts
    assert not others.falls_back(func, name)


def test_what_tuning_chose_gives_way_to_what_is_written_untuned():
    hw = load_profile("nvidia_h200")
    func = fuse(lambda bb, x: op.sum(x, -1), ((33, 1037), "float32"))
    other = text_of(ranked_configs(func, "row", hw, POLICY)[3][1])

    class Tuned:
        def choice(self, func, class_name, policy):
            return f"class {other}"

        def told(self, func, class_name, policy):
            return {"workload": "0", "choice": other, "us": 1.0, "untuned_us": 2.0}

    others = OtherKernels(Tuned(), hw, POLICY)
    assert others.choice(func, "row", POLICY) == f"class {other}"
    assert others.told(func, "row", POLICY)["choice"] == other
    assert others.reject(func, "row") == "default"
    assert others.choice(func, "row", POLICY) == ""
    assert others.told(func, "row", POLICY)["stale"] == "wrong numbers"
    assert others.reject(func, "row") not in (None, other)
