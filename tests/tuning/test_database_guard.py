"""Lines that the guard does not know, and lines of the guard that are damaged."""

import json

import pytest
import tvm

from tvm_fusion.tuning.database import workload_key

from ..support.tune_database_files import (
    GUARD,
    RECORDS,
    copy_of_sound,
    insert,
    lines,
    quarantined,
    reopened,
    without,
    write,
)
from ..support.tune_database_tools import (
    WORKLOADS,
    content,
    expected,
    fill,
    judge_by_fork,
    split_text,
)

A, B, _ = (workload_key(func) for func in WORKLOADS)
UNKNOWN_BLOCK = split_text(WORKLOADS[0]).replace("add", "mul")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A sound database, to be damaged."""
    monkeypatch.setattr("tvm_fusion.tuning.database.strays.judge", judge_by_fork)
    return copy_of_sound(tmp_path / "D")


def test_a_record_of_another_target_is_taken_out(folder):
    payload = json.loads(lines(folder, RECORDS)[0])[1]
    payload[1], payload[2]["num-cores"] = [5e-6], 64
    insert(folder, RECORDS, 5, f"[0,{json.dumps(payload)}]\n".encode())
    assert content(reopened(folder)) == expected()
    assert quarantined(folder)[RECORDS] == ["of another target"]


def test_lines_of_the_guard_of_another_device_are_taken_out(folder, tmp_path):
    other = fill(tmp_path / "other", "other", tvm.target.Target({"kind": "llvm", "num-cores": 4}))
    foreign = lines(other.path, GUARD)
    write(folder, GUARD, [*lines(folder, GUARD), *foreign])
    assert content(reopened(folder)) == expected()
    found = quarantined(folder)[GUARD]
    assert sorted(set(found)) == ["of another device", "the line is there twice"]
    assert len(found) == len(foreign)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (b'"us":4.0', b'"us":3.0', "wrong"),
        (b'"us":4.0', b'"us":1e-9', "wrong"),
        (A.encode(), B.encode(), "wrong"),
        (b'"checksum":', b'"checksun":', "missing"),
    ],
)
def test_a_line_of_the_guard_with_a_bad_checksum_is_taken_out_and_its_record_stays(
    folder, old, new, why
):
    found = lines(folder, GUARD)
    assert old in found[2]
    found[2] = found[2].replace(old, new)
    write(folder, GUARD, found)
    database = reopened(folder)
    sound = expected()
    *others, (key, taken) = content(database)
    assert others == without(sound, 0)
    assert (key, taken.text, taken.error) == (A, "Config(tile=1)", None)
    assert taken.us == pytest.approx(4.0)
    assert quarantined(folder)[GUARD] == [f"the checksum is {why}"]


def test_a_failure_whose_line_is_damaged_is_forgotten(folder):
    found = lines(folder, GUARD)
    write(folder, GUARD, [x.replace(b"signal 11", b"signal 12") for x in found])
    database = reopened(folder)
    assert content(database) == without(expected(), 1, 6)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda p: p.__setitem__(0, json.loads(split_text(WORKLOADS[0]).replace("add", "mul"))),
            "",
        ),
        (lambda p: p.__setitem__(0, [[["Fly", [], [], []]], []]), ""),
        (lambda p: p[3][0][2].__setitem__(0, 17), "arguments are not those"),
        (lambda p: p.__setitem__(3, [["TENSOR"]]), ""),
        (lambda p: p.__setitem__(2, {"kind": "llvm", "num-cores": "two"}), "of another target"),
        (lambda p: p.__setitem__(2, None), "no target"),
        (lambda p: p.__setitem__(0, [[["GetSBlock"]], []]), "the trace is not"),
        (lambda p: p.__setitem__(1, []), "no times"),
        (lambda p: p.append(None), "not a record"),
    ],
)
def test_a_record_without_a_line_in_the_guard_is_taken_out_unless_it_replays(folder, change, why):
    payload = json.loads(lines(folder, RECORDS)[0])[1]
    payload[1] = [5e-6]
    change(payload)
    insert(folder, RECORDS, 5, f"[0,{json.dumps(payload)}]\n".encode())
    assert content(reopened(folder)) == expected()
    (reason,) = quarantined(folder)[RECORDS]
    assert why in reason
