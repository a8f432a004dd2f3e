"""Sessions: which trials run, what they cost when they go wrong, and what is measured only once."""

import builtins
import math
import sys
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import tvm

from tvm_fusion.errors import TargetError
from tvm_fusion.tuning.measure import measuring
from tvm_fusion.tuning.search.space import USING_IPYTHON
from tvm_fusion.tuning.search.task_search import TaskState
from tvm_fusion.tuning.session import session as session_module
from tvm_fusion.tuning.session import settings as settings_module
from tvm_fusion.tuning.session.choices import DEFAULT, chosen
from tvm_fusion.tuning.session.finals import CLEAN_US, Finals
from tvm_fusion.tuning.session.settings import TimeLimit

from ..support.tune_sessions import (
    MEASURER,
    SETTINGS,
    end_time_of_what_hangs,
    make_session,
    several,
)
from ..support.tune_sticky import GoneMeter, StickyMeter


@pytest.fixture
def three_trials(tested):
    """A session that made three of all trials, the same for all tests."""
    return _three_trials()


@cache
def _three_trials():
    session, kept, state = make_session(replace(SETTINGS, trials=3))
    session.run()
    return session, kept, state


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


@pytest.mark.nightly
def test_a_server_that_is_gone_for_a_while_costs_no_trial(tested, tmp_path):
    choices = (DEFAULT, "plain", "fast")
    meter = GoneMeter(MEASURER, tmp_path / "count", 2)
    session, kept, _ = make_session(choices=choices, meter=meter)
    session.run()
    assert [(t.text, t.status) for t in kept.found[:2]] == [
        (DEFAULT, "ok"),
        ("Way(way=fast)", "ok"),
    ]


def test_a_session_in_a_notebook_needs_no_pandas(tested, monkeypatch):
    class ZMQInteractiveShell:
        """What MetaSchedule looks for."""

    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    monkeypatch.setitem(sys.modules, "pandas", None)
    session, kept, _ = make_session(choices=(DEFAULT,))
    session.run()
    assert [t.status for t in kept.found] == ["ok"]
    assert tvm.get_global_func(USING_IPYTHON)()


def test_a_session_ends_where_nothing_is_left_to_measure_on(tested, tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "MOST_LOST", 2)  # each is a process that starts anew
    meter = GoneMeter(MEASURER, tmp_path / "count", 100)
    session, kept, _ = make_session(choices=(DEFAULT, "plain"), meter=meter)
    with pytest.raises(TargetError, match="nothing is left to measure on: no server answers"):
        session.run()
    assert kept.found == []


def test_finalists_are_timed_beside_the_untuned_kernel(three_trials):
    session, kept, state = three_trials
    assert session.trials == 3
    assert [len(t.samples_us) for t in kept.of(DEFAULT)] == [5, 11]
    assert [len(t.samples_us) for t in kept.of("fast")] == [5, 11]
    assert not state.needs_final


def test_nothing_is_measured_twice(three_trials):
    _, kept, _ = three_trials
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
    with several(("refused", "fast")):
        session, kept, state = make_session()
        kept_text = state.choices[1].text
        monkeypatch.setattr(
            "tvm_fusion.tuning.measure.building.build_choice", tvm.ir.load_json
        )  # fails in the worker for any request
        session.run()
    assert [t.text for t in kept.found] == [DEFAULT]
    assert state.broken
    assert kept_text not in state.trials


# ---- trials end while there is time for what comes after them


@pytest.mark.nightly
@pytest.mark.usefixtures("tested")
def test_the_trials_leave_time_for_the_finals(monkeypatch):
    settings = replace(SETTINGS, minutes=500.0)
    session, _, state = make_session(settings, choices=(DEFAULT, "fast", "plain", "wrong"))
    monkeypatch.setattr(session_module, "BATCH", 1)
    seen = []

    def needed(finals):
        seen.append(len(state.trials))
        return 30_000.0 if state.needs_final else 0.0

    monkeypatch.setattr(Finals, "seconds", needed)
    session.run()
    assert seen[:2] == [1, 2]
    assert 2 <= len(state.trials) < len(state.choices)
    assert not state.needs_final
    assert session.limit.left_s > 60
    assert not state.pending


@pytest.mark.usefixtures("tested")
def test_contested_cuts_keep_their_time():
    settings = replace(SETTINGS, minutes=5.0)
    session, kept, state = make_session(settings, choices=(DEFAULT, "plain", "fast"))
    session.joint_s = 300.0
    state.rivals.append(SimpleNamespace(is_open=True))
    session.run()
    assert [t.text for t in kept.found] == [DEFAULT]


def test_finals_take_what_builds_and_measurements_took(three_trials):
    _, kept, state = three_trials
    shop = SimpleNamespace(builders=[0, 1], usual_s=7.0, library=lambda *_: None)
    measurements = SimpleNamespace(meters=[0], usual_s=lambda state: 3.0)
    settings = replace(SETTINGS, final_repeats=1000)
    again = TaskState(state.task, state.choices, settings)
    again.restore(kept.found)
    count = len(again.finalists())
    assert 2 <= count <= 3
    wanted = 7.0 * math.ceil(count / 2) + 3.0 + count * 1000 * (again.untuned_us + CLEAN_US) * 1e-6
    found = Finals([again], shop, measurements, settings).seconds()
    assert found == pytest.approx(wanted)
    assert Finals([state], shop, measurements, SETTINGS).seconds() == 0.0


def test_limits_of_time(monkeypatch):
    monkeypatch.setattr(settings_module, "time", SimpleNamespace(monotonic=lambda: 1060.0))
    limit = TimeLimit(2.0, kept_s=30.0, began=1000.0)
    assert limit.seconds == limit.left_s == 60.0
    assert not limit.is_near
    assert TimeLimit(1.2, kept_s=30.0, began=limit.began).is_near
    assert TimeLimit(0.5, began=limit.began).left_s == 0.0
    assert limit.share(0.25, 60.0) == 30.0
    assert limit.share(0.75, 60.0) == 60.0
    endless = TimeLimit(0.0, kept_s=1e9)
    assert not endless.is_near
    assert endless.share(0.25, 60.0) == 60.0
