"""Which paths are databases: only what is one is read, and a new one takes an empty folder.

D/<device folder>/guard.jsonl ...    a database
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tvm

from ...errors import InputError, NothingTuned
from .files import NAMES
from .guard import GUARD, VERSION, DeviceLine, other_version, parse_guard
from .lines import BadLine
from .lock import LOCK
from .workload_lines import identity, target_json

_SHOWN = 5  # folders, or files, that a message names


def check_database(path: Path) -> None:
    """Say what is wrong with a path that is to be read as a database.

    Raises
    ------
    InputError
        It does not exist, is a file, the folder of one device, or a folder of something else.
    """
    if not path.exists():
        raise InputError(f"there is no database {path}: `python -m tvm_fusion tune` makes one")
    _check_folder(path)
    if not folders_in(path):
        raise InputError(
            f"{path} is no database of tvm_fusion: {_held(path)}. Name the folder that "
            "`tvm_fusion.tune` was given"
        )


def check_place(path: Path) -> None:
    """Say why tuning cannot begin, or go on, at a path: it has to be a database, an empty folder,
    or none yet.

    Raises
    ------
    InputError
        It is a file, the folder of one device, or a folder of something else; or it cannot be
        written.
    """
    _check_writable(path)
    if not path.exists():
        return
    _check_folder(path)
    if _visible(path) and not folders_in(path):
        raise InputError(
            f"{path} is no database of tvm_fusion, and not empty: {_held(path)}. Name another "
            "folder for the database; it is made if it is not there"
        )


def folders_in(path: Path) -> list[Path]:
    """The folders of devices in a database, sorted."""
    return [inner for inner in _visible(path) if inner.is_dir() and _is_of_device(inner)]


def nothing_for(path: Path, name: str, target: tvm.target.Target) -> NothingTuned:
    """What to raise where a database has no folder of a device, but of others."""
    others = [f"{folder.name} ({_target_of(folder)})" for folder in folders_in(path)]
    return NothingTuned(
        f"{path} holds nothing for {name} ({_text(target_json(target))}), but for {_some(others)}: "
        "give the target that it was tuned for, or tune for this one"
    )


def check_version(folder: Path) -> None:
    """InputError for the folder of a device that another version of this format was written to."""
    found = other_version(_first_line(folder))
    if found is not None:
        raise InputError(
            f"{folder} has version {found} of the format, and this tvm_fusion reads version "
            f"{VERSION}: use the tvm_fusion that made it, or tune into another folder"
        )


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        raise InputError(f"{path} is not a folder: a database is a folder of files")
    if (path / GUARD).exists():
        raise InputError(
            f"{path} is the folder of one device in a database: name the database, {path.parent}"
        )
    if any((path / name).exists() for name in NAMES):
        raise InputError(
            f"{path} is a database of MetaSchedule, not of tvm_fusion: open it with "
            "ms.database.JSONDatabase(work_dir=...), and name another folder here"
        )


def _check_writable(path: Path) -> None:
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if there != path and not there.is_dir():
        raise InputError(f"cannot make {path}: {there} is not a folder")
    if not os.access(there, os.W_OK):
        raise InputError(f"cannot write to {there}: make it writable, or use another folder")


def _is_of_device(folder: Path) -> bool:
    return any((folder / name).exists() for name in (*NAMES, LOCK))


def _visible(path: Path) -> list[Path]:
    try:
        return sorted(inner for inner in path.iterdir() if not inner.name.startswith("."))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error


def _held(path: Path) -> str:
    names = [inner.name for inner in _visible(path)]
    return f"it holds {_some(names)}" if names else "it is empty"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _target_of(folder: Path) -> str:
    """The target of a device's folder as its first line has it."""
    try:
        found = parse_guard(_first_line(folder), None)
    except BadLine:
        return "of an unknown target"
    known = isinstance(found, DeviceLine) and found.target is not None
    return _text(found.target) if known else "of an unknown target"


def _text(target: Mapping[str, Any]) -> str:
    return json.dumps(identity(target), sort_keys=True)


def _first_line(folder: Path) -> bytes:
    try:
        with (folder / GUARD).open("rb") as file:
            return file.readline().removesuffix(b"\n")
    except OSError:
        return b""
