"""Schedules are evolved in processes of their own, while trials go on."""

import json
import logging
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import tvm

from tvm_fusion.config import load_policy
from tvm_fusion.errors import Unsupported
from tvm_fusion.tuning.measure.building import Place
from tvm_fusion.tuning.measure.processes import wait_for
from tvm_fusion.tuning.measure.trial_record import Trial
from tvm_fusion.tuning.search import evolutionary_search as evolve
from tvm_fusion.tuning.search import proposing
from tvm_fusion.tuning.search.proposing import Ask, propose
from tvm_fusion.tuning.search.task_schedules import Evolution, Search, evolution_of
from tvm_fusion.tuning.search.thinking import Thinkers
from tvm_fusion.tuning.session.choices import DEFAULT, Choice
from tvm_fusion.tuning.session.settings import load_settings
from tvm_fusion.tuning.session.task_state import TaskState
from tvm_fusion.tuning.session.tasks import without_stamps

from ..support import tune_proposers
from ..support.tune_functions import fused
from .test_session import SETTINGS, make_session, no_process_stays, no_process_stays_on, tested  # noqa: F401  # noqa: F401  # noqa: F401

PLACE = Place("llvm", load_policy(None))
BATCH = 4


def search(workload="x", *, batch=BATCH, trials=100, **options):
    return Search(workload, "own", seed=1, trials=trials, batch=batch, **options)


def trial(text, us=1.0):
    if us is None:
        return Trial("trace", text, "crash")
    return Trial("trace", text, "ok", us, 0.0, (us,))


# ---- what a session knows of a search


def test_a_search_is_asked_again_when_all_of_its_batch_is_measured():
    one, two = search("x", known=[("[[],[3]]", 9.0)]), search("y")
    evolution = Evolution([one, two], 0.4)
    assert evolution.free == [one, two]
    asked = one.ask()
    assert (asked.told, asked.left, asked.batch) == ((("[[],[3]]", 9.0),), 100, BATCH)
    assert evolution.free == [two]
    assert evolution.next() is None
    evolution.found(one, ["[[],[1]]", "[[],[2]]"])
    evolution.found(two, ["[[],[2]]", "[[],[4]]"])
    texts = []
    while (text := evolution.next()) is not None:
        evolution.take(text)
        texts.append(text)
    assert texts == ["[[],[1]]", "[[],[2]]", "[[],[4]]"]
    evolution.tell([], 10.0)
    evolution.tell([trial(texts[1], None)], 10.0)
    assert evolution.free == []
    evolution.tell([trial(texts[0], 5.0)], 5.0)
    assert evolution.free == [one]
    assert evolution.promise(one) == evolution.promise(two) == 0.1
    asked = one.ask()
    assert asked.told[1:] == ((texts[1], None), (texts[0], 5.0))
    evolution.tell([trial(texts[2], 7.0)], 5.0)
    assert evolution.promise(one) == 0.1
    assert evolution.promise(two) == 0.05  # faster than before, but not the best
    assert evolution.free == [two]
    assert two.ask().told == (*asked.told[1:], (texts[2], 7.0))  # whoever proposed it
    evolution.found(one, [])
    evolution.give_up(two)
    assert evolution.free == []


def text_of(*numbers):
    return json.dumps([[], [int(n) for n in numbers]], separators=(",", ":"))


def try_out(evolution, one, text, us, best_us):
    """One search proposes one schedule, which is tried."""
    one.ask()
    evolution.found(one, [text])
    evolution.take(text)
    evolution.tell([trial(text, us)], best_us)


def test_trials_go_to_the_search_that_brings_something():
    poor, good = search("x"), search("y")
    evolution = Evolution([poor, good], 0.4)
    evolution.tell([], 10.0)
    best_us, asked = 10.0, []
    for turn in range(6):
        free = evolution.free
        asked.append(["good" if one is good else "poor" for one in free])
        for one in free:
            better = best_us * (0.9 if turn < 3 else 0.995)
            us = better if one is good else 15.0
            best_us = min(best_us, us)
            try_out(evolution, one, text_of(turn, one is good), us, best_us)
    both, alone = ["good", "poor"], ["good"]
    # `poor` waits while it promises a quarter of what `good` does, which brings nothing from turn 3
    assert asked == [["poor", "good"], both, alone, alone, both, both]


def test_a_search_without_trials_left_holds_nobody_up():
    poor, good = search("x"), search("y", trials=1)
    evolution = Evolution([poor, good], 0.4)
    evolution.tell([], 10.0)
    for turn in range(2):
        try_out(evolution, poor, text_of(turn, 0), 15.0, 10.0)
    assert evolution.free == [good]
    try_out(evolution, good, text_of(0, 1), 5.0, 5.0)
    assert evolution.free == [poor]


def test_what_promises_most_is_tried_first_and_thought_about():
    """Though schedules of a search that promises little are ready before it."""
    poor, good = search("x"), search("y")
    state = a_state(poor)
    state.evolution = evolution = Evolution([poor, good], 0.4)
    evolution.tell([], 10.0)
    try_out(evolution, poor, text_of(0, 0), 15.0, 10.0)
    poor.ask()
    evolution.found(poor, [text_of(1, 0)])
    assert evolution.expected_share == 0.05
    assert state.propose().gain_us == pytest.approx(0.5)
    assert state.promising() == [(good, pytest.approx(1.0))]
    good.ask()
    evolution.found(good, [text_of(1, 1)])
    assert evolution.next() == text_of(1, 1)
    assert evolution.expected_share == 0.1
    assert state.promising() == []


def test_a_batch_of_failures_brings_nothing():
    one = search("x")
    evolution = Evolution([one], 0.4)
    for turn in range(2):
        try_out(evolution, one, text_of(turn), None, None)
    assert evolution.promise(one) == 0.1 / BATCH
    assert evolution.expected_share == 0.0


def test_a_batch_that_is_found_before_the_untuned_kernel_is_measured_has_to_be_better():
    one = search("x")
    evolution = Evolution([one], 0.4)
    one.ask()
    evolution.found(one, [text_of(0)])
    evolution.tell([], 10.0)
    evolution.take(text_of(0))
    evolution.tell([trial(text_of(0), 9.95)], 9.95)
    assert evolution.promise(one) == 0.05


def test_no_more_trials_are_asked_for_than_are_left():
    one = search(trials=6)
    one.ask()
    one.found(["a", "b", "c", "d"])
    for text in "abcd":
        one.tell(text, 1.0)
    assert (one.ask().left, one.ask().batch) == (2, 2)
    one.found(["e", "f"])
    one.tell("e", 1.0)
    one.tell("f", 1.0)
    assert not one.is_free


# ---- what a process answers


@pytest.fixture
def few(monkeypatch):
    """Small populations, and a process that has seen no search."""
    monkeypatch.setattr(evolve, "Evolving", partial(evolve.Evolving, population=12))
    monkeypatch.setattr(proposing, "_kept", {})


def two_batches(workload, lose=False):
    ask = Ask(workload, "own", 1, (), 8, BATCH)
    first = propose(PLACE, ask)
    if lose:
        proposing._kept.clear()
    told = tuple((text, 10.0 + i) for i, text in enumerate(first))
    return first, propose(PLACE, replace(ask, told=told, left=4))


def test_searches_of_a_process_that_died_are_built_from_what_was_measured(few):
    workload = tvm.ir.save_json(fused("chain"))
    first, second = two_batches(workload)
    assert len(first) == len(second) == BATCH
    assert set(first).isdisjoint(second)
    assert proposing._kept[workload, "own"].search.left == 0
    proposing._kept.clear()
    assert two_batches(workload) == (first, second)
    proposing._kept.clear()
    _, again = two_batches(workload, lose=True)
    assert len(again) == BATCH
    assert set(first).isdisjoint(again)


def test_schedules_whose_numbers_nobody_compared_are_tried_first(few):
    func = fused("chain")
    first = propose(PLACE, Ask(tvm.ir.save_json(func), "own", 1, (), 8, BATCH))
    known = [trial(text, 10.0 - n) for n, text in enumerate(first)]
    known[0] = replace(known[0], error=0.0)
    task = SimpleNamespace(workload=func, kernel_class="nest")
    own, stock = evolution_of(task, SimpleNamespace(kind="llvm"), load_settings(), known).free
    asked = own.ask()
    assert asked.told == ((first[0], 10.0),)
    assert stock.ask().seeds == ()
    proposing._kept.clear()
    assert propose(PLACE, asked)[:3] == first[:0:-1]  # the fastest before the others


# ---- processes


def a_state(one, *, count=1):
    """A task whose untuned kernel takes 10 us."""
    task = SimpleNamespace(name=one.space, count=count, predicted_us=10.0)
    state = TaskState(task, [Choice("class", DEFAULT, 10.0)], SETTINGS, Evolution([one], 0.4))
    state.restore([Trial("class", DEFAULT, "ok", 10.0, 0.0, (10.0,))])
    return state


@pytest.fixture
def thinkers():
    found = Thinkers(PLACE, load_settings({}))
    yield found
    found.stop()


def think(thinkers, states):
    """Thinks about what promises most until all searches have said something or are left."""
    while True:
        thinkers.begin([s for s in states if s.evolution.next() is None], 0.0)
        if not thinkers.busy:
            return
        wait_for(thinkers.busy, 1.0)
        thinkers.collect()


def test_a_search_that_dies_or_refuses_is_left_and_the_others_go_on(thinkers, caplog):
    proposers = (tune_proposers.die, tune_proposers.refuse, tune_proposers.count_up)
    states = [a_state(search("t", propose=p), count=9 - i) for i, p in enumerate(proposers)]
    with caplog.at_level(logging.INFO, "tvm_fusion.tuning.search.thinking"):
        think(thinkers, states)
    assert [state.evolution.next() for state in states] == [None, None, "t0"]
    died, refused = caplog.records
    assert (died.levelno, refused.levelno) == (logging.WARNING, logging.INFO)
    assert "crash" in died.getMessage()
    assert "no design space" in refused.getMessage()


def test_a_search_that_hangs_is_left_in_time(caplog):
    state = a_state(search(propose=tune_proposers.hang))
    thinkers = Thinkers(PLACE, load_settings({"evolve_timeout_s": 1}))
    think(thinkers, [state])
    thinkers.stop()
    assert state.evolution.free == []
    assert "no answer within 1 s" in caplog.text


def test_what_saves_nothing_is_not_thought_about(thinkers):
    idle, small = (a_state(search(propose=tune_proposers.hang), count=n) for n in (0, 1))
    thinkers.begin([idle], 0.0)
    thinkers.begin([small], 1.1)
    assert [gain for _, gain in small.promising()] == [pytest.approx(1.0)]
    assert [gain for _, gain in idle.promising()] == [0.0]
    assert thinkers.busy == []


# ---- sessions


@pytest.mark.usefixtures("tested")
def test_trials_of_other_tasks_go_on_while_a_slow_search_thinks(tmp_path):
    session, kept, state = make_session(choices=(DEFAULT, "plain", "fast"))
    slow = search(str(tmp_path / "go"), propose=tune_proposers.wait_for_file)
    other = TaskState(state.task, state.choices[:1], SETTINGS, Evolution([slow], 0.3))
    session.states = [state, other]
    seen = []

    def watch(session):
        seen.append(bool(session._thinkers.busy))
        if len(kept.found) == 3:  # the untuned kernel of both, and the other of the first
            (tmp_path / "go").touch()

    session.watch = watch
    session.run()
    assert seen[:3] == [True] * 3
    assert kept.of("fast")[0].ok
    assert other.evolution.free == []
    assert session._thinkers.busy == []


@pytest.mark.usefixtures("tested")
def test_an_interrupt_ends_what_thinks():
    session, kept, state = make_session(choices=(DEFAULT,))
    state.evolution = Evolution([search(propose=tune_proposers.hang)], 0.3)

    def interrupt(session):
        (worker,) = session._thinkers.busy
        thinking.append(worker)
        raise KeyboardInterrupt

    thinking = []
    session.watch = interrupt
    with pytest.raises(KeyboardInterrupt):
        session.run()
    assert [t.text for t in kept.found] == [DEFAULT]
    assert session._thinkers.busy == []
    assert not thinking[0].busy
    assert thinking[0].connection is None


@pytest.mark.long
@pytest.mark.usefixtures("tested")
def test_a_session_ends_and_is_resumed_in_the_middle_of_an_evolution():
    def evolved(trials, known=()):
        settings = replace(SETTINGS, trials=trials, final_repeats=5)
        session, kept, state = make_session(settings, known, choices=(DEFAULT,))
        workload = tvm.ir.save_json(without_stamps(state.task.workload))
        tried = [(t.text, t.us) for t in known if t.kind == "trace"]
        state.evolution = Evolution([search(workload, batch=BATCH, known=tried)], 0.3)
        session.run()
        assert session.trials == trials
        assert session._thinkers.busy == []
        return [t for t in kept.found if len(t.samples_us) == 5 or not t.ok], state

    first, _ = evolved(6)
    texts = {t.text for t in first}
    assert DEFAULT in texts
    assert len(texts) == 6
    again, state = evolved(2, first)
    assert texts.isdisjoint({t.text for t in again} - {t.text for t in state.finalists()})
    assert len(state.trials) == 8


def test_a_space_that_holds_no_schedule_is_an_error_of_the_request(few):
    with pytest.raises(Unsupported):
        propose(PLACE, Ask(tvm.ir.save_json(scheduled()), "own", 1, (), 4, 4))


def scheduled():
    from tvm_fusion.tuning.search import replay

    func = fused("chain")
    (text,) = evolve.Evolving(
        func, tvm.target.Target("nvidia/nvidia-h100"), trials=1, batch=1, population=12
    ).ask(1)
    return replay.scheduled(func, text)
