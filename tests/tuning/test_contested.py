"""Contested cuts: which are run, what decides them after tuning, and what is run again."""

import os
import signal
from dataclasses import replace

import pytest
import tvm
import tvm_ffi
from tvm import relax

import tvm_fusion
from tvm_fusion.check.plan_runner import specs_of
from tvm_fusion.check.sequential import Comparison
from tvm_fusion.config import load_policy, resolve_target
from tvm_fusion.flow.planned import Planned
from tvm_fusion.kernels import registry
from tvm_fusion.plan.differ import exchanged, regions
from tvm_fusion.plan.plan import PlannedGroup
from tvm_fusion.plan.refusal import RefusalCode
from tvm_fusion.plan.search.search import unfused_plan
from tvm_fusion.runtime.timing.launch_kernels import LaunchWriter, build_launches
from tvm_fusion.tuning.database import Trial, find_database
from tvm_fusion.tuning.measure import processes
from tvm_fusion.tuning.measure.building import BuildRequest, Place, build_choice
from tvm_fusion.tuning.measure.measuring import LocalMeter
from tvm_fusion.tuning.measure.processes import Answer
from tvm_fusion.tuning.session import contested
from tvm_fusion.tuning.session import tune as tune_module
from tvm_fusion.tuning.session.choices import DEFAULT, class_choices
from tvm_fusion.tuning.session.contested import JOINT, Weighed, cut_of, settled
from tvm_fusion.tuning.session.lookup import TunedKernels, plan_key
from tvm_fusion.tuning.session.settings import load_settings
from tvm_fusion.tuning.session.tasks import tasks_of

from ..support.tune_sessions import chain_module

TARGET, HW = resolve_target("llvm")
POLICY = load_policy("aggressive")
SETTINGS = load_settings({"spaces": ["class"]})

FASTER = Comparison(10.0, 14.0, 4.0, 0.1, 20)  # the other way against that of the plan
SLOWER = Comparison(14.0, 10.0, -4.0, 0.1, 20)
TIE = Comparison(10.0, 10.1, 0.1, 0.1, 320)


def fail(request):
    raise ValueError("run again")


def both_plans():
    """A planned of three operators, and its plans with all in one kernel and with none fused."""
    planned = Planned.of(chain_module(), TARGET, HW, POLICY)
    apart = unfused_plan(planned.graph, HW, POLICY)
    assert len(planned.plan.groups) == 1
    assert len(apart.groups) == 3
    return planned, planned.plan, apart


def tasks_in(planned, plan):
    return tasks_of(planned.low, planned.graph, plan, POLICY)


def contested_by(planned, plan, other, joins):
    for region in regions(planned.graph, plan, other):
        yield region, exchanged(planned.graph, plan, region.careful, region.hopeful), joins


@pytest.fixture(params=[False, True], ids=["apart", "together"])
def settling(request, monkeypatch):
    """What to tune: a function whose plan is `together` or not, with the other way contested."""
    planned, fused, apart = both_plans()
    joins = not request.param
    plan, other = (apart, fused) if joins else (fused, apart)
    planned = replace(planned, plan=plan)
    cuts = list(contested_by(planned, planned.plan, other, joins))
    assert len(cuts) == 1
    monkeypatch.setattr(contested, "contested", lambda _: cuts)
    monkeypatch.setattr(tune_module, "planned_functions", lambda *_: {"main": planned})
    return planned, other


def kept(folder, planned, other, fused_us, apart_us):
    """A database that says how long the kernels take by themselves."""
    keeper = find_database(folder, HW, TARGET)
    for plan in (planned.plan, other):
        us = fused_us if len(plan.groups) == 1 else apart_us / len(plan.groups)
        for task in tasks_in(planned, plan):
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
    planned, other = settling
    keeper = kept(tmp_path, planned, other, **SUMS)
    first = tuned(tmp_path)
    evidence = evidence_of(first.plan)
    assert (evidence.kind, evidence.verdict) == ("measured", "sure")
    assert evidence.together_us < evidence.apart_us
    assert evidence.samples >= 20
    (comparison,) = keeper.plan(plan_key(planned.mod, HW, POLICY))[JOINT].values()
    assert comparison["pairs"] == evidence.samples

    monkeypatch.setattr(contested, "run_here", fail)
    assert tuned(tmp_path).plan == first.plan
    for task in tasks_in(planned, first.plan):  # another kernel is chosen
        keeper.add(task.workload, TARGET, Trial("class", "f", "ok", 10.0, 0.0, (10.0,) * 45, 0.0))
    again = tuned(tmp_path)
    assert keeper.plan(plan_key(planned.mod, HW, POLICY))[JOINT] == {}
    assert len(again.plan.groups) == 1


def die(request):
    os.kill(os.getpid(), signal.SIGSEGV)


def interrupted(*_):
    raise KeyboardInterrupt


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("of", "at", "how"), [(contested, "run_here", die), (processes, "wait_for", interrupted)]
)
def test_where_nothing_can_be_run_the_sums_decide(
    tmp_path, settling, tuned, monkeypatch, caplog, of, at, how
):
    planned, other = settling
    kept(tmp_path, planned, other, **SUMS)
    monkeypatch.setattr(of, at, how)
    result = tuned(tmp_path)
    assert len(result.plan.groups) == 3
    assert ("SIGSEGV" in caplog.text) == (how is die)
    refusals = [r.why for r in result.plan.refusals if r.why.startswith("tuned kernels take")]
    assert len(refusals) == (0 if len(other.groups) == 1 else 1)


# ---- what a joint run says


def all_weighed(planned, plan, other, joins=True, now_us=100.0, other_us=101.0):
    cuts = contested_by(planned, plan, other, joins)
    tasks = tasks_in(planned, plan)
    cuts = [cut_of(region, joins, tasks, tasks_in(planned, x)) for region, x, _ in cuts]
    return [Weighed(cut, now_us, other_us) for cut in cuts]


def weighed_chain(joins, **times):
    planned, fused, apart = both_plans()
    plan, other = (apart, fused) if joins else (fused, apart)
    (one,) = all_weighed(planned, plan, other, joins, **times)
    return planned, plan, one


@pytest.mark.parametrize(
    ("joins", "comparison", "count", "said"),
    [
        (True, FASTER, 1, "sure"),
        (True, SLOWER, 3, RefusalCode.SLOWER),
        (True, TIE, 3, RefusalCode.UNDECIDED),
        (False, FASTER, 3, RefusalCode.SLOWER),
        (False, SLOWER, 1, "sure"),
        (False, TIE, 1, "undecided"),
    ],
)
def test_the_other_way_is_taken_only_if_it_is_clearly_faster(joins, comparison, count, said):
    planned, plan, one = weighed_chain(joins, other_us=50.0)
    found = settled(planned.graph, plan, [(one, comparison)], 0.01)
    assert len(found.groups) == count
    together, apart = comparison.first, comparison.second
    if not joins:
        together, apart = apart, together
    if isinstance(said, str):
        evidence = evidence_of(found)
        assert (evidence.kind, evidence.verdict) == ("measured", said)
        assert (evidence.together_us, evidence.apart_us) == (together, apart)
        return
    (reason,) = [r for r in found.refusals if r.why.startswith("measured together")]
    assert reason.code is said
    assert dict(reason.numbers)["together_us"] == together
    assert set(reason.where) == {op for group in plan.groups for op in group.ops}


@pytest.mark.parametrize(("other_us", "count"), [(98.0, 1), (99.5, 3)])
def test_the_sums_must_differ_by_the_certain_gain(other_us, count):
    planned, plan, one = weighed_chain(joins=True, other_us=other_us)
    assert len(settled(planned.graph, plan, [(one, None)], 0.01).groups) == count


# ---- which cuts are run, in which order, and with which kernels


class Answering:
    """In place of a worker: notes requests and answers at once."""

    def __init__(self, comparison):
        self.comparison, self.requests = comparison, []

    def send(self, function, arguments, limit_s):
        assert function is contested.run_here
        assert limit_s > arguments[0].seconds
        self.requests.append(arguments[0])

    def wait(self):
        return Answer("ok", self.comparison)


class Untuned:
    """A source with one trial of every workload."""

    def trials(self, workload):
        return (Trial("class", DEFAULT, "ok", 10.0, 0.0, (10.0,) * 9, 0.0),)


@pytest.fixture
def function_of(tmp_path):
    """Makes a function of the plan with these cuts, all in one database."""

    def make(planned, cuts):
        keeper = find_database(tmp_path, HW, TARGET)
        place, kernels = Place("llvm", POLICY, registry.added()), TunedKernels(Untuned(), 0.01)
        function = contested.TunedFunction(planned, keeper, place, kernels)
        function.weighed = lambda: cuts
        return function

    return make


def test_cuts_that_cannot_win_are_not_run(function_of):
    planned, _, one = weighed_chain(joins=True, other_us=111.0)
    near, worker = replace(one, other_us=109.0), Answering(FASTER)
    function_of(planned, [one]).run(worker, 60.0)
    function_of(planned, [near]).run(worker, 0.0)
    function_of(planned, [near]).run(None, 60.0)
    assert not worker.requests
    function = function_of(planned, [near])
    function.run(worker, 60.0)
    assert len(worker.requests) == 1
    assert list(function.comparisons.values()) == [FASTER]


def test_equal_cuts_run_once_and_the_most_valuable_first(function_of):
    builder = relax.BlockBuilder()
    shapes = {"x": (64, 64), "y": (64, 32), "z": (64, 64)}
    params = [relax.Var(name, relax.TensorType(s, "float32")) for name, s in shapes.items()]
    with builder.function("main", params):
        with builder.dataflow():
            ends = [builder.emit(relax.op.tanh(relax.op.exp(v))) for v in params]
            out = builder.emit_output(relax.Tuple(ends))
        builder.emit_func_output(out)
    planned = Planned.of(builder.get(), TARGET, HW, POLICY)
    apart = unfused_plan(planned.graph, HW, POLICY)
    names = [g.ops[0] for g in apart.groups]
    pairs = [PlannedGroup(tuple(names[k : k + 2]), "pointwise") for k in (0, 2, 4)]
    found = all_weighed(planned, apart, exchanged(planned.graph, apart, apart.groups, pairs))
    assert len(found) == 3
    small = next(one for one in found if one.cut.region.ops == (2, 3))
    found = [small, *(one for one in found if one is not small)]
    planned, worker = replace(planned, plan=apart), Answering(FASTER)
    function = function_of(planned, found)
    function.run(worker, 60.0)
    assert [r.trials.keys() for r in worker.requests] == [
        {t.key for t in one.cut.now + one.cut.other} for one in (found[1], small)
    ]
    assert len(function.comparisons) == 2
    assert len(function.settle(0.01).groups) == 3
    assert function_of(planned, found).comparisons == function.comparisons


@pytest.mark.usefixtures("two_ways")
def test_a_run_launches_the_chosen_kernels():
    planned = Planned.of(chain_module(), TARGET, HW, POLICY)
    fast = Trial("class", "Way(way=fast)", "ok", 1.0, 0.0, (1.0,) * 9, 0.0)
    source = Untuned()
    plain = source.trials(None)
    tuned = TunedKernels(source, 0.01)
    source.trials = lambda workload: (*plain, fast)
    (spec,) = specs_of(planned.plan, planned.graph)
    writers = [LaunchWriter(planned.low, planned.graph, HW, POLICY, t) for t in (tuned, None)]
    kernels = [writer.write(spec)[0] for writer in writers]
    (task,) = tasks_of(planned.low, planned.graph, planned.plan, POLICY)
    assert tuned.used[task.key] is fast
    assert not tvm_ffi.structural_equal(*kernels)


def test_a_kernel_that_was_compiled_as_a_trial_is_not_compiled_again(tmp_path, monkeypatch):
    monkeypatch.setenv("TVM_FUSION_CACHE", str(tmp_path))
    target, hw = resolve_target("nvidia_h200")
    planned = Planned.of(chain_module(), target, hw, POLICY)
    (task,) = tasks_of(planned.low, planned.graph, planned.plan, POLICY)
    *_, choice = (c for c, _ in class_choices(task.workload, hw, POLICY))
    source = tvm.ir.save_json(task.workload)
    place = Place("nvidia_h200", POLICY)
    built = build_choice(
        BuildRequest(source, choice.kind, choice.text, place, tmp_path / "trial.so")
    )
    compiled = sorted(tmp_path.glob("*.cubin"))
    assert compiled
    plain, fast = (
        Trial("class", t, "ok", us, 0.0, (us,) * 9, 0.0)
        for t, us in ((DEFAULT, 9.0), (choice.text, 1.0))
    )
    tuned = TunedKernels(contested.Sent({task.key: (plain, fast)}), 0.01)
    writer = LaunchWriter(planned.low, planned.graph, hw, POLICY, tuned)
    (kernel,) = build_launches(writer, specs_of(planned.plan, planned.graph), target).kernels
    assert kernel.symbol == built.symbol
    assert sorted(tmp_path.glob("*.cubin")) == compiled
