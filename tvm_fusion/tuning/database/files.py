"""The files of a database folder: read as bytes, appended to, repaired."""

from __future__ import annotations

import base64
import errno
import os
import stat
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...errors import InputError
from ...host.atomic_files import replace_file
from .guard import GUARD
from .lines import RECORDS, WORKLOADS, canonical

NAMES = (GUARD, WORKLOADS, RECORDS)
QUARANTINE = "quarantine"
PLANS = "plans"
ROOM_BYTES = 1 << 16  # more than the lines of a trial


@dataclass(frozen=True, slots=True)
class RawFile:
    """What is found under the name of a file.

    Attributes
    ----------
    lines : list of bytes
    state : str
        "file", "missing", "cut" (its last line has no end), "foreign" (not a file) or "unreadable".
    why : str
        Of an unreadable one.
    """

    lines: list[bytes]
    state: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A line that is taken out of a file: the name of the file, the number from 1, and why."""

    file: str
    number: int
    raw: bytes
    why: str


def read(path: Path) -> RawFile:
    """The lines of a file."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return RawFile([], "foreign")
        data = path.read_bytes()
    except FileNotFoundError:
        return RawFile([], "foreign" if path.is_symlink() else "missing")
    except OSError as error:
        return RawFile([], "unreadable", error.strerror or str(error))
    *lines, tail = data.split(b"\n")
    return RawFile([*lines, tail], "cut") if tail else RawFile(lines, "file")


def signature(folder: Path) -> tuple[tuple[int, int, int] | None, ...]:
    """Changes whenever one of the files does."""
    return tuple(_signature(folder / name) for name in NAMES)


def _signature(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def append(folder: Path, pieces: Iterable[tuple[str, str]]) -> None:
    """Append texts of whole lines to files, in this order and each at once.

    Where one cannot be written, all files get the length back that they had. The caller holds the
    lock.

    Raises
    ------
    InputError
        The disk is full, or the folder cannot be written.
    """
    lengths: dict[Path, int] = {}
    try:
        for name, text in pieces:
            _append(folder / name, text.encode(), lengths)
    except BaseException as error:
        for path, length in lengths.items():
            with suppress(OSError):
                os.truncate(path, length)
        if isinstance(error, OSError):
            raise InputError(
                f"cannot write the trial to {folder}: {error.strerror or error}. Nothing of it is "
                "left in the files: free space on the disk or make the folder writable"
            ) from error
        raise


def _append(path: Path, data: bytes, lengths: dict[Path, int]) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        lengths.setdefault(path, os.fstat(file).st_size)
        _write(file, data)
        os.fsync(file)
    finally:
        os.close(file)


def _write(file: int, data: bytes) -> None:
    while data:  # a disk that takes a part says why at the rest
        written = os.write(file, data)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data = data[written:]


def repair(folder: Path, texts: Mapping[str, str], rejected: Iterable[Rejected]) -> None:
    """Put rejected lines into the quarantine, and write the files anew, `GUARD` first.

    A process that ends on the way leaves files that repair to the same ones. The caller holds the
    lock.

    Raises
    ------
    InputError
        The folder cannot be written; no line is lost.
    """
    rejected = list(rejected)
    try:
        for name in NAMES:
            _quarantine_lines(folder, name, [x for x in rejected if x.file == name])
            path = folder / name
            if read(path).state == "foreign":
                os.replace(path, free_name(folder, name, ""))
    except OSError as error:
        raise InputError(f"cannot repair {folder}: {error.strerror or error}") from error
    for name in NAMES:
        replace_file(folder / name, texts[name])


def check_room(folder: Path) -> None:
    """OSError unless files can be made in the folder, and those there be added to. The caller holds
    the lock.
    """
    for name in NAMES:
        if (folder / name).is_file():
            os.close(os.open(folder / name, os.O_WRONLY | os.O_APPEND))
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{GUARD}.", buffering=0) as file:
        _write(file.fileno(), bytes(ROOM_BYTES))
        os.fsync(file.fileno())


def sweep(folder: Path) -> None:
    """Remove what processes left that ended while they wrote a file anew (`replace_file`). The
    caller holds the lock, under which all of these files are written.
    """
    patterns = (*(f".{name}.*" for name in NAMES), f"{PLANS}/.*.json.*", f"{QUARANTINE}/.*.jsonl.*")
    with suppress(OSError):
        for pattern in patterns:
            for path in folder.glob(pattern):
                path.unlink()


def _quarantine_lines(folder: Path, name: str, rejected: list[Rejected]) -> None:
    if rejected:
        text = "".join(canonical(_described(x)) + "\n" for x in rejected)
        replace_file(free_name(folder, name, ".jsonl"), text)


def _described(line: Rejected) -> dict[str, object]:
    found: dict[str, object] = {"line": line.number, "why": line.why}
    try:
        return found | {"text": line.raw.decode("utf-8")}
    except UnicodeDecodeError:
        return found | {"base64": base64.b64encode(line.raw).decode("ascii")}


def free_name(folder: Path, name: str, suffix: str) -> Path:
    """``quarantine/<name>.<n><suffix>`` with the lowest n that is free."""
    place = folder / QUARANTINE
    place.mkdir(exist_ok=True)
    taken = {path.name for path in place.iterdir()}
    number = 1
    while f"{name}.{number}{suffix}" in taken:
        number += 1
    return place / f"{name}.{number}{suffix}"
