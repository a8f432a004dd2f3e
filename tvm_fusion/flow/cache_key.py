"""What plans and kernels depend on beside the model: a part of the key of all that is kept."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import tvm

from .._version import __version__
from ..config import HardwareProfile, Policy, shipped_file
from ..config.digest import digest
from ..cost.learned.learned import residual_file
from ..errors import BuildError
from ..kernels.registry import families
from ..runtime.build.cuda_compiler import find_compiler


def all_ours(hw: HardwareProfile) -> bool:
    """Whether all kernel classes are this package's: the code of others is in no key."""
    own = "tvm_fusion."
    return all(type(k).__module__.startswith(own) for k in families(hw))


def surroundings(target: tvm.target.Target, hw: HardwareProfile, policy: Policy) -> list[Any]:
    """The versions, the package, the target, the numbers of the device and of its residual, the
    policy, the kernel classes and the compiler that probes, as plain values.
    """
    return [
        __version__,
        tvm.__version__,
        package_state(),
        str(target),
        hw.name,
        hw.fingerprint(),
        repr(policy),
        [k.name for k in families(hw)],
        _residual_state(hw),
        _compiler(policy),
    ]


@cache
def package_state() -> str:
    """Of each file of the package its size and time: a change makes all entries new."""
    root = Path(__file__).parents[1]
    files = sorted(root.rglob("*.py"))
    return digest([(str(f.relative_to(root)), *_size_and_time(f)) for f in files])


def _size_and_time(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_size, found.st_mtime_ns


def _residual_state(hw: HardwareProfile) -> list[str]:
    files = (residual_file(hw), shipped_file(f"{hw.name}.residual.json"))
    return [hashlib.sha256(f.read_bytes()).hexdigest() for f in files if f.is_file()]


def _compiler(policy: Policy) -> list[str]:
    """What probes kernels while planning."""
    if policy.probe == "off":
        return []
    try:
        compiler = find_compiler()
    except BuildError:
        return []
    return [compiler.kind, compiler.path, compiler.version]
