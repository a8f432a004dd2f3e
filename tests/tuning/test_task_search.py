"""The search strategy of a task, and MetaSchedule's own objects in place of this package's."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tvm
from tvm import relax, s_tir
from tvm.ir.utils import derived_object
from tvm.relax import op
from tvm.s_tir import meta_schedule as ms

import tvm_fusion
from tvm_fusion.errors import InputError, Unsupported
from tvm_fusion.kernels import registry
from tvm_fusion.tuning import build_candidate
from tvm_fusion.tuning.database import Trial, check
from tvm_fusion.tuning.database.replay import module_of
from tvm_fusion.tuning.search import task_search
from tvm_fusion.tuning.search.space import CONFIGURATION, annotate, class_space
from tvm_fusion.tuning.search.task_search import OPEN, Rival, TaskState
from tvm_fusion.tuning.session.choices import DEFAULT, Choice

from ..support.graphs import module
from ..support.tune_functions import fused, softmax
from ..support.tune_sessions import (
    ALONE,
    BUILDERS,
    METER,
    OPTIONS,
    SETTINGS,
    chain_module,
    make_session,
)

EVOLVED = replace(SETTINGS, spaces=("class", "stock"), final_repeats=5)


def a_state(us=None, *, count=1, texts=("a", "b", "c"), **options):
    """A task whose untuned kernel takes `us`, if it was measured."""
    task = SimpleNamespace(name="t", count=count, predicted_us=10.0)
    choices = [Choice("class", t, 10.0 + n) for n, t in enumerate((DEFAULT, *texts))]
    state = TaskState(task, choices, EVOLVED, **options)
    if us is not None:
        state.restore([timed(DEFAULT, us)])
    return state


def timed(text, us, kind="class"):
    return Trial(kind, text, "ok", us, 0.0, (us,))


# ---- which choices are next


def test_the_untuned_kernel_and_favourites_come_first():
    state = a_state(favourites=("c", "not offered"))
    assert [c.text for c in state.next_choices(2, 0.0)] == [DEFAULT, "c"]
    assert [c.text for c in state.next_choices(9, 0.0)] == [DEFAULT, "c", "a", "b"]
    state.pending.add(DEFAULT)
    assert DEFAULT not in [c.text for c in state.next_choices(9, 0.0)]


def test_what_saves_too_little_is_not_tried():
    state = a_state(10.0)
    some = state.next_choices(9, 0.001)
    assert 0 < len(some) <= 3
    assert state.next_choices(9, 100.0) == []
    assert a_state(10.0, count=0).next_choices(9, 0.0) == []
    many = a_state(10.0, texts=[f"W(way={n})" for n in range(40)])
    assert 0 < len(many.next_choices(40, 0.001)) < 39  # what is like others says little


def test_trials_of_a_task_have_a_number():
    state = a_state(10.0)
    state.settings = replace(EVOLVED, trials_per_task=2)
    assert len(state.next_choices(9, 0.0)) == 1
    state.pending.add("a")
    assert state.next_choices(9, 0.0) == []


def test_schedules_promise_less_with_every_batch_that_brings_nothing():
    state = a_state(10.0, is_evolved=True)
    assert state.evolved_gain_us(2) == pytest.approx(10.0 * EVOLVED.evolved_gain / 2)
    state.tell(timed("[[],[1]]", 5.0, "trace"))
    state.judge(["[[],[1]]"], 10.0)
    assert state.evolved_share == EVOLVED.evolved_gain
    state.tell(timed("[[],[2]]", 4.98, "trace"))
    state.judge(["[[],[2]]", "[[],[3]]"], 5.0)  # the second one was dropped
    assert state.evolved_share == EVOLVED.evolved_gain / 2
    state.judge([], 5.0)
    assert state.evolved_share == EVOLVED.evolved_gain / 4
    assert a_state(10.0).evolved_gain_us(2) == 0.0


# ---- kernels of other cuts get trials only while their cut may win


def make_rival(now, other):
    rival = Rival((now,), tuple(other), 2.0)
    for state in other:
        state.rivals.append(rival)
    return rival


@pytest.mark.parametrize(
    ("times", "is_open"),
    [((5.0, 4.0), True), ((20.0, 20.0), False), ((5.0, OPEN * 12.0 - 9.0), True)],
)
def test_a_cut_is_open_while_it_is_about_as_fast(times, is_open):
    other = [a_state(us, count=0) for us in times]
    rival = make_rival(a_state(10.0), other)
    assert rival.is_open == is_open
    assert [bool(s.next_choices(1, 0.0)) for s in other] == [is_open] * 2


def test_what_was_not_measured_is_measured_once():
    slow, unknown = a_state(50.0, count=0), a_state(count=0)
    rival = make_rival(a_state(10.0), [slow, unknown])
    assert rival.is_open
    assert unknown.next_choices(1, 0.0)[0].text == DEFAULT


def test_a_cut_with_a_kernel_that_does_not_run_is_given_up():
    broken, fine = a_state(count=0), a_state(1.0, count=0)
    broken.restore([Trial("class", DEFAULT, "build", why="does not compile")])
    assert not make_rival(a_state(10.0), [broken, fine]).is_open
    assert fine.next_choices(1, 0.0) == []


def test_kernels_of_the_plan_are_tried_whatever_their_rivals():
    now = a_state(10.0, count=2)
    make_rival(now, [a_state(100.0, count=0)])
    assert now.weight == 2
    assert now.next_choices(1, 0.0)


# ---- the space of a class


def test_a_configuration_is_an_annotation_that_is_sampled():
    mod = module_of(fused("chain"))
    (sch,) = class_space(3).generate_design_space(mod)
    (inst,) = [i for i in sch.trace.insts if i.kind.name == "SampleCategorical"]
    assert len(inst.attrs[0]) == 3
    again = s_tir.Schedule(mod)
    sch.trace.with_decision(inst, 2, remove_postproc=True).apply_to_schedule(again, False)
    wanted = s_tir.Schedule(mod)
    annotate(wanted, 3, 2)
    assert int(wanted.mod["main"].body.block.annotations[CONFIGURATION]) == 2
    tvm.ir.assert_structural_equal(again.mod, wanted.mod)


# ---- sessions


# Always: `test_session` goes on with what was measured.
@pytest.mark.nightly
@pytest.mark.long
@pytest.mark.usefixtures("tested")
def test_a_session_is_resumed_in_the_middle_of_an_evolution():
    def evolved(trials, known=()):
        settings = replace(EVOLVED, trials=trials)
        session, kept, state = make_session(
            settings, known, mod=module(softmax, ((64, 96), "float32"))
        )
        state.is_evolved, state.evolved_share = True, 0.3
        session.run()
        assert session.trials == trials
        return [t for t in kept.found if len(t.samples_us) == 5 or not t.ok], state

    first, _ = evolved(6)
    texts = {t.text for t in first}
    assert DEFAULT in texts
    assert len(texts) == 6
    again, state = evolved(2, first)
    assert texts.isdisjoint({t.text for t in again} - {t.text for t in state.finalists()})
    assert len(state.trials) == 8


@pytest.mark.usefixtures("tested")
@pytest.mark.parametrize("error", [Unsupported("no schedule"), RuntimeError("of TVM"), None])
def test_a_search_that_fails(monkeypatch, error):
    """A function without a design space is left; another error ends the session, as it is."""
    session, kept, state = make_session(EVOLVED, choices=(DEFAULT, "plain"))
    state.is_evolved, state.evolved_share = True, 0.3

    def fail(*_, **__):
        raise error or KeyboardInterrupt

    monkeypatch.setattr(task_search, "Evolved", fail)
    if isinstance(error, Unsupported):
        session.run()
        assert session.ended == "nothing is left to try"
    else:
        with pytest.raises(type(error) if error else KeyboardInterrupt):
            session.run()
    assert [t.text for t in kept.found][:1] == [DEFAULT]
    assert not state.pending


@pytest.mark.usefixtures("tested")
def test_no_batch_begins_that_would_end_too_late(monkeypatch):
    session, kept, state = make_session(replace(EVOLVED, minutes=9.0), choices=(DEFAULT,))
    state.is_evolved, state.evolved_share = True, 0.3
    monkeypatch.setattr(session, "is_late_for", lambda seconds: True)
    session.run()
    assert [t.text for t in kept.found] == [DEFAULT]


# ---- objects of MetaSchedule


def test_a_builder_without_a_runner_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"ms\.runner\.LocalRunner"):
        tvm_fusion.tune(
            chain_module(), "llvm", database=tmp_path, builder=ms.builder.LocalBuilder()
        )


@derived_object
class LocalBuilds(ms.builder.PyBuilder):
    """Builds by `build_candidate`, in this process."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.made = folder, 0

    def build(self, build_inputs):
        results = []
        for one in build_inputs:
            path = self.folder / f"{self.made}.so"
            self.made += 1
            build_candidate(one.mod, one.target).export_library(str(path))
            results.append(ms.builder.BuilderResult(str(path), None))
        return results


@derived_object
class LoadingRunner(ms.runner.PyRunner):
    """Says that what can be loaded takes a millisecond."""

    def run(self, runner_inputs):
        return [Loaded(one) for one in runner_inputs]


@derived_object
class Loaded(ms.runner.PyRunnerFuture):
    def __init__(self, asked):
        super().__init__()
        self.asked = asked

    def done(self):
        return True

    def result(self):
        library = tvm.runtime.load_module(self.asked.artifact_path)
        assert [str(one.shape) for one in self.asked.args_info] == ["(128, 1024)"] * 2
        assert library["main"] is not None
        return ms.runner.RunnerResult([1e-3] * 3, None)


@derived_object
class FailingRunner(ms.runner.PyRunner):
    """Says of everything but the first that the time was up, or what MetaSchedule writes then."""

    def __init__(self, said):
        super().__init__()
        self.said = [ms.runner.RunnerResult([1e-3] * 3, None)], said

    def run(self, runner_inputs):
        first, said = self.said
        return [Said(first.pop() if first else said) for _ in runner_inputs]


@derived_object
class Said(ms.runner.PyRunnerFuture):
    def __init__(self, result):
        super().__init__()
        self.found = result

    def done(self):
        return True

    def result(self):
        return self.found


@pytest.mark.usefixtures("two_ways")
@pytest.mark.parametrize(
    "builds",
    [
        pytest.param(False, id="their runner"),
        pytest.param(True, id="their builder", marks=pytest.mark.nightly),
    ],
)
def test_objects_of_metaschedule_in_place_of_this_packages(tmp_path, builds):
    records = ms.database.MemoryDatabase()
    theirs = {"runner": LoadingRunner(), "records": records}
    theirs |= {"builder": LocalBuilds(tmp_path)} if builds else {}
    theirs |= {"cost_model": ms.cost_model.RandomModel()}
    database = tmp_path / "tuned"
    result = tvm_fusion.tune(chain_module(), "llvm", database=database, **OPTIONS, **theirs)
    assert result.trials == len(records) == 2
    assert result.untuned_us == 0  # nobody compared its numbers
    (folder,) = check(database).folders
    assert (folder.counts["records"], folder.counts["unchecked"]) == (2, 2)
    again = tvm_fusion.tune(chain_module(), "llvm", database=database, **OPTIONS)
    assert again.untuned_us > 0
    assert again.best_us > 0


TIMEOUT = ms.runner.RunnerResult(None, "RPC timeout")
NO_TIME = ms.runner.RunnerResult([1e10], None)


@pytest.mark.usefixtures("tested")
@pytest.mark.parametrize(
    "said",
    [
        pytest.param(TIMEOUT, id="error"),
        pytest.param(NO_TIME, id="no time", marks=pytest.mark.nightly),
    ],
)
def test_failures_of_another_runner_are_not_kept(tmp_path, said):
    """They may be of the runner: the next session tries again."""
    records = ms.database.MemoryDatabase()
    theirs = {"runner": FailingRunner(said), "records": records}
    registry.family("tested").ways = ("plain", "fast", "wrong")
    result = tvm_fusion.tune(chain_module(), "llvm", database=tmp_path, **ALONE, **theirs)
    assert (result.trials, result.failures.count, len(records)) == (3, 2, 1)
    again = tvm_fusion.tune(chain_module(), "llvm", database=tmp_path, **ALONE)
    assert (again.trials, again.failures.count) == (3, 1)  # the wrong one


@pytest.mark.usefixtures("tested")
def test_what_was_dropped_is_no_record():
    session, kept, _ = make_session(choices=(DEFAULT, "plain", "fast"))
    session.records = ms.database.MemoryDatabase()

    def interrupt(session):
        raise KeyboardInterrupt

    session.watch = interrupt
    with pytest.raises(KeyboardInterrupt):
        session.run()
    assert session.trials == len(kept.found) == len(session.records) == 1


def test_tasks_of_one_schedule_space_are_told_apart(tmp_path):
    """Kernels of a constant and of an input: their schedules are of equal functions."""
    weight = np.random.default_rng(0).standard_normal((48, 40)).astype("float32")
    builder = relax.BlockBuilder()
    for name in ("constant", "given"):
        x = relax.Var("x", relax.TensorType((32, 48), "float32"))
        w = relax.Var("w", relax.TensorType((48, 40), "float32"))
        with builder.function(name, [x] if name == "constant" else [x, w]):
            with builder.dataflow():
                other = relax.const(weight) if name == "constant" else w
                out = builder.emit_output(op.matmul(x, other))
            builder.emit_func_output(out)
    settings = replace(EVOLVED, trials=10, repeats=3)
    how = {"builders": BUILDERS, "meters": [METER]}
    result = tvm_fusion.tune(builder.get(), "llvm", database=tmp_path, settings=settings, **how)
    assert len(result.tasks) == 2
    assert sum(task.trials for task in result.tasks) == result.trials == 10
    (folder,) = check(tmp_path).folders
    assert folder.counts["unchecked"] == 0
