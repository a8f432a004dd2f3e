"""The minutes of a session: trials end while there is time for what comes after them."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tvm_fusion.tuning.search.task_search import TaskState
from tvm_fusion.tuning.session import session as session_module
from tvm_fusion.tuning.session.choices import DEFAULT
from tvm_fusion.tuning.session.finals import CLEAN_US, Finals
from tvm_fusion.tuning.session.session import TimeLimit

from .test_session import SETTINGS, make_session, no_process_stays, no_process_stays_on, tested  # noqa: F401


@pytest.mark.long
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


@pytest.mark.usefixtures("tested")
def test_finals_take_what_builds_and_measurements_took():
    session, kept, state = make_session(replace(SETTINGS, trials=3))
    session.run()
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
    monkeypatch.setattr(session_module, "time", SimpleNamespace(monotonic=lambda: 1060.0))
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
