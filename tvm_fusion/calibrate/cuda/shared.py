"""Shared memory: its bandwidth, and what lanes that meet on a bank cost."""

from __future__ import annotations

import statistics

from ...config import HardwareProfile
from ..findings import Family, Finding, Measured
from .bench import Call, CudaBench, inline_kernel

THREADS, BLOCKS_PER_SM = 512, 4
WORDS = 4096
READS = 32
STRIDES = (1, 2, 4, 8, 16, 32)
"""Words between neighbouring lanes: as many lanes meet on each bank that is used."""

TRIPS = (16, 80)

_CODE = f"""
__shared__ float words[{WORDS}];
for (int i = thread; i < {WORDS}; i += {THREADS}) words[i] = 1.0f;
__syncthreads();
unsigned at = (unsigned)__cvta_generic_to_shared(words) + 4 * ((thread % 32) * extra);
float v;
#pragma unroll 1
for (int trip = 0; trip < trips; trip++) {{
  STEPS
}}
"""


def kernels(hw: HardwareProfile) -> dict:
    """A kernel whose lanes read words that lie `extra` words apart, 32 times a trip."""
    read = 'asm volatile("ld.volatile.shared.f32 %0, [%1+{at}];" : "=f"(v) : "r"(at)); sum += v;'
    reads = " ".join(read.replace("{at}", str(128 * k % 4096)) for k in range(READS))
    return {"mb_shared": inline_kernel("mb_shared", THREADS, _CODE.replace("STEPS", reads))}


def measure(bench: CudaBench) -> Finding:
    """Bandwidth without conflicts, and the factor of a conflict."""
    blocks = BLOCKS_PER_SM * bench.hw.num_sms
    calls = {
        stride: tuple(Call("mb_shared", blocks, trips, extra=stride) for trips in TRIPS)
        for stride in STRIDES
    }
    seconds = bench.slopes(calls)
    rate = blocks * THREADS * READS * 4 / seconds[1]
    growth = {stride: seconds[stride] / seconds[1] for stride in STRIDES}
    factor = statistics.median(growth[stride] / stride for stride in STRIDES if stride > 1)
    note = "time of a read of shared memory by lanes on a bank: " + ", ".join(
        f"{stride}: {value:.3g}" for stride, value in growth.items()
    )
    values = [
        Measured("smem_bytes_per_s", rate, "reads of 4 bytes a lane, no conflicts"),
        Measured("smem_conflict_factor", round(factor, 3), "2 to 32 lanes on a bank"),
    ]
    return Finding(values, [note])


FAMILY = Family(
    "shared",
    "shared memory",
    ("smem_bytes_per_s", "smem_conflict_factor"),
    measure,
    kernels,
)
