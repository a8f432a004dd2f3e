"""Runs TIRx kernels with TMA, mbarriers and wgmma on the CPU, on top of `cuda_on_cpu`.

A device function that holds PTX of these units becomes a call of the unit in
`cuda_emulator/hopper.h`; tensor maps are encoded by Python, with the driver's rules checked.
"""

import contextlib
import ctypes
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import tvm_ffi
from tvm import tirx

from . import cuda_on_cpu
from .cuda_on_cpu import EMULATOR, cuda_source, ptxas_report

ENCODE = "runtime.cuTensorMapEncodeTiled"

# `CUtensorMap` in hopper.h.
MAP_LAYOUT = "=2iQ5q5q10hi"

BYTES = {"float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "float32": 4}
TFLOAT32 = 11

# Dtypes of wgmma's operands as hopper.h calls them, and the terms of one instruction.
TERM_KINDS = {"f16": "HALF", "bf16": "BRAIN", "e4m3": "E4M3", "e5m2": "E5M2", "tf32": "TF32"}
TERMS = {"HALF": 16, "BRAIN": 16, "E4M3": 32, "E5M2": 32, "TF32": 8}

_translate_plain = cuda_on_cpu._translate


def run_hopper_on_cpu(func: tirx.PrimFunc, arrays: Sequence[np.ndarray]) -> int:
    """Runs `func` on `arrays` (written in place); see `cuda_on_cpu.run_cuda_on_cpu`."""
    tvm_ffi.register_global_func(ENCODE, encode_map, override=True)
    with translation():
        return cuda_on_cpu.run_cuda_on_cpu(func, arrays)


@contextlib.contextmanager
def translation(wanted: bool = True) -> Iterator[None]:
    """Kernels are translated with these units, if that is wanted."""
    cuda_on_cpu._translate = _translate if wanted else _translate_plain
    try:
        yield
    finally:
        cuda_on_cpu._translate = _translate_plain


def encode_map(target: object, dtype: str, rank: int, data: object, *numbers: int) -> int:
    """What cuTensorMapEncodeTiled does, and what it refuses."""
    extents, numbers = numbers[:rank], numbers[rank:]
    strides, numbers = numbers[: rank - 1], numbers[rank - 1 :]
    box, numbers = numbers[:rank], numbers[rank:]
    steps, (interleave, swizzle, _, fill, *forced) = numbers[:rank], numbers[rank:]
    size = BYTES[dtype]
    assert 1 <= rank <= 5
    assert _address(data) % 16 == 0
    assert all(0 < s < 2**40 and s % 16 == 0 for s in strides), strides
    assert all(0 < e <= 2**32 for e in extents), extents
    assert all(0 < b <= 256 for b in box), box
    assert all(1 <= s <= 8 for s in steps), steps
    assert (interleave, swizzle, fill) == (0, 3, 0)
    assert box[0] * size <= 128
    assert forced == ([TFLOAT32] if dtype == "float32" else [])
    pad = [0] * (5 - rank)
    fields = [rank, size, _address(data), *extents, *pad, size, *strides, *pad]
    fields += [*box, *pad, *steps, *pad]
    fields.append(len(forced))
    packed = struct.pack(MAP_LAYOUT, *fields)
    ctypes.memmove(_address(target), packed, len(packed))
    return 0


def _address(value: object) -> int:
    return value.value if isinstance(value, ctypes.c_void_p) else int(value)


def _translate(source: str, kernel: str) -> str:
    """As `cuda_on_cpu._translate`, with the units of hopper.h in place of their PTX."""
    units = (EMULATOR / "hopper.h").read_text()
    known = units + cuda_on_cpu._device_header()
    start = source.rindex('extern "C" __global__')
    head = source[source.index("#define ushort unsigned short") : start].split("#endif", 1)[1]
    helpers = [
        _stand_in(definition) if "asm volatile" in definition else definition
        for name, definition in cuda_on_cpu._functions(head)
        if not re.search(rf"\b{name}\b", known) and re.sub(r"\d+", "##N##", name) not in known
    ]
    body = source[start:].replace("const __grid_constant__ CUtensorMap", "CUtensorMap")
    shared = re.findall(r"^ *extern __shared__ .*;\n", body, re.MULTILINE)
    assert len(set(shared)) <= 1
    if shared:
        body = body.replace(shared[0], "", len(shared) - 1)
    text = "#define ushort unsigned short\n#endif\n" + "\n".join(helpers) + "\n" + body
    text = _translate_plain(text, kernel)
    include = f'#include "{cuda_on_cpu.HEADER}"\n'
    return text.replace(include, f"{include}{units}\n", 1)


def _stand_in(definition: str) -> str:
    """The device function with its PTX replaced by a call of the emulated unit."""
    head, _ = definition.split("{", 1)
    ptx = re.search(r'asm volatile\("([^"]*)"', definition).group(1)
    parameters = head[head.index("(") + 1 : head.rindex(")")].split(",")
    names = [p.split()[-1].lstrip("&*") for p in parameters if p.strip()]
    return f"{head}{{ {_unit(ptx, names)} }}"


def _unit(ptx: str, names: list[str]) -> str:
    for emulate in (_tensor_copy, _multiply, _matrices):
        call = emulate(ptx, names)
        if call is not None:
            return call
    count = re.search(r" (\d+);$", ptx)
    number, words = count and count.group(1), ", ".join(names)
    table = {
        "mbarrier.init": f"barrier_init({words});",
        "mbarrier.arrive.expect_tx": f"barrier_arrive_expect({words});",
        "mbarrier.arrive.shared": f"barrier_arrive({words});",
        "bar.sync": f"named_barrier({words});",
        "bar.arrive": f"named_barrier_arrive({words});",
        "wgmma.commit_group": "multiply_commit();",
        "wgmma.wait_group": f"multiply_wait({number});",
        "cp.async.bulk.commit_group": "store_commit();",
        "cp.async.bulk.wait_group": f"store_wait({number});",
        "wgmma.fence": "",
        "setmaxnreg": "",
        "fence.proxy.async": "",
        "fence.mbarrier_init": "",
    }
    for start, call in table.items():
        if ptx.startswith(start):
            return call
    raise NotImplementedError(f"PTX that the emulator does not know: {ptx}")


def _tensor_copy(ptx: str, names: list[str]) -> str | None:
    found = re.match(r"cp\.async\.bulk\.tensor\.(\d)d\.(shared|global)", ptx)
    if found is None:
        return None
    rank = int(found.group(1))
    if found.group(2) == "shared":
        target, tensor, *at = names
        at, rest = at[:rank], ", ".join(at[rank:])
        assert rest.count(",") == ptx.count("multicast")
        call = f"tensor_load({target}, {tensor}, at, {rank}, {rest});"
    else:
        tensor, *at, source = names
        call = f"tensor_store({tensor}, at, {rank}, {source});"
    return f"int at[] = {{{', '.join(at)}}}; {call}"


def _multiply(ptx: str, names: list[str]) -> str | None:
    found = re.search(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.f32\.(\w+)\.(\w+)", ptx)
    if found is None:
        return None
    n, terms = int(found.group(1)), int(found.group(2))
    kinds = [TERM_KINDS[kind] for kind in found.groups()[2:]]
    assert all(terms == TERMS[kind] for kind in kinds)
    sums, (*a, b, keep) = names[: n // 2], names[n // 2 :]
    pointers = ", ".join(f"&{s}" for s in sums)
    if len(a) > 1:  # the left operand lies in registers
        words = ", ".join(a)
        transposed = re.search(r"ps0, 1, 1, (\d);", ptx).group(1)
        arguments = ", ".join([transposed, *kinds])
        return f"multiply_registers({{{pointers}}}, {{{words}}}, {b}, {n}, {keep}, {arguments});"
    transposed = re.search(r"ps0, 1, 1(?:, (\d), (\d))?;", ptx).groups("0")
    arguments = ", ".join([*transposed, str(terms), *kinds])
    return f"multiply({{{pointers}}}, {a[0]}, {b}, {n}, {keep}, {arguments});"


def _matrices(ptx: str, names: list[str]) -> str | None:
    if ptx.startswith("stmatrix"):
        place, *words = names
        return f"uint32_t w[] = {{{', '.join(words)}}}; move_matrices<true>({place}, w);"
    if ptx.startswith("ldmatrix"):
        *words, place = names
        out = " ".join(f"{word} = w[{i}];" for i, word in enumerate(words))
        return f"uint32_t w[4]; move_matrices<false>({place}, w); {out}"
    return None


@dataclass(frozen=True)
class Compiled:
    """What ptxas says of a kernel; `remarks` are warnings such as serialised wgmma."""

    registers: int
    spill_bytes: int
    remarks: tuple[str, ...]


def compile_hopper(func: tirx.PrimFunc) -> Compiled:
    """Compiles one kernel to a cubin for sm_90a; raises as `ptxas_report` does."""
    report = ptxas_report(cuda_source(func), "sm_90a")
    spills = map(int, re.findall(r"(\d+) bytes spill", report))
    registers = int(re.search(r"Used (\d+) registers", report).group(1))
    return Compiled(registers, sum(spills), tuple(re.findall(r"\(C7\d+\)[^\n]*", report)))
