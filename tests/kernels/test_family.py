"""A kernel family of the user's is one class and one line that registers it."""

from dataclasses import dataclass

import pytest
from tvm.relax import op

import tvm_fusion
from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.cost.traffic import Resources, Traffic
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels import registry
from tvm_fusion.kernels.base import REDUCES, Family, Fit, Needs, OnCPU, write_on_cpu
from tvm_fusion.kernels.forms import Form, Writer
from tvm_fusion.plan import structure
from tvm_fusion.plan.refusal import RefusalCode
from tvm_fusion.tuning.session.choices import class_choices
from tvm_fusion.tuning.session.tasks import CLASS

from ..support.graphs import module
from ..support.kernel_cases import fuse

X = ((64, 96), "float32")
LLVM, POLICY = load_profile("llvm_cpu"), load_policy(None)


@dataclass(frozen=True)
class Unrolled:
    """A configuration."""

    factor: int


class Toy(Family):
    """Pointwise work, whatever its outputs."""

    name = "toy"
    needs = Needs(absent=REDUCES)

    def __init__(self):
        self.asked, self.written = [], []

    def accepts(self, group, hw, policy):
        self.asked.append(group.names)
        if len(group.outputs) > 1:
            return group.refuse(RefusalCode.SPACE_MISMATCH, "toys have one output")
        return Fit(self.name, 64, 96, tuple(1.0 for _ in group.blocks))

    def traffic(self, group, fit, hw):
        return Traffic(hbm_bytes=1.0, l2_bytes=1.0)

    def resources(self, group, fit, hw):
        return Resources(32, 0)

    def writer(self, hw):
        return Writer("a toy", OnCPU, (Form("toy", Unrolled, self.rank, self.emit),))

    def rank(self, problem, hw, policy):
        return [(1e-6 * factor, Unrolled(factor)) for factor in (1, 3, 2)]

    def emit(self, problem, hw, config):
        if config.factor == 3:
            raise Unsupported("three is too many")
        self.written.append(config)
        return write_on_cpu(problem, hw)


@pytest.fixture
def toy():
    family = Toy()
    registry.register(family, ("llvm",))
    yield family
    registry.unregister(family.name)


def chain(bb, x):
    return bb.emit(op.exp(bb.emit(op.add(x, x))))


def softmax(bb, x):
    return bb.emit(op.nn.softmax(bb.emit(op.add(x, x))))


def test_the_planner_asks_it_and_its_writer_writes(toy):
    compiled = tvm_fusion.compile(module(chain, X), "llvm", verify=True)
    assert [g.kernel_class for g in compiled.report.groups] == ["toy"]
    assert compiled.report.verify.passed
    assert set(toy.written) == {Unrolled(1)}  # the best guess


def test_it_is_not_asked_about_what_it_cannot_have(toy):
    groups = tvm_fusion.compile(module(softmax, X), "llvm", verify=True).report.groups
    asked = {name for names in toy.asked for name in names}
    assert "toy" in {g.kernel_class for g in groups}
    assert {"lv", "softmax1_shifted"} <= asked
    assert not {"softmax1_max", "softmax1_sum"} & asked


def test_tuning_has_its_configurations_with_their_predicted_times(toy):
    func = fuse(chain, X).with_attr(CLASS, "toy")
    choices = class_choices(func, LLVM, POLICY)
    assert [(c.text, c.predicted_us) for c, _ in choices[1:]] == [
        ("Unrolled(factor=3)", 3.0),
        ("Unrolled(factor=2)", 2.0),
    ]
    assert choices[0][0].like == "Unrolled(factor=1)"


def test_a_configuration_of_another_family_is_refused(toy):
    with pytest.raises(Unsupported, match="str is no configuration of a toy"):
        toy.write(fuse(chain, X), LLVM, POLICY, "fast")


def test_what_is_no_family_cannot_be_registered():
    with pytest.raises(TypeError, match="instance of a Family, got 'row'"):
        registry.register("row")


def test_an_operator_that_all_families_fail_on_keeps_tvms_own_code(monkeypatch):
    def fails(*_):
        raise ZeroDivisionError("planted")

    for family in registry.families(LLVM):
        monkeypatch.setattr(type(family), "accepts", fails)
    monkeypatch.setenv("TVM_FUSION_PLAN_CACHE", "0")
    structure._RECENT.clear()
    compiled = tvm_fusion.compile(module(chain, X), "llvm", verify=True)
    structure._RECENT.clear()
    assert [g.kernel_class for g in compiled.report.groups] == ["stock", "stock"]
    assert compiled.report.verify.passed


def test_a_family_is_refused_for_a_device_that_it_does_not_write_for():
    class Loops(Family):
        name = "loops"

    with pytest.raises(Unsupported, match="loops writes nothing for cuda"):
        Loops().write(fuse(chain, X), load_profile("nvidia_h200"), POLICY)


def test_the_package_lists_what_it_loads_later():
    assert {"compile", "explain", "TuningDatabase"} <= set(dir(tvm_fusion))
