"""Files that several processes append to: one at a time, under the lock of their folder.

A process that ends in the middle leaves a part of what it appended, and nothing else.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from ..errors import InputError

LOCK = "lock"
LOCK_TIMEOUT_S = 60.0
ROOM_BYTES = 1 << 16  # more than most appends take
_POLL_S = 0.01


class CannotLock(InputError):
    """The lock of a folder cannot be taken here, whoever holds it: the folder is read-only."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; the system gives it back when the process dies.

    Raises
    ------
    InputError
        Another process holds it for longer than `LOCK_TIMEOUT_S`; or, as `CannotLock`, there is no
        right to write the lock file.
    """
    lock = FileLock(folder / LOCK, poll_interval=_POLL_S)
    try:
        lock.acquire(timeout=LOCK_TIMEOUT_S)
    except Timeout as error:
        raise InputError(
            f"{folder} is locked by another process for more than {LOCK_TIMEOUT_S:g} s; end that "
            "process, or give this one a folder of its own and merge the two"
        ) from error
    except OSError as error:
        raise CannotLock(f"cannot lock {folder}: {error.strerror or error}") from error
    try:
        yield
    finally:
        lock.release()


def append(path: Path, data: bytes) -> None:
    """Append to a file and have it on disk, or leave the file as it was; under the lock.

    Raises
    ------
    InputError
        The disk is full, or the file cannot be written.
    """
    if not data:
        return
    length = None
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            length = os.fstat(file).st_size
            _write(file, data)
            os.fsync(file)
        finally:
            os.close(file)
    except BaseException as error:
        if length is not None:
            with suppress(OSError):
                os.truncate(path, length)
        if isinstance(error, OSError):
            raise InputError(
                f"cannot write {path}: {error.strerror or error}. Nothing of it is left in the "
                "file: free space on the disk or make the folder writable"
            ) from error
        raise


def _write(file: int, data: bytes) -> None:
    while data:  # a disk that takes a part says why at the rest
        written = os.write(file, data)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data = data[written:]


def read_from(path: Path, start: int) -> bytes:
    """A file from a byte on; none of one that is not there. InputError if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror or error}; make it readable"
        ) from error


def signature(path: Path) -> tuple[int, int, int] | None:
    """Changes whenever a file does."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def check_room(folder: Path, names: Iterable[str]) -> None:
    """OSError unless files can be made in a folder, and these there be added to. Removes what a
    process left that ended while it wrote one anew (`replace_file`); under the lock.
    """
    for name in names:
        if (folder / name).is_file():
            os.close(os.open(folder / name, os.O_WRONLY | os.O_APPEND))
        for path in folder.glob(f".{name}.*"):
            path.unlink()
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".room.", buffering=0) as file:
        _write(file.fileno(), bytes(ROOM_BYTES))
        os.fsync(file.fileno())
