"""What a kernel asks for before it waits for the kernels in front of it (`runtime.build.
early_launches`): bytes that are to be in the L2 when it reads them.

    kernel(...) {
      before_wait:  bring the first terms of this block's weights into the L2
      wait
      body
    }

Nothing is read into a thread, and nothing written. All multiprocessors share the L2: what a kernel
in front still writes to bytes that were asked for is seen all the same. So any tensor can be asked
for, caches that the kernel in front writes among them; one in vain costs time only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tvm.ir import Expr
from tvm.script import tirx as T

from ...config import HardwareProfile
from ..program.expr import constant
from .intrinsics import PREFIX, device_call

VARIABLE = "TVM_FUSION_EARLY_LAUNCHES"
MARK = "tvm_fusion.before_wait"
"""The attribute of the statements of a kernel that stand in front of its wait."""
BRINGING = ("bring_bytes", "bring_box")
REQUESTS = frozenset(f"{PREFIX}{name}{rank}" for name in BRINGING for rank in ("", *range(1, 6)))
"""Device functions that `before_wait` may call."""
GRANULE = 128  # bytes of a line
SHARE_OF_L2 = 1 / 3
"""What the blocks that run at once ask for. Between two kernels of a layer of Llama 3 8B lie about
2.5 us (H200, 126.9 us for 104 in 9 to 11 launches), in which memory moves 10 MB."""


def launches_early() -> bool:
    """Whether kernels of modules are launched early where a device can."""
    return os.environ.get(VARIABLE) == "1"


def asks_ahead(hw: HardwareProfile) -> bool:
    """Whether kernels for a device have something in front of their wait."""
    return launches_early() and hw.architecture.has_dependent_launch


@contextmanager
def before_wait() -> Iterator[None]:
    """Statements in front of a kernel's wait: indices and requests. It stands behind nothing but
    indices and allocations, under no condition.
    """
    with T.attr({MARK: 1}):
        yield


def bytes_of_block(hw: HardwareProfile, blocks: int, threads: int) -> int:
    """What a block may ask for: those that have places at once have a share of the L2."""
    places = hw.num_sms * min(hw.max_blocks_per_sm, hw.max_threads_per_sm // threads)
    return int(hw.l2_bytes * SHARE_OF_L2 / min(blocks, places))


def bring_bytes(source: Expr, size: int, at: Expr | int = 0) -> Expr:
    """Asks for `size` bytes from the byte `at` of an address on; all are multiples of 16."""
    body = (
        'asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" '
        ':: "l"((const char*)source + at), "r"(size) : "memory");'
    )
    arguments = "const void* source, long long at, int size"
    at = constant(at, "int64") if isinstance(at, int) else at
    return device_call("void", BRINGING[0], arguments, body, source, at, size)


def bring_box(tensor_map: Expr, coordinates: list[Expr | int]) -> Expr:
    """Asks for a box of a tensor."""
    rank = len(coordinates)
    places = ", ".join(f"%{i + 1}" for i in range(rank))
    words = "".join(f', "r"(c{i})' for i in range(rank))
    body = (
        f'asm volatile("cp.async.bulk.prefetch.tensor.{rank}d.L2.global.tile [%0, {{{places}}}];" '
        f':: "l"(m){words} : "memory");'
    )
    arguments = "unsigned long long m" + "".join(f", int c{i}" for i in range(rank))
    return device_call("void", f"{BRINGING[1]}{rank}", arguments, body, tensor_map, *coordinates)
