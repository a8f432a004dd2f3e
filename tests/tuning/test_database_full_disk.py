"""Full disks, read-only folders and locks: an error that says so, and no trial is lost."""

import errno
import os
import resource
import shutil
import tempfile
from pathlib import Path

import pytest

from tvm_fusion.errors import InputError
from tvm_fusion.host import appended_files
from tvm_fusion.host.appended_files import LOCK
from tvm_fusion.tuning.database import Database, export, store
from tvm_fusion.tuning.database.store import TRIALS

from ..support.tune_database import (
    DEVICE,
    TARGET,
    WORKLOADS,
    content,
    copy_of_sound,
    expected,
    exported,
    in_child,
    ok,
    open_,
    records_of,
    workload,
)

A = WORKLOADS[0]
NEW = workload(88)
NOBODY = 65534


def bytes_of(folder):
    return (folder / TRIALS).read_bytes()


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("write", range(2))
def test_a_full_disk_leaves_nothing_behind_and_the_trial_in_memory(
    folder, monkeypatch, write, short
):
    database, before, new = open_(folder), bytes_of(folder), NEW
    plain, calls = os.write, iter(range(100))

    def full(file, data):
        call = next(calls)
        if call < write or (short and call == write):
            return plain(file, data[:7])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(appended_files.os, "write", full)
        with pytest.raises(InputError, match=r"cannot write .*No space left.*free space"):
            database.add(new, TARGET, ok("default", 2.0))
    assert bytes_of(folder) == before
    assert database.trials(new)[0].us == 2.0
    assert sum(map(len, database.tuning_records().values())) == 6
    database.add(new, TARGET, ok("Config(tile=2)", 1.0))
    again = open_(folder)
    assert again.problems == ()
    assert content(again) == content(database)
    assert [trial.us for trial in again.trials(new)] == [2.0, 1.0]
    assert exported(again) == records_of(content(again))


@pytest.mark.parametrize("step", ["append", "replace_file"])
def test_a_repair_that_cannot_be_written_is_tried_again_and_loses_nothing(
    folder, monkeypatch, step
):
    """Another process died in the middle of a line; the disk is full when that is moved away."""
    database = open_(folder)
    database.save_plan("k", {})
    with (folder / TRIALS).open("ab") as file:
        file.write(b'{"torn')
    before = bytes_of(folder)

    def full(path, data):
        raise InputError("cannot write: No space left")

    with monkeypatch.context() as patch:
        patch.setattr(store, step, full)
        for use in (lambda: database.save_plan("x", {}), lambda: open_(folder)):
            with pytest.raises(InputError, match="No space left"):
                use()
    assert bytes_of(folder) == before
    database.save_plan("y", {})
    again = open_(folder)
    assert again.problems == ()
    assert {key: again.plan(key) for key in "kxy"} == {"k": {}, "x": {}, "y": {}}
    assert content(again) == content(database) == expected()


def test_a_folder_that_is_gone_is_made_again(folder):
    database = open_(folder)
    shutil.rmtree(folder)
    database.save_plan("key", {"function": "main"})
    assert Database(folder, None).plan("key") == {"function": "main"}


def test_a_limit_of_the_system_on_files_is_a_full_disk(folder):
    before = bytes_of(folder)
    assert "File too large" in in_child(_add_beyond_limit, folder)
    assert f"cannot write {folder}/out: " in in_child(_export_beyond_limit, folder)
    assert bytes_of(folder) == before


def _export_beyond_limit(folder):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    with pytest.raises(InputError) as caught:  # TVM writes a part and says nothing
        export(folder, folder / "out")
    return str(caught.value)


def _add_beyond_limit(folder):
    database = open_(folder)
    limit = (folder / TRIALS).stat().st_size + 1000
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    with pytest.raises(InputError) as caught:
        database.add(NEW, TARGET, ok("default", 1.0))
    return str(caught.value)


@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("name", ["", TRIALS])
def test_what_cannot_be_written_is_noticed_when_it_is_opened_and_can_be_read(name, locked):
    with tempfile.TemporaryDirectory() as place:
        folder = copy_of_sound(Path(place) / "D")
        (folder / LOCK).unlink()
        if locked:
            (folder / LOCK).touch()
        Path(place).chmod(0o755)
        for path in folder.iterdir():
            path.chmod(0o444 if path.name == name else 0o644)
        folder.chmod(0o755 if name else 0o555)
        if os.geteuid() == 0:
            for path in (folder, *folder.iterdir()):
                os.chown(path, NOBODY, -1)
        before = bytes_of(folder)
        found, problems, message = in_child(_use_without_rights, folder)
        folder.chmod(0o755)
        assert bytes_of(folder) == before
        left = {path.name for path in folder.iterdir()} - {LOCK}
    assert (found, problems) == (expected(), ())
    assert left == {TRIALS}
    assert f"cannot write to {folder}: Permission denied. " in message
    assert "make the folder writable" in message


def _use_without_rights(folder):
    if os.geteuid() == 0:
        os.seteuid(NOBODY)
    with pytest.raises(InputError) as caught:
        open_(folder)
    database = Database(folder, DEVICE, read_only=True)
    return content(database), database.problems, str(caught.value)


@pytest.mark.parametrize("taken", [0, 7])
def test_a_full_disk_is_noticed_when_the_database_is_opened(folder, monkeypatch, taken):
    before, plain = bytes_of(folder), os.write

    def full(file, data):
        if taken and len(data) == appended_files.ROOM_BYTES:
            return plain(file, data[:taken])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(appended_files.os, "write", full)
        with pytest.raises(InputError, match=r"cannot write to .*No space left.*Free space"):
            open_(folder)
    assert bytes_of(folder) == before
    assert {path.name for path in folder.iterdir()} == {TRIALS, LOCK}
    assert content(open_(folder)) == expected()


def test_a_file_that_cannot_be_read_is_an_error_and_not_written_over(folder, monkeypatch):
    before, plain = bytes_of(folder), Path.open

    def refuse(path, *how):
        if path.name == TRIALS:
            raise PermissionError(errno.EACCES, "Permission denied")
        return plain(path, *how)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        for read_only in (True, False):
            with pytest.raises(InputError, match=r"cannot read .*: Permission denied"):
                Database(folder, DEVICE, read_only=read_only)
    assert bytes_of(folder) == before


def test_a_lock_that_another_process_keeps_is_an_error_that_says_so(folder, monkeypatch):
    monkeypatch.setattr(appended_files, "LOCK_TIMEOUT_S", 0.05)
    database = open_(folder)
    with appended_files.locked(folder):
        with pytest.raises(InputError, match="locked by another process"):
            database.add(A, TARGET, ok("X", 1.0))
        with pytest.raises(InputError, match="locked by another process"):
            open_(folder)
    database.add(A, TARGET, ok("Y", 1.0))
    assert len(open_(folder)) == len(expected()) + 2
