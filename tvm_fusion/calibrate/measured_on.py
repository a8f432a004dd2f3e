"""What a measurement was made on: date, device, driver, versions."""

from __future__ import annotations

import datetime
import platform
import re
import shutil
import subprocess
from pathlib import Path

import tvm

from ..config import HardwareProfile


def described(hw: HardwareProfile) -> str:
    """ "2026-11-20 on NVIDIA H200, driver 570.86, CUDA 12.8, TVM 0.27" and the like."""
    parts = [f"{datetime.date.today().isoformat()} on {_device(hw)}"]
    if hw.kind == "cuda":
        parts += [f"driver {driver_version()}", cuda_version()]
    return ", ".join([*parts, f"TVM {tvm.__version__}"])


def driver_version() -> str:
    """Version of the NVIDIA driver, or "unknown"."""
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        run = subprocess.run(query, capture_output=True, text=True, errors="replace")
        if run.returncode == 0 and run.stdout.strip():
            return run.stdout.split()[0]
    return _found(r"Kernel Module\D*([\d.]+)", "/proc/driver/nvidia/version") or "unknown"


def cuda_version() -> str:
    """ "CUDA 12.8", as the compiler says, or "CUDA unknown"."""
    from ..runtime.build.cuda_compiler import find_compiler

    compiler = find_compiler()
    found = re.search(r"cuda_([\d.]+)", compiler.version) or re.search(
        r"([\d.]+)", compiler.version
    )
    return f"CUDA {found[1].rstrip('.')}" if found else "CUDA unknown"


def cpu_name() -> str:
    """What the CPU of this machine calls itself."""
    name = _found(r"model name\s*:\s*(.+)", "/proc/cpuinfo") or platform.processor() or "CPU"
    return " ".join(name.split())


def _device(hw: HardwareProfile) -> str:
    from ..host.cores import available_cores

    if hw.kind == "cuda":
        return str(tvm.cuda(0).device_name)
    name = cpu_name()
    return f"{available_cores()} cores of {' '.join(name.split())}"


def _found(pattern: str, file: str) -> str | None:
    """What a pattern finds in a file of the system, or None."""
    try:
        match = re.search(pattern, Path(file).read_text(errors="replace"))
    except OSError:
        return None
    return match[1] if match else None
