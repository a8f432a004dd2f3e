"""Lines of unknown origin are tried in a process of their own."""

import json
import sys

import pytest
import tvm
from tvm.s_tir.meta_schedule.database import JSONDatabase, TuningRecord

from tvm_fusion.config import resolve_target
from tvm_fusion.errors import InputError
from tvm_fusion.tuning.database import check, foreign, import_folders, replay, tools, workload_key
from tvm_fusion.tuning.database.metaschedule import RECORDS, WORKLOADS

from ..support.tune_database_files import copy_of_sound, lines, write
from ..support.tune_database_tools import (
    TARGET,
    content,
    in_child,
    judge_by_fork,
    records_of,
    split_text,
    stock_records,
    times,
)
from ..support.tune_database_tools import WORKLOADS as ALL

A, B, C = ALL
_, HW = resolve_target("llvm")


@pytest.fixture
def stock(tmp_path):
    """A folder that MetaSchedule wrote: of three workloads a record each."""
    folder = tmp_path / "stock"
    folder.mkdir()
    in_child(_commit, str(folder))
    return folder


def _commit(folder):
    database = JSONDatabase(work_dir=folder)
    for number, func in enumerate(ALL, 1):
        mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
        loaded = database.commit_workload(mod)
        payload = [json.loads(split_text(func)), [number * 1e-6], json.loads(str(TARGET)), None]
        database.commit_tuning_record(TuningRecord.from_json(payload, loaded))


def import_(folder, into):
    return import_folders([folder], into, HW, TARGET)


def database_of(place):
    from tvm_fusion.tuning.database import find_database

    return find_database(place, HW, TARGET)


def test_records_of_metaschedule_are_imported_as_unchecked(stock, tmp_path):
    before = lines(stock, WORKLOADS), lines(stock, RECORDS)
    (found,) = import_(stock, tmp_path / "D").folders
    assert (found.added, found.present, found.problems) == (3, 0, ())
    database = database_of(tmp_path / "D")
    assert times(records_of(content(database))) == times(stock_records(stock))
    assert [trial.checked for _, trial in content(database)] == [False] * 3
    assert database.best(A) is None
    assert check(tmp_path / "D").folders[0].unchecked == 3
    (again,) = import_(stock, tmp_path / "D").folders
    assert (again.added, again.present) == (0, 3)
    assert (lines(stock, WORKLOADS), lines(stock, RECORDS)) == before
    with pytest.raises(InputError, match="no database of MetaSchedule"):
        import_(tmp_path / "D", tmp_path / "D")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda p: p.__setitem__(0, json.loads(split_text(A).replace("add", "mul"))), ""),
        (lambda p: p.__setitem__(0, [[["Fly", [], [], []]], []]), ""),
        (lambda p: p.__setitem__(3, [["TENSOR", "float32", [17, 8]]] * 2), "arguments are not"),
        (lambda p: p.__setitem__(3, [["TENSOR"]]), ""),
        (lambda p: p[2].__setitem__("num-cores", 64), "of another target"),
        (lambda p: p.__setitem__(2, None), "not a workload's line and a record"),
        (lambda p: p.__setitem__(0, [[["GetSBlock"]], []]), ""),
        (lambda p: p.__setitem__(0, [7]), "is no trace"),
        (lambda p: p.__setitem__(1, []), "not a workload's line and a record"),
        (lambda p: p.__setitem__(1, ["fast"]), ""),
        (lambda p: p.__setitem__(1, [1e10]), "not between 0 and"),
        (lambda p: p.append(None), "not a workload's line and a record"),
    ],
)
def test_a_record_that_does_not_replay_or_makes_no_sense_is_left_out(
    stock, tmp_path, monkeypatch, change, why
):
    monkeypatch.setattr(foreign, "judge", judge_by_fork)
    first, *others = lines(stock, RECORDS)
    payload = json.loads(first)[1]
    change(payload)
    write(stock, [json.dumps([0, payload]).encode() + b"\n", *others], RECORDS)
    (found,) = import_(stock, tmp_path / "D").folders
    assert found.added == 2
    (problem,) = found.problems
    assert problem.where == f"{RECORDS} line 1"
    assert why in problem.why
    assert [key for key, _ in content(database_of(tmp_path / "D"))] == [
        workload_key(B),
        workload_key(C),
    ]


@pytest.mark.parametrize("index", [-1, 3, 10**30])
def test_a_record_of_no_line_is_left_out(stock, tmp_path, monkeypatch, index):
    monkeypatch.setattr(foreign, "judge", judge_by_fork)
    first, *others = lines(stock, RECORDS)
    write(stock, [json.dumps([index, json.loads(first)[1]]).encode() + b"\n", *others], RECORDS)
    (found,) = import_(stock, tmp_path / "D").folders
    assert (found.added, len(found.problems)) == (2, 1)
    assert "which cannot be used" in found.problems[0].why


FAKE = """
import json, os, sys, time
suspects, verdicts, done = sys.argv[1:]
parts = [p for line in open(suspects) for x in [json.loads(line)] for p in (x[0], *x[1])]
with open(verdicts, "a") as out:
    def say(why):
        out.write(json.dumps([why]) + "\\n")
        out.flush()
    say("ready")
    for part in parts[int(done):]:
        if "crash" in str(part):
            os.abort()
        if "hang" in str(part):
            time.sleep(60)
        say("bad" if "bad" in str(part) else None)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """In place of TVM a script that crashes, hangs and refuses on demand."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    monkeypatch.setattr(replay, "command", lambda: [sys.executable, str(script)])
    monkeypatch.setattr(replay, "_START_S", 1)
    monkeypatch.setattr(replay, "_PART_S", 0)
    return script


def suspect(key, *payloads):
    return replay.Suspect(str(key), "module", tuple([payload] for payload in payloads))


def test_a_line_at_which_the_process_ends_or_hangs_is_damaged_and_the_next_are_tried(fake):
    suspects = [suspect(1, "a", "crash", "bad"), suspect(2), suspect(3, "hang", "b")]
    first, second, third = replay.judge(suspects)
    assert (first.workload, second, third.workload) == (None, replay.Verdict(None, ()), None)
    assert (first.payloads[0], first.payloads[2]) == (None, "bad")
    assert "crashes on it (status -6)" in first.payloads[1]
    assert "hangs on it" in third.payloads[0]
    assert third.payloads[1] is None


def test_after_some_crashes_what_is_left_is_not_tried(fake, monkeypatch):
    monkeypatch.setattr(replay, "_MOST_CRASHES", 2)
    (found,) = replay.judge([suspect(1, "crash", "a", "crash", "b")])
    assert found.payloads[1] is None
    assert "crashes" in found.payloads[2]
    assert found.payloads[3] == "not tried, after other lines that crash TVM"


@pytest.mark.parametrize("done", range(6))
def test_parts_that_were_judged_are_passed_over(done, monkeypatch):
    monkeypatch.setattr(replay, "check_workload", lambda key, module: key)
    monkeypatch.setattr(replay, "check_record", lambda payload, key: int(payload))
    given = [[["1", "m"], ["0", "x"]], [["2", "m"], ["y"]]]
    found = list(replay.verdicts_on(map(json.dumps, given), done))
    assert [why is None for why in found] == [True, True, False, True, False][done:]


def test_where_no_process_can_be_started_nothing_is_taken_over(stock, tmp_path, fake):
    fake.write_text("raise SystemExit(3)")
    with pytest.raises(InputError, match="ends before its first one"):
        import_(stock, tmp_path / "D")
    assert len(database_of(tmp_path / "D")) == 0


def test_check_replays_all_records_on_demand(tmp_path, monkeypatch):
    asked = []

    def judge(suspects):
        asked.extend(suspects)
        return [replay.Verdict(None, tuple("no" for _ in s.payloads)) for s in suspects]

    monkeypatch.setattr(tools, "judge", judge)
    report = check(copy_of_sound(tmp_path / "D"), replay=True)
    assert sorted(x.key for x in asked) == sorted(map(workload_key, ALL))
    assert [problem.why for problem in report.folders[0].problems] == ["no"] * 5


def test_sound_records_replay_in_the_process_itself(tmp_path):
    assert check(copy_of_sound(tmp_path / "D"), replay=True).ok
