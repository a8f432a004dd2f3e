"""The threads that kernels run on: how many, and the pool of each thread that calls kernels.

TVM makes a pool for each thread that runs a parallel kernel, of half of the hardware threads on
x86-64, also where there is no hyper-threading, and pins it. Here each such thread gets a pool of

    TVM_NUM_THREADS of the user, else OMP_NUM_THREADS (torch and TVM follow it, too),
    else what a calibration of this machine found fastest (`use_calibrated_threads`),
    else the physical cores that the process may use, by its affinity and its control group,

and nothing is pinned: who shares the cores with us is not known. Where torch is loaded, kernels run
on as many threads of torch's team instead (`team.py`); in a child that a process with threads
forked, in the thread that calls.
"""

from __future__ import annotations

import logging
import os
import threading
from functools import cache

from .cores import available_cores, available_physical_cores, on_all_cores, usable_cores
from .team import is_alone, share_team

VARIABLES = ("TVM_NUM_THREADS", "OMP_NUM_THREADS")
_SHARE_ALL_CORES = -3  # TVM's kSpecifyThreadShareAllCore
_LAUNCHED_BEFORE = (
    "this thread ran a kernel through TVM alone before, on a pool of %d threads, which keeps its "
    "size: kernels use %d threads, not %d. Import tvm_fusion and compile first, or set "
    "TVM_NUM_THREADS"
)

_logger = logging.getLogger(__name__)
_calibrated: int | None = None
settled = False  # whether every thread's kernels run on torch's team, as `kernel_threads` would say
_pool = threading.local()


def thread_count() -> int:
    """How many threads kernels of this process run on, at least 1.

    Variables and cores are looked up once. A value that is no number of threads, or more than
    there are cores, is not followed, and a warning says so.
    """
    return 1 if is_alone() else asked_threads() or _calibrated or _found_threads()


def use_calibrated_threads(count: int | None) -> None:
    """Let kernels run on as many threads as a calibration found fastest here; the user's variables
    win. Threads that have a pool change over with their next call.

    Parameters
    ----------
    count : int or None
        At most `available_cores()`; None for the physical cores.
    """
    global _calibrated, settled
    if count is not None and not 1 <= count <= available_cores():
        raise ValueError(f"{count} threads on {available_cores()} cores")
    _calibrated, settled = count, False


def kernel_threads() -> int:
    """How many threads the calling thread's kernels run on.

    They get their pool here, if they have none or one of another size, or torch's team; the thread
    is not pinned. Whatever runs kernels on a CPU calls this first, unless they are `settled`: it
    takes 0.2 us where nothing is to be done.
    """
    global settled
    wanted = thread_count()
    if is_alone():
        settled = True
        return wanted
    if share_team(wanted, exactly=asked_threads() is not None):
        settled = True
        return wanted
    if getattr(_pool, "wanted", None) != wanted:
        _pool.size = _configure(wanted)
        _pool.wanted = wanted
    return _pool.size


@cache
def _found_threads() -> int:
    return available_physical_cores()


def _configure(count: int) -> int:
    """Give the calling thread's pool its size; returns what it got."""
    import tvm_ffi

    configure = tvm_ffi.get_global_func("runtime.config_threadpool")
    cores = sorted(map(str, usable_cores()))
    with on_all_cores():
        # A pool that is made here has a worker for each core that is named, of which `count` work:
        # the rest sleep, until a calibration wants them.
        configure(_SHARE_ALL_CORES, count, _repeated(cores, max(count, len(cores))))
        size = int(tvm_ffi.get_global_func("runtime.NumThreads")())
    if size < count:
        _logger.warning(_LAUNCHED_BEFORE, size, size, count)
    return size


def _repeated(cores: list[str], count: int) -> list[str]:
    """`count` names of cores; each is one for which TVM makes a worker, and all may run on all."""
    return [cores[i % len(cores)] for i in range(count)]


@cache
def asked_threads() -> int | None:
    """The number of threads that the user's variables ask for, None if they ask for none."""
    for name in VARIABLES:
        value = os.environ.get(name)
        if value is not None:
            return _asked(name, value, len(usable_cores()))
    return None


def _asked(name: str, value: str, most: int) -> int | None:
    first = value.split(",")[0].strip()  # OMP_NUM_THREADS may list a number for each level
    count = int(first) if first.isdecimal() else 0
    if count < 1:
        _logger.warning(
            "%s=%r is no number of threads (1, 2, ...): kernels run as if it were not set",
            name,
            value,
        )
        return None
    if count > most:
        _logger.warning(
            "%s=%s is more than this process has cores: kernels run on %d threads",
            name,
            first,
            most,
        )
    return min(count, most)
