"""What is written down of a benchmark: where, when, with which versions, and what failed."""

import datetime
import importlib.metadata
import platform
import re
import sys
from pathlib import Path
from typing import Any

from .._version import __version__

OURS = "tvm_fusion"
FORMAT = 1
_PACKAGES = ("apache-tvm", "apache-tvm-ffi", "torch", "triton", "jax", "numpy")


def header(profile: str, on_gpu: bool, scale: float, repeats: int) -> dict[str, Any]:
    """Return a result without rows."""
    import torch

    return {
        "format": FORMAT,
        "device": torch.cuda.get_device_name() if on_gpu else _cpu_name(),
        "profile": profile,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "versions": _versions(torch.version.cuda),
        "command": " ".join(["python -m tvm_fusion.bench", *sys.argv[1:]]),
        "method": "kernel time (CUPTI), L2 cleaned before each call" if on_gpu else "wall time",
        "scale": scale,
        "repeats": repeats,
        "rows": [],
    }


def reason(error: Exception) -> str:
    """Return type and first lines of an error, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2]) or 'no message'}"[:500]


def line(row: dict[str, Any]) -> str:
    """Return a row in one line."""

    def us(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    others = ", ".join(f"{name} {us(value)}" for name, value in row["peers_us"].items())
    failed = "; ".join(f"{name}: {why}" for name, why in row["failures"].items())
    return (
        f"{row['name']} {row['shape']}: ours {us(row['ours_us'])} us ({row['launches']} launches, "
        f"limit {us(row['limit_us'])}), {others}{' | ' if failed else ''}{failed}"
    )


def _cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _versions(cuda: str | None) -> dict[str, str]:
    found = {"python": platform.python_version(), OURS: __version__}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | ({"cuda": cuda} if cuda else {})
