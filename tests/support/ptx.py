"""Counts the instructions of a kernel in the PTX that nvcc makes of it."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tvm import tirx

from .cuda_on_cpu import lower

SPECIAL = ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh", "div")

# Part of other instructions in machine code: signs, addresses, parameters, halves of words.
FREE = ("neg", "abs", "mov", "ld.param", "cvta", "ret", "bar")


@dataclass(frozen=True)
class Instructions:
    """Instructions of one kernel, as written (without loops: as executed)."""

    total: int
    special: int


def ptx_of(func: tirx.PrimFunc, arch: str) -> str:
    """The PTX of a scheduled PrimFunc."""
    with tempfile.TemporaryDirectory() as folder:
        code, ptx = Path(folder, "kernel.cu"), Path(folder, "kernel.ptx")
        code.write_text(lower(func).source)
        command = ["nvcc", f"-arch={arch}", "-ptx", "-O3", "--use_fast_math", "-diag-suppress=177"]
        subprocess.run([*command, "-o", str(ptx), str(code)], check=True, capture_output=True)
        return ptx.read_text()


def instructions(func: tirx.PrimFunc) -> Instructions:
    """The instructions of a scheduled PrimFunc, for sm_90a; a float division counts as two."""
    body = ptx_of(func, "sm_90a").split(".entry", 1)[1]
    found = re.findall(
        r"^\s*(?:\{\s*)?(?:@!?%p\d+ )?([a-z]\w*(?:\.\w+|::)*)[ ;]", body, re.MULTILINE
    )
    found = [name for name in found if not name.startswith(FREE)]
    floats = [name for name in found if ".f32" in name]
    special = [name for name in floats if name.startswith(SPECIAL)]
    return Instructions(len(found) + sum(n.startswith("div") for n in floats), len(special))
