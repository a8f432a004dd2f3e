"""Compile workloads in several processes ahead of a run, which then finds the work on disk.

There are our builds, as libraries, and torch's caches: graphs, Triton's kernels, and which
candidates were fastest. One process at a time may time candidates, since two would disturb each
other. JAX compiles in little time, and what it chooses by time is left to the run.
"""

import contextlib
import functools
import inspect
import logging
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tvm

from tvm_fusion.bench.apart import reason
from tvm_fusion.bench.patience import within
from tvm_fusion.config import resolve_target
from tvm_fusion.host.cores import available_cores

from ..peers.names import FLEX, SDPA
from ..peers.registry import peer
from ..record import OURS, PRODUCTS, UNFUSED
from ..workloads.instance import Instance
from .ours import Ours
from .setup import Saved, Setup, exact_float32

_log = logging.getLogger(__name__)
_LEFT_TO_THE_RUN = ("torch", SDPA, "jax", PRODUCTS)
_FIRST = ("torch.max-autotune", OURS, "tvm")  # what takes longest begins first
_gpu: Any = contextlib.nullcontext()  # in a process of the pool, the lock that all share


@dataclass(frozen=True, slots=True)
class Work:
    """What one process compiles at a time: a workload by one or two of the compilers."""

    name: str
    labels: tuple[str, ...]
    target: Any
    dtype: str | None
    scale: float
    patience_s: float | None
    folder: Path


@dataclass(frozen=True, slots=True)
class Prepared:
    """What came of it.

    Attributes
    ----------
    failures : dict[tuple[str, str], str]
        Why what failed did, by workload and compiler.
    saved : dict[str, Saved]
        Our builds, by workload.
    """

    failures: dict[tuple[str, str], str] = field(default_factory=dict)
    saved: dict[str, Saved] = field(default_factory=dict)

    @property
    def given_up(self) -> dict[tuple[str, str], str]:
        """The failures that a run need not wait for once more."""
        timeout = TimeoutError.__name__
        return {key: why for key, why in self.failures.items() if why.startswith(timeout)}


def prepare(names: Sequence[str], setup: Setup, workers: int, folder: Path) -> Prepared:
    """Compile all workloads by us and by the peers, in several processes.

    Parameters
    ----------
    names : sequence of str
        Workloads.
    setup : Setup
        Of the run that follows.
    workers : int
        Number of processes.
    folder : Path
        Where our builds are written.
    """
    prepared = Prepared()
    failures = prepared.failures
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    threads = max(1, available_cores() // workers)
    with ProcessPoolExecutor(workers, context, _enter, (threads, context.RLock())) as pool:
        jobs = {pool.submit(_prepare, work): work for work in _works(names, setup, folder)}
        for job in as_completed(jobs):
            work = jobs[job]
            try:
                failed, saved = job.result()
            except Exception as error:  # a trial: a process may die with what it compiles
                failed, saved = dict.fromkeys(work.labels, reason(error)), None
            failures.update({(work.name, label): why for label, why in failed.items()})
            if saved is not None:
                prepared.saved[work.name] = saved
    for (name, label), why in failures.items():
        _log.warning("compiling ahead: %s by %s: %s", name, label, why)
    return prepared


def _works(names: Sequence[str], setup: Setup, folder: Path) -> list[Work]:
    found = []
    common = (setup.named, setup.dtype, setup.scale, setup.patience_s, folder)
    for name in names:
        labels = setup.peers_of(name)
        by_us = (OURS, *(label for label in labels if label == UNFUSED))
        others = [label for label in labels if label not in (*by_us, *_LEFT_TO_THE_RUN)]
        for group in (by_us, *((label,) for label in others)):
            found.append(Work(name, group, *common))
    ranks = {label: rank for rank, label in enumerate(_FIRST)}
    return sorted(found, key=lambda work: ranks.get(work.labels[0], len(ranks)))


def _enter(threads: int, lock: Any) -> None:
    """Set up a process: few threads for Triton, and the GPU to itself while it times."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    time_candidates_alone(lock)
    exact_float32()


def time_candidates_alone(lock: Any) -> None:
    """Have torch's compilers in this process hold a lock while they time kernels."""
    global _gpu
    _gpu = lock
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    _run_alone(CachingAutotuner, "bench")
    _run_alone(AlgorithmSelectorCache, "benchmark_choices")  # for one matrix product


def _run_alone(owner: type, name: str) -> None:
    """Have a method run while no other process times anything."""
    found = inspect.getattr_static(owner, name)
    kind = type(found) if isinstance(found, classmethod | staticmethod) else None
    method = _alone(found.__func__ if kind else found)
    setattr(owner, name, kind(method) if kind else method)


def _alone(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        with _gpu:
            return function(*args, **options)

    return call


def _prepare(work: Work) -> tuple[dict[str, str], Saved | None]:
    """Compile in a process of the pool; return what failed, and our builds."""
    import torch

    target, hw = resolve_target(work.target)
    setup = Setup(work.target, target, hw, (), work.dtype, work.scale, 1, 0.0)
    failures, saved = {}, None
    with torch.no_grad():
        with _gpu:
            instance = setup.instance(work.name)
            if setup.device == "cuda":
                torch.cuda.synchronize()
        torch.compiler.reset()
        try:
            if OURS in work.labels:
                saved = Ours(instance, setup).save(work.folder, work.labels)
            else:
                _compile(work, instance, target)
        except Exception as error:  # a trial
            failures = dict.fromkeys(work.labels, reason(error))
    del instance
    if setup.device == "cuda":
        torch.cuda.empty_cache()
    return failures, saved


def _compile(work: Work, instance: Instance, target: tvm.target.Target) -> None:
    (label,) = work.labels
    with within(work.patience_s):
        call = peer(label)(instance, target)
        if label.startswith("torch.") or label == FLEX:
            call()  # compiles
