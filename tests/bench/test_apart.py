"""Compilers in processes of their own, asked in turns."""

import os

import pytest

from tvm_fusion.bench.apart import (
    INSTRUCTIONS,
    SLOW_REPEATS,
    Failed,
    Process,
    cores_for,
    in_rounds,
)
from tvm_fusion.errors import InputError
from tvm_fusion.host.cores import usable_cores

from ..support.apart_makers import make_death, make_something, make_spinner, make_variables


@pytest.mark.usefixtures("no_torch")
def test_a_process_has_threads_and_cores_of_its_own_and_lives_on_after_a_failure():
    before = dict(os.environ)
    with Process(make_something, 1) as process:
        pid, threads, cores = process.make("a")
        assert pid != os.getpid()
        assert set(threads.values()) == {"1"}
        assert cores == 1
        assert 0 < process.time(3) < 1
        with pytest.raises(Failed, match=r"^ValueError: the maker's own words$"):
            process.make("fail")
        assert process.make("b")[0] == pid
    assert dict(os.environ) == before
    assert len(usable_cores()) >= cores


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("instructions", [*INSTRUCTIONS, None])
def test_a_process_keeps_to_a_set_of_instructions_and_its_neighbours_do_not(instructions):
    names = sorted({name for limits in INSTRUCTIONS.values() for name in limits})
    here = {name: os.environ.get(name) for name in names}
    with Process(make_variables, 1, instructions=instructions) as process:
        found = process.make(names)
    assert found == here | INSTRUCTIONS.get(instructions, {})
    assert {name: os.environ.get(name) for name in names} == here


@pytest.mark.usefixtures("no_torch")
def test_a_process_that_died_says_so_and_the_next_request_has_a_new_one():
    with Process(make_something, 1) as process:
        first = process.make("a")[0]
        with pytest.raises(Failed, match="ended with status 7"):
            process.make("die")
        assert process.make("b")[0] != first


@pytest.mark.usefixtures("no_torch")
def test_who_does_not_answer_in_time_is_given_up():
    with Process(make_something, 1) as process, pytest.raises(Failed, match=r"within 0\.001 s"):
        process.make("a", limit_s=0.001)


@pytest.mark.usefixtures("no_torch")
def test_threads_that_go_on_after_a_call_are_waited_for():
    with Process(make_spinner, 1) as process:
        process.make()
        process.time()
        assert process.make() == 0


# Always: one that fails in its turn, and a process that died.
@pytest.mark.nightly
@pytest.mark.usefixtures("no_torch")
def test_the_death_of_one_is_no_end_for_the_others():
    with Process(make_death, 1) as mortal, Process(make_something, 1) as other:
        mortal.make()
        other.make("a")
        times, failures = in_rounds({"mortal": mortal, "other": other}, repeats=4)
    assert failures == {"mortal": "its process ended with status 9"}
    assert times["other"].samples == 4


class Slow:
    """Stands in for a process."""

    def __init__(self, log, name, seconds):
        self.log, self.name, self.seconds = log, name, seconds

    def time(self, number, _limit):
        self.log.append((self.name, number))
        return self.seconds


class Mortal(Slow):
    """Ends when it is asked for the third time."""

    def time(self, number, limit):
        if len(self.log) == 2:
            raise Failed("its process ended with status 9")
        return super().time(number, limit)


def test_one_that_fails_in_its_turn_is_no_end_for_the_others():
    processes = {"mortal": Mortal([], "mortal", 1e-4), "other": Slow([], "other", 1e-4)}
    times, failures = in_rounds(processes, repeats=4)
    assert failures == {"mortal": "its process ended with status 9"}
    assert times["other"].samples == 4


def test_turns_alternate_and_slow_calls_get_few_of_them():
    log = []
    processes = {"slow": Slow(log, "slow", 0.5), "fast": Slow(log, "fast", 0.0001)}
    times, _ = in_rounds(processes, repeats=SLOW_REPEATS + 2)
    turns = [("slow", 1), ("fast", 20)] * SLOW_REPEATS + [("fast", 20)] * 2
    assert log == [("slow", 1)] * 2 + [("fast", 1)] * 2 + turns
    assert times["slow"].median_us == 5e5
    assert (times["slow"].samples, times["fast"].samples) == (SLOW_REPEATS, SLOW_REPEATS + 2)


@pytest.mark.parametrize("threads", [0, -1, 10**6])
def test_more_threads_than_cores_or_none_are_refused(threads):
    with pytest.raises(InputError, match="--threads: expected 1 to"):
        cores_for(threads)


def test_physical_cores_come_before_second_threads_of_them(monkeypatch):
    pairs = frozenset({frozenset({0, 2}), frozenset({1, 3})})
    monkeypatch.setattr("tvm_fusion.bench.apart.usable_cores", lambda: frozenset(range(4)))
    monkeypatch.setattr("tvm_fusion.bench.apart.physical_cores", lambda _: pairs)
    assert [cores_for(count) for count in (1, 2, 3)] == [[0], [0, 1], [0, 1, 2]]
