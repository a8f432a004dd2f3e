"""CUDA compilers: nvcc in a process of its own, or NVRTC where there is no nvcc."""

import logging
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import tvm
from tvm.support import nvcc as tvm_nvcc

from ...config.architecture import read_architecture
from ...config.cards import newest_architecture
from ...errors import BuildError
from .nvrtc import compile_with_nvrtc, nvrtc_architectures, nvrtc_version

logger = logging.getLogger(__name__)

_ALWAYS_KNOWN = 90  # to all compilers of CUDA 12 and later
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
        """Return the command-line flags, those that TVM itself would give (`_lambdas_of` has one
        more); for PTX where the compiler does not know the architecture.
        """
        undefined = [f"-U__CUDA_NO_{t}_{k}__" for t in _HALF_TYPES for k in _HALF_SWITCHES]
        unused = "-diag-suppress=177"  # variables and helpers
        shared = (*undefined, unused, *_fast_math())
        if self.kind == "nvrtc":
            ptxas = (f"--ptxas-options={flag}" for flag in _ptxas_flags())
            return ("-default-device", "--device-int128", *shared, *ptxas, *_nvrtc_extra())
        known = self.nearest(arch)
        if known != arch:
            return ("--ptx", *self._nvcc_flags(known, "compute"), *shared)
        return ("--cubin", *self._nvcc_flags(arch, "sm"), *shared, *_ptxas_option())

    @staticmethod
    def _nvcc_flags(arch: str, kind: str) -> tuple[str, ...]:
        code = read_architecture(arch).code
        return (
            "-O3",
            "-gencode",
            f"arch=compute_{code},code={kind}_{code}",
            "--expt-relaxed-constexpr",
        )

    def nearest(self, arch: str) -> str:
        """`arch`, or the latest earlier architecture where the compiler does not know it: PTX for
        that one is compiled by the driver when a module is loaded.

        Raises
        ------
        BuildError
            The compiler knows no earlier one either.
        """
        asked = read_architecture(arch).number
        if asked <= _ALWAYS_KNOWN or not (known := self._known()) or asked in known:
            return arch
        earlier = [number for number in known if number < asked]
        if not earlier:
            raise BuildError(
                f"{self.kind} ({self.path}) is for {', '.join(f'sm_{n}' for n in sorted(known))}, "
                f"not for {arch}; put the nvcc of an earlier CUDA toolkit on PATH"
            )
        return f"sm_{max(earlier)}"

    def _known(self) -> frozenset[int]:
        """Compute capabilities that machine code can be made for; empty where it does not say."""
        return _nvcc_architectures(self.path) if self.kind == "nvcc" else nvrtc_architectures()

    def compile(self, source: str, arch: str) -> DeviceCode:
        """Compile without any cache; raises BuildError with the compiler's own words. PTX comes
        with what ptxas says of the same kernels for the architecture that it is of.
        """
        source = split_arrays(with_wide_vectors(least_integers(with_float8(source))))
        known = self.nearest(arch)
        code = self._compile(source, arch)
        if known == arch:
            return code
        _tell_of_ptx(self.kind, self.path, arch, known)
        return DeviceCode(code.binary, self._compile(source, known).log)

    def _compile(self, source: str, arch: str) -> DeviceCode:
        if self.kind == "nvcc":
            return self._nvcc(source, arch)
        known = self.nearest(arch)
        found = compile_with_nvrtc(source, known, self.flags(arch), is_ptx=known != arch)
        return DeviceCode(*found)

    def _nvcc(self, source: str, arch: str) -> DeviceCode:
        with tempfile.TemporaryDirectory(prefix="tvm_fusion_") as folder:
            code, binary = Path(folder, "kernel.cu"), Path(folder, "kernel.cubin")
            code.write_text(without_driver(source))
            flags = *self.flags(arch), *_lambdas_of(source)
            command = [self.path, *flags, "-o", str(binary), str(code)]
            run = subprocess.run(command, capture_output=True, text=True, errors="replace")
            log = (run.stdout + run.stderr).replace(f"{folder}{os.sep}", "")
            if run.returncode != 0 or not binary.exists():
                names = ", ".join(kernel_names(source)) or "(none)"
                raise BuildError(
                    f"nvcc ({self.path}, {arch}) refuses the kernels {names}; look at their source "
                    f"(TVM_FUSION_DUMP), or use another nvcc:\n{_errors_of(log)}"
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


@cache
def _nvcc_architectures(path: str) -> frozenset[int]:
    try:
        run = subprocess.run([path, "--list-gpu-code"], capture_output=True, text=True)
    except OSError:
        return frozenset()
    return frozenset(map(int, re.findall(r"^sm_(\d+)$", run.stdout, re.MULTILINE)))


@cache
def _tell_of_ptx(kind: str, path: str, arch: str, known: str) -> None:
    """One line: a warning where a newer compiler would do better."""
    newer = read_architecture(arch).number > newest_architecture()
    logger.log(
        logging.INFO if newer else logging.WARNING,
        "%s (%s) does not know %s: kernels are PTX for %s, which the driver compiles at each load"
        "; put the nvcc of a newer CUDA toolkit on PATH",
        kind,
        path,
        arch,
        known,
    )


def flags_of_environment() -> list[str]:
    """The flags that environment variables decide, of all compilers."""
    return [*_fast_math(), *_ptxas_flags(), *_nvrtc_extra()]


def _fast_math() -> list[str]:
    return [] if os.environ.get("TVM_CUDA_NVCC_NO_FAST_MATH") else ["--use_fast_math"]


def _nvrtc_extra() -> list[str]:
    return shlex.split(os.environ.get("TVM_CUDA_NVRTC_EXTRA_OPTS", ""))


def _ptxas_option() -> tuple[str]:
    return (f"--ptxas-options={','.join(_ptxas_flags())}",)


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


# ---- Headers that a kernel needs nothing of, which nvcc reads no faster than the kernel itself.
#
#     #include <cuda.h>        struct alignas(128) CUtensorMap_st { ... };
#
# Of the driver's header TVM's sources name the tensor map alone. For lambdas that are sent to a
# kernel nvcc includes <functional>, and with it half of the standard library. Without both it takes
# 1.05 s of CPU time in place of 1.55 for a product of an H200, and makes the same code (nvcc 13.0).

_DRIVER = "  #include <cstdint>\n  #include <type_traits>\n  #include <cuda.h>\n#endif"  # TVM's
_BY_ANOTHER = re.compile(r"#include\s*[<\"]cuda(?:Typedefs|GL|EGL|VDPAU|D3D\w*|Profiler)\.h")
_OF_DRIVER = re.compile(r"\b(?:CU[a-z_]\w*|CUDA_(?!UNSUPPORTED_)\w+|cu[A-Z]\w*|cuuint\w+)\b")
_TENSOR_MAP = """#if __CUDACC_VER_MAJOR__ < 13
struct alignas(64) CUtensorMap_st { unsigned long long opaque[16]; };
#else
struct alignas(128) CUtensorMap_st { unsigned long long opaque[16]; };
#endif
typedef struct CUtensorMap_st CUtensorMap;"""
_LAMBDA = re.compile(r"\]\s*[A-Za-z_]\w*\s*[(_]")  # what is annotated, also by a macro


def without_driver(source: str) -> str:
    """Return CUDA source that includes no header of the driver, where TVM alone includes it, and
    nothing of it is named but the tensor map.
    """
    if source.count("cuda.h") != 1 or _BY_ANOTHER.search(source):
        return source
    if set(_OF_DRIVER.findall(source)) <= {"CUtensorMap"}:
        return source.replace(_DRIVER, _DRIVER.replace("  #include <cuda.h>", _TENSOR_MAP))
    return source


def _lambdas_of(source: str) -> tuple[str, ...]:
    """The flag for lambdas that are sent to kernels, where a source has any."""
    return ("--expt-extended-lambda",) if _LAMBDA.search(source) else ()


# ---- Large arrays of registers become variables before nvcc reads a kernel.
#
#     float acc[128];  mma(acc[0], acc[1], ...)     float acc__0, acc__1, ...;  mma(acc__0, ...)
#
# TVM prints what a thread keeps as arrays. Where every index is a constant nvcc makes registers of
# them, but late: a kernel whose tensor-core instructions name 128 accumulators each takes it three
# to four times as long as the same kernel with variables, for the same machine code.

LEAST_ELEMENTS = 96  # nvcc is quick with fewer

_DECLARED = re.compile(r"^([ \t]*)alignas\(\d+\) (\w+) (\w+)\[(\d+)\];$", re.MULTILINE)


def split_arrays(source: str) -> str:
    """Return CUDA source in which thread-local arrays are variables, one per element.

    An array stays if it is small, if an index is no constant within it, if its name may mean
    something else as well, or where the address of an element is taken (what is read there may be
    wider than the element).
    """
    declared = Counter(match[3] for match in _DECLARED.finditer(source))
    for match in list(_DECLARED.finditer(source)):
        indent, dtype, name, size = match[1], match[2], match[3], int(match[4])
        if size < LEAST_ELEMENTS or declared[name] > 1 or f"{name}__" in source:
            continue
        if not _only_elements(source.replace(match[0], "", 1), name, size):
            continue
        variables = ", ".join(f"{name}__{i}" for i in range(size))
        source = source.replace(match[0], f"{indent}{dtype} {variables};", 1)
        source = re.sub(rf"\b{name}\[(\d+)\]", rf"{name}__\1", source)
    return source


def _only_elements(source: str, name: str, size: int) -> bool:
    """Whether all that the source says of an array is elements of it by constant indices."""
    before = r"(&[\s(]*|\w\s+|\.|->)?"  # its address, another declaration, a member
    uses = re.findall(rf"{before}\b{name}\b(?:\[(\d+)\])?", source)
    return all(not strange and index and int(index) < size for strange, index in uses)


# ---- The least int32 as an int: what TVM prints for it is another type to nvcc.
#
#     max(x, c ? y : -2147483648)        max(x, c ? y : (-2147483647 - 1))
#
# In C the number without its sign is too large for an int, so the literal is a long, and a function
# that is overloaded for int and long refuses an int beside it. For int64 TVM writes the difference.

_LEAST = re.compile(r"(?<![\w.])-2147483648(?![\w.])")


def least_integers(source: str) -> str:
    """Return CUDA source in which the least int32 is an int."""
    return _LEAST.sub("(-2147483647 - 1)", source)


# ---- 8-bit floats before sm_89: TVM 0.27 includes their header from there on, but the header has
# conversions by arithmetic for all architectures.

_FLOAT8_GUARD = "#if !defined(__CUDA_ARCH__) || (__CUDA_ARCH__ >= 890)\n#include <cuda_fp8.h>"


def with_float8(source: str) -> str:
    """Return CUDA source that has 8-bit floats on any architecture, where it names them."""
    return source.replace(_FLOAT8_GUARD, "#if 1\n#include <cuda_fp8.h>")


# ---- Vectors of six and of eight elements, which CUDA has not: TVM 0.27 keeps two elements in each
# one of a vector of three or four, and makes it by a call that CUDA's headers do not have.
#
#     longlong4 v = make_longlong4(9, 9, 9, 9, 9, 9, 9, 9);        eight int32
#     *(uint4*)to = make_uint4(x[i], x[j], ...);                    eight float16

_MADE = re.compile(r"\bmake_((?:u?longlong|uint)([34]))\(")


def with_wide_vectors(source: str) -> str:
    """Return CUDA source in which vectors of six and eight elements can be made of them."""
    made = sorted({(match[1], 2 * int(match[2])) for match in _MADE.finditer(source)})
    return "".join(_constructor(vector, lanes) for vector, lanes in made) + source


def _constructor(vector: str, lanes: int) -> str:
    given = ", ".join(f"T a{i}" for i in range(lanes))
    written = " ".join(f"reinterpret_cast<T*>(&v)[{i}] = a{i};" for i in range(lanes))
    return (
        f"template <typename T> static __inline__ __device__ {vector} make_{vector}({given}) "
        f"{{ {vector} v; {written} return v; }}\n"
    )
