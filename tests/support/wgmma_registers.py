"""Whether machine code writes registers that a wgmma in flight still reads its A from.

PTX forbids to touch them before the wait; ptxas 13.0 does it nevertheless where a kernel's wait
stands in another turn of a loop (see the notes on TVM). The emulator, which runs CUDA, cannot see
that.
"""

import importlib.util
import re
import subprocess
import tempfile
from pathlib import Path

from tvm import tirx

from .cuda_on_cpu import cuda_source
from .tools import require

# Instructions whose first operand is read.
_READ_ONLY = ("ST", "SYNCS", "BAR", "RED", "WARPSYNC", "BSYNC", "MEMBAR", "U", "R2UR", "CCTL")
_GUARD = re.compile(r"@!?U?P\w+ ")
_BRANCH = re.compile(r"(@!?U?P\w+ )?BRA\S*(?: !?U?P\w+,)? `\((\.L_x_\d+)\)")
_FROM_REGISTERS = re.compile(r"HGMMA\S* R\d+, R(\d+), gdesc")
_WORDS_OF_A = 4

Groups = tuple[frozenset[int], ...]
"""Registers of A of the groups of wgmmas that are under way, the oldest first; the last is open."""


def machine_code(func: tirx.PrimFunc) -> str:
    """The SASS of a kernel for sm_90a."""
    nvcc, nvdisasm = require("nvcc"), _nvdisasm()
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.cu"), Path(folder, "kernel.cubin")
        source.write_text(cuda_source(func))
        options = ["-arch=sm_90a", "-cubin", "-O3", "--use_fast_math", "-w"]
        subprocess.run([nvcc, *options, str(source), "-o", str(binary)], check=True)
        return subprocess.run(
            [nvdisasm, str(binary)], check=True, capture_output=True, text=True
        ).stdout


def _nvdisasm() -> str:
    """That of Triton's wheel, which comes with PyTorch, where the toolkit has none."""
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        found = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
        if found.exists():
            return str(found)
    return require("nvdisasm")


def early_writes(sass: str) -> list[str]:
    """Instructions that write what a wgmma under way reads, along all ways through a kernel."""
    code, labels = _parse(sass)
    found: dict[int, str] = {}
    seen: set[tuple[int, Groups]] = set()
    waiting: list[tuple[int, Groups]] = [(0, (frozenset(),))]
    while waiting:
        state = waiting.pop()
        place, groups = state
        if state in seen or place >= len(code):
            continue
        seen.add(state)
        line = _GUARD.sub("", code[place], count=1)
        if _written(line) & frozenset().union(*groups):
            found[place] = line
        groups = _after(line, groups)
        branch = _BRANCH.match(code[place])
        if branch:
            waiting.append((labels[branch.group(2)], groups))
        always = code[place].startswith(("EXIT", "BRA `"))
        if not always:
            waiting.append((place + 1, groups))
    return [found[place] for place in sorted(found)]


def _parse(sass: str) -> tuple[list[str], dict[str, int]]:
    """The instructions, and the places of labels among them."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label.group(1)] = len(code)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,6}\*/\s+(.*?)\s*;", line):
            code.append(instruction.group(1))
    return code, labels


def _after(line: str, groups: Groups) -> Groups:
    """What is under way behind an instruction."""
    if line.startswith("HGMMA"):
        read = _FROM_REGISTERS.match(line)
        first = int(read.group(1)) if read else 0
        words = frozenset(range(first, first + _WORDS_OF_A)) if read else frozenset()
        groups = (*groups[:-1], groups[-1] | words)
        return (*groups, frozenset()) if "gsb0" in line else groups
    if line.startswith("WARPGROUP.DEPBAR"):
        left = int(line.rsplit("0x", 1)[1], 16)
        return groups[-1 - left :]
    return groups


def _written(line: str) -> frozenset[int]:
    """The registers that an instruction writes."""
    name, _, rest = line.partition(" ")
    if "SETP" in name or name.startswith((*_READ_ONLY, "HGMMA", "WARPGROUP")):
        return frozenset()
    operands = [operand.strip() for operand in rest.split(",")]
    while operands and re.fullmatch(r"P\d|PT", operands[0]):
        operands.pop(0)
    register = re.fullmatch(r"R(\d+)", operands[0]) if operands else None
    if register is None:
        return frozenset()
    wide = ".64" in name or ".WIDE" in name
    count = 4 if ".128" in name or "M88.4" in name else 2 if wide else 1
    return frozenset(range(int(register.group(1)), int(register.group(1)) + count))
