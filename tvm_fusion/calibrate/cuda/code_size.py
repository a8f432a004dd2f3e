"""What code beyond the instruction cache costs: straight-line special functions, looped over.

One ex2 among seven multiply-adds, as in the forms of erf and tanh that our writer emits: neither
unit is then so busy that the fetching of code would hide behind it.
"""

from __future__ import annotations

from ...config import HardwareProfile
from ..findings import Family, Finding, Measured, cache_knee, readable
from .bench import Call, CudaBench, inline_kernel

THREADS = 256
SIZES = tuple(kib << 10 for kib in (16, 32, 64, 96, 128, 160, 192, 256, 384, 512))
INSTRUCTION = 16
"""Bytes of a machine instruction, from Volta on."""

BLOCK = 64
"""Instructions in one asm statement."""

PASS_BYTES = 2 << 20
"""Code that the shorter of the two timed loops runs through at least."""

_FMAS = " ".join(f"fma.rn.f32 %{1 + k % 3}, %{1 + k % 3}, %4, %4;" for k in range(7))
_STEPS = f"ex2.approx.ftz.f32 %0, %0; {_FMAS} "
_CODE = """
float a = x[thread], b = x[thread + 1], c = x[thread + 2], d = x[thread + 3], e = x[1];
#pragma unroll 1
for (int trip = 0; trip < trips; trip++) {{ {steps} }}
sum = (a + b) + (c + d);
"""


def kernels(hw: HardwareProfile) -> dict:
    """Kernels of 16 KiB to 512 KiB of code."""
    values = ", ".join(f'"+f"({name})' for name in "abcd")
    block = f'asm volatile("{_STEPS * (BLOCK // 8)}" : {values} : "f"(e));\n'
    found = {}
    for size in SIZES:
        name = f"mb_code{size >> 10}"
        steps = block * (size // INSTRUCTION // BLOCK)
        found[name] = inline_kernel(name, THREADS, _CODE.format(steps=steps))
    return found


def measure(bench: CudaBench) -> Finding:
    """Size of the instruction cache, and the rate at which code comes from behind it."""
    calls = {}
    for size in SIZES:
        trips = max(2, PASS_BYTES // size)
        pair = (Call(f"mb_code{size >> 10}", bench.hw.num_sms, t) for t in (trips, 4 * trips))
        calls[size] = tuple(pair)
    seconds = bench.slopes(calls)
    each = {size: taken / size for size, taken in seconds.items()}
    note = "ns of a straight-line instruction (8 warps a multiprocessor) by size of the code: "
    note += ", ".join(f"{readable(s)}: {t * INSTRUCTION * 1e9:.3g}" for s, t in each.items())
    knee = cache_knee(each)
    if knee is None:
        limit = f"no cost of code up to {readable(max(SIZES))} was seen"
        return Finding((), [note], [f"instruction_cache_bytes, code_bytes_per_s: {limit}"])
    beyond = each[max(SIZES)] - min(each.values())  # of what the units take anyway
    values = [
        Measured("instruction_cache_bytes", knee, "largest code that runs at the full rate"),
        Measured("code_bytes_per_s", 1 / beyond, f"{readable(max(SIZES))} of code, time added"),
    ]
    return Finding(values, [note])


FAMILY = Family(
    "code",
    "code beyond the instruction cache",
    ("instruction_cache_bytes", "code_bytes_per_s"),
    measure,
    kernels,
)
