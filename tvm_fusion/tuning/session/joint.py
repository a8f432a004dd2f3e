"""Contested cuts run both ways with their tuned kernels: what sums of single times leave out.

A kernel that is measured by itself finds a clean L2; in a plan it finds there what the launch
before it wrote, and there are gaps between launches. So both ways of a cut run as a module of their
own in a measuring process, pair by pair (`check.sequential`). Cuts of equal structure with the same
kernels run once; what was found is kept with the plan, under a key of the structure and of the
kernels, and is not run again.

Does not handle: symbolic extents, opaque operators, devices behind RPC. The sums decide there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import tvm
from tvm import tirx

from ...check.compared_regions import PlanSampler, fill, views_held
from ...check.plan_runner import PlanRunner
from ...check.sequential import Budget, Comparison, settle
from ...config.digest import digest
from ...errors import BuildError
from ...flow.planned import Planned
from ...ir.graph import build_graph
from ...plan.plan import FusionPlan, PlannedGroup
from ...transform.apply.region_module import RegionModule, region_module
from ..measure.building import Place
from ..measure.measuring import LocalMeter, forget
from ..measure.processes import Worker, wait_for
from ..measure.site import ends_with_device
from ..measure.trial_record import Trial
from ..measure.workshop import POLL_S
from .contested import Contested, Weighed
from .lookup import TunedKernels
from .tasks import Task, key_of

logger = logging.getLogger(__name__)

GRACE_S = 30.0  # a request looks at its time between builds and between batches of samples
NEAR = 1.1  # cuts whose other way takes longer than this many times the plan's are not run


@dataclass(frozen=True, slots=True)
class JointRequest:
    """A cut to be run both ways.

    Attributes
    ----------
    mod : str
        JSON of the region's module.
    constants : mapping of int to array
        Those of its parameters that are constants of the model.
    plans : tuple of dict
        The other way and that of the plan, as plans of `mod`.
    trials : mapping of str to tuple of Trial
        By key of a task: its untuned kernel's and those that may be chosen.
    certain_gain : float
        See `choices.chosen`.
    place : Place
    seconds : float
        Building included.
    """

    mod: str
    constants: Mapping[int, Any]
    plans: tuple[dict[str, Any], dict[str, Any]]
    trials: Mapping[str, tuple[Trial, ...]]
    certain_gain: float
    place: Place
    seconds: float


@dataclass(frozen=True, slots=True)
class Sent:
    """The trials of a request as a source of tuned kernels."""

    found: Mapping[str, tuple[Trial, ...]]

    def trials(self, workload: tirx.PrimFunc) -> tuple[Trial, ...]:
        """The trials of a workload."""
        return self.found.get(key_of(workload), ())

    def plan(self, key: str) -> None:
        """There are none."""


def run_here(request: JointRequest) -> Comparison | None:
    """Runs a cut both ways on the device of this process, which ends where an error takes the
    device; None where the time does not reach.

    Raises
    ------
    BuildError
        A kernel cannot be built.
    """
    target, _ = request.place.resolved()
    make_room(target)
    with ends_with_device(target):
        return _run(request)


def make_room(target: tvm.target.Target) -> None:
    """Gives back the memory of the tasks that were measured in this process."""
    forget()
    if target.kind.name == "cuda":
        import torch

        torch.cuda.empty_cache()


def _run(request: JointRequest) -> Comparison | None:
    budget = Budget(request.seconds)
    target, hw = request.place.resolved()
    mod = tvm.ir.load_json(request.mod)
    plans = [FusionPlan.from_dict(plan) for plan in request.plans]
    tuned = TunedKernels(Sent(request.trials), request.certain_gain)
    part = RegionModule(mod, build_graph(mod), dict(request.constants))
    if hw.kind == "llvm":
        part = part.with_constants()
    runner = PlanRunner(part.mod, part.graph, hw, request.place.policy, target, tuned)
    if failed := runner.build(plans):
        raise BuildError(next(iter(failed.values())))
    if missing := request.trials.keys() - tuned.used.keys():
        raise BuildError(f"the chosen kernels of {', '.join(sorted(missing))} are not used")
    fill(runner, part.constants)
    return settle(PlanSampler(runner, plans), budget)


@dataclass
class JointRuns:
    """Runs of the contested cuts of one plan.

    Attributes
    ----------
    planned : Planned
    place : Place
    kernels : TunedKernels
    comparisons : dict of str to Comparison
        What is known by key: of this session and of those before.
    """

    planned: Planned
    place: Place
    kernels: TunedKernels
    comparisons: dict[str, Comparison] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._parts: dict[int, tuple[Contested, RegionModule | None]] = {}

    def run(self, cuts: Iterable[Weighed], worker: Worker | None, seconds: float) -> None:
        """Runs the cuts that may be made otherwise, until the time is up.

        First those that may save most, over all cuts of a structure.

        Parameters
        ----------
        cuts : iterable of Weighed
        worker : Worker or None
            A process that measures on this machine; without one nothing is run.
        seconds : float
            For all of them.
        """
        if worker is None:
            return
        budget = Budget(seconds)
        for key, one, part in self._left(cuts):
            if budget.left_s <= 0:
                logger.info("no time is left for the joint run of a cut")
                return
            request = self._request(one, part, budget.left_s)
            try:
                worker.send(run_here, (request,), request.seconds + GRACE_S)
                while (answer := worker.collect()) is None:
                    wait_for([worker], POLL_S)
            except KeyboardInterrupt:
                worker.stop()
                raise
            if answer.status != "ok":
                logger.warning("a cut is not run with its tuned kernels: %s", answer.why)
            elif answer.value is not None:
                self.comparisons[key] = answer.value

    def found(self, one: Weighed) -> Comparison | None:
        """The comparison of a cut: its other way against that of the plan."""
        known = self._keyed(one) if self.comparisons else None
        return known and self.comparisons.get(known[0])

    def to_dict(self, cuts: Iterable[Weighed]) -> dict[str, Any]:
        """The comparisons of these cuts as JSON has them."""
        known = {part[0] for one in cuts if (part := self._keyed(one)) is not None}
        return {
            key: asdict(comparison)
            for key, comparison in sorted(self.comparisons.items())
            if key in known
        }

    def restore(self, data: Any) -> None:
        """Takes what `to_dict` gave; what is no such thing counts as missing."""
        try:
            self.comparisons.update({key: Comparison(**value) for key, value in data.items()})
        except (AttributeError, TypeError) as why:
            logger.info("no joint runs are known: %s", why)

    def _left(self, cuts: Iterable[Weighed]) -> list[tuple[str, Weighed, RegionModule]]:
        """A cut of each structure that is not known and may win, the most valuable first."""
        found: dict[str, tuple[Weighed, RegionModule]] = {}
        worth: dict[str, float] = {}
        for one in cuts:
            if (known := self._keyed(one)) is None:
                continue
            key, part = known
            if key not in self.comparisons:
                found.setdefault(key, (one, part))
                worth[key] = worth.get(key, 0.0) + NEAR * one.now_us - one.other_us
        return [(key, *found[key]) for key in sorted(found, key=lambda k: -worth[k])]

    def _keyed(self, one: Weighed) -> tuple[str, RegionModule] | None:
        """The module of a cut's region and the key of its runs; None where it is not to be run."""
        if one.other_us > NEAR * one.now_us:
            return None
        if id(one.cut) not in self._parts:
            region, own = one.cut.region, self.planned
            part = region_module(own.low, own.graph, region.ops, views_held(own.graph, region))
            self._parts[id(one.cut)] = one.cut, part
        part = self._parts[id(one.cut)][1]
        return part and (self._key(one, part), part)

    def _key(self, one: Weighed, part: RegionModule) -> str:
        """Equal for cuts whose two ways launch the same kernels on tensors of the same shapes."""
        number = {op.name: op.id for op in part.graph.ops}
        parts = [part.graph.fingerprint()]
        for groups, tasks in _sides(one):
            launched = (g for g in groups if g.kernel_class != "view")
            for group, task in zip(launched, tasks, strict=True):
                trial = self.kernels.trial(task.workload)
                parts.append([[number[n] for n in group.ops], task.key, trial.kind, trial.text])
            parts.append("against")
        return digest(parts)[:32]

    def _request(self, one: Weighed, part: RegionModule, seconds: float) -> JointRequest:
        names = self.planned.hw.name, self.planned.policy.name
        plans = tuple(part.plan(groups, *names).to_dict() for groups, _ in _sides(one))
        trials = {t.key: tuple(self.kernels.source.trials(t.workload)) for t in one.now + one.other}
        mod = tvm.ir.save_json(part.mod)
        gain = self.kernels.certain_gain
        return JointRequest(mod, part.constants, plans, trials, gain, self.place, seconds)


def _sides(one: Weighed) -> Sequence[tuple[tuple[PlannedGroup, ...], tuple[Task, ...]]]:
    """The groups and tasks of the other way, and those of the plan's."""
    region = one.cut.region
    return (region.hopeful, one.other), (region.careful, one.now)


def local_worker(meters: Iterable[Any]) -> Worker | None:
    """The process of the first meter that measures on this machine."""
    return next((meter.worker for meter in meters if isinstance(meter, LocalMeter)), None)
