"""Traffic that all kernel classes share: what a launch reads and writes, and how much of the device
it fills.
"""

from __future__ import annotations

from ..config import HardwareProfile
from ..ir.graph import OpKind
from .base import Fit, GroupView, Traffic
from .footprint import footprint_bytes, operations

# Threads a multiprocessor needs in flight before memory-bound code stops gaining (16-byte loads,
# Little's law at 600 ns).
THREADS_TO_FILL_SM = 512


def memory_traffic(
    group: GroupView, fit: Fit, hw: HardwareProfile, parallel: float = 1.0, **more
) -> Traffic:
    """Inputs once by footprint, outputs once.

    An input that another kernel of the function has just written, and that fits half of the L2, is
    charged at L2 speed.
    """
    hbm = sum(group.tensor_bytes(t) for t in group.outputs)
    l2 = 0.0
    for t in group.inputs:
        size = footprint_bytes(group, t)
        l2 += size
        hbm += 0.0 if is_resident(group, t, size, hw) else size
    l2 += sum(group.tensor_bytes(t) for t in group.outputs)
    return Traffic(float(hbm), l2, operations(group, fit.evaluations), parallel=parallel, **more)


def is_resident(group: GroupView, tensor: int, size: float, hw: HardwareProfile) -> bool:
    """Whether another kernel of the function has just written the tensor and half of the L2 holds
    the `size` bytes of it that are read.
    """
    graph = group.graph
    producer = graph.tensors[tensor].producer
    while producer is not None and graph.ops[producer].kind is OpKind.VIEW:
        producer = graph.tensors[graph.ops[producer].inputs[0]].producer
    return producer is not None and size <= hw.l2_bytes / 2


def filled_by_threads(threads: float, hw: HardwareProfile) -> float:
    """Share of the device that so many threads keep busy."""
    if hw.kind == "llvm":
        return min(1.0, max(1.0, threads) / hw.num_sms)
    return min(1.0, max(1.0, threads) / (hw.num_sms * THREADS_TO_FILL_SM))
