"""Untuned and tuned builds of workloads, compiled in several processes."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tvm_fusion.bench.apart import reason
from tvm_fusion.compilation.one_function import Wishes, compile_function
from tvm_fusion.compilation.tuned_parts import TunedParts
from tvm_fusion.config import resolve_target
from tvm_fusion.flow.functions import planned_function
from tvm_fusion.host.cores import available_cores
from tvm_fusion.runtime.calls.compiled_module import CompiledModule
from tvm_fusion.tuning.session.choices import DEFAULT

from ..rows.setup import Setup

UNTUNED, TUNED = "untuned", "tuned"
_gpu: Any = contextlib.nullcontext()  # in a process of the pool, the lock that all share


@dataclass(frozen=True, slots=True)
class Build:
    """A compiled workload in a file.

    Attributes
    ----------
    path : str
    groups : tuple of tuples of str
        The operators of each launch.
    choices : tuple of str
        Tuned kernels that are not the untuned ones.
    """

    path: str
    groups: tuple[tuple[str, ...], ...]
    choices: tuple[str, ...] = ()

    @property
    def module(self) -> CompiledModule:
        """The compiled workload, loaded."""
        return CompiledModule.load(self.path)

    def same_as(self, other: Build) -> bool:
        """Whether it runs the kernels of another build."""
        return (self.groups, self.choices) == (other.groups, other.choices)


@dataclass(frozen=True, slots=True)
class Builds:
    """What was compiled, or why not, by workload and label."""

    found: dict[tuple[str, str], Build | str]

    def of(self, name: str, label: str) -> Build:
        """A build; raises RuntimeError with the reason where it could not be compiled."""
        build = self.found[name, label]
        if isinstance(build, str):
            raise RuntimeError(f"{label}: {build}")
        return build


def build_ahead(
    names: Sequence[str], setup: Setup, database: Path, folder: Path, workers: int = 0
) -> Builds:
    """Compiles each workload untuned and from a database.

    Parameters
    ----------
    names : sequence of str
        Workloads.
    setup : Setup
    database : Path
    folder : Path
        Where the libraries go.
    workers : int
        Processes; 0 for one a core but one.
    """
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    count = workers or max(1, available_cores() - 1)
    found: dict[tuple[str, str], Build | str] = {}
    with ProcessPoolExecutor(count, context, _enter, (context.RLock(),)) as pool:
        common = (setup.named, setup.dtype, setup.scale, folder)
        jobs = {
            (name, label): pool.submit(_build, name, label, source, *common)
            for name in names
            for label, source in ((UNTUNED, None), (TUNED, database))
        }
        for key, job in jobs.items():
            try:
                found[key] = job.result()
            except Exception as error:  # a trial
                found[key] = reason(error)
    return Builds(found)


def _enter(lock: Any) -> None:
    global _gpu
    _gpu = lock


def _build(
    name: str,
    label: str,
    database: Path | None,
    named: Any,
    dtype: str | None,
    scale: float,
    folder: Path,
) -> Build:
    """Runs in a process of the pool."""
    target, hw = resolve_target(named)
    setup = Setup(named, target, hw, (), dtype, scale, 1, 0.0)
    with _gpu:  # weights are drawn there: those of the CPU differ
        instance = setup.instance(name)
        if setup.device == "cuda":
            torch.cuda.synchronize()
    model = (instance.module, instance.inputs)
    tuned = TunedParts(database).of if database is not None else None
    planned = planned_function(model, named, tuned=tuned)
    compiled = compile_function(planned, Wishes())
    path = compiled.save(folder / f"{name}-{label}.so")
    groups = tuple(group.ops for group in compiled.plan.groups)
    used = planned.tuned.used.values() if planned.tuned else ()
    del instance, model
    if setup.device == "cuda":
        torch.cuda.empty_cache()
    return Build(str(path), groups, tuple(sorted(t.text for t in used if t.text != DEFAULT)))
