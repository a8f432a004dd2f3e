"""Strided access: what an element that stands alone costs in memory traffic."""

from __future__ import annotations

from ...config import HardwareProfile
from ..findings import Family, Finding, Measured, power_of_two
from .bench import Call, CudaBench, inline_kernel

THREADS, BLOCKS_PER_SM = 256, 6
STRIDES = (1, 2, 4, 8, 16, 32, 64)
REGION = 1 << 30
ALONE = 64
"""Bytes between elements from which on each is in a sector of its own."""

_CODE = """
const {ctype}* from = (const {ctype}*)x;
long long step = (long long)blocks * {threads};
long long i = (long long)block * {threads} + thread;
unsigned bits = 0;
for (; i + 7 * step < count; i += 8 * step) {{
  {loads}
}}
sum = __uint_as_float(bits);
"""
_TYPES = {2: "unsigned short", 4: "unsigned"}


def kernels(hw: HardwareProfile) -> dict:
    """Kernels that read every `extra`-th element of 2 or 4 bytes, `count` of them."""
    found = {}
    for size, ctype in _TYPES.items():
        loads = [f"{ctype} v{k} = __ldcg(from + (i + {k} * step) * extra);" for k in range(8)]
        loads += [f"bits += v{k};" for k in range(8)]
        code = _CODE.format(ctype=ctype, threads=THREADS, loads=" ".join(loads))
        found[f"mb_stride{size}"] = inline_kernel(f"mb_stride{size}", THREADS, code)
    return found


def measure(bench: CudaBench) -> Finding:
    """Bytes of memory traffic that an isolated access takes."""
    region = min(REGION, bench.bytes)
    calls = {
        (size, stride): Call(
            f"mb_stride{size}",
            BLOCKS_PER_SM * bench.hw.num_sms,
            count=region // (size * stride),
            extra=stride,
        )
        for size in _TYPES
        for stride in STRIDES
    }
    seconds = bench.times(calls)
    whole = region / min(seconds[4, stride] for stride in STRIDES if stride * 4 <= 32)
    traffic = {
        (size, stride): whole * seconds[size, stride] / (region // (size * stride))
        for size, stride in calls
    }
    notes = [
        f"bytes of traffic an element of {size} bytes costs, by stride in elements: "
        + ", ".join(f"{stride}: {traffic[size, stride]:.3g}" for stride in STRIDES)
        for size in _TYPES
    ]
    alone = min(value for (size, stride), value in traffic.items() if size * stride >= ALONE)
    low = bench.hw.sector_bytes
    how = f"elements {ALONE} to {max(STRIDES) * 4} bytes apart in {region >> 20} MiB"
    return Finding([Measured("hbm_access_bytes", power_of_two(alone, low, 8 * low), how)], notes)


FAMILY = Family("access", "strided access", ("hbm_access_bytes",), measure, kernels)
