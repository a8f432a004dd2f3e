"""What is loaded is what was meant: plans of another device, model or version are refused with what
differs, and what an edited plan predicts is predicted again.
"""

import dataclasses
import json

import pytest
from tvm.relax import op

import tvm_fusion
from tvm_fusion.errors import PlanError
from tvm_fusion.plan.plan import FusionPlan, load_plans

from ..support.graphs import module

X = ((256, 512), "float32")


def chain(bb, x):
    tall = bb.emit(op.tanh(bb.emit(op.exp(x), "a")), "b")
    return bb.emit(op.sum(tall, axis=0), "c"), bb.emit(op.sqrt(tall), "d")


def other(bb, x):
    return bb.emit(op.sum(bb.emit(op.exp(x), "a"), axis=1), "z")


MODEL = module(chain, X)


def plan_for(target="llvm", mod=MODEL, **options) -> FusionPlan:
    return FusionPlan.from_dict(tvm_fusion.explain(mod, target, **options).plan)


def given(plan, target="llvm", mod=MODEL, **options):
    return FusionPlan.from_dict(tvm_fusion.explain(mod, target, plan=plan, **options).plan)


@pytest.mark.parametrize(("made_for", "used_on"), [("nvidia_h200", "llvm"), ("llvm", "h100")])
def test_a_plan_of_another_device_is_refused_by_both_names(made_for, used_on):
    plan = plan_for(made_for)
    with pytest.raises(PlanError, match=rf"made for {plan.device}, this is \w+: compile for"):
        given(plan, used_on)


def test_a_plan_of_another_model_says_what_differs():
    with pytest.raises(PlanError, match=r"another module: it has b, c, d, this one has gv"):
        given(plan_for(), mod=module(other, X))
    wider = module(chain, ((256, 640), "float32"))
    with pytest.raises(PlanError, match="operators of the same names, with other shapes"):
        given(plan_for(), mod=wider)


@pytest.mark.parametrize("name", ["tvm", "tvm_fusion"])
def test_a_plan_of_another_version_is_refused_by_both(name):
    plan = plan_for()
    old = dataclasses.replace(plan, versions=plan.versions | {name: "0.0.1"})
    with pytest.raises(PlanError, match=rf"made by {name} 0\.0\.1, this is {name} "):
        given(old)
    assert given(dataclasses.replace(plan, versions={})).groups == plan.groups  # of before


def test_another_policy_is_told(caplog):
    assert given(plan_for(), policy="aggressive")
    assert "made with the policy default, not aggressive" in caplog.text
    caplog.clear()
    given(plan_for(), policy="default")
    assert caplog.text.count("policy") == 0


def test_rates_of_another_cpu_are_told(caplog):
    plan = dataclasses.replace(plan_for(), measured={"host": "Another CPU"})
    plan.check_made_for(plan.device, plan.policy, host="Another CPU")
    assert caplog.text.count("rates") == 0
    plan.check_made_for(plan.device, plan.policy, host="This CPU")
    assert "made with the rates of Another CPU, this is This CPU" in caplog.text


@pytest.mark.parametrize("target", ["llvm", "nvidia_h200"])
def test_a_plan_that_nobody_edited_is_as_it_was(target, caplog):
    plan = plan_for(target)
    assert given(plan, target) == plan
    assert "predictions" not in caplog.text


def edits():
    """What may be wrong about a group, and how its prediction is found again."""
    return {
        "time": {"predicted_us": 1e-3},
        "bytes": {"bytes": 1.0},
        "apart": {"unfused_us": 9e9},
        "terms": {"terms": {"hbm": 1e-6}},
    }


@pytest.mark.parametrize("edit", edits())
def test_numbers_of_the_file_are_not_believed(edit, caplog):
    plan = plan_for()
    wrong = tuple(dataclasses.replace(g, **edits()[edit]) for g in plan.groups)
    again = given(dataclasses.replace(plan, groups=wrong))
    assert again.groups == plan.groups
    assert "predictions of the plan were not the model's" in caplog.text


def test_groups_that_were_taken_apart_have_the_predictions_of_what_they_are_now():
    apart = plan_for(policy={"max_group_ops": 1})
    fused = plan_for()
    assert len(apart.groups) > len(fused.groups)
    names = {g.ops for g in fused.groups}
    edited = dataclasses.replace(
        fused,
        groups=tuple(
            dataclasses.replace(g, predicted_us=fused.groups[0].predicted_us) for g in apart.groups
        ),
    )
    again = given(edited)
    assert [g.ops for g in again.groups] == [g.ops for g in apart.groups]
    for found, expected in zip(again.groups, apart.groups, strict=True):
        assert found.predicted_us == pytest.approx(expected.predicted_us)
    assert again.predicted_us == pytest.approx(apart.predicted_us)
    joined = dataclasses.replace(apart, groups=fused.groups)
    told = tvm_fusion.explain(MODEL, "llvm", plan=joined)
    assert {g.ops for g in given(joined).groups} == names
    stale = [r for r in told.refusals if any(set(r.where) <= set(g.ops) for g in told.groups)]
    assert stale == []


def test_a_group_that_its_class_does_not_take_has_no_prediction(caplog):
    plan = plan_for()
    wrong = [dataclasses.replace(g, kernel_class="attention") for g in plan.groups]
    again = given(dataclasses.replace(plan, groups=(wrong[0], *plan.groups[1:])))
    assert again.groups[0].predicted_us == 0
    assert again.groups[0].evidence is None
    assert "is none of class attention" in caplog.text
    mixed = dataclasses.replace(plan.groups[0], kernel_class="transpose")
    with pytest.raises(PlanError, match="transpose, which is a kernel class of another kind"):
        given(dataclasses.replace(plan, groups=(mixed, *plan.groups[1:])))


def test_the_report_of_several_functions_is_plans_by_name(tmp_path):
    plan = plan_for().to_dict()
    file = tmp_path / "report.json"
    file.write_text(json.dumps({"version": 3, "functions": {"f": {"plan": plan}, "g": plan}}))
    assert list(load_plans(file)) == ["f", "g"]
    with pytest.raises(PlanError, match=r"the plans of several functions \(f, g\), not one"):
        FusionPlan.load(file)
