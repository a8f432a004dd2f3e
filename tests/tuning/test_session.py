"""Sessions: which trials run, what they cost when they go wrong, and what is measured only once."""

from dataclasses import replace

import pytest
import tvm
from tvm import relax

from tvm_fusion.config import load_policy, resolve_target
from tvm_fusion.errors import TargetError
from tvm_fusion.flow.planned import Planned
from tvm_fusion.kernels import registry
from tvm_fusion.tuning.measure.building import Place, make_builders
from tvm_fusion.tuning.measure.measuring import LocalMeter
from tvm_fusion.tuning.measure.processes import Worker, stop_all
from tvm_fusion.tuning.search.task_search import TaskState
from tvm_fusion.tuning.session.choices import DEFAULT, chosen, class_choices
from tvm_fusion.tuning.session.session import Session
from tvm_fusion.tuning.session.settings import load_settings
from tvm_fusion.tuning.session.tasks import tasks_of

from ..support.tune_classes import HUNG, Several
from ..support.tune_sticky import GoneMeter, StickyMeter

SIZE = (128, 1024)
SETTINGS = load_settings(
    {
        "spaces": ["class"],
        "trials": 20,
        "repeats": 5,
        "final_repeats": 11,
        "builders": 1,
        "build_memory_bytes": 4 << 30,
        "least_gain": 0.0,
    }
)


# A new process takes seconds to import TVM: the sessions of all tests build and measure in the same
# ones, and what a session ends or loses is started again.
BUILDERS = make_builders(SETTINGS)
MEASURER = LocalMeter().worker
_started = [*BUILDERS, MEASURER]


@pytest.fixture(autouse=True)
def no_process_stays():
    yield
    shared = (*BUILDERS, MEASURER)
    stop_all([w for w in _started if w.busy or w not in shared])
    _started[:] = shared


@pytest.fixture(autouse=True, scope="session")
def no_process_stays_on():
    yield
    stop_all([*BUILDERS, MEASURER])


@pytest.fixture
def tested(monkeypatch, tmp_path_factory):
    end_time_of_what_hangs(monkeypatch, tmp_path_factory)
    registry.register(Several(), ("llvm",))
    yield
    registry.unregister("tested")


def end_time_of_what_hangs(monkeypatch, folders):
    """The time of a process that says that it hangs is over; others have all that they need, on a
    machine that is busy too.
    """
    hung = folders.getbasetemp() / "hung"  # the same in all tests that share a process
    hung.unlink(missing_ok=True)
    left = Worker.left_s.fget

    def left_s(worker):
        process = hung.read_text() if hung.exists() else ""
        if worker._process is not None and process == str(worker._process.pid):
            return 0.0
        return left(worker)

    monkeypatch.setenv(HUNG, str(hung))
    monkeypatch.setattr(Worker, "left_s", property(left_s))


class Kept:
    """Trials in memory."""

    def __init__(self):
        self.found = []

    def add(self, workload, target, trial):
        self.found.append(trial)

    def of(self, text):
        return [t for t in self.found if f"way={text}" in t.text or t.text == text]


def chain_module(**sizes: tuple[int, int]) -> tvm.IRModule:
    """Functions y = tanh(x / 4) + 3 / 4 by name, of tensors of these sizes; a `main` by default."""
    builder = relax.BlockBuilder()
    for name, size in (sizes or {"main": SIZE}).items():
        x = relax.Var("x", relax.TensorType(size, "float32"))
        with builder.function(name, [x]):
            with builder.dataflow():
                scaled = builder.emit(relax.op.multiply(x, relax.const(0.25, "float32")))
                bent = builder.emit(relax.op.tanh(scaled))
                out = builder.emit_output(relax.op.add(bent, relax.const(0.75, "float32")))
            builder.emit_func_output(out)
    return builder.get()


def make_session(settings=SETTINGS, trials=(), choices=None, meter=None, mod=None):
    """A session over one task; `choices` are those of its choices that are offered."""
    target, hw = resolve_target("llvm")
    policy = load_policy("aggressive")
    planned = Planned.of(mod or chain_module(), target, hw, policy)
    (task,) = tasks_of(planned.low, planned.graph, planned.plan, policy)
    assert mod is not None or task.kernel_class == "tested"
    offered = [c for c, _ in class_choices(task.workload, hw, policy)]
    if choices is not None:
        offered = [
            c for c in offered if c.text.partition("=")[2][:-1] in choices or c.text in choices
        ]
    state = TaskState(task, offered, settings)
    state.restore(trials)
    kept = Kept()
    place = Place("llvm", policy, registry.added())
    if meter is None:
        meter = LocalMeter()
        meter.worker = MEASURER
    _started.append(meter.worker)
    return Session([state], kept, place, settings, BUILDERS, [meter]), kept, state


@pytest.mark.long
def test_what_goes_wrong_costs_its_trial_only(tested):
    session, kept, state = make_session()
    session.run()
    status = {t.text.partition("=")[2].rstrip(")") or t.text: t.status for t in kept.found}
    assert status == {
        "default": "ok",  # which writes the first way, "plain"
        "fast": "ok",
        "wrong": "wrong",
        "refused": "build",
        "hanging": "timeout",
        "dying": "crash",
        "greedy": "memory",
    }
    (wrong,) = kept.of("wrong")
    assert wrong.us is None
    assert "error" in wrong.why
    assert wrong.error > 0.1
    assert chosen(state.trials.values(), 0.01).text == "Way(way=fast)"
    assert session.total_us < session.untuned_us


def test_a_process_that_lost_its_device_is_not_used_again(tested, tmp_path):
    choices = (DEFAULT, "plain", "fast", "wrong")
    session, kept, _ = make_session(choices=choices, meter=StickyMeter(tmp_path / "count"))
    session.run()
    assert sorted(t.status for t in kept.found[1:3]) == ["crash", "wrong"]
    assert "lost" in kept.found[1].why


def test_a_server_that_is_gone_for_a_while_costs_no_trial(tested, tmp_path):
    choices = (DEFAULT, "plain", "fast")
    meter = GoneMeter(MEASURER, tmp_path / "count", 2)
    session, kept, _ = make_session(choices=choices, meter=meter)
    session.run()
    assert [(t.text, t.status) for t in kept.found[:2]] == [
        (DEFAULT, "ok"),
        ("Way(way=fast)", "ok"),
    ]


def test_a_session_ends_where_nothing_is_left_to_measure_on(tested, tmp_path):
    meter = GoneMeter(MEASURER, tmp_path / "count", 100)
    session, kept, _ = make_session(choices=(DEFAULT, "plain"), meter=meter)
    with pytest.raises(TargetError, match="nothing is left to measure on: no server answers"):
        session.run()
    assert kept.found == []


def test_finalists_are_timed_beside_the_untuned_kernel(tested):
    session, kept, state = make_session(replace(SETTINGS, trials=3))
    session.run()
    assert session.trials == 3
    assert [len(t.samples_us) for t in kept.of(DEFAULT)] == [5, 11]
    assert [len(t.samples_us) for t in kept.of("fast")] == [5, 11]
    assert not state.needs_final


def test_nothing_is_measured_twice(tested):
    session, kept, _ = make_session(replace(SETTINGS, trials=3))
    session.run()
    again, more, _ = make_session(replace(SETTINGS, trials=2), kept.found)
    again.run()
    before = {t.text for t in kept.found}
    assert DEFAULT in before
    assert len(before) == 3
    assert before.isdisjoint(t.text for t in more.found)
    assert len(more.found) == 2


def test_an_interrupt_leaves_what_was_measured(tested):
    session, kept, _ = make_session(choices=(DEFAULT, "plain", "fast"))

    def interrupt(session):
        if len(kept.found) == 2:
            raise KeyboardInterrupt

    session.watch = interrupt
    with pytest.raises(KeyboardInterrupt):
        session.run()
    assert [t.status for t in kept.found] == ["ok", "ok"]
    assert not any(w.busy for w in (*session.builders, session.meters[0].worker))


def test_a_session_ends_where_nothing_is_worth_a_trial(tested):
    session, kept, _ = make_session(replace(SETTINGS, least_gain=10.0))
    session.run()
    assert [t.text for t in kept.found] == [DEFAULT]


def test_a_task_whose_untuned_kernel_fails_is_left(monkeypatch, tmp_path_factory):
    end_time_of_what_hangs(monkeypatch, tmp_path_factory)
    registry.register(Several(("refused", "fast")), ("llvm",))
    try:
        session, kept, state = make_session()
        state.choices[0] = replace(state.choices[0])
        kept_text = state.choices[1].text
        monkeypatch.setattr(
            "tvm_fusion.tuning.measure.building.build_choice", tvm.ir.load_json
        )  # fails in the worker for any request
        session.run()
    finally:
        registry.unregister("tested")
    assert [t.text for t in kept.found] == [DEFAULT]
    assert state.broken
    assert kept_text not in state.trials
