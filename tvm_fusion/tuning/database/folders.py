"""Which folder of a database is of which device: one for each device, target and version.

D/<device>-tvm<version>-<compiler>-fusion<version>-<digest>/
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import tvm

from ..._version import __version__
from ...errors import InputError
from ...hardware import HardwareProfile
from ...runtime.cuda_compiler import find_compiler
from .files import NAMES, PLANS, QUARANTINE
from .lines import canonical, digest
from .store import Database
from .workloads import identity, target_json

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
        Of the database; the device's folder in it is made unless `read_only`.
    hw : HardwareProfile
    target : tvm.target.Target
    read_only : bool
        Write nothing. Where there is no folder of the device, the database is empty.

    Raises
    ------
    InputError
        See `Database.open`; or there is no such path to be read.
    BuildError
        There is no CUDA compiler, whose version is a part of the folder's name.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is not a folder: a database is a folder of files")
    if read_only and not path.exists():
        raise InputError(f"there is no database {path}: `python -m tvm_fusion tune` makes one")
    name = folder_of(hw, target)
    return Database.open(path / name, name, target=target, read_only=read_only)


def device_folders(path: str | Path) -> list[Path]:
    """The folders at or below a path that hold a file of a database, sorted."""
    found = []
    for folder, inner, names in os.walk(path):
        inner[:] = sorted(name for name in inner if name not in (QUARANTINE, PLANS))
        if set(NAMES) & {*inner, *names}:
            found.append(Path(folder))
            inner.clear()
    return sorted(found)
