"""Which folder of a database is of which device: one for each device, target and version.

D/<device>-tvm<version>-<compiler>-fusion<version>-<digest>/
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import tvm

from ..._version import __version__
from ...config.hardware import HardwareProfile
from ...runtime.build.cuda_compiler import find_compiler
from .files import NAMES, PLANS, QUARANTINE
from .lines import canonical, digest
from .open_folder import check_database, check_place, folders_in, nothing_for
from .store import Database
from .workload_lines import identity, target_json

_LONGEST = 45  # of a part of a name; five of them fit in what file systems take


def device_folder(
    device: str, tvm_version: str, compiler: str, package_version: str, key: str = ""
) -> str:
    """The name of a folder, of characters that any file system takes.

    Parameters
    ----------
    device : str
        `HardwareProfile.name`.
    tvm_version, compiler, package_version : str
    key : str
        What else tells it from others.

    Examples
    --------
    >>> device_folder("nvidia_h200", "0.27.0", "nvcc 13.0", "0.1.0")
    'nvidia_h200-tvm0.27.0-nvcc_13.0-fusion0.1.0'
    """
    parts = [device, f"tvm{tvm_version}", compiler, f"fusion{package_version}", key]
    return "-".join(_safe(part) for part in parts if part)


def _safe(part: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+]+", "_", part).strip("._")[:_LONGEST]


def compiler_version(target: tvm.target.Target) -> str:
    """What makes machine code for a target: `nvcc 13.0...`, `llvm 22`.

    Raises
    ------
    BuildError
        There is no CUDA compiler for a CUDA target.
    """
    if target.kind.name == "llvm":
        from tvm.target.codegen import llvm_version_major

        return f"llvm{llvm_version_major()}"
    compiler = find_compiler()
    return f"{compiler.kind}{compiler.version.removeprefix('Build cuda_').removeprefix('NVRTC ')}"


def folder_of(hw: HardwareProfile, target: tvm.target.Target) -> str:
    """The name of the folder of a device; its digest is of the target and of the multiprocessors,
    by which devices of one profile differ.
    """
    key = digest(canonical([identity(target_json(target)), hw.num_sms]))[:8]
    return device_folder(hw.name, tvm.__version__, compiler_version(target), __version__, key)


def find_database(
    path: str | Path,
    hw: HardwareProfile,
    target: tvm.target.Target,
    *,
    read_only: bool = False,
) -> Database:
    """Open the folder of a device in a database.

    Parameters
    ----------
    path : path
        Of the database; it and the device's folder in it are made unless `read_only`.
    hw : HardwareProfile
    target : tvm.target.Target
    read_only : bool
        Write nothing.

    Raises
    ------
    InputError
        See `Database.open`; or the path is no database: it does not exist or is empty and is to be
        read, it has nothing of the device and is to be read, or it holds something else.
    BuildError
        There is no CUDA compiler, whose version is a part of the folder's name.
    """
    path, name = Path(path), folder_of(hw, target)
    if not read_only:
        check_place(path)
    else:
        check_database(path)
        if not (path / name).is_dir():
            raise nothing_for(path, name, target)
    return Database.open(path / name, name, target=target, read_only=read_only)


class Folders:
    """The stores of a database, by device; they are only read.

    Parameters
    ----------
    path : str or Path

    Raises
    ------
    InputError
        The path is no database.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        check_database(self.path)
        self._opened: dict[str, Database] = {}

    def __str__(self) -> str:
        return str(self.path)

    def of(self, hw: HardwareProfile, target: tvm.target.Target) -> Database:
        """That of a device.

        Raises
        ------
        NothingTuned
            There is none.
        """
        name = folder_of(hw, target)
        if name not in self._opened:
            self._opened[name] = find_database(self.path, hw, target, read_only=True)
        return self._read(name)

    def all(self) -> list[Database]:
        """Those that this version of TVM and of this package wrote."""
        mine = {_safe(f"tvm{tvm.__version__}"), _safe(f"fusion{__version__}")}
        names = [x.name for x in folders_in(self.path) if mine <= set(x.name.split("-"))]
        for name in names:
            if name not in self._opened:
                self._opened[name] = Database.open(self.path / name, None)
        return [self._read(name) for name in names]

    def _read(self, name: str) -> Database:
        self._opened[name].refresh()
        return self._opened[name]


def device_folders(path: str | Path) -> list[Path]:
    """The folders at or below a path that hold a file of a database, sorted."""
    found = []
    for folder, inner, names in os.walk(path):
        inner[:] = sorted(name for name in inner if name not in (QUARANTINE, PLANS))
        if set(NAMES) & {*inner, *names}:
            found.append(Path(folder))
            inner.clear()
    return sorted(found)
