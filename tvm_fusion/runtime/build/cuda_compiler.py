"""CUDA compilers: nvcc in a process of its own, or NVRTC where there is no nvcc."""

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import tvm
from tvm.support import nvcc as tvm_nvcc

from ...errors import BuildError
from .least_integers import least_integers
from .nvrtc import compile_with_nvrtc, nvrtc_version
from .split_arrays import split_arrays

_HALF_TYPES = ("HALF", "BFLOAT16", "BFLOAT162")
_HALF_SWITCHES = ("OPERATORS", "CONVERSIONS")


@dataclass(frozen=True, slots=True)
class DeviceCode:
    """Machine code for one CUDA source, and what the compiler said about it."""

    binary: bytes
    log: str


@dataclass(frozen=True, slots=True)
class Compiler:
    """A CUDA compiler; `kind` is "nvcc" or "nvrtc"."""

    kind: str
    path: str
    version: str

    def flags(self, arch: str) -> tuple[str, ...]:
        """Return the command-line flags, those that TVM itself would give."""
        undefined = [f"-U__CUDA_NO_{t}_{k}__" for t in _HALF_TYPES for k in _HALF_SWITCHES]
        fast_math = () if os.environ.get("TVM_CUDA_NVCC_NO_FAST_MATH") else ("--use_fast_math",)
        shared = (*undefined, "-diag-suppress=177", *fast_math)  # 177: unused variables and helpers
        if self.kind == "nvrtc":
            extra = shlex.split(os.environ.get("TVM_CUDA_NVRTC_EXTRA_OPTS", ""))
            ptxas = (f"--ptxas-options={flag}" for flag in _ptxas_flags())
            return ("-default-device", "--device-int128", *shared, *ptxas, *extra)
        number = arch.removeprefix("sm_")
        return (
            "--cubin",
            "-O3",
            "-gencode",
            f"arch=compute_{number},code=sm_{number}",
            "--expt-relaxed-constexpr",
            "--expt-extended-lambda",
            *shared,
            f"--ptxas-options={','.join(_ptxas_flags())}",
        )

    def compile(self, source: str, arch: str) -> DeviceCode:
        """Compile without any cache; raises BuildError with the compiler's own words."""
        source = split_arrays(least_integers(source))
        if self.kind == "nvcc":
            return self._nvcc(source, arch)
        return DeviceCode(*compile_with_nvrtc(source, arch, self.flags(arch)))

    def _nvcc(self, source: str, arch: str) -> DeviceCode:
        with tempfile.TemporaryDirectory(prefix="tvm_fusion_") as folder:
            code, binary = Path(folder, "kernel.cu"), Path(folder, "kernel.cubin")
            code.write_text(source)
            command = [self.path, *self.flags(arch), "-o", str(binary), str(code)]
            run = subprocess.run(command, capture_output=True, text=True, errors="replace")
            log = (run.stdout + run.stderr).replace(f"{folder}{os.sep}", "")
            if run.returncode != 0 or not binary.exists():
                raise BuildError(
                    f"nvcc ({self.path}, {arch}) refuses the kernels "
                    f"{', '.join(kernel_names(source)) or '(none)'}:\n{_errors_of(log)}"
                )
            return DeviceCode(binary.read_bytes(), log)


def find_compiler() -> Compiler:
    """Return the CUDA compiler to use: nvcc from PATH, else NVRTC.

    `TVM_CUDA_COMPILE_MODE` ("nvcc" or "nvrtc") asks for one of them.
    """
    mode = os.environ.get("TVM_CUDA_COMPILE_MODE", "").lower()
    path = shutil.which("nvcc")
    if path and mode != "nvrtc":
        return Compiler("nvcc", os.path.realpath(path), _nvcc_version(path))
    version = nvrtc_version()
    if version and mode != "nvcc":
        return Compiler("nvrtc", "nvrtc", version)
    raise BuildError(
        "no CUDA compiler: nvcc is not on PATH"
        + (" (TVM_CUDA_COMPILE_MODE asks for it)" if mode == "nvcc" else "")
        + ", and NVRTC (Python package cuda-bindings) is "
        + ("not asked for" if version else "not installed")
        + ". Install the CUDA toolkit and put its bin folder on PATH, or "
        "`pip install cuda-bindings`, or compile for the target llvm"
    )


@cache
def _nvcc_version(path: str) -> str:
    run = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace")
    return run.stdout.strip().splitlines()[-1] if run.returncode == 0 else "unknown"


def _ptxas_flags() -> list[str]:
    return [
        "-v",
        f"--register-usage-level={os.environ.get('TVM_CUDA_PTXAS_REG_LEVEL', '10')}",
        "--warn-on-local-memory-usage",
        *shlex.split(os.environ.get("TVM_CUDA_PTXAS_EXTRA_OPTS", "")),
    ]


def _errors_of(log: str) -> str:
    """Return the lines that name errors, or the end of the log where none does."""
    lines = log.splitlines()
    errors = [line for line in lines if re.search(r"\b(error|fatal)\b", line, re.IGNORECASE)]
    return "\n".join((errors or lines[-20:])[:20])


def kernel_names(source: str) -> tuple[str, ...]:
    """Return the names of the kernels that a CUDA source defines, in order of appearance."""
    pattern = r"__global__\s+void\s+(?:__\w+__\s*\([^)]*\)\s*)*(\w+)\s*\("
    return tuple(dict.fromkeys(re.findall(pattern, source)))


def cuda_arch(target: tvm.target.Target | None = None) -> str:
    """Return "sm_90a" and the like: the target's, else the current target's, else the device's."""
    target = target or tvm.target.Target.current(allow_none=True)
    named = str(target.attrs.get("arch", "")) if target is not None else ""
    if named:
        return named
    return "sm_" + tvm_nvcc.get_target_compute_version(target).replace(".", "")
