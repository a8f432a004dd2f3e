"""Kernels of other cuts get trials only while their cut may win."""

import pytest

from tvm_fusion.tuning.database.trial import Trial
from tvm_fusion.tuning.search.task_search import OPEN, Rival, TaskState
from tvm_fusion.tuning.session.choices import CLASS_CHOICE, DEFAULT, Choice
from tvm_fusion.tuning.session.settings import load_settings
from tvm_fusion.tuning.session.tasks import Task

LAUNCH_US = 2.0
CHOICES = [Choice(CLASS_CHOICE, DEFAULT), Choice(CLASS_CHOICE, "Way(threads=64)")]


def make_state(count, us=None, status="ok"):
    """The state of a task that takes `us`, if it was measured."""
    task = Task(None, "tested", 1, count, 10.0, (("op",),))
    state = TaskState(task, CHOICES, load_settings())
    if us is not None or status != "ok":
        found = (us,) * 9 if us is not None else ()
        why = "" if status == "ok" else "does not compile"
        state.restore([Trial(CLASS_CHOICE, DEFAULT, status, us, 0.0, found, 0.0, why=why)])
    return state


def make_rival(now, other):
    rival = Rival((now,), tuple(other), LAUNCH_US)
    for state in other:
        state.rivals.append(rival)
    return rival


@pytest.mark.parametrize(
    ("times", "is_open"),
    [((5.0, 4.0), True), ((20.0, 20.0), False), ((5.0, OPEN * 12.0 - 9.0), True)],
)
def test_a_cut_is_open_while_it_is_about_as_fast(times, is_open):
    other = [make_state(0, us) for us in times]
    rival = make_rival(make_state(1, 10.0), other)
    assert rival.is_open == is_open
    assert [bool(s.next_choices(1, 0.0)) for s in other] == [is_open] * 2


def test_what_was_not_measured_is_measured_once():
    slow, unknown = make_state(0, 50.0), make_state(0)
    rival = make_rival(make_state(1, 10.0), [slow, unknown])
    assert rival.is_open
    assert unknown.next_choices(1, 0.0)[0].text == DEFAULT


def test_a_cut_with_a_kernel_that_does_not_run_is_given_up():
    broken, fine = make_state(0, None, "build"), make_state(0, 1.0)
    assert not make_rival(make_state(1, 10.0), [broken, fine]).is_open
    assert fine.next_choices(1, 0.0) == []


def test_kernels_of_the_plan_are_tried_whatever_their_rivals():
    now = make_state(2, 10.0)
    make_rival(now, [make_state(0, 100.0)])
    assert now.weight == 2
    assert now.next_choices(1, 0.0)
