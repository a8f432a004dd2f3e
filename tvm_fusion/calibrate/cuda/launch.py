"""Launches: bound by the host, by a full queue, in the virtual machine, in a CUDA graph."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from ...config import HardwareProfile
from ..findings import Family, Finding, Measured, NotMeasured
from . import arithmetic as cuda_arithmetic
from .bench import CHAIN, Call, CudaBench, inline_kernel

LAUNCHES = 500
"""Fewer than a stream holds (about 1,000) before a launch waits."""

CALLS = 20
SAMPLES = 7
BUSY_S = 0.02
"""What keeps the device busy while launches queue up."""

TINY = Call("mb_empty", 1)


def kernels(hw: HardwareProfile) -> dict:
    """A kernel that does nothing, and one that takes as long as one likes."""
    return {
        "mb_empty": inline_kernel("mb_empty", 128, "sum = (float)trips;"),
        "mb_fma": cuda_arithmetic.kernels(hw)["mb_fma"],
    }


def measure(bench: CudaBench) -> Finding:
    """Host time of a launch, and time between kernels that are queued."""
    vm = in_machine_us(bench)
    stream = _host_us(bench, _launcher(bench), LAUNCHES)
    notes = [f"host time of a launch: {stream:.3g} us alone, {vm:.3g} us in the virtual machine"]
    how = f"chain of {CHAIN} tiny kernels in the virtual machine, bound by the host"
    values, missing = [Measured("launch_us", vm, how)], []
    gaps: tuple[tuple[str, Callable[[CudaBench], float], str], ...] = (
        ("queued_launch_us", _queued_us, f"{LAUNCHES} tiny kernels behind a long one"),
        ("graph_launch_us", _graph_us, f"CUDA graph of {LAUNCHES} dependent tiny kernels"),
    )
    for field, interval, how in gaps:
        try:
            taken = interval(bench)
            kernel = bench.times({0: TINY})[0] * 1e6
            value = max(0.0, taken - kernel)
            values.append(Measured(field, value, f"{how}, less the kernel's own time"))
            notes.append(f"{field}: a kernel each {taken:.3g} us, itself {kernel:.3g} us")
        except NotMeasured as why:
            missing.append(f"{field}: {why}")
    return Finding(values, notes, missing)


def _launcher(bench: CudaBench) -> Callable[[], Any]:
    kernel, arguments = bench.function(TINY.kernel), bench.arguments(TINY)
    return lambda: kernel(*arguments)


def _host_us(bench: CudaBench, call: Callable[[], Any], number: int) -> float:
    """Median time in which the host gets rid of a call, until the device has done all."""
    for _ in range(3):
        call()
    samples = []
    for _ in range(SAMPLES):
        bench.device.sync()
        start = time.perf_counter()
        for _ in range(number):
            call()
        bench.device.sync()
        samples.append((time.perf_counter() - start) / number * 1e6)
    return statistics.median(samples)


def in_machine_us(bench: CudaBench) -> float:
    """Time of a launch in the virtual machine, one chain after the other."""
    import tvm

    value = tvm.runtime.empty((32,), "float32", bench.device)
    return _host_us(bench, bench.module.bind(value), CALLS) / CHAIN


def _queued_us(bench: CudaBench) -> float:
    """Time between the starts of kernels that wait in the stream for the device."""
    _needs_torch(bench)
    blocks = 4 * bench.hw.num_sms
    short, long = (Call("mb_fma", blocks, trips) for trips in (1 << 12, 1 << 14))
    trip = bench.slopes({0: (short, long)}, repeats=3)[0]
    import torch

    busy = bench.function("mb_fma")
    arguments = bench.arguments(Call("mb_fma", blocks, int(BUSY_S / trip)))
    call = _launcher(bench)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    samples = []
    for _ in range(SAMPLES):
        torch.cuda.synchronize()
        began = time.perf_counter()
        busy(*arguments)
        start.record()
        for _ in range(LAUNCHES):
            call()
        end.record()
        if time.perf_counter() - began > BUSY_S / 2:
            raise NotMeasured("the host is too slow to fill the queue")
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / LAUNCHES)
    return statistics.median(samples)


def _graph_us(bench: CudaBench) -> float:
    """Time between the starts of dependent kernels of a CUDA graph."""
    _needs_torch(bench)
    import torch

    x, y = (torch.zeros(64, device="cuda") for _ in range(2))
    numbers = bench.arguments(TINY)[2:]
    kernel = bench.function(TINY.kernel)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            kernel(x, y, *numbers)  # torch tensors: launched on torch's stream, which captures
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    samples = []
    for _ in range(SAMPLES + 1):
        torch.cuda.synchronize()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / LAUNCHES)
    taken = statistics.median(samples[1:])
    if taken < 0.2:
        raise NotMeasured("the launches were not captured by torch's graph")
    return taken


def _needs_torch(bench: CudaBench) -> None:
    if not bench.with_torch:
        raise NotMeasured("needs torch with CUDA (graphs and kernel times)")


FAMILY = Family(
    "launch",
    "launches in a stream, the VM and a graph",
    ("launch_us", "queued_launch_us", "graph_launch_us"),
    measure,
    kernels,
)
