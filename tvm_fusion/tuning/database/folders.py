"""Which folder of a database is of which device, and which paths are databases.

    D/<device>-tvm<version>-<compiler>-fusion<version>-<digest>/trials.jsonl

Only what is a database is read, and a new one takes an empty folder.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import tvm
from tvm.target.codegen import llvm_version_major

from ..._version import __version__
from ...config.hardware import HardwareProfile
from ...errors import InputError, NothingTuned
from ...host.appended_files import LOCK
from ...runtime.build.cuda_compiler import find_compiler
from .foreign import GUARD
from .lines import canonical, digest, identity
from .metaschedule import RECORDS, WORKLOADS, target_json
from .store import TRIALS, Database

_LONGEST = 45  # of a part of a name; five of them fit in what file systems take
_SHOWN = 5  # folders, or files, that a message names
_OURS, _STOCK = (TRIALS, GUARD), (WORKLOADS, RECORDS)


def device_folder(*parts: str) -> str:
    """The name of a folder, of characters that any file system takes.

    >>> device_folder("nvidia_h200", "tvm0.27.0", "nvcc 13.0", "fusion0.1.0")
    'nvidia_h200-tvm0.27.0-nvcc_13.0-fusion0.1.0'
    """
    return "-".join(re.sub(r"[^A-Za-z0-9._+]+", "_", part).strip("._")[:_LONGEST] for part in parts)


_VERSIONS = tuple(map(device_folder, (f"tvm{tvm.__version__}", f"fusion{__version__}")))


def folder_of(hw: HardwareProfile, target: tvm.target.Target) -> str:
    """The name of the folder of a device; its digest is of the target and of the multiprocessors,
    by which devices of one profile differ. BuildError without a compiler, whose version is in it.
    """
    key = digest(canonical([identity(target_json(target)), hw.num_sms]))[:8]
    of_tvm, of_fusion = _VERSIONS
    return device_folder(hw.name, of_tvm, _compiler_version(target), of_fusion, key)


def _compiler_version(target: tvm.target.Target) -> str:
    """What makes machine code for a target: `nvcc 13.0...`, `llvm 22`."""
    if target.kind.name == "llvm":
        return f"llvm{llvm_version_major()}"
    compiler = find_compiler()
    return f"{compiler.kind}{compiler.version.removeprefix('Build cuda_').removeprefix('NVRTC ')}"


def find_database(
    path: str | Path,
    hw: HardwareProfile,
    target: tvm.target.Target,
    *,
    read_only: bool = False,
) -> Database:
    """Open the folder of a device in a database; both are made unless `read_only`.

    Raises
    ------
    InputError
        See `Database`; or the path is no database: it does not exist or is empty and is to be read,
        it has nothing of the device and is to be read (`NothingTuned`), or it holds something else.
    BuildError
        There is no CUDA compiler, whose version is a part of the folder's name.
    """
    path, name = Path(path), folder_of(hw, target)
    if not read_only:
        check_place(path)
    else:
        _check_database(path)
        if not (path / name).is_dir():
            others = [f"{folder.name} ({_target_of(folder)})" for folder in _folders_in(path)]
            raise NothingTuned(
                f"{path} holds nothing for {name} ({_text(target_json(target))}), but for "
                f"{_some(others)}: give the target that it was tuned for, or tune for this one"
            )
    return Database(path / name, name, target=target, read_only=read_only)


class Folders:
    """The stores of a database, by device; they are only read. InputError for another path."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        _check_database(self.path)
        self._opened: dict[str, Database] = {}

    def __str__(self) -> str:
        return str(self.path)

    def of(self, hw: HardwareProfile, target: tvm.target.Target) -> Database:
        """That of a device; `NothingTuned` where there is none."""
        name = folder_of(hw, target)
        if name not in self._opened:
            self._opened[name] = find_database(self.path, hw, target, read_only=True)
        return self._read(name)

    def all(self) -> list[Database]:
        """Those that this version of TVM and of this package wrote."""
        found = [x.name for x in _folders_in(self.path) if {*_VERSIONS} <= {*x.name.split("-")}]
        return [self._read(name) for name in found]

    def _read(self, name: str) -> Database:
        if name not in self._opened:
            self._opened[name] = Database(self.path / name, None)
        self._opened[name].refresh()
        return self._opened[name]


def device_folders(path: str | Path) -> list[Path]:
    """The folders at or below a path that hold a file of a database, sorted."""
    found = []
    for folder, inner, names in os.walk(path):
        inner.sort()
        if {*_OURS, *_STOCK} & {*inner, *names}:
            found.append(Path(folder))
            inner.clear()
    return sorted(found)


def check_place(path: Path) -> None:
    """InputError for a path where tuning cannot begin or go on: it has to be a database, an empty
    folder, or none yet, and can be written.
    """
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if there != path and not there.is_dir():
        raise InputError(f"cannot make {path}: {there} is not a folder; name another folder")
    if not os.access(there, os.W_OK):
        raise InputError(f"cannot write to {there}: make it writable, or use another folder")
    if not path.exists():
        return
    _check_folder(path)
    if _visible(path) and not _folders_in(path):
        raise InputError(
            f"{path} is no database of tvm_fusion, and not empty: {_held(path)}. Name another "
            "folder for the database; it is made if it is not there"
        )


def _check_database(path: Path) -> None:
    """InputError for a path that is to be read and is no database, with what it is."""
    if not path.exists():
        raise InputError(f"there is no database {path}: `python -m tvm_fusion tune` makes one")
    _check_folder(path)
    if not _folders_in(path):
        raise InputError(
            f"{path} is no database of tvm_fusion: {_held(path)}. Name the folder that "
            "`tvm_fusion.tune` was given"
        )


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        raise InputError(f"{path} is not a folder: a database is a folder of files; name a folder")
    if any((path / name).exists() for name in _OURS):
        raise InputError(
            f"{path} is the folder of one device in a database: name the database, {path.parent}"
        )
    if any((path / name).exists() for name in _STOCK):
        raise InputError(
            f"{path} is a database of MetaSchedule, not of tvm_fusion: open it with "
            "ms.database.JSONDatabase(work_dir=...), or take it over with `python -m tvm_fusion "
            "tune --db-import`, and name another folder here"
        )


def _folders_in(path: Path) -> list[Path]:
    """The folders of devices in a database, sorted."""
    names = (*_OURS, *_STOCK, LOCK)
    return [x for x in _visible(path) if x.is_dir() and any((x / name).exists() for name in names)]


def _visible(path: Path) -> list[Path]:
    try:
        return sorted(inner for inner in path.iterdir() if not inner.name.startswith("."))
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror or error}; make it readable"
        ) from error


def _held(path: Path) -> str:
    names = [inner.name for inner in _visible(path)]
    return f"it holds {_some(names)}" if names else "it is empty"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _target_of(folder: Path) -> str:
    target = Database(folder, None, silent=True).target
    return "of an unknown target" if target is None else _text(target)


def _text(target: dict[str, Any]) -> str:
    return json.dumps(identity(target), sort_keys=True)
