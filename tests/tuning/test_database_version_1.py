"""Folders of version 1, MetaSchedule's two files and a guard: taken over once, and nothing lost.

`tests/data/tuning_folder_v1` was made by that version: the trials of `trials_of_all`, a plan, and
a record that MetaSchedule's own `JSONDatabase` added.
"""

import json
import os
import shutil
from pathlib import Path

import pytest

from tvm_fusion.errors import InputError
from tvm_fusion.tuning.database import Database, check, foreign, merge, workload_key
from tvm_fusion.tuning.database.store import TRIALS

from ..support.tune_database_files import lines, reasons, write
from ..support.tune_database_tools import (
    DEVICE,
    WORKLOADS,
    content,
    expected,
    exported,
    in_child,
    judge_by_fork,
    ok,
    records_of,
    times,
    workload,
)

GIVEN = Path(__file__).parent.parent / "data" / "tuning_folder_v1"
FILES = ("guard.jsonl", "database_workload.json", "database_tuning_record.json")
GUARD, WORK, RECORDS = FILES
PLAN = {"groups": [{"ops": ["a", "b"], "us": 1.25}], "b": None, "a": "é"}
ADDED = workload_key(workload(128))
A, B, C = map(workload_key, WORKLOADS)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of version 1."""
    monkeypatch.setattr(foreign, "judge", judge_by_fork)
    return Path(shutil.copytree(GIVEN, tmp_path / "D"))


def check_all(database, trials=None):
    """Whether a database has all that the folder holds, or these trials of version 1."""
    trials = expected() if trials is None else trials
    assert content(database)[: len(trials)] == trials
    ((key, trial),) = content(database)[len(trials) :]
    assert (key, trial.kind) == (ADDED, "trace")
    assert '"Split"' in trial.text
    assert (trial.us, trial.checked) == (pytest.approx(5.0), False)
    assert database.plan("0123abcd") == PLAN


def test_it_is_read_by_who_only_reads_and_left_as_it_is(folder, caplog):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    database = Database.open(folder, None)
    check_all(database)
    database.refresh()
    check_all(database)
    assert (database.device, database.target["num-cores"]) == (DEVICE, 2)
    assert caplog.messages[0].startswith("1 problems in the database, listed by: ")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_the_next_session_puts_it_into_one_file_and_says_so(folder, caplog):
    said = f"{GUARD}: version 1 of the format: 8 trials, 1 plans; "
    (problem,) = check(folder).problems
    assert str(problem).startswith(f"{said}would be put into {TRIALS}")
    check_all(Database.open(folder, DEVICE))
    assert caplog.messages == [f"{folder}: {said}put into {TRIALS}, the old files into old.<n>"]
    assert check(folder).ok
    for name in (*FILES, "plans/0123abcd.json"):
        assert (folder / "old.1" / name).read_bytes() == (GIVEN / name).read_bytes()
        assert not (folder / name).exists()
    database = Database.open(folder, DEVICE)
    check_all(database)
    assert database.problems == ()
    assert times(exported(database)) == times(records_of(content(database)))
    database.add(WORKLOADS[0], _target(), ok("Config(tile=8)", 1.0))
    assert len(Database.open(folder, None)) == 9


def _target():
    import tvm

    return tvm.target.Target(json.loads(lines(GIVEN, GUARD)[0])["target"])


@pytest.mark.parametrize("last", range(5))
def test_killed_at_any_step_the_next_session_begins_again(folder, last):
    with pytest.raises(AssertionError, match="the process ends with 9"):
        in_child(_end_in_step, folder, last)
    check_all(Database.open(folder, None))
    database = Database.open(folder, DEVICE)
    check_all(database)
    assert len(lines(folder)) == 1 + 4 + 8 + 1
    assert not any((folder / name).exists() for name in FILES)


def _end_in_step(folder, last):
    steps, replace = iter(range(9)), os.replace

    def replacing(source, target):
        if next(steps) == last:
            os._exit(9)
        replace(source, target)

    os.replace = replacing
    if last == 4:
        foreign.retire = None  # behind the append
        os.fsync = lambda file: os._exit(9) if os.fstat(file).st_size > 1 << 16 else None
    Database.open(folder, DEVICE)


def test_sources_of_version_1_are_merged(folder, tmp_path):
    (merged,) = merge([folder], tmp_path / "F").folders
    assert (merged.added, merged.present) == (8, 0)
    check_all(Database.open(tmp_path / "F" / DEVICE, DEVICE))
    assert (folder / GUARD).exists()


def test_a_damaged_line_of_the_guard_costs_its_trial_whose_record_stays_unchecked(folder):
    found = lines(folder, GUARD)
    write(folder, [x.replace(b'"us":4.0', b'"us":3.0') for x in found], GUARD)
    database = Database.open(folder, DEVICE)
    *others, _, (key, trial) = content(database)
    assert others == expected()[1:]
    assert (key, trial.text, trial.checked) == (A, "Config(tile=1)", False)
    assert f"{GUARD} line 3: the checksum is wrong; left out" in reasons(database)


def test_a_lost_guard_leaves_the_records_unchecked(folder):
    (folder / GUARD).unlink()
    found = content(Database.open(folder, DEVICE))
    assert records_of(found) == records_of([*expected(), found[-1]])
    assert [trial.checked for _, trial in found] == [False] * 6


@pytest.mark.parametrize("order", [(1, 0, 2, 3), (1, 2, 0, 3)])
def test_records_find_no_wrong_workload_when_lines_change_places(folder, order):
    found = lines(folder, WORK)
    write(folder, [found[n] for n in order], WORK)
    check_all(Database.open(folder, DEVICE))


@pytest.mark.parametrize("name", [WORK, RECORDS])
def test_damaged_lines_of_the_other_files_cost_themselves(folder, name):
    write(folder, [b"garbage\n", *lines(folder, name)[1:]], name)
    database = Database.open(folder, DEVICE)
    check_all(database)
    assert f"{name} line 1: not JSON" in reasons(database)
    assert (A in database.modules()) == (name == RECORDS)


def test_a_workload_under_the_hash_of_another_is_left_out(folder):
    (folder / GUARD).unlink()
    found = lines(folder, WORK)
    found[0] = json.dumps([json.loads(found[0])[0], json.loads(found[1])[1]]).encode() + b"\n"
    write(folder, found, WORK)
    database = Database.open(folder, DEVICE)
    assert set(database.keys) == {B, C, ADDED}
    assert "structural hash is" in reasons(database)


def test_another_version_or_device_is_not_opened(folder):
    with pytest.raises(InputError, match=r"is of test_cpu.*, not of other"):
        Database.open(folder, "other")
    from tvm_fusion.tuning.database.lines import canonical, digest

    body = json.loads(lines(folder, GUARD)[0]) | {"v": 7}
    del body["checksum"]
    body["checksum"] = digest(canonical(body))
    write(folder, [canonical(body).encode() + b"\n", *lines(folder, GUARD)[1:]], GUARD)
    with pytest.raises(InputError, match="has version 7 of the format"):
        Database.open(folder, DEVICE)
    assert (folder / GUARD).exists()
