"""Folders of libraries that sessions build: they go with the session, or with the next one."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tvm_fusion.tuning.measure.processes import PREFIX, remove_abandoned, scratch_folder

OWNER = """
import sys, time
from tvm_fusion.tuning.measure.processes import scratch_folder
with scratch_folder() as folder:
    (folder / "0.so").write_text("a library")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """Where temporary folders are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def owner(place, no_torch):
    """A process that has a scratch folder, and the folder."""
    environment = os.environ | {"TMPDIR": str(place)}
    with subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    ) as process:
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_a_folder_goes_with_its_context(place):
    with scratch_folder() as folder:
        (folder / "0.so").write_text("a library")
        assert folder.parent == place
    assert not list(place.iterdir())


def test_a_folder_stays_as_long_as_its_process_and_goes_with_the_next_session(owner):
    process, folder = owner
    with scratch_folder():
        assert (folder / "0.so").exists()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (folder / "0.so").exists()
    with scratch_folder() as other:
        assert not folder.exists()
        assert other.exists()


def test_only_folders_of_sessions_are_removed(place):
    for name in (f"{PREFIX}abandoned", "another"):
        (place / name).mkdir()
    (place / f"{PREFIX}file").write_text("no folder")
    (place / f"{PREFIX}link").symlink_to(place / "another")
    remove_abandoned()
    left = sorted(path.name for path in place.iterdir())
    assert left == ["another", f"{PREFIX}file", f"{PREFIX}link"]


def test_a_folder_that_another_session_takes_for_abandoned_is_made_again(place, monkeypatch):
    make, made = tempfile.mkdtemp, []

    def making(prefix):
        made.append(Path(make(prefix=prefix)))
        if len(made) == 1:
            remove_abandoned()
        return str(made[-1])

    monkeypatch.setattr(tempfile, "mkdtemp", making)
    with scratch_folder() as folder:
        assert folder == made[1]
        assert folder.exists()
        assert not made[0].exists()
