"""The few rates of a CPU that decide its plans, each within a fraction of a second.

The fastest quarter of several calls counts: what else runs on the machine only adds. What is
measured are our own kernels and loops.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from tvm.relax import op

from .arithmetic import ELEMENTS, chain
from .bandwidth import LANES, copy_loop
from .bench import CpuBench
from .launch import CHAIN, chains

SAMPLES = 20
SAMPLE_S = 0.15
"""Of one kernel, all samples together, but for the first."""
PRODUCT = 512
CACHED_BYTES = 3 << 20
"""Of one core, three tensors: beyond its own caches, within the last level."""
MOST_BYTES = 128 << 20
"""Copied by all cores from memory."""


def quick_s(call: Callable[[], Any]) -> float:
    """Seconds of a call: the lower quartile of a few, after two that warm up."""
    call()
    found, end = [], time.perf_counter() + SAMPLE_S
    call()
    while len(found) < SAMPLES and (not found or time.perf_counter() < end):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return sorted(found)[len(found) // 4]


def functions(bench: CpuBench) -> dict[str, float]:
    """exp of float32: of two kernels that differ by one application."""
    x = np.linspace(0.5, 1.0, ELEMENTS, dtype="float32")
    once, twice = (
        quick_s(bench.written(chain(lambda v, b: op.exp(v), length), x, x)) for length in (1, 3)
    )
    if twice <= once:
        return {}
    return {"special_per_s": 2 * ELEMENTS / (twice - once)}


def products(bench: CpuBench) -> dict[str, float]:
    """Flop of a float32 product."""
    x = np.ones((PRODUCT, PRODUCT), "float32")
    call = bench.written(lambda bb, p: bb.emit(op.matmul(p[0], p[1])), x, x)
    return {"fma_per_s_f32": 2 * PRODUCT**3 / quick_s(call)}


def launches(bench: CpuBench) -> dict[str, float]:
    """A kernel in the virtual machine on one core, and what waking the others adds."""
    alone, woken = (quick_s(call) / CHAIN * 1e6 for call in chains(bench).values())
    found = {"kernel_gap_us": alone}
    if bench.cores > 1 and woken > alone:
        found["launch_us"] = woken - alone
    return found


def cache(bench: CpuBench) -> dict[str, float]:
    """Sums of two tensors within the last-level cache, over sums of a few numbers."""
    large, few = (
        quick_s(bench.written(lambda bb, p: bb.emit(op.add(p[0], p[1])), x, x))
        for x in (np.ones((bench.cores, CACHED_BYTES // 12), "float32"), np.ones(8, "float32"))
    )
    return {"l2_bytes_per_s": CACHED_BYTES * bench.cores / (large - few)} if large > few else {}


def memory(bench: CpuBench) -> dict[str, float]:
    """Copies within the memory, read and written; every core copies a part of its own."""
    elements = min(4 * bench.hw.l2_bytes, MOST_BYTES) // bench.cores // 8 // LANES * LANES
    kernel = bench.loop(copy_loop(bench.cores, elements))
    x, y = (tvm.runtime.tensor(np.ones((bench.cores, elements), "float32")) for _ in range(2))
    seconds = quick_s(functools.partial(kernel, x, y, 1))
    return {"hbm_bytes_per_s": 8 * elements * bench.cores / seconds}


STEPS = (functions, products, launches, memory, cache)
