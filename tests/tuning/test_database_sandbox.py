"""Lines of unknown origin are tried in a process of their own."""

import json

import pytest

from tvm_fusion.errors import InputError
from tvm_fusion.tuning.database import Database, check, sandbox, workload_key
from tvm_fusion.tuning.database.lines import parse_workload

from ..support.tune_database_files import copy_of_sound
from ..support.tune_database_tools import (
    DEVICE,
    TARGET,
    WORKLOADS,
    content,
    expected,
    ok,
    records_of,
    stock_records,
)

A, _, C = WORKLOADS


@pytest.fixture
def folder(tmp_path):
    """A sound database."""
    return copy_of_sound(tmp_path / "D")


def test_lines_of_unknown_origin_are_tried_in_a_process_of_their_own(folder):
    """A folder without its guard, one of whose workloads has the hash of another."""
    (folder / "guard.jsonl").unlink()
    work = folder / "database_workload.json"
    first, second, third = map(json.loads, work.read_bytes().splitlines())
    lines = [first, second, [third[0], second[1]]]
    work.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = content(Database.open(folder, DEVICE, target=TARGET))
    assert records_of(found) == records_of(x for x in expected() if x[0] != workload_key(C))
    assert stock_records(folder) == records_of(found)


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
    monkeypatch.setattr(sandbox, "_SCRIPT", script)
    monkeypatch.setattr(sandbox, "_START_S", 1)
    monkeypatch.setattr(sandbox, "_PART_S", 0)
    return script


def suspect(key, *payloads):
    line = parse_workload(json.dumps([str(key), "module"]).encode())
    return sandbox.Suspect(line, tuple([payload] for payload in payloads))


def test_a_line_at_which_the_process_ends_or_hangs_is_damaged_and_the_next_are_tried(fake):
    suspects = [suspect(1, "a", "crash", "bad"), suspect(2), suspect(3, "hang", "b")]
    first, second, third = sandbox.judge(suspects)
    assert (first.workload, second, third.workload) == (None, sandbox.Verdict(None, ()), None)
    assert (first.payloads[0], first.payloads[2]) == (None, "bad")
    assert "crashes on it (status -6)" in first.payloads[1]
    assert "hangs on it" in third.payloads[0]
    assert third.payloads[1] is None


def test_after_some_crashes_what_is_left_is_not_tried(fake, monkeypatch):
    monkeypatch.setattr(sandbox, "_MOST_CRASHES", 2)
    (found,) = sandbox.judge([suspect(1, "crash", "a", "crash", "b")])
    assert found.payloads[1] is None
    assert "crashes" in found.payloads[2]
    assert found.payloads[3] == "not tried, after other lines that crash TVM"


def test_where_no_process_can_be_started_nothing_is_taken_over_or_thrown_away(folder, fake):
    fake.write_text("raise SystemExit(3)")
    guard, work = folder / "guard.jsonl", folder / "database_workload.json"
    lines = guard.read_bytes().splitlines(keepends=True)
    guard.write_bytes(b"".join(lines[:-4]))  # without the last workload and its trials
    before = guard.read_bytes(), work.read_bytes()
    again = Database.open(folder, DEVICE)
    assert content(again) == expected()[:4]
    assert "ends before its first one" in str(again.problems[-1])
    with pytest.raises(InputError, match="cannot be written"):
        again.add(A, TARGET, ok("X", 1.0))
    assert (guard.read_bytes(), work.read_bytes()) == before
    assert not (folder / "quarantine").exists()


def test_check_replays_all_records_on_demand(folder, monkeypatch):
    asked = []

    def judge(suspects):
        asked.extend(suspects)
        return [sandbox.Verdict(None, tuple("no" for _ in s.payloads)) for s in suspects]

    monkeypatch.setattr("tvm_fusion.tuning.database.checking.judge", judge)
    report = check(folder, replay=True)
    assert sorted(x.workload.key for x in asked) == sorted(map(workload_key, WORKLOADS))
    assert [problem.why for problem in report.folders[0].problems] == ["no"] * 5
