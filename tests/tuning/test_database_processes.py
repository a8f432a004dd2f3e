"""Several processes on one folder, and processes that are killed: no trial is lost."""

import os
import random
import signal
import time

import pytest

from tvm_fusion.host import appended_files
from tvm_fusion.host.atomic_files import replace_file
from tvm_fusion.tuning.database import store, workload_key
from tvm_fusion.tuning.database.store import DAMAGED, TRIALS

from ..support.tune_database import (
    FORK,
    TARGET,
    content,
    expected,
    exported,
    failed,
    in_child,
    ok,
    open_,
    records_of,
    workload,
)

MANY = [workload(8 * n) for n in range(1, 13)]
KILLS = 20


def test_two_processes_add_to_one_folder(tmp_path):
    children = [FORK.Process(target=_add_some, args=(tmp_path / "D", n)) for n in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0]
    database = open_(tmp_path / "D")
    assert database.problems == ()
    found = content(database)
    assert set(found) == {(workload_key(func), trial) for n in range(2) for func, trial in _some(n)}
    assert len(found) == 40
    assert exported(database) == records_of(found)


def _some(n):
    """Workloads that both processes have, and some of one's own."""
    for i in range(20):
        text = f"Config(n={n},i={i})"
        func = MANY[i % 4 + (4 * n if i % 3 else 8)]
        yield func, failed(text) if i % 5 == 0 else ok(text, 1.0 + i)


def _add_some(folder, n):
    database = open_(folder)
    for func, trial in _some(n):
        database.add(func, TARGET, trial)


def test_what_others_wrote_is_seen_by_the_next_call(folder):
    one, two = open_(folder), open_(folder)
    one.add(MANY[6], TARGET, ok("one", 1.0))
    assert two.trials(MANY[6]) == ()
    two.refresh()
    assert two.trials(MANY[6])[0].text == "one"
    two.add(MANY[8], TARGET, ok("two", 1.0))
    one.add(MANY[10], TARGET, ok("three", 1.0))
    assert content(one) == content(open_(folder))
    assert exported(one) == records_of(content(one))


def test_killed_at_any_moment_all_but_the_running_trial_is_there(tmp_path):
    rng = random.Random(7)
    acknowledged = []
    for run in range(KILLS):
        here, there = FORK.Pipe(duplex=False)
        child = FORK.Process(target=_add_forever, args=(tmp_path / "D", run, there))
        child.start()
        there.close()
        if run % 2:  # while it writes; else also before
            assert here.poll(60)
        time.sleep(rng.uniform(0.0, 0.15))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        acknowledged += _drain(here)
        found = content(open_(tmp_path / "D"))
        assert set(acknowledged) <= set(found)
        assert len(found) <= len(acknowledged) + run + 1
    assert len(acknowledged) >= KILLS // 2
    assert exported(open_(tmp_path / "D")) == records_of(found)
    assert open_(tmp_path / "D").problems == ()


def _add_forever(folder, run, pipe):
    database = open_(folder)
    for n in range(10_000):
        func = MANY[(run + n) % len(MANY)]
        trial = failed(f"C(run={run},n={n})") if n % 4 == 0 else ok(f"C(run={run},n={n})", 1.0 + n)
        database.add(func, TARGET, trial)
        pipe.send((workload_key(func), trial))


def _drain(pipe):
    found = []
    while True:
        try:
            found.append(pipe.recv())
        except (EOFError, OSError):
            return found


@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.98, 0.999, 1.0])
def test_an_append_that_ends_after_any_part_is_put_right(folder, part):
    new = MANY[10]
    with pytest.raises(AssertionError, match="the process ends with 9"):
        in_child(_end_in_write, folder, new, part)
    database = open_(folder)
    found = content(database)
    assert found[: len(expected())] == expected()
    assert len(found) <= len(expected()) + 1
    assert exported(database) == records_of(found)
    again = open_(folder)
    assert again.problems == ()
    again.add(new, TARGET, ok("default", 1.0))
    assert len(again) == len(expected()) + 1
    assert exported(again) == records_of(content(again))


def _end_in_write(folder, func, part):
    database = open_(folder)
    write = os.write

    def writing(file, data):
        write(file, data[: round(len(data) * part)])
        os._exit(9)

    appended_files.os.write = writing
    database.add(func, TARGET, ok("default", 1.0))


@pytest.mark.parametrize("moment", ["before", "between", "behind"])
def test_a_repair_that_ends_on_the_way_is_made_again(folder, moment):
    path = folder / TRIALS
    path.write_bytes(path.read_bytes() + b"garbage\n")
    with pytest.raises(AssertionError, match="the process ends with 9"):
        in_child(_end_in_repair, folder, moment)
    assert content(open_(folder)) == expected()
    assert open_(folder).problems == ()
    assert b"garbage" in (folder / DAMAGED).read_bytes()


def _end_in_repair(folder, moment):
    def replacing(path, text):
        if moment == "behind":
            replace_file(path, text)
        os._exit(9)

    if moment == "before":
        store._described = lambda *_: os._exit(9)
    store.replace_file = replacing
    open_(folder)
