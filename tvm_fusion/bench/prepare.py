"""Compile workloads in several processes ahead of a run, which then finds the work in the caches.

What is kept on disk is nvcc's (by us) and torch's: graphs, Triton's kernels, and which candidates
were fastest. One process at a time may time candidates, since two would disturb each other. JAX
compiles in little time, and what it chooses by time is left to the run.
"""

import contextlib
import logging
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from ..runtime.cubin_cache import available_cores
from .record import OURS, reason

_log = logging.getLogger(__name__)
_LEFT_TO_THE_RUN = ("torch", "jax")
_gpu: Any = contextlib.nullcontext()  # in a process of the pool, the lock that all share


def prepare(
    names: Sequence[str],
    target: Any,
    peers: Sequence[str],
    dtype: str | None,
    scale: float,
    workers: int,
) -> dict[str, str]:
    """Compile all workloads by us and by the peers; return what failed, by workload and compiler.

    Parameters
    ----------
    names, target, peers, dtype, scale
        As `run_suite` takes them.
    workers : int
        Number of processes.
    """
    labels = (OURS, *(name for name in peers if name not in _LEFT_TO_THE_RUN))
    failures: dict[str, str] = {}
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    threads = max(1, available_cores() // workers)
    with ProcessPoolExecutor(workers, context, _enter, (threads, context.Lock())) as pool:
        jobs = {pool.submit(_prepare, name, target, labels, dtype, scale): name for name in names}
        for job in as_completed(jobs):
            try:
                failures |= job.result()
            except Exception as error:  # a trial: a process may die with what it compiles
                failures[jobs[job]] = reason(error)
    for where, why in failures.items():
        _log.warning("compiling ahead: %s: %s", where, why)
    return failures


def _enter(threads: int, lock: Any) -> None:
    """Set up a process: few threads for Triton, and the GPU to itself while it times."""
    global _gpu
    _gpu = lock
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    bench = CachingAutotuner.bench

    def bench_alone(self: Any, *args: Any, **options: Any) -> Any:
        with _gpu:
            return bench(self, *args, **options)

    CachingAutotuner.bench = bench_alone


def _prepare(
    name: str, target: Any, labels: Sequence[str], dtype: str | None, scale: float
) -> dict[str, str]:
    import torch

    from ..config import resolve_target
    from .peers import peer
    from .suite import Setup, compile_ours

    tvm_target, hw = resolve_target(target)
    setup = Setup(target, tvm_target, hw, (), dtype, scale, 1, 0.0)
    failures = {}
    with torch.no_grad():
        with _gpu:
            instance = setup.instance(name)
            if setup.device == "cuda":
                torch.cuda.synchronize()
        torch.compiler.reset()
        for label in labels:
            try:
                if label == OURS:
                    compile_ours(instance, setup)
                else:
                    call = peer(label)(instance, tvm_target)
                    if label.startswith("torch."):
                        call()  # compiles
            except Exception as error:  # a trial
                failures[f"{name} by {label}"] = reason(error)
    del instance
    if setup.device == "cuda":
        torch.cuda.empty_cache()
    return failures
