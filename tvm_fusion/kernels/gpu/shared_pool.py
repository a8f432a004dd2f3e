"""TVM's pool of shared memory, made quickly."""

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx.script.builder import ir as builder

from ...ir.quick_stacks import quick_stacks


def shared_pool() -> T.SMEMPool:
    """An empty pool of the kernel that is being written. TVM notes the line that makes it, for its
    messages, and takes longer for that than for the rest of many a kernel.
    """
    with quick_stacks(builder):
        return T.SMEMPool()
