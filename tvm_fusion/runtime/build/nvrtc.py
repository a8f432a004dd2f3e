"""NVRTC: CUDA source to machine code within this process.

A kernel of ours takes NVRTC about 0.05 s where nvcc takes 0.5, since nvcc preprocesses the host's
headers. NVRTC loses as much over libcu++, which TVM's sources include for a few names: unless a
source needs more of it, it gets headers with these names alone.
"""

import os
import re
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from ...errors import BuildError

# what the sources that TVM generates include under NVRTC, and of it the names that they use
_STAND_INS = {
    "cuda/std/cstdint": """
#pragma once
namespace cuda { namespace std {
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
} }
""",
    "cuda/std/type_traits": """
#pragma once
namespace cuda { namespace std {
template <bool V> struct truth { static constexpr bool value = V; };
template <class A, class B> struct is_same : truth<false> {};
template <class A> struct is_same<A, A> : truth<true> {};
template <class A, class B> inline constexpr bool is_same_v = is_same<A, B>::value;
template <class T> struct is_floating_point
    : truth<is_same_v<T, float> || is_same_v<T, double>> {};
template <class T> struct is_integral
    : truth<is_same_v<T, bool> || is_same_v<T, char> || is_same_v<T, signed char> ||
            is_same_v<T, unsigned char> || is_same_v<T, short> || is_same_v<T, unsigned short> ||
            is_same_v<T, int> || is_same_v<T, unsigned> || is_same_v<T, long> ||
            is_same_v<T, unsigned long> || is_same_v<T, long long> ||
            is_same_v<T, unsigned long long>> {};
template <class T, bool = is_integral<T>::value> struct is_unsigned : truth<(T(-1) > T(0))> {};
template <class T> struct is_unsigned<T, false> : truth<false> {};
template <class T> struct is_signed
    : truth<is_floating_point<T>::value || (is_integral<T>::value && !is_unsigned<T>::value)> {};
template <bool V, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { typedef T type; };
template <bool V, class A, class B> struct conditional { typedef A type; };
template <class A, class B> struct conditional<false, A, B> { typedef B type; };
} }
""",
}
_SELF_CONTAINED = {"cuda_fp16.h", "cuda_bf16.h", "math_constants.h", *_STAND_INS}
_HOST_ONLY = {"cuda.h", "cstdint", "type_traits"}  # between #else and #endif of __CUDACC_RTC__

# what nvcc's host headers would bring: CUtensorMap is 128 opaque bytes (cuda.h; that of CUDA 13
# aligns it at 128)
_PRELUDE = """
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
struct alignas(64) CUtensorMap_st { unsigned long long opaque[16]; };
typedef struct CUtensorMap_st CUtensorMap;
"""


def nvrtc_version() -> str | None:
    """Return "NVRTC 13.0" and the like; None where it cannot be used."""
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError):  # without the bindings, or the library behind them
        return None
    return f"NVRTC {major}.{minor}"


@cache
def nvrtc_architectures() -> frozenset[int]:
    """Compute capabilities that NVRTC can make machine code for; empty where it does not say."""
    from cuda.bindings import nvrtc

    status, found = nvrtc.nvrtcGetSupportedArchs()
    return frozenset(found) if status.value == 0 else frozenset()


def compile_with_nvrtc(
    source: str, arch: str, options: Sequence[str], is_ptx: bool = False
) -> tuple[bytes, str]:
    """Compile a CUDA source to a cubin, or to PTX.

    Parameters
    ----------
    source : str
        CUDA C++ as TVM generates it.
    arch : str
        Such as "sm_90a".
    options : sequence of str
        Further options of NVRTC.

    Returns
    -------
    code : bytes
        The cubin, or the PTX.
    log : str
        What the compiler said, ptxas included.

    Raises
    ------
    BuildError
        If NVRTC refuses the source, with its words, or the CUDA headers are not found.
    """
    from cuda.bindings import nvrtc

    headers = _STAND_INS if _needs_no_library(source) else {}
    given = [text.encode() for text in headers.values()]
    names = [name.encode() for name in headers]
    text = (_PRELUDE + source.replace("#include <cuda.h>", "")).encode()
    virtual = arch.replace("sm_", "compute_") if is_ptx else arch
    arguments = [
        f"--gpu-architecture={virtual}",
        *options,
        *(f"-I{path}" for path in _include_dirs()),
    ]
    encoded = [argument.encode() for argument in arguments]
    status, program = nvrtc.nvrtcCreateProgram(text, b"kernel.cu", len(given), given, names)
    _check(status, arch)
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = _text(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        _check(status, arch, log.decode(errors="replace"))
        sized, content = (
            (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
            if is_ptx
            else (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        )
        code = _text(program, sized, content)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return code, log.rstrip(b"\0").decode(errors="replace")


def _needs_no_library(source: str) -> bool:
    """Whether the stand-ins, and headers that include nothing more, are all that a source names."""
    named = set(re.findall(r'#\s*include\s*[<"]([^>"]+)[>"]', source))
    return named <= _SELF_CONTAINED | _HOST_ONLY


def _text(program: object, size_of: object, content_of: object) -> bytes:
    status, size = size_of(program)
    _check(status, "")
    # NVRTC writes into it: two bytes at least, since Python has one object for each single byte,
    # and the end of an empty log would be written over every b" " of the process
    buffer = bytes(size + 1)
    (status,) = content_of(program, buffer)
    _check(status, "")
    return buffer[:size]


def _check(status: object, arch: str, log: str = "") -> None:
    if int(status) != 0:
        raise BuildError(
            f"NVRTC ({arch}) refuses a kernel ({status.name}); put nvcc on PATH:\n{log}"
        )


@cache
def _include_dirs() -> tuple[str, ...]:
    """The folders of CUDA's headers and of libcu++, the latter only where it is installed."""
    folders = _folders()
    found = next((folder for folder in folders if (folder / "cuda_fp16.h").is_file()), None)
    if found is None:
        raise BuildError(
            "NVRTC needs CUDA's headers (cuda_fp16.h), and they are not in "
            f"{', '.join(map(str, folders))}. Set CUDA_PATH to the toolkit, or `pip install "
            "nvidia-cuda-runtime`"
        )
    library = (path for folder in (found, *folders) for path in (folder / "cccl", folder))
    library = next((path for path in library if (path / "cuda/std/cstdint").is_file()), None)
    return tuple(str(path) for path in (found, library) if path is not None)


def _folders() -> list[Path]:
    """Where CUDA's headers may be: $CUDA_PATH, $CUDA_HOME, nvcc's toolkit, installed packages, the
    usual folder.
    """
    nvcc = shutil.which("nvcc")
    roots = [os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME")]
    roots.append(str(Path(nvcc).resolve().parent.parent) if nvcc else None)
    folders = [str(Path(root, "include")) for root in roots if root]
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError:  # an older cuda-pathfinder
        pass
    else:
        folders += [find_nvidia_header_directory(name) for name in ("cudart", "cccl")]
    return [Path(folder) for folder in (*folders, "/usr/local/cuda/include") if folder]
