"""Runs TIRx kernels with TMA, mbarriers and wgmma on the CPU, on top of `cuda_on_cpu`.

Every device function that holds PTX of these units is replaced by a call of the unit in
`cuda_emulator/hopper.h`; tensor maps are encoded by Python, with the driver's rules checked.
"""

import ctypes
import re
import struct
from collections.abc import Sequence

import numpy as np
import tvm_ffi
from tvm import tirx

from tests import cuda_on_cpu
from tests.cuda_on_cpu import EMULATOR

ENCODE = "runtime.cuTensorMapEncodeTiled"

# `CUtensorMap` in hopper.h.
MAP_LAYOUT = "=2iQ5q5q5i"

BYTES = {"float16": 2, "bfloat16": 2}


def run_hopper_on_cpu(func: tirx.PrimFunc, arrays: Sequence[np.ndarray]) -> int:
    """Runs `func` on `arrays` (written in place); see `cuda_on_cpu.run_cuda_on_cpu`."""
    tvm_ffi.register_global_func(ENCODE, encode_map, override=True)
    plain = cuda_on_cpu._translate
    cuda_on_cpu._translate = _translate
    try:
        return cuda_on_cpu.run_cuda_on_cpu(func, arrays)
    finally:
        cuda_on_cpu._translate = plain


def encode_map(
    target: ctypes.c_void_p, dtype: str, rank: int, data: ctypes.c_void_p, *numbers: int
) -> int:
    """What cuTensorMapEncodeTiled does, and what it refuses."""
    extents, numbers = numbers[:rank], numbers[rank:]
    strides, numbers = numbers[: rank - 1], numbers[rank - 1 :]
    box, numbers = numbers[:rank], numbers[rank:]
    steps, (interleave, swizzle, _, fill) = numbers[:rank], numbers[rank:]
    size = BYTES[dtype]
    assert 1 <= rank <= 5
    assert _address(data) % 16 == 0
    assert all(0 < s < 2**40 and s % 16 == 0 for s in strides), strides
    assert all(0 < e <= 2**32 for e in extents), extents
    assert all(0 < b <= 256 for b in box), box
    assert all(s == 1 for s in steps)
    assert (interleave, swizzle, fill) == (0, 3, 0)
    assert box[0] * size <= 128
    pad = [0] * (5 - rank)
    fields = [rank, size, _address(data), *extents, *pad, size, *strides, *pad, *box, *pad]
    packed = struct.pack(MAP_LAYOUT, *fields)
    ctypes.memmove(_address(target), packed, len(packed))
    return 0


def _address(value: object) -> int:
    return value.value if isinstance(value, ctypes.c_void_p) else int(value)


_PLAIN = cuda_on_cpu._translate


def _translate(source: str, kernel: str) -> str:
    start = source.rindex('extern "C" __global__')
    head = source[source.index("#define ushort unsigned short") : start]
    helpers = []
    for name, definition in cuda_on_cpu._functions(head):
        if name in ("tvm_builtin_cuda_mbarrier_wait", "ptx_wgmma_encode_matrix_descriptor"):
            continue
        helpers.append(_stand_in(definition) if "asm volatile" in definition else definition)
    body = source[start:].replace("const __grid_constant__ CUtensorMap", "CUtensorMap")
    shared = re.findall(r"^ *extern __shared__ .*;\n", body, re.MULTILINE)
    for line in shared[1:]:
        body = body[::-1].replace(line[::-1], "", 1)[::-1]
    text = "#define ushort unsigned short\n#endif\n" + "\n".join(helpers) + "\n" + body
    text = _PLAIN(text, kernel)
    hopper = (EMULATOR / "hopper.h").read_text() + _DESCRIPTOR
    text = text.replace('#include "device.h"\n', f'#include "device.h"\n{hopper}\n', 1)
    text = text.replace("static void enter() {", "static void enter() { hopper_reset_once();", 1)
    return text


_DESCRIPTOR = """
#define tvm_builtin_cuda_mbarrier_wait barrier_wait
static float __low2float(uint u) { return from_table(false, u & 0xffff); }
static float __high2float(uint u) { return from_table(false, u >> 16); }
static float __uint_as_float(uint u) { float f; memcpy(&f, &u, 4); return f; }
typedef uint __half2;
static void ptx_wgmma_encode_matrix_descriptor(uint64_t* d, void* p, int leading, int stride, int swizzle) {
  uint64_t kind = swizzle == 3 ? 1 : 0;
  *d = (__cvta_generic_to_shared(p) >> 4 & 0x3fff) | (uint64_t)leading << 16 | (uint64_t)stride << 32 | kind << 62;
}
static Block* last_home;
static void hopper_reset_once() {
  if (cluster_blocks->data() == last_home && !counted_barriers.empty() && current->linear) return;
  if (current->linear == 0) { hopper_reset(); last_home = cluster_blocks->data(); }
}
"""


def _stand_in(definition: str) -> str:
    """The device function with its PTX replaced by a call of the emulated unit."""
    head, _ = definition.split("{", 1)
    ptx = re.search(r'asm volatile\("([^"]*)"', definition).group(1)
    names = [
        p.split()[-1].lstrip("&*")
        for p in head[head.index("(") + 1 : head.rindex(")")].split(",")
        if p
    ]
    return f"{head}{{ {_unit(ptx, names)} }}"


def _unit(ptx: str, names: list[str]) -> str:
    tensor = re.match(r"cp\.async\.bulk\.tensor\.(\d)d\.(shared|global)", ptx)
    if tensor:
        rank = int(tensor.group(1))
        if tensor.group(2) == "shared":
            target, tmap, *at, barrier = names
            return f"int at[] = {{{', '.join(at)}}}; tensor_load({target}, {tmap}, at, {rank}, {barrier});"
        tmap, *at, source = names
        return f"int at[] = {{{', '.join(at)}}}; tensor_store({tmap}, at, {rank}, {source});"
    wgmma = re.search(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(b?)f16", ptx)
    if wgmma:
        n = int(wgmma.group(1))
        sums, (a, b, keep) = names[: n // 2], names[n // 2 :]
        ta, tb = re.search(r"ps0, 1, 1, (\d), (\d);", ptx).groups()
        pointers = ", ".join(f"&{s}" for s in sums)
        brain = "true" if wgmma.group(2) else "false"
        return f"multiply({{{pointers}}}, {a}, {b}, {n}, {keep}, {ta}, {tb}, {brain});"
    count = re.search(r" (\d+);$", ptx)
    words = ", ".join(names)
    table = {
        "mbarrier.init": f"barrier_init({words});",
        "mbarrier.arrive.expect_tx": f"barrier_arrive_expect({words});",
        "mbarrier.arrive.shared": f"barrier_arrive({words});",
        "bar.sync": f"named_barrier({words});",
        "wgmma.commit_group": "multiply_commit();",
        "wgmma.wait_group": f"multiply_wait({count and count.group(1)});",
        "cp.async.bulk.commit_group": "store_commit();",
        "cp.async.bulk.wait_group": f"store_wait({count and count.group(1)});",
        "stmatrix": f"uint32_t w[] = {{{', '.join(names[1:])}}}; move_matrices<true>({names[0] if names else ''}, w);",
        "ldmatrix": "uint32_t w[4]; move_matrices<false>({4}, w); {0} = w[0]; {1} = w[1]; {2} = w[2]; {3} = w[3];".format(
            *(names + [""] * 5)[:5]
        ),
        "wgmma.fence": "",
        "setmaxnreg": "",
        "fence.proxy.async": "",
    }
    for start, unit in table.items():
        if ptx.startswith(start):
            return unit
    raise NotImplementedError(f"PTX that the emulator does not know: {ptx}")
