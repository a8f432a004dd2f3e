"""Shuffles, barriers, and the exchange of a number by a whole block; and how fast blocks start.

The row model holds fitted values of the same resources; these become comments.
"""

from __future__ import annotations

from ...config import HardwareProfile
from ..findings import Family, Finding
from .bench import Call, CudaBench, inline_kernel

WIDTHS = (128, 256, 512, 1024)
STEPS = 16
TRIPS = (32, 160)
GRID = (1 << 16, 5 << 16)

_LOOP = """
float v = x[thread % 32];
#pragma unroll 1
for (int trip = 0; trip < trips; trip++) {{ {steps} }}
sum = v;
"""
_SHUFFLE = "v += __shfl_xor_sync(0xffffffffu, v, {lane});"
_BARRIER = "__syncthreads(); v += 1.0f;"
_EXCHANGE = (
    "__shared__ float parts[2][32]; float* part = parts[trip & 1]; "
    + " ".join(_SHUFFLE.format(lane=1 << k) for k in range(5))
    + " if (thread % 32 == 0) part[thread / 32] = v; __syncthreads(); "
    "v = thread % 32 < {warps} ? part[thread % 32] : 0.0f; "
    + " ".join(_SHUFFLE.format(lane=1 << k) for k in range(5))
)


def kernels(hw: HardwareProfile) -> dict:
    """Loops over shuffles, over barriers, and over both; an empty kernel."""
    shuffles = " ".join(_SHUFFLE.format(lane=1 << k % 5) for k in range(STEPS))
    found = {
        "mb_shuffle": inline_kernel("mb_shuffle", 32, _LOOP.format(steps=shuffles)),
        "mb_empty": inline_kernel("mb_empty", 128, "sum = (float)trips;"),
    }
    for width in WIDTHS:
        bodies = {"barrier": _BARRIER * STEPS, "exchange": _EXCHANGE.format(warps=width // 32)}
        for name, steps in bodies.items():
            full = f"mb_{name}{width}"
            found[full] = inline_kernel(full, width, _LOOP.format(steps=steps))
    return found


def measure(bench: CudaBench) -> Finding:
    """Times as comments."""
    sms = bench.hw.num_sms
    pairs = {"shuffle": ("mb_shuffle", STEPS)}
    pairs |= {f"barrier {w}": (f"mb_barrier{w}", STEPS) for w in WIDTHS}
    pairs |= {f"exchange {w}": (f"mb_exchange{w}", 1) for w in WIDTHS}
    calls = {k: tuple(Call(name, sms, t) for t in TRIPS) for k, (name, _) in pairs.items()}
    seconds = bench.slopes(calls)
    times = ", ".join(f"{k}: {seconds[k] / pairs[k][1] * 1e9:.3g}" for k in pairs)
    starts = bench.times({blocks: Call("mb_empty", blocks) for blocks in GRID})
    rate = (GRID[1] - GRID[0]) / (starts[GRID[1]] - starts[GRID[0]])
    return Finding(
        (),
        [
            "ns of a step, one block a multiprocessor, by threads of it "
            f"(fitted: shuffle_s, barrier_s): {times}",
            f"empty blocks of 128 threads started a second: {rate:.3g} (fitted: blocks_per_s)",
        ],
    )


FAMILY = Family("exchange", "shuffles, barriers, block starts", (), measure, kernels)
