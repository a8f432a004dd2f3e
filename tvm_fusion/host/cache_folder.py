"""The user's own folder of what is kept: machine code, plans, kernels, calibrations, measurements.

What lies there is run. A folder that belongs to another user, or that all may write to, could hold
code of anybody: it is not used, a warning says so once, and what is kept goes to a folder of this
process, which ends with it.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

CACHE_VARIABLE = "TVM_FUSION_CACHE"
_MODE = 0o755  # less what the umask takes: others never write
_log = logging.getLogger(__name__)


def cache_dir() -> Path:
    """Return the folder: $TVM_FUSION_CACHE, or that in the platform's cache folder; a folder of
    this process where it is not the user's own.
    """
    folder = _named()
    why = not_own(folder)
    return folder if why is None else _instead(folder, why)


def _named() -> Path:
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or "~/.cache"
    return Path(base).expanduser() / "tvm_fusion"


def not_own(folder: Path) -> str | None:
    """Why others may write to a folder; None where only its owner may, who is the user, and where
    there is none yet.
    """
    try:
        found = folder.stat()
    except OSError:
        return None
    if hasattr(os, "geteuid") and found.st_uid != os.geteuid():  # Windows has no such numbers
        return "it belongs to another user"
    return "all users may write to it" if is_open(folder) else None


def is_open(folder: Path) -> bool:
    """Whether all users may write to a folder, which is there."""
    return bool(folder.stat().st_mode & stat.S_IWOTH)


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, that others cannot write to, whatever the umask is; raises
    OSError.
    """
    for missing in reversed([f for f in (folder, *folder.parents) if not f.exists()]):
        missing.mkdir(mode=_MODE, exist_ok=True)
    folder.mkdir(exist_ok=True)  # raises where a file is in its place


def mark_used(path: Path) -> None:
    """Let a file or folder be the one that was used last; what another process took away, or cannot
    be changed (a cache that is mounted to be read), stays as it is.
    """
    with suppress(OSError):
        os.utime(path)  # `Path.touch` makes an empty file of what is gone


def by_use(paths: Iterable[Path]) -> list[Path]:
    """Files and folders, the ones that were used last first, without those that are gone."""
    times = {}
    for path in paths:
        with suppress(FileNotFoundError):  # another process took it away meanwhile
            times[path] = path.stat().st_mtime
    return sorted(times, key=times.__getitem__, reverse=True)


@cache
def _instead(folder: Path, why: str) -> Path:
    _log.warning(
        "the cache folder %s is not used: %s. Name a folder of your own in %s, or take the "
        "permission away (chmod o-w)",
        folder,
        why,
        CACHE_VARIABLE,
    )
    made, owner = Path(tempfile.mkdtemp(prefix="tvm_fusion_")), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # and no process that it was forked to
            shutil.rmtree(made, ignore_errors=True)

    atexit.register(remove)
    return made
