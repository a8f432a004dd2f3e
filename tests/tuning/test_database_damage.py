"""Damaged lines: what is left, what is taken out, and no record under a wrong kernel."""

import json

import pytest

from tvm_fusion.tuning.database import Database, workload_key
from tvm_fusion.tuning.database.guard import workload_line
from tvm_fusion.tuning.database.lines import canonical, parse_workload

from ..support.tune_database_files import (
    FILES,
    GUARD,
    RECORDS,
    WORK,
    copy_of_sound,
    edit,
    insert,
    lines,
    quarantined,
    reasons,
    reopened,
    without,
    write,
)
from ..support.tune_database_tools import (
    DEVICE,
    WORKLOADS,
    content,
    expected,
    fill,
    judge_by_fork,
    records_of,
    stock_records,
)

A, B, C = (workload_key(func) for func in WORKLOADS)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A sound database, to be damaged."""
    monkeypatch.setattr("tvm_fusion.tuning.database.strays.judge", judge_by_fork)
    return copy_of_sound(tmp_path / "D")


@pytest.mark.parametrize(
    ("number", "raw"), [(0, b"\n"), (1, b"[]\n"), (2, b"\xff\xfe\x00\n"), (3, b"garbage\n")]
)
@pytest.mark.parametrize("name", FILES)
def test_a_line_of_garbage_is_taken_out_and_nothing_is_lost(folder, name, number, raw):
    insert(folder, name, number, raw)
    database = reopened(folder)
    assert content(database) == expected()
    assert [len(found) for found in quarantined(folder).values()] == [1]
    assert f"{name} line {number + 1}" in reasons(database)


@pytest.mark.parametrize("left", [-1, -20])
@pytest.mark.parametrize(
    ("name", "lost"),
    [(RECORDS, []), (WORK, []), (GUARD, [6])],
    ids=["records", "workloads", "guard"],
)
def test_of_a_torn_last_line_only_the_trial_is_lost_that_was_being_written(
    folder, name, lost, left
):
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:left])
    database = reopened(folder)
    if left == -1:  # the line is whole
        assert content(database) == expected()
        assert quarantined(folder) == {}
        return
    assert content(database) == without(expected(), *lost)
    assert len(quarantined(folder)[name]) == 1


def test_trials_of_a_lost_workload_count_and_get_their_records_back_with_it(folder):
    write(folder, WORK, lines(folder, WORK)[:2])
    database = reopened(folder)
    assert content(database) == expected()
    assert database.best(C).text == "default"
    assert "2 trials are of 1 workloads without a line" in reasons(database)
    assert len(stock_records(folder)) == 4
    fill(folder)
    assert stock_records(folder) == records_of(expected())
    assert Database.open(folder, DEVICE).problems == ()


@pytest.mark.parametrize(
    "time", ["Infinity", "NaN", "-1e-6", "0", "1e10", "1e999", '"fast"', "null"]
)
def test_a_time_that_no_kernel_takes_is_written_again_from_the_guard(folder, time):
    found = lines(folder, RECORDS)
    payload = json.loads(found[2])[1]
    payload[1][1] = "TIME"
    found[2] = f"[0,{json.dumps(payload)}]\n".replace('"TIME"', time).encode()
    write(folder, RECORDS, found)
    assert content(reopened(folder)) == expected()
    assert len(quarantined(folder)[RECORDS]) == 1


def test_a_time_that_differs_from_the_guard_is_not_believed(folder):
    edit(folder, 2, lambda value: value[1][1].__setitem__(1, 1e-9))
    assert content(reopened(folder)) == expected()
    assert quarantined(folder)[RECORDS] == ["not as guard.jsonl has it"]


@pytest.mark.parametrize("order", [(1, 0, 2), (1, 2, 0)])
def test_records_find_their_workloads_when_the_lines_change_places(folder, order):
    found = lines(folder, WORK)
    write(folder, WORK, [found[n] for n in order])
    database = reopened(folder)
    assert content(database) == expected()
    assert "not in the order" in reasons(database)
    assert "under another workload's line; put right" in reasons(database)


def test_a_record_that_the_guard_does_not_know_is_not_believed_when_lines_change_places(folder):
    found = lines(folder, WORK)
    write(folder, WORK, [found[1], found[0], found[2]])
    guard = lines(folder, GUARD)
    write(folder, GUARD, [x for x in guard if b'predicted_us":3.5' not in x])
    database = reopened(folder)
    assert content(database) == without(expected(), 0)
    assert "the workload's line is not where it was written" in quarantined(folder)[RECORDS][0]


@pytest.mark.parametrize("index", [-1, 1, 10**30])
def test_a_record_with_the_number_of_another_line_finds_its_workload(folder, index):
    edit(folder, 0, lambda value: value.__setitem__(0, index))
    database = reopened(folder)
    assert content(database) == expected()
    assert "1 under another workload's line; put right" in reasons(database)


@pytest.mark.parametrize("index", [-1, 3, 10**30])
def test_a_record_of_no_line_that_the_guard_does_not_know_is_taken_out(folder, index):
    payload = json.loads(lines(folder, RECORDS)[0])[1]
    payload[1] = [5e-6]
    insert(folder, RECORDS, 1, f"[{index},{json.dumps(payload)}]\n".encode())
    assert content(reopened(folder)) == expected()
    assert "damaged or not there" in quarantined(folder)[RECORDS][0]


@pytest.mark.parametrize("guarded", [True, False])
def test_a_workload_under_the_hash_of_another_is_taken_out(folder, guarded):
    found = lines(folder, WORK)
    swapped = [json.loads(found[0])[0], json.loads(found[1])[1]]
    found[0] = json.dumps(swapped).encode() + b"\n"
    write(folder, WORK, found)
    if not guarded:
        (folder / GUARD).unlink()
    database = reopened(folder)
    assert "structural hash is" in quarantined(folder)[WORK][0]
    if guarded:  # trials are known by the hash
        assert content(database) == expected()
        assert database.best(A).text == "Config(tile=4)"
    else:
        assert {key for key, _ in content(database)} == {B, C}


def test_the_guard_does_not_vouch_for_a_digest_under_another_hash(folder):
    found = lines(folder, WORK)
    swapped = canonical([json.loads(found[0])[0], json.loads(found[1])[1]])
    found[0] = swapped.encode() + b"\n"
    write(folder, WORK, found)
    line = parse_workload(json.dumps([B, json.loads(swapped)[1]]).encode())
    insert(folder, GUARD, 1, (workload_line(DEVICE, line, 0) + "\n").encode())
    assert content(reopened(folder)) == expected()
    assert "structural hash is" in quarantined(folder)[WORK][0]


@pytest.mark.parametrize("name", FILES)
def test_a_line_that_is_there_twice_counts_once(folder, name):
    for number in (3, 1):
        if number < len(lines(folder, name)):
            insert(folder, name, number + 1, lines(folder, name)[number])
    database = reopened(folder)
    assert content(database) == expected()
    assert {"twice" in why for why in quarantined(folder)[name]} == {True}


def test_a_workload_that_is_there_twice_keeps_its_records(folder):
    insert(folder, WORK, 0, lines(folder, WORK)[2])
    assert content(reopened(folder)) == expected()
    assert len(lines(folder, WORK)) == 3
