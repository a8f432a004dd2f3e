"""The folder of libraries that a session builds: it goes with the session, or with the next one."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "tvm_fusion_tune_"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for as long as the context lasts; those of processes that were killed are removed.

    Its owner holds a lock on it, which the system gives back when the process dies.
    """
    remove_abandoned()
    folder, lock = _make()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_abandoned() -> None:
    """Removes the folders of this user that no process holds the lock of."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            lock = _open(folder)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _make() -> tuple[Path, int]:
    """A new folder and its lock; another one where a session took the first for abandoned."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        with suppress(FileNotFoundError):
            lock = _open(folder)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
