"""What no schedule for a GPU may exceed: grids that launch, and intermediates that fit memory."""

from __future__ import annotations

import math
from collections import Counter

import tvm_ffi
from tvm import DataType, tirx
from tvm.s_tir import SBlock

LARGEST_GRID = {"blockIdx.x": (1 << 31) - 1, "blockIdx.y": 65535, "blockIdx.z": 65535}
LARGEST_BYTES = 1 << 32  # of what one launch of a function hands to the next


def beyond_limits(func: tirx.PrimFunc) -> str:
    """Why a scheduled function cannot run; empty where nothing speaks against it.

    Extents have to be numbers. Registers, shared memory and threads are `VerifyGPUCode`'s.
    """
    grids: Counter[str] = Counter()
    sizes: list[int] = []

    def loop(node: tirx.For) -> None:
        if node.thread_binding is not None:
            tag = str(node.thread_binding.thread_tag)
            grids[tag] = max(grids[tag], int(node.extent))

    def block(node: SBlock) -> None:
        for buffer in node.alloc_buffers:
            if buffer.scope() == "global":
                count = math.prod(int(extent) for extent in buffer.shape)
                sizes.append(count * DataType(str(buffer.dtype)).itemsize)

    tvm_ffi.structural_walk(func.body, [(tirx.For, loop), (SBlock, block)])
    for tag, most in LARGEST_GRID.items():
        if grids[tag] > most:
            return f"a grid of {grids[tag]} blocks along {tag}, {most} can be launched"
    if sum(sizes) > LARGEST_BYTES:
        return f"intermediates of {sum(sizes)} bytes, {LARGEST_BYTES} at most"
    return ""
