"""Files that are gone or hold anything: no crash, and nothing under a wrong workload."""

import random
import shutil

import pytest

from tvm_fusion.tuning.database import Database

from ..support.tune_database_files import (
    FILES,
    GUARD,
    WORK,
    copy_of_sound,
    insert,
    lines,
    reopened,
    write,
)
from ..support.tune_database_tools import (
    DEVICE,
    TARGET,
    content,
    expected,
    fill,
    judge_by_fork,
    ok,
    records_of,
    workload,
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A sound database, to be damaged."""
    monkeypatch.setattr("tvm_fusion.tuning.database.strays.judge", judge_by_fork)
    return copy_of_sound(tmp_path / "D")


@pytest.mark.parametrize("how", ["missing", "empty", "binary", "folder", "link"])
@pytest.mark.parametrize("name", FILES)
def test_a_whole_file_that_is_gone_is_written_again_as_far_as_the_others_know(folder, name, how):
    path = folder / name
    path.unlink()
    if how == "empty":
        path.write_bytes(b"")
    elif how == "binary":
        path.write_bytes(random.Random(0).randbytes(4096))
    elif how == "folder":
        path.mkdir()
        (path / "file").write_text("")
    elif how == "link":
        path.symlink_to(folder / "nothing")
    database = reopened(folder)
    if name != GUARD:
        assert content(database) == expected()
    else:  # failures and errors are in no other file
        assert records_of(content(database)) == records_of(expected())
        assert [t.error for _, t in content(database)] == [None] * 5
    assert [p.is_file() for p in (folder / n for n in FILES)] == [True] * 3


def test_a_folder_of_nothing_but_garbage_is_empty_and_can_be_used(folder):
    for name in FILES:
        (folder / name).write_bytes(random.Random(1).randbytes(4096) + b"\n\n[1\n")
    assert content(reopened(folder)) == []
    fill(folder)
    assert content(reopened(folder)) == expected()


def test_carriage_returns_do_no_harm(folder):
    for name in FILES:
        write(folder, name, [x.replace(b"\n", b"\r\n") for x in lines(folder, name)])
    assert content(reopened(folder)) == expected()


def test_what_is_read_only_is_read_as_well_and_left_as_it_is(folder):
    insert(folder, GUARD, 1, b"garbage\n")
    insert(folder, WORK, 0, b"\n")
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    database = Database.open(folder, DEVICE, read_only=True)
    assert content(database) == expected()
    assert len(database.problems) == 4
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("seed", range(10))
def test_random_damage_leaves_nothing_under_a_wrong_workload(folder, seed):
    rng = random.Random(seed)
    for _ in range(rng.randint(1, 6)):
        _damage(folder / rng.choice(FILES), rng)
    database = reopened(folder)
    known = {(key, trial.kind, trial.text): trial for key, trial in expected()}
    for key, trial in content(database):
        sound = known[key, trial.kind, trial.text]
        assert trial.status == sound.status
        assert trial.samples_us == pytest.approx(sound.samples_us)
    fill(folder)
    assert set(records_of(content(reopened(folder)))) >= set(records_of(expected()))


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


def test_a_stranger_in_the_place_of_a_workload_is_another_workload(folder):
    """A stock tuner that rewrites a line: the records of that line are not the stranger's."""
    other = Database.open(folder.parent / "other", DEVICE, target=TARGET)
    other.add(workload(128), TARGET, ok("default", 1.0))
    found = lines(folder, WORK)
    found[0] = lines(other.path, WORK)[0]
    write(folder, WORK, found)
    database = reopened(folder)
    assert content(database) == expected()
    assert database.trials(workload(128)) == ()


def test_files_that_a_killed_process_left_half_written_go_with_the_next_session(folder):
    (folder / "plans").mkdir()
    (folder / "quarantine").mkdir()
    left = [
        folder / f".{GUARD}.a1b2c3",
        folder / f".{WORK}.a1b2c3",
        folder / "plans" / ".key.json.a1b2c3",
        folder / "quarantine" / f".{GUARD}.1.jsonl.a1b2c3",
    ]
    kept = [folder / "lock.a1b2c3", folder / "plans" / "key.json"]
    for path in (*left, *kept):
        path.write_text("half")
    Database.open(folder, None)
    assert all(path.exists() for path in left)
    database = Database.open(folder, DEVICE)
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in kept)
    assert content(database) == expected()


def test_a_plan_is_written_to_a_folder_that_is_gone(folder):
    database = Database.open(folder, DEVICE)
    shutil.rmtree(folder)
    database.save_plan("key", {"function": "main"})
    assert database.plan("key") == {"function": "main"}
