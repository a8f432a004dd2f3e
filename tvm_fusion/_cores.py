"""The cores of this process, whatever TVM pinned its threads to.

A thread that first runs a parallel kernel, or asks for the number of threads, gets a pool from TVM
and is pinned to one core; what it starts afterwards (threads, compilers, processes that measure)
would share that core with it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

HAS_AFFINITY = hasattr(os, "sched_getaffinity")
_AT_IMPORT = frozenset(os.sched_getaffinity(0)) if HAS_AFFINITY else frozenset()
_TASKS = Path("/proc/self/task")


def usable_cores() -> frozenset[int]:
    """The cores that this process may use: those that any of its threads may."""
    if not HAS_AFFINITY:
        return frozenset(range(os.cpu_count() or 1))
    found = set(os.sched_getaffinity(0)) | _AT_IMPORT
    with contextlib.suppress(OSError):  # no such folder
        for task in _TASKS.iterdir():
            with contextlib.suppress(OSError):  # it ended
                found |= os.sched_getaffinity(int(task.name))
    return frozenset(found)


def available_cores() -> int:
    """How many they are."""
    return len(usable_cores())


def use_all_cores() -> None:
    """Lets the calling thread, and what it starts from now on, run on all of them."""
    if HAS_AFFINITY:
        with contextlib.suppress(OSError):  # a core was taken from the process
            os.sched_setaffinity(0, usable_cores())


@contextlib.contextmanager
def on_all_cores() -> Iterator[None]:
    """As `use_all_cores` within the block; the thread is then as it was before."""
    before = os.sched_getaffinity(0) if HAS_AFFINITY else None
    use_all_cores()
    try:
        yield
    finally:
        if before is not None:
            os.sched_setaffinity(0, before)


def kernel_threads() -> int:
    """How many threads the calling thread's kernels run on; they get their pool here, if they have
    none, and the thread is not pinned.
    """
    from tvm import runtime

    with on_all_cores():
        return runtime.num_threads()
