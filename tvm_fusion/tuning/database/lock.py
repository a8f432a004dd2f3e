"""The lock of a database folder: one process reads and writes its files at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import InputError

LOCK = "lock"
LOCK_TIMEOUT_S = 60.0  # the lock is held for an append or a repair, never for a trial
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
    from filelock import FileLock, Timeout

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
