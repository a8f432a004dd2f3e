"""Folders of version 1, MetaSchedule's two files and a guard: taken over once, and nothing lost.

`tests/data/tuning_folder_v1` was made by that version: the trials of `trials_of_all`, a plan, and
a record that MetaSchedule's own `JSONDatabase` added.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import tvm

from tvm_fusion.errors import InputError
from tvm_fusion.host import appended_files
from tvm_fusion.tuning.database import Database, check, foreign, merge, store, workload_key
from tvm_fusion.tuning.database.lines import canonical, digest
from tvm_fusion.tuning.database.store import TRIALS

from ..support.tune_database import (
    DEVICE,
    WORKLOADS,
    ForkedWorker,
    content,
    expected,
    exported,
    in_child,
    lines,
    ok,
    reasons,
    records_of,
    times,
    workload,
    write,
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
    monkeypatch.setattr(foreign, "Worker", ForkedWorker)
    return Path(shutil.copytree(GIVEN, tmp_path / "D"))


def check_all(database):
    """Whether a database has all that the folder holds."""
    *others, (key, trial) = content(database)
    assert others == expected()
    assert (key, trial.kind) == (ADDED, "trace")
    assert '"Split"' in trial.text
    assert (trial.us, trial.checked) == (pytest.approx(5.0), False)
    assert database.plan("0123abcd") == PLAN


def test_who_only_reads_leaves_it_and_the_next_session_puts_it_into_one_file(folder, caplog):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    reader = Database(folder, None)
    reader.refresh()
    check_all(reader)
    assert (reader.device, reader.target["num-cores"], reader.problems) == (DEVICE, 2, ())
    said = f"{GUARD}: version 1 of the format, 8 trials, 1 plans; "
    report = check(folder)
    assert report.ok
    (note,) = [text for text in report.folders[0].notes if "unchecked" not in text]
    assert note.startswith(f"{said}would be put into {TRIALS}")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert caplog.messages == []
    check_all(Database(folder, DEVICE))
    assert caplog.messages == [f"{folder}: {said}put into {TRIALS}, the old files into old.<n>"]
    for name in (*FILES, "plans/0123abcd.json"):
        assert (folder / "old.1" / name).read_bytes() == (GIVEN / name).read_bytes()
        assert not (folder / name).exists()
    database = Database(folder, DEVICE)
    check_all(database)
    assert times(exported(database)) == times(records_of(content(database)))
    target = tvm.target.Target(json.loads(lines(GIVEN, GUARD)[0])["target"])
    database.add(WORKLOADS[0], target, ok("Config(tile=8)", 1.0))
    assert len(Database(folder, None)) == 9


@pytest.mark.parametrize("last", range(5))
def test_killed_at_any_step_the_next_session_begins_again(folder, last):
    with pytest.raises(AssertionError, match="the process ends with 9"):
        in_child(_end_in_step, folder, last)
    check_all(Database(folder, None))
    database = Database(folder, DEVICE)
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
    Database(folder, DEVICE)


def test_others_may_write_while_its_lines_are_judged_and_lose_nothing(folder, monkeypatch):
    monkeypatch.setattr(appended_files, "LOCK_TIMEOUT_S", 0.05)
    last, plain = lines(folder, RECORDS)[-1], store.read_version_1
    write(folder, lines(folder, RECORDS)[:-1], RECORDS)

    def reading(*arguments):
        found = plain(*arguments)
        if last not in lines(folder, RECORDS):
            with appended_files.locked(folder):  # another process appends with the old version
                write(folder, [*lines(folder, RECORDS), last], RECORDS)
        return found

    monkeypatch.setattr(store, "read_version_1", reading)
    check_all(Database(folder, DEVICE))


def test_sources_of_version_1_are_merged(folder, tmp_path):
    (merged,) = merge([folder], tmp_path / "F").folders
    assert merged.counts == {"added": 8, "present": 0}
    check_all(Database(tmp_path / "F" / DEVICE, DEVICE))
    assert (folder / GUARD).exists()


def test_a_damaged_line_of_the_guard_costs_its_trial_whose_record_stays_unchecked(folder):
    found = lines(folder, GUARD)
    write(folder, [x.replace(b'"us":4.0', b'"us":3.0') for x in found], GUARD)
    database = Database(folder, DEVICE)
    *others, (key, trial), _ = content(database)
    assert others == expected()[1:]
    assert (key, trial.text, trial.checked) == (A, "Config(tile=1)", False)
    assert f"{GUARD} line 3: the checksum is wrong; left out" in reasons(database)


def test_a_lost_guard_leaves_the_records_unchecked(folder):
    (folder / GUARD).unlink()
    workloads = lines(folder, WORK)
    workloads[0] = json.dumps([A, json.loads(workloads[1])[1]]).encode() + b"\n"
    write(folder, workloads, WORK)  # under the hash of another
    database = Database(folder, DEVICE)
    found = content(database)
    assert set(database.content().workloads) == {B, C, ADDED}
    assert "structural hash is" in reasons(database)
    assert records_of(found) == records_of([x for x in [*expected(), found[-1]] if x[0] != A])
    assert not any(trial.checked for _, trial in found)


@pytest.mark.parametrize("order", [(1, 0, 2, 3), (1, 2, 0, 3)])
def test_records_find_no_wrong_workload_when_lines_change_places(folder, order):
    found = lines(folder, WORK)
    write(folder, [found[n] for n in order], WORK)
    check_all(Database(folder, DEVICE))


@pytest.mark.parametrize("name", [WORK, RECORDS])
def test_damaged_lines_of_the_other_files_cost_themselves(folder, name):
    write(folder, [b"garbage\n", *lines(folder, name)[1:]], name)
    database = Database(folder, DEVICE)
    check_all(database)
    assert f"{name} line 1: not JSON" in reasons(database)
    assert (A in database.content().workloads) == (name == RECORDS)


def test_another_version_or_device_is_not_opened(folder):
    with pytest.raises(InputError, match=r"is of test_cpu.*, not of other"):
        Database(folder, "other")
    body = json.loads(lines(folder, GUARD)[0]) | {"v": 7}
    del body["checksum"]
    body["checksum"] = digest(canonical(body))
    write(folder, [canonical(body).encode() + b"\n", *lines(folder, GUARD)[1:]], GUARD)
    with pytest.raises(InputError, match="has version 7 of the format"):
        Database(folder, DEVICE)
    assert (folder / GUARD).exists()
