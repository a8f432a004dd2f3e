"""Contested cuts: what decides them after tuning, and what is run again."""

import os
import signal
from dataclasses import replace

import pytest

import tvm_fusion
from tvm_fusion.check.sequential import Comparison
from tvm_fusion.config import load_policy, resolve_target
from tvm_fusion.flow.planned import Planned
from tvm_fusion.plan.differ import exchanged, regions
from tvm_fusion.plan.refusal import RefusalCode
from tvm_fusion.plan.search.search import unfused_plan
from tvm_fusion.tuning.database import find_database
from tvm_fusion.tuning.measure.measuring import LocalMeter
from tvm_fusion.tuning.measure.trial_record import Trial
from tvm_fusion.tuning.session import joint
from tvm_fusion.tuning.session import tune as tune_module
from tvm_fusion.tuning.session.choices import DEFAULT
from tvm_fusion.tuning.session.contested import Contested, settled, weighed
from tvm_fusion.tuning.session.lookup import plan_key
from tvm_fusion.tuning.session.settings import load_settings
from tvm_fusion.tuning.session.tasks import tasks_of

from .test_session import chain_module

TARGET, HW = resolve_target("llvm")
POLICY = load_policy("aggressive")
SETTINGS = load_settings({"spaces": ["class"]})

FASTER = Comparison(10.0, 14.0, 4.0, 0.1, 20)  # the other way against that of the plan
SLOWER = Comparison(14.0, 10.0, -4.0, 0.1, 20)
TIE = Comparison(10.0, 10.1, 0.1, 0.1, 320)


def die(request):
    os.kill(os.getpid(), signal.SIGSEGV)


def fail(request):
    raise ValueError("run again")


def both_plans():
    """A planned of three operators, and its plans with all in one kernel and with none fused."""
    planned = Planned.of(chain_module(), TARGET, HW, POLICY)
    apart = unfused_plan(planned.graph, HW, POLICY)
    assert len(planned.plan.groups) == 1
    assert len(apart.groups) == 3
    return planned, planned.plan, apart


def cuts_of(planned, plan, other, joins):
    for region in regions(planned.graph, plan, other):
        changed = exchanged(planned.graph, plan, region.careful, region.hopeful)
        yield Contested(region, changed, joins)


@pytest.fixture(params=[False, True], ids=["apart", "together"])
def settling(request, monkeypatch):
    """What to tune: a function whose plan is `together` or not, with the other way contested."""
    planned, fused, apart = both_plans()
    joins = not request.param
    plan, other = (apart, fused) if joins else (fused, apart)
    planned = replace(planned, plan=plan)
    (cut,) = cuts_of(planned, planned.plan, other, joins)
    monkeypatch.setattr(tune_module, "contested", lambda *_: [cut])
    monkeypatch.setattr(tune_module, "planned_functions", lambda *_: {"main": planned})
    return planned, cut


def kept(folder, planned, cut, fused_us, apart_us):
    """A database that says how long the kernels take by themselves."""
    keeper = find_database(folder, HW, TARGET)
    for plan in (planned.plan, cut.plan):
        tasks = tasks_of(planned.low, planned.graph, plan, POLICY)
        us = fused_us if len(plan.groups) == 1 else apart_us / len(plan.groups)
        for task in tasks:
            trial = Trial("class", DEFAULT, "ok", us, 0.0, (us,) * 45, 0.0)
            keeper.add(task.workload, TARGET, trial)
    return keeper


@pytest.fixture(scope="module")
def meter():
    meter = LocalMeter()
    yield meter
    meter.worker.stop()


@pytest.fixture
def tuned(meter, monkeypatch):
    """`tune` with trials that are all in the database."""

    monkeypatch.setattr(tune_module.Session, "run", lambda session: None)

    def tune(folder):
        options = {"settings": SETTINGS, "policy": "aggressive", "meters": [meter]}
        return tvm_fusion.tune(None, "llvm", database=folder, **options)

    return tune


# Sums of single times by which the way that is slower, apart, is a little better.
SUMS = {"fused_us": 1000.0, "apart_us": 950.0 - 2 * HW.queued_launch_us}


def evidence_of(plan):
    (group,) = plan.groups
    return group.evidence


def test_a_joint_run_decides_against_the_sums_and_is_not_repeated(
    tmp_path, settling, tuned, monkeypatch
):
    planned, cut = settling
    keeper = kept(tmp_path, planned, cut, **SUMS)
    first = tuned(tmp_path)
    evidence = evidence_of(first.plan)
    assert (evidence.kind, evidence.verdict) == ("measured", "sure")
    assert evidence.together_us < evidence.apart_us
    assert evidence.samples >= 20
    (comparison,) = keeper.plan(plan_key(planned.mod, HW, POLICY))[tune_module.JOINT].values()
    assert comparison["pairs"] == evidence.samples

    monkeypatch.setattr(joint, "run_here", fail)
    assert tuned(tmp_path).plan == first.plan
    for task in tasks_of(
        planned.low, planned.graph, first.plan, POLICY
    ):  # another kernel is chosen
        keeper.add(task.workload, TARGET, Trial("class", "f", "ok", 10.0, 0.0, (10.0,) * 45, 0.0))
    again = tuned(tmp_path)
    assert keeper.plan(plan_key(planned.mod, HW, POLICY))[tune_module.JOINT] == {}
    assert len(again.plan.groups) == 1


def test_where_the_process_dies_the_sums_decide(tmp_path, settling, tuned, monkeypatch, caplog):
    planned, cut = settling
    kept(tmp_path, planned, cut, **SUMS)
    monkeypatch.setattr(joint, "run_here", die)
    plan = tuned(tmp_path).plan
    assert len(plan.groups) == 3
    assert "SIGSEGV" in caplog.text
    refusals = [r.why for r in plan.refusals if r.why.startswith("tuned kernels take")]
    assert len(refusals) == (0 if cut.joins else 1)


def test_an_interrupt_leaves_the_sums(tmp_path, settling, tuned, monkeypatch):
    planned, cut = settling
    kept(tmp_path, planned, cut, **SUMS)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(joint, "wait_for", interrupted)
    result = tuned(tmp_path)
    assert result.interrupted
    assert len(result.plan.groups) == 3


# ---- what a joint run says


def all_weighed(planned, plan, other, joins=True, now_us=100.0, other_us=101.0):
    cuts = list(cuts_of(planned, plan, other, joins))
    tasks = [
        tasks_of(planned.low, planned.graph, p, POLICY) for p in (plan, *(c.plan for c in cuts))
    ]
    found = weighed(cuts, tasks, lambda task: 1.0, 0.0)
    assert [(one.now_us, one.other_us) for one in found] == [
        (len(one.now), len(one.other)) for one in found
    ]
    return [replace(one, now_us=now_us, other_us=other_us) for one in found]


def weighed_chain(joins, **times):
    planned, fused, apart = both_plans()
    plan, other = (apart, fused) if joins else (fused, apart)
    (one,) = all_weighed(planned, plan, other, joins, **times)
    return planned, plan, one


@pytest.mark.parametrize(
    ("comparison", "count", "code"),
    [(FASTER, 1, None), (SLOWER, 3, RefusalCode.SLOWER), (TIE, 3, RefusalCode.UNDECIDED)],
    ids=["faster", "slower", "tie"],
)
def test_a_fusion_is_taken_only_if_it_is_clearly_faster(comparison, count, code):
    planned, plan, one = weighed_chain(joins=True)
    found = settled(planned.graph, plan, [(one, comparison)], 0.01)
    assert len(found.groups) == count
    said = [r for r in found.refusals if r.why.startswith("measured together")]
    assert [r.code for r in said] == ([] if code is None else [code])
    if code is None:
        assert evidence_of(found).together_us == 10.0


@pytest.mark.parametrize(
    ("comparison", "verdict"), [(SLOWER, "sure"), (TIE, "undecided")], ids=["slower", "tie"]
)
def test_a_fusion_stays_where_its_operators_are_not_clearly_faster(comparison, verdict):
    planned, plan, one = weighed_chain(joins=False, other_us=50.0)
    evidence = evidence_of(settled(planned.graph, plan, [(one, comparison)], 0.01))
    assert (evidence.kind, evidence.verdict) == ("measured", verdict)
    assert (evidence.together_us, evidence.apart_us) == (comparison.second, comparison.first)


def test_a_fusion_is_taken_apart_where_that_is_clearly_faster():
    planned, plan, one = weighed_chain(joins=False)
    found = settled(planned.graph, plan, [(one, FASTER)], 0.01)
    assert len(found.groups) == 3
    reason = found.refusals[-1]
    assert reason.code is RefusalCode.SLOWER
    assert dict(reason.numbers)["together_us"] == 14.0
    assert set(reason.where) == set(plan.groups[0].ops)


@pytest.mark.parametrize(("other_us", "count"), [(98.0, 1), (99.5, 3)])
def test_the_sums_must_differ_by_the_certain_gain(other_us, count):
    planned, plan, one = weighed_chain(joins=True, other_us=other_us)
    assert len(settled(planned.graph, plan, [(one, None)], 0.01).groups) == count
