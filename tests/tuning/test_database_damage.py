"""Damaged lines: they cost themselves only, and are kept with the reason."""

import json
import random

import pytest
import tvm

from tvm_fusion.errors import InputError
from tvm_fusion.tuning.database import Database, workload_key
from tvm_fusion.tuning.database.lines import Content, unpack
from tvm_fusion.tuning.database.store import DAMAGED, TRIALS

from ..support.tune_database import (
    DEVICE,
    TARGET,
    WORKLOADS,
    content,
    expected,
    exported,
    failed,
    fill,
    insert,
    lines,
    ok,
    open_,
    reasons,
    reopened,
    taken_out,
    without,
    workload,
    write,
)

A, B, C = (workload_key(func) for func in WORKLOADS)


@pytest.mark.parametrize("number", [0, 1, 5, 11])
@pytest.mark.parametrize(
    "raw", [b"\n", b"[]\n", b"\xff\xfe\x00\n", b"garbage\n", b"[" * 9999 + b"\n"]
)
def test_a_line_of_garbage_is_taken_out_and_nothing_is_lost(folder, number, raw):
    insert(folder, number, raw)
    database = reopened(folder)
    assert content(database) == expected()
    assert f"{TRIALS} line {number + 1}" in reasons(database)
    (kept,) = map(json.loads, lines(folder, DAMAGED))
    assert kept["line"] == number + 1
    assert kept["text"].encode("utf-8", "surrogateescape") + b"\n" == raw


@pytest.mark.parametrize("left", [-1, -2, -20, -200])
def test_of_a_cut_last_line_only_the_trial_is_lost_that_was_being_written(folder, left):
    path = folder / TRIALS
    path.write_bytes(path.read_bytes()[:left])
    database = reopened(folder)
    whole = left == -1
    assert content(database) == expected() if whole else without(expected(), 6)
    assert len(taken_out(folder)) == (0 if whole else 1)
    database.add(WORKLOADS[2], TARGET, failed("Config(tile=2)", "wrong", error=0.5))
    assert content(reopened(folder)) == expected()


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (b'"us":4.0', b'"us":3.0', "wrong"),
        (b'"us":4.0', b'"us":NaN', "not JSON of finite numbers"),
        (A.encode(), B.encode(), "wrong"),
        (b'"checksum":', b'"checksun":', "missing"),
    ],
)
def test_a_line_that_was_changed_is_taken_out(folder, old, new, why):
    found = lines(folder)
    assert old in found[2]
    found[2] = found[2].replace(old, new)
    write(folder, found)
    assert content(reopened(folder)) == without(expected(), 0)
    (reason,) = taken_out(folder)
    assert why in reason


def test_trials_of_a_lost_workload_count_and_get_their_records_back_with_it(folder):
    write(folder, [x for x in lines(folder) if C.encode() not in x or b'"trial"' in x])
    database = reopened(folder)
    assert content(database) == expected()
    assert database.trials(C)[0].text == "default"
    assert "2 trials are of 1 workloads without a line" in reasons(database)
    assert len(exported(database)) == 4
    fill(folder)
    again = reopened(folder)
    assert (again.problems, content(again)) == ((), expected())
    assert len(exported(again)) == 5


def test_lines_that_are_there_twice_count_once(folder):
    write(folder, [x for x in lines(folder) for _ in range(2)])
    assert content(reopened(folder)) == expected()
    assert taken_out(folder) == ["the line is there twice"] * 11


def test_lines_in_another_order_say_the_same(folder):
    head, *others = lines(folder)
    write(folder, [head, *reversed(others)])
    database = reopened(folder)
    assert set(content(database)) == set(expected())
    assert database.problems == ()


def test_lines_of_another_device_are_taken_out(folder, tmp_path):
    other = fill(tmp_path / "other", "other", tvm.target.Target({"kind": "llvm", "num-cores": 4}))
    foreign = lines(other.path)
    write(folder, [*lines(folder), *foreign])
    assert content(reopened(folder)) == expected()
    assert taken_out(folder) == ["of another device"] * len(foreign)


def test_a_missing_first_line_is_written_again(folder):
    head, *others = lines(folder)
    write(folder, others)
    assert Database(folder, None).device is None
    assert content(reopened(folder)) == expected()
    assert lines(folder) == [head, *others]


@pytest.mark.parametrize("kind", ["empty", "binary", "missing"])
def test_a_file_that_is_gone_can_be_used(folder, kind):
    path = folder / TRIALS
    path.unlink()
    if kind != "missing":
        path.write_bytes(random.Random(0).randbytes(4096) if kind == "binary" else b"")
    assert content(open_(folder)) == []
    fill(folder)
    assert content(reopened(folder)) == expected()


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_what_is_no_file_is_an_error(folder, kind):
    path = folder / TRIALS
    path.unlink()
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(folder / "nowhere" / "nothing")
    with pytest.raises(InputError, match=r"cannot (read|write)"):
        open_(folder).add(WORKLOADS[0], TARGET, ok("default", 1.0))


def test_carriage_returns_do_no_harm(folder):
    write(folder, [x.replace(b"\n", b"\r\n") for x in lines(folder)])
    assert content(reopened(folder)) == expected()


@pytest.mark.parametrize("seed", range(20))
def test_random_damage_leaves_nothing_that_was_not_written(folder, seed):
    rng = random.Random(seed)
    before = lines(folder)
    for _ in range(rng.randint(1, 6)):
        _damage(folder / TRIALS, rng)
    after = {line + b"\n" for line in (folder / TRIALS).read_bytes().split(b"\n")}
    database = reopened(folder)
    assert set(content(database)) <= set(expected())
    whole = [x for x in before if x in after]
    found = Content(DEVICE)
    for line in whole:
        found.take(unpack(line))
    assert set(found.entries) <= set(content(database))
    fill(folder)
    assert set(content(reopened(folder))) == set(expected())


def _damage(path, rng):
    data = bytearray(path.read_bytes())
    start = rng.randrange(len(data) + 1)
    stop = min(len(data), start + rng.choice([1, 8, 300]))
    match rng.randrange(6):
        case 0:
            data[start:stop] = b""
        case 1:
            data[start:stop] = rng.randbytes(stop - start)
        case 2:
            data[start:start] = data[start:stop] or b"\n"
        case 3:
            data[start:] = b""
        case 4:
            found = data.splitlines(keepends=True)
            rng.shuffle(found)
            data = b"".join(found)
        case 5:
            for n in range(start, stop):
                data[n] = data[n] ^ (1 << rng.randrange(8)) if rng.random() < 0.2 else data[n]
    path.write_bytes(data)


def test_damage_behind_what_was_read_is_taken_out_by_the_next_call(folder):
    database = open_(folder)
    insert(folder, len(lines(folder)), b"garbage\n")
    database.add(workload(88), TARGET, ok("default", 1.0))
    assert content(database)[:-1] == expected()
    assert (len(taken_out(folder)), len(database)) == (1, 8)
    assert content(reopened(folder)) == content(database)


def test_files_that_a_killed_process_left_half_written_go_with_the_next_session(folder):
    left, kept = folder / f".{TRIALS}.a1b2c3", folder / "lock.a1b2c3"
    for path in (left, kept):
        path.write_text("half")
    Database(folder, None)
    assert left.exists()
    assert content(open_(folder)) == expected()
    assert not left.exists()
    assert kept.exists()


def test_a_damaged_plan_counts_as_missing_and_an_earlier_one_stands(folder):
    database = open_(folder)
    for us in (1.25, 2.5):
        database.save_plan("a", {"us": us})
    write(folder, [x.replace(b'{"us":2.5}', b'{"us":2.0}') for x in lines(folder)])
    assert reopened(folder).plan("a") == {"us": 1.25}
    assert taken_out(folder) == ["the checksum is wrong"]
