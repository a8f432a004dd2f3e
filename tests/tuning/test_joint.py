"""Joint runs: which cuts are run, in which order, and with which kernels."""

from dataclasses import replace

import tvm
import tvm_ffi
from tvm import relax

from tvm_fusion.check.plan_runner import specs_of
from tvm_fusion.config import resolve_target
from tvm_fusion.flow.planned import Planned
from tvm_fusion.kernels import registry
from tvm_fusion.plan.differ import exchanged
from tvm_fusion.plan.plan import PlannedGroup
from tvm_fusion.plan.search.search import unfused_plan
from tvm_fusion.runtime.timing.launch_kernels import LaunchWriter, build_launches
from tvm_fusion.tuning.measure.building import BuildRequest, Place, build_choice
from tvm_fusion.tuning.measure.processes import Answer
from tvm_fusion.tuning.measure.trial_record import Trial
from tvm_fusion.tuning.session import joint
from tvm_fusion.tuning.session.choices import DEFAULT, class_choices
from tvm_fusion.tuning.session.lookup import TunedKernels
from tvm_fusion.tuning.session.tasks import tasks_of

from ..support.tune_classes import Several
from .test_contested import FASTER, HW, POLICY, TARGET, all_weighed, weighed_chain
from .test_session import chain_module


class Answering:
    """In place of a worker: notes requests and answers at once."""

    def __init__(self, comparison):
        self.comparison, self.requests = comparison, []

    def send(self, function, arguments, limit_s):
        assert function is joint.run_here
        assert limit_s > arguments[0].seconds
        self.requests.append(arguments[0])

    def collect(self):
        return Answer("ok", self.comparison)


class Untuned:
    """A source with one trial of every workload."""

    def trials(self, workload):
        return (Trial("class", DEFAULT, "ok", 10.0, 0.0, (10.0,) * 9, 0.0),)


def runs_of(planned):
    place = Place("llvm", POLICY, registry.added())
    return joint.JointRuns(planned, place, TunedKernels(Untuned(), 0.01))


def test_cuts_that_cannot_win_are_not_run():
    planned, _, one = weighed_chain(joins=True, other_us=111.0)
    worker, runs = Answering(FASTER), runs_of(planned)
    runs.run([one], worker, 60.0)
    runs.run([replace(one, other_us=109.0)], worker, 0.0)
    runs.run([replace(one, other_us=109.0)], None, 60.0)
    assert not worker.requests
    runs.run([replace(one, other_us=109.0)], worker, 60.0)
    assert len(worker.requests) == 1
    assert runs.found(one) is None
    assert runs.found(replace(one, other_us=109.0)) == FASTER


def test_equal_cuts_run_once_and_the_most_valuable_first():
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
    worker, runs = Answering(FASTER), runs_of(planned)
    runs.run(found, worker, 60.0)
    assert [r.trials.keys() for r in worker.requests] == [
        {t.key for t in one.now + one.other} for one in (found[1], small)
    ]
    assert [runs.found(one) for one in found] == [FASTER] * 3
    again = runs_of(planned)
    again.restore(runs.to_dict(found))
    assert again.comparisons == runs.comparisons


def test_a_run_launches_the_chosen_kernels():
    registry.register(Several(("plain", "fast")), ("llvm",))
    try:
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
    finally:
        registry.unregister("tested")


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
    tuned = TunedKernels(joint.Sent({task.key: (plain, fast)}), 0.01)
    writer = LaunchWriter(planned.low, planned.graph, hw, POLICY, tuned)
    (kernel,) = build_launches(writer, specs_of(planned.plan, planned.graph), target).kernels
    assert kernel.symbol == built.symbol
    assert sorted(tmp_path.glob("*.cubin")) == compiled
