"""Bandwidth against bytes in flight, and what one multiprocessor can draw."""

from __future__ import annotations

from ...config import HardwareProfile
from ..findings import Family, Finding, Measured, littles_latency
from .bench import VECTOR, Call, CudaBench, inline_kernel

THREADS, AHEAD = 512, 4
ACTIVE = (32, 64, 128, 256, 384, 512)
REGION = 256 << 20
BLOCKS_PER_SM = (1, 2, 3)

_CODE = f"""
const float4* from = (const float4*)x;
if (thread < extra) {{
  long long step = (long long)blocks * extra;
  for (int round = 0; round < trips; round++) {{
    long long i = (long long)block * extra + thread;
    #pragma unroll 1
    for (; i + {AHEAD - 1} * step < count; i += {AHEAD} * step) {{
      STEPS
    }}
  }}
}}
"""


def kernels(hw: HardwareProfile) -> dict:
    """A kernel of which `extra` threads a block have four vectors each on their way."""
    loads = [
        f'float4 v{k}; asm volatile("ld.global.cg.v4.f32 {{%0,%1,%2,%3}}, [%4];" '
        f': "=f"(v{k}.x), "=f"(v{k}.y), "=f"(v{k}.z), "=f"(v{k}.w) : "l"(from + i + {k} * step));'
        for k in range(AHEAD)
    ]
    loads += [f"sum += (v{k}.x + v{k}.y) + (v{k}.z + v{k}.w);" for k in range(AHEAD)]
    code = _CODE.replace("STEPS", " ".join(loads))
    return {"mb_flight": inline_kernel("mb_flight", THREADS, code)}


def measure(bench: CudaBench) -> Finding:
    """Latency that bytes in flight have to hide (Little's law)."""
    hw = bench.hw
    count = min(REGION, bench.bytes) // VECTOR
    calls = {
        (per_sm, active): Call("mb_flight", per_sm * hw.num_sms, 1, count, active)
        for per_sm in BLOCKS_PER_SM
        for active in ACTIVE
    }
    seconds = bench.times(calls)
    rates = {
        per_sm * active * AHEAD * VECTOR * hw.num_sms: count * VECTOR / seconds[per_sm, active]
        for per_sm, active in sorted(calls)
    }
    note = "memory read at bytes in flight a multiprocessor, GB/s: " + ", ".join(
        f"{size // hw.num_sms}: {rate / 1e9:.4g}" for size, rate in sorted(rates.items())
    )
    most = max(BLOCKS_PER_SM) * THREADS
    how = f"reads with {min(ACTIVE)} to {most} threads a multiprocessor, 64 bytes each"
    value = Measured("bytes_in_flight_latency_s", littles_latency(rates), how)
    return Finding([value], [note, *_single(bench)])


def _single(bench: CudaBench) -> list[str]:
    """What one multiprocessor reads, from the L2 and from the memory."""
    vectors = bench.hw.l2_bytes // 8 // VECTOR
    pair = tuple(Call("mb_flight", 1, trips, vectors, THREADS) for trips in (2, 6))
    cached = vectors * VECTOR / bench.slopes({0: pair})[0]
    whole = Call("mb_flight", 1, 1, (64 << 20) // VECTOR, THREADS)
    memory = (64 << 20) / bench.times({0: whole}, repeats=3)[0]
    return [
        f"one multiprocessor alone reads {cached / 1e9:.4g} GB/s from the L2, "
        f"{memory / 1e9:.4g} GB/s from the memory (fitted: sm_bytes_per_s)"
    ]


FAMILY = Family("flight", "bytes in flight", ("bytes_in_flight_latency_s",), measure, kernels)
