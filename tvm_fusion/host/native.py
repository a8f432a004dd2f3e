"""What lies below TVM's Python: functions written in LLVM IR, and addresses of C functions.

A few steps of a call must not take longer than the call of a small kernel, and Python does. They
are LLVM IR, which TVM compiles when they are first needed.
"""

from __future__ import annotations

import ctypes
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

_LOADER = "ffi.Module.load_from_file.ll"


def load_ir(text: str) -> Any:
    """Compile LLVM IR; returns a module, whose function `__tvm_ffi_NAME` is its NAME.

    Raises
    ------
    ValueError
        If TVM cannot load LLVM IR.
    """
    import tvm_ffi

    loader = tvm_ffi.get_global_func(_LOADER)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "functions.ll"
        file.write_text(f"{_layout()}\n{text}")
        return loader(str(file), "ll")


@cache
def library(name: str) -> ctypes.CDLL:
    """One of TVM's libraries, which is loaded already; raises OSError if there is none."""
    import tvm
    import tvm_ffi

    for package in (tvm, tvm_ffi):
        for file in sorted(Path(package.__file__).parent.glob(f"lib/{name}.*")):
            return ctypes.CDLL(str(file))
    raise OSError(f"no {name}")


def address_of(function: Any) -> int:
    """The address of a function of a library."""
    return ctypes.cast(function, ctypes.c_void_p).value


@cache
def _layout() -> str:
    """The lines of a module's IR that say what machine it is for."""
    import tvm
    import tvm_ffi

    build = tvm_ffi.get_global_func("target.build.llvm")
    lines = build(tvm.IRModule(), tvm.target.Target("llvm")).inspect_source("ll").splitlines()
    return "\n".join(line for line in lines if line.startswith("target "))
