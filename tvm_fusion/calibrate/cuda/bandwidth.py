"""Bandwidth of the memory and of the L2, by size: reads, writes and copies.

Small sizes are moved several times by one kernel, each time by other blocks, past the level-1
cache; two numbers of rounds give the time of one. A block takes consecutive vectors, four a thread;
large sizes have a block for each such piece, as our pointwise kernels have.
"""

from __future__ import annotations

from ...config import HardwareProfile
from ..findings import (
    Family,
    Finding,
    Measured,
    cache_rate,
    curve_text,
    memory_rate,
    readable,
    usable_bytes,
)
from .bench import VECTOR, Call, CudaBench, inline_kernel

THREADS, BLOCKS_PER_SM, AHEAD = 256, 6, 4
SMALLEST = 64 << 10
L2_PARTS = (0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0, 1.25, 1.5, 2.0)
ROUND_BYTES = 128 << 20
"""What a timed loop moves at least, in each of its two lengths."""

_LOOP = f"""
const float4* from = (const float4*)x;
float4* to = (float4*)y;
long long step = (long long)blocks * {AHEAD * THREADS};
for (int round = 0; round < trips; round++) {{
  long long i = (long long)((block + round * 37) % blocks) * {AHEAD * THREADS} + thread;
  for (; i + {(AHEAD - 1) * THREADS} < count; i += step) {{ FOUR }}
  for (; i < count; i += {THREADS}) {{ ONE }}
}}
"""


def _moves(load: str, store: str) -> tuple[str, str]:
    """Four vectors at a time, all loaded before the first is used; and one."""
    places = [f"i + {k * THREADS}" for k in range(AHEAD)]
    four = [load.format(k=k, i=place) for k, place in enumerate(places)]
    four += [store.format(k=k, i=place) for k, place in enumerate(places)]
    return " ".join(four), load.format(k=0, i="i") + " " + store.format(k=0, i="i")


READ = _moves("float4 v{k} = __ldcg(from + {i});", "sum += (v{k}.x + v{k}.y) + (v{k}.z + v{k}.w);")
WRITE = _moves("", "to[{i}] = make_float4(1.0f, 2.0f, 1.0f, (float)round);")
COPY = _moves("float4 v{k} = __ldcg(from + {i});", "to[{i}] = v{k};")


def kernels(hw: HardwareProfile) -> dict:
    """Kernels that read, write and copy `count` vectors `trips` times."""
    bodies = {"mb_read": READ, "mb_write": WRITE, "mb_copy": COPY}
    return {
        name: inline_kernel(name, THREADS, _LOOP.replace("FOUR", four).replace("ONE", one))
        for name, (four, one) in bodies.items()
    }


def sizes(hw: HardwareProfile, largest: int) -> list[int]:
    """Sizes from 64 KiB to `largest` in steps of 4, and some around the size of the L2."""
    found = {int(part * hw.l2_bytes) // 4096 * 4096 for part in L2_PARTS}
    size = SMALLEST
    while size <= largest:
        found.add(size)
        size *= 4
    return sorted(size for size in found if size <= largest)


def curves(bench: CudaBench) -> dict[str, dict[int, float]]:
    """Bytes a second by kernel and by size; a copy of a size reads half of it and writes half."""
    hw = bench.hw
    blocks = BLOCKS_PER_SM * hw.num_sms
    once, rounds = {}, {}
    for kernel in ("mb_read", "mb_write", "mb_copy"):
        for size in sizes(hw, bench.bytes):
            count = size // VECTOR // (2 if kernel == "mb_copy" else 1)
            if size > 2 * hw.l2_bytes:
                once[kernel, size] = Call(kernel, -(-count // (AHEAD * THREADS)), 1, count)
            else:
                trips = max(2, min(2000, ROUND_BYTES // size))
                pair = (Call(kernel, blocks, t, count) for t in (trips, 3 * trips))
                rounds[kernel, size] = tuple(pair)
    seconds = bench.times(once) | bench.slopes(rounds)
    found: dict[str, dict[int, float]] = {}
    for (kernel, size), taken in sorted(seconds.items()):
        found.setdefault(kernel.removeprefix("mb_"), {})[size] = size / taken
    return found


def measure(bench: CudaBench) -> Finding:
    """Rates of the memory and the L2, and how much of the L2 can be used."""
    found = curves(bench)
    notes = [f"{name}, GB/s by bytes moved: {curve_text(curve)}" for name, curve in found.items()]
    values, missing = [], []
    l2 = bench.hw.l2_bytes
    largest = readable(max(found["copy"]))
    for field, compute, how in (
        ("hbm_bytes_per_s", lambda: memory_rate(found["copy"], l2), f"copies of up to {largest}"),
        ("l2_bytes_per_s", lambda: cache_rate(found["read"], l2), "reads of up to half the L2"),
        ("l2_usable_share", lambda: usable_share(found["read"], l2), "reads around the L2's size"),
    ):
        try:
            values.append(Measured(field, compute(), how))
        except ValueError as error:
            missing.append(f"{field}: {error}")
    return Finding(values, notes, missing)


def usable_share(read: dict[int, float], l2_bytes: int) -> float:
    """Share of the L2 that keeps what is read again and again."""
    fast, slow = cache_rate(read, l2_bytes), memory_rate(read, l2_bytes)
    return min(1.0, usable_bytes(read, fast, slow) / l2_bytes)


FAMILY = Family(
    "bandwidth",
    "bandwidth of memory and L2",
    ("hbm_bytes_per_s", "l2_bytes_per_s", "l2_usable_share"),
    measure,
    kernels,
)
