"""Runs plans of one graph launch by launch, without the virtual machine, and times them.

    PlanRunner -- kernels (each distinct launch once) --+-- run:  numbers of one plan
                  buffers (each tensor once)           --+-- time: many plans, interleaved

All plans share kernels and buffers: a tensor lies at the same place whichever launch writes it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from ..config import HardwareProfile, Policy
from ..config.targets import device_of
from ..errors import BuildError, PlanError, TargetError
from ..ir.graph import FusionGraph
from ..plan.legality import Evaluator
from ..plan.plan import FusionPlan
from ..plan.search.solution import Solution, costed, is_opaque, is_view, members_of
from ..runtime.build.version_names import launches_of
from ..runtime.calls.signature import function_of, load_library
from ..runtime.timing.launch_kernels import (
    BuiltLaunches,
    Kernel,
    LaunchSpec,
    LaunchWriter,
    build_launches,
)
from ..runtime.timing.plan_timing import Buffers, PlanTimes, device_samples
from ..transform.apply.materialize import group_views
from ..transform.apply.write_kernels import Tuned
from .reference import flatten

Specs = tuple[LaunchSpec, ...]
MIN_WALL_S = 100e-6  # shorter launches are repeated within a sample, above the clock's noise

__all__ = ["LaunchSpec", "PlanRunner", "PlanTimes", "specs_of"]


def specs_of(
    plan: FusionPlan | Solution, graph: FusionGraph, evaluator: Evaluator | None = None
) -> Specs:
    """The launches of a plan in the order in which they run; lone views and opaque operators are
    none.

    Parameters
    ----------
    plan : FusionPlan or tuple of Launch
        For a solution the evaluator says the kernel classes.
    graph : FusionGraph
    evaluator : Evaluator, optional

    Raises
    ------
    PlanError
        No kernel class takes a launch of a solution.
    """
    if isinstance(plan, FusionPlan):
        pairs = zip(group_views(graph, plan), plan.groups, strict=True)
        none = ("view", "opaque")
        return tuple(
            LaunchSpec(view.ops, tuple(sorted(view.outputs)), group.kernel_class)
            for view, group in pairs
            if group.kernel_class not in none
        )
    if evaluator is None:
        raise PlanError("the launches of a solution need an evaluator; give one")
    found = []
    for launch in plan:
        if is_view(graph, launch) or is_opaque(graph, launch):
            continue
        cost = costed(evaluator, launch)
        if not hasattr(cost, "kernel"):
            raise PlanError(f"a launch of the solution is refused: {cost.why}; leave it out")
        found.append(LaunchSpec(members_of(launch.members), launch.stores, cost.kernel.name))
    return tuple(found)


class PlanRunner:
    """Kernels and buffers of the plans of one graph.

    Parameters
    ----------
    low : IRModule
        The lowered module.
    graph : FusionGraph
        Read from `low`.
    hw : HardwareProfile
    policy : Policy
    target : Target
    tuned : Tuned, optional
        Has kernels that tuning chose (see `write_kernels`).

    Raises
    ------
    TargetError
        This machine has no such device.
    """

    def __init__(
        self,
        low: tvm.IRModule,
        graph: FusionGraph,
        hw: HardwareProfile,
        policy: Policy,
        target: tvm.target.Target,
        tuned: Tuned | None = None,
    ) -> None:
        self.low, self.graph, self.target = low, graph, target
        self.hw, self.policy = hw, policy
        self.device = device_of(target)
        if not self.device.exist:
            raise TargetError(
                f"this machine has no {target.kind.name} device to run plans on"
                "; run it where there is one"
            )
        self.writer = LaunchWriter(low, graph, hw, policy, tuned)
        self.buffers = Buffers(graph, self.writer, self.device)
        self.failures: dict[LaunchSpec, str] = {}
        self._kernels: dict[LaunchSpec, Kernel] = {}
        self._calls: dict[LaunchSpec, Callable[[], Any]] = {}
        self._evaluator = Evaluator(graph, hw, policy)

    # ---- kernels
    def specs(self, plan: FusionPlan | Solution | Specs) -> Specs:
        """The launches of a plan, of a solution, or as they are given."""
        if not isinstance(plan, FusionPlan) and all(isinstance(x, LaunchSpec) for x in plan):
            return tuple(plan)
        return specs_of(plan, self.graph, self._evaluator)

    def build(self, plans: Iterable[FusionPlan | Solution | Specs]) -> dict[LaunchSpec, str]:
        """Writes and builds the kernels of plans, those that are not there yet.

        Returns
        -------
        dict
            Why launches of these plans have no kernel.
        """
        wanted = dict.fromkeys(spec for plan in plans for spec in self.specs(plan))
        missing = [s for s in wanted if s not in self._kernels and s not in self.failures]
        if missing:
            self.add(build_launches(self.writer, missing, self.target))
        return {spec: self.failures[spec] for spec in wanted if spec in self.failures}

    def add(self, built: BuiltLaunches) -> None:
        """Takes kernels that were built elsewhere for the same graph."""
        self.failures.update(built.failures)
        for kernel in built.kernels:
            function = function_of(built.library, kernel.symbol, self.device)
            tensors = [self.buffers.tensor(key) for key in kernel.arguments]
            self._kernels[kernel.spec] = kernel
            self._calls[kernel.spec] = partial(function, *tensors)

    def load(self, path: Path, kernels: Sequence[Kernel], failures: Mapping[LaunchSpec, str]):
        """Takes kernels from a library that `BuiltLaunches.save` wrote in another process."""
        library = load_library(path) if kernels else None
        self.add(BuiltLaunches(library, list(kernels), dict(failures)))

    def kernel(self, spec: LaunchSpec) -> Kernel | None:
        """The kernel of a launch, or None where it has none."""
        return self._kernels.get(spec)

    def can_run(self, plan: FusionPlan | Solution | Specs) -> bool:
        """Whether all launches of a plan have kernels."""
        return all(spec in self._calls for spec in self.specs(plan))

    # ---- numbers
    def set_inputs(self, inputs: Sequence[Any]) -> None:
        """Fills the parameters of the function; NumPy arrays or tensors, in order."""
        for param, value in zip(self.buffers.params, inputs, strict=True):
            self.buffers.fill(param, value)

    def launch(self, spec: LaunchSpec) -> None:
        """Runs one launch; on a GPU it is only queued."""
        self._calls[spec]()

    def run(
        self, plan: FusionPlan | Solution | Specs, inputs: Sequence[Any] | None = None
    ) -> list[np.ndarray]:
        """Runs a plan once and returns the results of the function.

        Parameters
        ----------
        plan : FusionPlan, solution, or launches
            Of the whole function.
        inputs : sequence, optional
            Values of the parameters; those of the last call if not given.
        """
        specs = self.specs(plan)
        why = self.build([specs])
        if why:
            raise BuildError(
                f"launches of the plan have no kernel: {next(iter(why.values()))}"
                "; take the group apart, or give another plan"
            )
        if inputs is not None:
            self.set_inputs(inputs)
        for spec in specs:
            self.launch(spec)
        self.device.sync()
        return flatten([self.buffers.tensor(key) for key in self.buffers.results])

    # ---- time
    def time(
        self, plans: Sequence[FusionPlan | Solution | Specs], repeats: int = 15, warmup: int = 2
    ) -> list[PlanTimes]:
        """Times plans, interleaved; their kernels have to be built.

        On a GPU each sample finds a clean L2 and its launches queued up (see `plan_timing`); on a
        CPU it is the time on the wall. Parts of a plan can be timed, too: what they read is as the
        last launch left it.

        Parameters
        ----------
        plans : sequence
            FusionPlans, solutions, or sequences of launches.
        repeats : int
            Samples of each plan.
        warmup : int
            Runs of each plan before.
        """
        every = [self.specs(plan) for plan in plans]
        calls = [[self._calls[spec] for spec in specs] for specs in every]
        for _ in range(warmup):
            for plan in calls:
                for call in plan:
                    call()
        self.device.sync()
        if not all(calls):
            raise PlanError(
                "a plan without any launch cannot be timed; give one that computes something"
            )
        if self.device.type == "cuda":
            kernels = [
                [launches_of(self._kernels[s].device_kernels) for s in specs] for specs in every
            ]
            return [PlanTimes.of(s, "kernel") for s in device_samples(calls, kernels, repeats)]
        return [PlanTimes.of(s, "wall") for s in wall_samples(calls, repeats, self.device.sync)]


def wall_samples(
    calls: Sequence[Sequence[Callable[[], Any]]], repeats: int, sync: Callable[[], Any]
) -> list[list[list[tuple[float, float]]]]:
    """As `plan_timing.device_samples`, by the clock on the wall.

    Launches shorter than the clock can tell are repeated; the run with the median span of a sample
    stands for it.
    """
    found: list[list[list[tuple[float, float]]]] = [[] for _ in calls]

    def once(plan: Sequence[Callable[[], Any]]) -> list[tuple[float, float]]:
        times = []
        for call in plan:
            start = time.perf_counter()
            call()
            sync()
            times.append((start * 1e6, time.perf_counter() * 1e6))
        return times

    numbers = []
    for plan in calls:
        span = once(plan)
        shortest = (span[-1][1] - span[0][0]) / 1e6
        numbers.append(min(9, max(1, int(MIN_WALL_S / max(shortest, 1e-7)))))
    for _ in range(repeats):
        for index, plan in enumerate(calls):
            runs = [once(plan) for _ in range(numbers[index])]
            spans = [run[-1][1] - run[0][0] for run in runs]
            found[index].append(runs[spans.index(statistics.median_low(spans))])
    return found
