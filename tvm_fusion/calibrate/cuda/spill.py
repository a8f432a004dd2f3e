"""What a spilled register costs: threads that keep values in local memory, where spills go.

The values are volatile, so that each is loaded and stored once a trip, as what the compiler spills
is: the bytes are known, where those of a kernel that has to spill are ptxas' choice. They lie at a
place that is unknown at compile time, or they would become registers again. Of one block of 1,024
threads a multiprocessor, up to about 200 KB lie in the level-1 cache; what lies beyond it is shown
in the notes.
"""

from __future__ import annotations

from ...config import HardwareProfile
from ..findings import Family, Finding, Measured, slope
from .bench import Call, CudaBench, inline_kernel

THREADS = 1024
VALUES = (8, 16, 32, 128)
"""Values a thread: 32 KB, 64 KB, 128 KB and 512 KB a multiprocessor."""

IN_CACHE = VALUES[:3]
TRIPS = (64, 320)

_CODE = """
volatile float kept[{values} + 8];
volatile float* place = kept + (extra & 7);
float a = x[1];
for (int k = 0; k < {values}; k++) place[k] = x[thread + k];
#pragma unroll 1
for (int trip = 0; trip < trips; trip++) {{
  #pragma unroll
  for (int k = 0; k < {values}; k++) place[k] = place[k] + a;
}}
#pragma unroll
for (int k = 0; k < {values}; k++) sum += place[k];
"""


def kernels(hw: HardwareProfile) -> dict:
    """Kernels of more and more values a thread in local memory."""
    codes = {f"mb_spill{n}": _CODE.format(values=n) for n in VALUES}
    return {name: inline_kernel(name, THREADS, code) for name, code in codes.items()}


def measure(bench: CudaBench) -> Finding:
    """Rate of spilled bytes, out and back, on the whole device."""
    blocks = bench.hw.num_sms
    calls = {n: tuple(Call(f"mb_spill{n}", blocks, t) for t in TRIPS) for n in VALUES}
    seconds = bench.slopes(calls)
    moved = {n: 8 * n * THREADS * blocks for n in VALUES}
    rate = 1 / slope([(moved[n], seconds[n]) for n in IN_CACHE])
    note = "spilled bytes out and back a second, by values a thread: " + ", ".join(
        f"{n}: {moved[n] / seconds[n]:.3g}" for n in VALUES
    )
    how = f"{min(IN_CACHE)} to {max(IN_CACHE)} values of 1,024 threads a multiprocessor"
    return Finding([Measured("spill_bytes_per_s", rate, how)], [note])


FAMILY = Family("spill", "spilled registers", ("spill_bytes_per_s",), measure, kernels)
