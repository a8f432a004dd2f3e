"""A first guess of the time of a scheduled function, from what its launches do (`nest_walk`).

    T = sum over launches of gap + (sum_i T_i^p)^(1/p)

with the terms of a roofline: main memory once, the last-level cache for what the accesses touch in
whole sectors, arithmetic, special functions, and on a GPU the latency of a thread's own chain of
steps. All rates are those of the profile. It ranks candidates until measurements do, and is one of
the columns that the learned model sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...config.hardware import HardwareProfile
from ...ir.access import Pipe
from .nest_walk import Access, Launch

CLASSES = ("one", "vector", "run", "apart", "data")
"""How a load or store meets memory: all threads at one address, neighbours side by side by vectors,
side by side one by one, apart from one another, or where data say."""


def access_class(access: Access, vector: int) -> str:
    """One of CLASSES."""
    if access.thread_stride is None or access.vector_stride is None:
        return "data"
    thread, lane = abs(access.thread_stride), abs(access.vector_stride)
    if thread == 0 and lane == 0:
        return "one"
    if vector > 1 and lane == 1 and thread in (0, vector):
        return "vector"
    return "run" if max(thread, lane) <= 1 else "apart"


def touched_bytes(access: Access, vector: int, hw: HardwareProfile) -> float:
    """Bytes that a load or store moves between the last-level cache and the cores."""
    kind = access_class(access, vector)
    if kind == "one":
        return access.runs * access.element_bytes / hw.warp_size
    if kind in ("vector", "run"):
        return access.runs * access.element_bytes
    return access.runs * max(access.element_bytes, hw.sector_bytes)


def unique_bytes(accesses: Iterable[Access]) -> float:
    """Bytes of the tensors accessed, each at most once."""
    most: dict = {}
    for access in accesses:
        moved = min(access.whole_bytes, access.runs * access.element_bytes)
        most[access.buffer] = max(most.get(access.buffer, 0.0), moved)
    return sum(most.values())


def busy_share(launch: Launch, hw: HardwareProfile) -> float:
    """Share of the device that the launch fills."""
    if hw.kind == "llvm":
        rounds = -(-launch.parallel // hw.num_sms)
        return launch.parallel / (rounds * hw.num_sms)
    resident = max(1, min(hw.max_threads_per_sm // max(1, launch.threads), hw.max_blocks_per_sm))
    at_once = hw.num_sms * resident
    waves = -(-launch.grid // at_once)
    in_waves = launch.grid / (waves * at_once)
    per_sm = min(1.0, resident * launch.threads / hw.max_threads_per_sm)
    return max(1e-6, in_waves * per_sm)


def terms(launch: Launch, hw: HardwareProfile) -> dict[str, float]:
    """Seconds of each limit by itself."""
    outer = [a for a in launch.accesses if a.scope == "global"]
    share = busy_share(launch, hw)
    inner = sum(a.runs * a.element_bytes for a in launch.accesses if a.scope == "shared")
    arithmetic = launch.operations.get(Pipe.ARITHMETIC, 0.0)
    if hw.kind == "llvm":  # what is in no vector loop uses one lane
        arithmetic += launch.scalar_runs * (hw.warp_size - 1)
    found = {
        "memory": unique_bytes(outer) / hw.hbm_bytes_per_s,
        "cache": sum(touched_bytes(a, launch.vector, hw) for a in outer) / hw.l2_bytes_per_s,
        "shared": inner / hw.smem_bytes_per_s,
        "arithmetic": 2 * arithmetic / hw.fma_per_s_f32,
        "special": launch.operations.get(Pipe.SPECIAL, 0.0) / hw.special_per_s,
        "division": launch.operations.get(Pipe.DIVISION, 0.0) / hw.special_per_s,
        "integer": launch.operations.get(Pipe.INTEGER, 0.0) / hw.int_div_per_s,
    }
    found = {name: value / share for name, value in found.items()}
    latency = hw.memory_latency_s if hw.kind == "cuda" else 0.0
    found["latency"] = launch.steps / min(8.0, launch.unrolled) * latency
    found["barriers"] = launch.reduced_by_threads * hw.barrier_s
    return found


def seconds(parts: Mapping[str, float], hw: HardwareProfile) -> float:
    """The guess for a launch with these terms."""
    gap = hw.kernel_gap_us * 1e-6
    largest = max(parts.values())
    if largest == 0.0:
        return gap
    power = max(1.0, hw.roofline_exponent)
    return gap + largest * sum((p / largest) ** power for p in parts.values()) ** (1 / power)
