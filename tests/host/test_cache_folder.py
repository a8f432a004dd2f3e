"""Folders of what is kept belong to the user alone."""

import logging
import os
import stat

import pytest

from tvm_fusion.errors import InputError
from tvm_fusion.host import cache_folder
from tvm_fusion.host.atomic_files import replace_file
from tvm_fusion.host.cache_folder import (
    CACHE_VARIABLE,
    by_use,
    cache_dir,
    make_folder,
    mark_used,
    not_own,
)
from tvm_fusion.tuning.database.store import Database


@pytest.fixture(params=["writable by all", "of another user"])
def foreign(request, tmp_path, monkeypatch):
    """A cache folder that is not the user's own."""
    folder = tmp_path / "cache"
    folder.mkdir()
    if request.param == "writable by all":
        folder.chmod(0o777)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    return folder


def test_a_folder_that_is_not_the_users_own_is_not_used_and_that_is_said_once(foreign, caplog):
    with caplog.at_level(logging.WARNING, "tvm_fusion"):
        found = cache_dir()
        assert cache_dir() == found
    assert found != foreign
    assert stat.S_IMODE(found.stat().st_mode) == 0o700
    (record,) = caplog.records
    assert str(foreign) in record.getMessage()
    assert CACHE_VARIABLE in record.getMessage()


def test_what_is_kept_instead_ends_with_its_process(tmp_path, monkeypatch):
    at_exit = []
    monkeypatch.setattr(cache_folder.atexit, "register", at_exit.append)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    tmp_path.chmod(0o777)
    found = cache_dir()
    (remove,) = at_exit
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        remove()
    assert found.is_dir()
    remove()
    assert not found.exists()


def test_a_folder_of_the_users_own_is_used_as_is_one_that_is_not_there_yet(tmp_path, monkeypatch):
    for folder in (tmp_path, tmp_path / "new"):
        monkeypatch.setenv(CACHE_VARIABLE, str(folder))
        assert cache_dir() == folder


@pytest.mark.parametrize(("mask", "file"), [(0o077, 0o600), (0o022, 0o644), (0o000, 0o666)])
def test_new_files_have_what_the_umask_leaves_and_folders_are_closed_to_others(
    mask, file, tmp_path
):
    before = os.umask(mask)
    try:
        make_folder(tmp_path / "a" / "b")
        replace_file(tmp_path / "a" / "b" / "c", "text")
    finally:
        os.umask(before)
    mode = stat.S_IMODE((tmp_path / "a" / "b" / "c").stat().st_mode)
    assert mode == file
    for folder in (tmp_path / "a", tmp_path / "a" / "b"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o755 & ~mask
        assert not_own(folder) is None


def test_a_database_that_all_users_may_write_to_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(InputError, match=r"all users may write to it.*chmod o-w"):
        Database(tmp_path, "a device", read_only=True)


def test_what_another_process_took_away_is_neither_listed_nor_made_anew(tmp_path):
    old, new, gone = (tmp_path / name for name in ("old", "new", "gone"))
    for path in (old, new):
        path.touch()
    os.utime(old, (1, 1))
    mark_used(gone)
    assert not gone.exists()
    assert by_use([old, gone, new]) == [new, old]
    mark_used(old)
    os.utime(new, (1, 1))
    assert by_use([old, gone, new]) == [old, new]
