"""Bandwidth of the caches and the memory of a CPU, by size.

Every core copies a part of its own again and again, 16 numbers at a time; two numbers of rounds
give the time of one. A size is that of both tensors together.
"""

from __future__ import annotations

import functools
from typing import Any

import tvm
from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as B

from ..findings import Family, Finding, Measured, cache_rate, curve_text, memory_rate
from .bench import CpuBench

LANES = 16
PART_BYTES = tuple(kib << 10 for kib in (16, 64, 256, 1024, 2048, 4096, 8192, 32768, 131072))
"""Of one core: level 1, level 2, last level, memory."""

ROUND_BYTES = 32 << 20
"""What one core copies at least in the shorter of the two timed calls."""

LAST_LEVEL = 16
"""Sizes from this part of the last-level cache on are not in the caches before it."""


def copy_loop(cores: int, elements: int) -> tirx.PrimFunc:
    """``kernel(x, y, rounds)``: every core copies `elements` numbers, `rounds` times."""
    with IRBuilder() as builder, B.prim_func():
        T.func_name("main")
        x = T.arg("x", T.buffer((cores, elements), "float32"))
        y = T.arg("y", T.buffer((cores, elements), "float32"))
        rounds = T.arg("rounds", T.int32())
        with (
            T.parallel(cores) as core,
            T.serial(rounds) as step,
            T.serial(elements // LANES) as i,
            T.vectorized(LANES) as lane,
        ):
            place = i * LANES + lane
            # the sum changes with the round, so that no round can be left out
            T.buffer_store(y, x[core, place] + tirx.Cast("float32", step), [core, place])
    return builder.get().with_attr({"tirx.noalias": True, "global_symbol": "main"})


def curve(bench: CpuBench) -> dict[int, float]:
    """Bytes a second on all cores, by bytes of both tensors on all cores."""
    pairs, calls = {}, {}
    for part in PART_BYTES:
        if part * bench.cores > bench.hw.memory_bytes // 8:
            break
        elements = part // 8
        kernel = bench.loop(copy_loop(bench.cores, elements))
        x, y = (_ones(bench.cores, elements) for _ in range(2))
        first = max(1, ROUND_BYTES // part)
        pairs[part] = first, 3 * first
        for rounds in pairs[part]:
            calls[part, rounds] = functools.partial(kernel, x, y, rounds)
    seconds = bench.times(calls)
    found = {}
    for part, (short, long) in pairs.items():
        taken = (seconds[part, long] - seconds[part, short]) / (long - short)
        if taken > 0:
            found[part * bench.cores] = part * bench.cores / taken
    return found


def _ones(cores: int, elements: int) -> Any:
    import numpy as np

    return tvm.runtime.tensor(np.ones((cores, elements), "float32"))


def measure(bench: CpuBench) -> Finding:
    """Rates of the first-level caches, the last-level cache and the memory."""
    rates = curve(bench)
    hw, values, missing = bench.hw, [], []
    first = bench.cores * hw.smem_per_sm_bytes
    for field, compute, how in (
        ("smem_bytes_per_s", lambda: cache_rate(rates, first), "copies within level 1"),
        (
            "l2_bytes_per_s",
            lambda: cache_rate(rates, hw.l2_bytes, hw.l2_bytes // LAST_LEVEL),
            "copies within the last-level cache",
        ),
        ("hbm_bytes_per_s", lambda: memory_rate(rates, hw.l2_bytes), "copies within the memory"),
    ):
        try:
            values.append(Measured(field, compute(), f"{how}, {bench.cores} cores"))
        except ValueError as error:
            missing.append(f"{field}: {error}")
    values.append(Measured("num_sms", bench.cores, "cores that this process may use"))
    note = f"copy on {bench.cores} cores, GB/s by bytes: {curve_text(rates)}"
    return Finding(values, [note], missing)


FAMILY = Family(
    "bandwidth",
    "bandwidth of caches and memory",
    ("smem_bytes_per_s", "l2_bytes_per_s", "hbm_bytes_per_s", "num_sms"),
    measure,
)
