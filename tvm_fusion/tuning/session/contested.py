"""Cuts of a plan that tuning may decide otherwise: their kernels are tuned, too.

A fusion is contested where the plan of least predicted time differs from the plan, and where the
interval of a fusion's gain comes near a loss: a tuned kernel of one operator may win then. A kernel
that is measured by itself finds a clean L2, in a plan what the launch before it wrote; so both ways
of a cut are compared as `check.compared_regions` compares a region, with their tuned kernels and in
a measuring process. Cuts of equal structure with the same kernels run once; what was found is kept
with the plan, and is not run again. Where nothing can be run (symbolic extents, opaque operators,
devices behind RPC), the sums of the times of single kernels decide.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import tvm
from tvm import tirx

from ...check.compared_regions import part_of, settled_apart, timed, whole
from ...check.compared_regions import settled as settled_together
from ...check.sequential import Budget, Comparison
from ...config.digest import digest
from ...errors import BuildError
from ...flow.planned import Planned
from ...ir.graph import FusionGraph, build_graph
from ...plan.decide.decide import hopeful_plan, with_evidence, without
from ...plan.differ import Region, exchanged, regions
from ...plan.plan import JOIN, Evidence, FusionPlan, PlannedGroup
from ...plan.refusal import Refusal, RefusalCode
from ...transform.apply.region_module import RegionModule
from ..database import Database
from ..database.trial import Trial
from ..measure.building import Place
from ..measure.measuring import LocalMeter, forget
from ..measure.processes import Worker
from ..measure.site import ends_with_device
from ..search.task_search import Rival, TaskState
from .lookup import TunedKernels, plan_key
from .tasks import Task, key_of, tasks_of

logger = logging.getLogger(__name__)

CLOSE = 0.85  # fusions whose time may be more than this share of their operators' are contested
NEAR = 1.1  # cuts whose other way takes longer than this many times the plan's are not run
GRACE_S = 30.0  # a request looks at its time between builds and between batches of samples
JOINT = "joint"  # beside the fields of a kept plan: the comparisons of its cuts


@dataclass(frozen=True, eq=False)
class Cut:
    """Groups of the plan (`region.careful`) and others (`region.hopeful`), with the tasks of their
    launches (`now`, `other`). It `joins` where the others fuse more; else they are a fusion apart.
    """

    region: Region
    joins: bool
    now: tuple[Task, ...]
    other: tuple[Task, ...]

    @property
    def ways(self) -> tuple[tuple[PlannedGroup, ...], tuple[PlannedGroup, ...]]:
        """The other groups, and those of the plan."""
        return self.region.hopeful, self.region.careful


@dataclass(frozen=True, slots=True)
class Weighed:
    """A cut whose kernels were all measured: the times of both ways, each kernel measured by
    itself, and of their launches.
    """

    cut: Cut
    now_us: float
    other_us: float


def contested(planned: Planned) -> Iterator[tuple[Region, FusionPlan, bool]]:
    """The contested cuts of a plan: the region, the plan with its other groups, and whether these
    fuse more.
    """
    graph, plan = planned.graph, planned.plan
    for region in regions(graph, plan, hopeful_plan(graph, planned.hw, planned.policy)):
        other = exchanged(graph, plan, region.careful, region.hopeful)
        if other is not None:
            yield region, other, True
    reason = Refusal(RefusalCode.SLOWER, (), "measured apart")
    for group in plan.groups:
        if group.evidence is not None and group.evidence.high >= CLOSE:
            other = without(graph, plan, group, planned.alone, reason)
            yield from ((region, other, False) for region in regions(graph, plan, other))


def cut_of(region: Region, joins: bool, *tasks: Sequence[Task]) -> Cut | None:
    """A cut, with its tasks among those of the plan and of the other one; None where a launch is no
    task.
    """
    sides = []
    for groups, every in zip((region.careful, region.hopeful), tasks, strict=True):
        by_group = {ops: task for task in every for ops in task.groups}
        sides.append(tuple(by_group.get(group.ops) for group in launched(groups)))
    return None if None in sides[0] + sides[1] else Cut(region, joins, *sides)


def launched(groups: Iterable[PlannedGroup]) -> Iterator[PlannedGroup]:
    """Without views and joins."""
    return (group for group in groups if group.kernel_class not in ("view", JOIN))


def settled(
    graph: FusionGraph,
    plan: FusionPlan,
    cuts: Iterable[tuple[Weighed, Comparison | None]],
    certain_gain: float,
) -> FusionPlan:
    """The plan with those cuts made otherwise that are measured to be faster so; of cuts that
    exclude each other the one that saves most.

    A comparison is of the other way (first) with that of the plan; where there is none, the other
    way has to be faster by a share of `certain_gain` in the sums.
    """

    def saved_us(pair: tuple[Weighed, Comparison | None]) -> float:
        return pair[1].difference if pair[1] else pair[0].now_us - pair[0].other_us

    for one, found in sorted(cuts, key=saved_us, reverse=True):
        region = one.cut.region
        if not {g.ops for g in region.careful} <= {g.ops for g in plan.groups}:
            continue  # another cut has changed them
        if found is not None:
            settle = settled_together if one.cut.joins else settled_apart
            plan = settle(graph, plan, region, found)
        elif one.other_us < (1 - certain_gain) * one.now_us:
            plan = _by_sums(graph, plan, one)
    return plan


def _by_sums(graph: FusionGraph, plan: FusionPlan, one: Weighed) -> FusionPlan:
    """The plan with a cut made otherwise, and the sums as the reason."""
    region, now, other = one.cut.region, one.now_us, one.other_us
    changed = exchanged(graph, plan, region.careful, region.hopeful)
    if changed is None:
        return plan
    if one.cut.joins:
        ratios = (round(other / now, 4),) * 3
        times = {"together_us": round(other, 3), "apart_us": round(now, 3)}
        evidence = Evidence("measured", "sure", *ratios, **times)
        return with_evidence(changed, dict.fromkeys((g.ops for g in region.hopeful), evidence))
    why = f"tuned kernels take {now:.1f} us together and {other:.1f} us apart"
    numbers = (("apart_us", round(other, 3)), ("together_us", round(now, 3)))
    members = tuple(dict.fromkeys(op for g in region.careful for op in g.ops))
    reason = Refusal(RefusalCode.SLOWER, members, why, numbers)
    return replace(changed, refusals=(*changed.refusals, reason))


@dataclass(frozen=True, slots=True)
class Sent:
    """Trials by the keys of their tasks, as a source of tuned kernels without a plan."""

    found: Mapping[str, tuple[Trial, ...]]

    def trials(self, workload: tirx.PrimFunc) -> tuple[Trial, ...]:
        """The trials of a workload."""
        return self.found.get(key_of(workload), ())


@dataclass(frozen=True, slots=True)
class JointRequest:
    """A cut to be run both ways: `mod` is the JSON of the region's module, `constants` are those of
    the model among its parameters, and `trials` those of the kernels.
    """

    mod: str
    constants: Mapping[int, Any]
    ways: tuple[tuple[PlannedGroup, ...], tuple[PlannedGroup, ...]]
    trials: Mapping[str, tuple[Trial, ...]]
    certain_gain: float
    place: Place
    seconds: float


def run_here(request: JointRequest) -> Comparison | None:
    """Runs a cut both ways on the device of this process, which ends where an error takes the
    device; None where the time does not reach, BuildError where a kernel cannot be built.
    """
    budget = Budget(request.seconds)
    target, hw = request.place.resolved()
    forget()  # the memory of the tasks that were measured in this process
    if target.kind.name == "cuda":
        import torch

        torch.cuda.empty_cache()
    with ends_with_device(target):
        mod = tvm.ir.load_json(request.mod)
        part = RegionModule(mod, build_graph(mod), dict(request.constants))
        tuned = TunedKernels(Sent(request.trials), request.certain_gain)
        found = timed(part, request.ways, hw, request.place.policy, target, budget, tuned)
        if missing := request.trials.keys() - tuned.used.keys():
            raise BuildError(
                f"the chosen kernels of {', '.join(sorted(missing))} are not used; tune them again"
            )
        return found


class TunedFunction:
    """What is tuned of one function of the model.

    Attributes
    ----------
    tasks : list of lists of Task
        Of the plan, and of each contested cut's plan.
    comparisons : dict of str to Comparison
        Of the cuts that were run, in this session and in those before, by `_keyed`.
    """

    def __init__(
        self, planned: Planned, keeper: Database, place: Place, kernels: TunedKernels
    ) -> None:
        self.planned, self._keeper, self._place, self._kernels = planned, keeper, place, kernels
        graph, hw, policy = planned.graph, planned.hw, planned.policy
        found = list(contested(planned))
        plans = (planned.plan, *(plan for _, plan, _ in found))
        self.tasks = [tasks_of(planned.low, graph, plan, policy, hw) for plan in plans]
        first, *others = self.tasks
        cuts = [
            cut_of(region, joins, first, tasks)
            for (region, _, joins), tasks in zip(found, others, strict=True)
        ]
        self.cuts = [cut for cut in cuts if cut is not None]
        self._key, self._parts = plan_key(planned.mod, hw, policy), {}
        self.comparisons: dict[str, Comparison] = {}
        kept = (keeper.plan(self._key) or {}).get(JOINT)
        try:
            self.comparisons.update({key: Comparison(**value) for key, value in kept.items()})
        except (AttributeError, TypeError) as why:
            logger.info("no joint runs are known: %s", why)

    def add_rivals(self, states: Iterable[TaskState]) -> None:
        """Tell the states of its kernels which cuts they are for, but for cuts with a kernel that
        nothing can write.
        """
        states = {state.task.key: state for state in states}
        for cut in self.cuts:
            if all(task.key in states for task in cut.now + cut.other):
                now, other = (tuple(states[t.key] for t in side) for side in (cut.now, cut.other))
                for state in other:
                    state.rivals.append(Rival(now, other, self.planned.hw.queued_launch_us))

    def run(self, worker: Worker | None, seconds: float) -> None:
        """Run the cuts that may be made otherwise, with their tuned kernels, in a process that
        measures on this machine, until the time is up; without such a process nothing is run.
        """
        budget = Budget(seconds)
        for key, one, part in self._left() if worker is not None else ():
            if budget.left_s <= 0:
                logger.info("no time is left for the joint run of a cut")
                return
            request = self._request(one.cut, part, budget.left_s)
            worker.send(run_here, (request,), request.seconds + GRACE_S)
            answer = worker.wait()
            if answer.status != "ok":
                logger.warning("a cut is not run with its tuned kernels: %s", answer.why)
            elif answer.value is not None:
                self.comparisons[key] = answer.value

    def settle(self, certain_gain: float) -> FusionPlan:
        """Keep, and return, the plan as joint runs or the times of tuned kernels settle it."""
        cuts = self.weighed()
        keys = [known and known[0] for known in map(self._keyed, cuts)]
        pairs = zip(cuts, map(self.comparisons.get, keys), strict=True)
        plan = settled(self.planned.graph, self.planned.plan, pairs, certain_gain)
        if plan.evidence is not None:
            plan = whole(self.planned, plan)
        kept = {k: asdict(one) for k, one in sorted(self.comparisons.items()) if k in keys}
        self._keeper.save_plan(self._key, plan.to_dict() | {JOINT: kept})
        return plan

    def weighed(self) -> list[Weighed]:
        """The cuts whose kernels were all measured."""
        found, launch_us = [], self.planned.hw.queued_launch_us
        for cut in self.cuts:
            sides = [[self._kernels.trial(t.workload) for t in x] for x in (cut.now, cut.other)]
            if None not in sides[0] + sides[1]:
                sums = (sum(t.us + launch_us for t in trials) for trials in sides)
                found.append(Weighed(cut, *sums))
        return found

    def _left(self) -> list[tuple[str, Weighed, RegionModule]]:
        """A cut of each structure that is not known and may win, those first that may save most
        over all cuts of their structure.
        """
        found: dict[str, tuple[Weighed, RegionModule]] = {}
        worth: dict[str, float] = {}
        for one in self.weighed():
            key, part = self._keyed(one) or (None, None)
            if key is not None and key not in self.comparisons:
                found.setdefault(key, (one, part))
                worth[key] = worth.get(key, 0.0) + NEAR * one.now_us - one.other_us
        return [(key, *found[key]) for key in sorted(found, key=lambda k: -worth[k])]

    def _keyed(self, one: Weighed) -> tuple[str, RegionModule] | None:
        """A key that is equal for cuts whose two ways launch the same kernels on tensors of the
        same shapes, and the region's module; None where the cut is not to be run.
        """
        if one.other_us > NEAR * one.now_us:
            return None
        if one.cut not in self._parts:
            self._parts[one.cut] = part_of(self.planned, one.cut.region)
        if (part := self._parts[one.cut]) is None:
            return None
        number = {op.name: op.id for op in part.graph.ops}
        parts = [part.graph.fingerprint()]
        for groups, tasks in zip(one.cut.ways, (one.cut.other, one.cut.now), strict=True):
            for group, task in zip(launched(groups), tasks, strict=True):
                trial = self._kernels.trial(task.workload)
                parts.append([[number[n] for n in group.ops], task.key, trial.kind, trial.text])
            parts.append("against")
        return digest(parts)[:32], part

    def _request(self, cut: Cut, part: RegionModule, seconds: float) -> JointRequest:
        mod, kernels = tvm.ir.save_json(part.mod), self._kernels
        trials = {t.key: tuple(kernels.source.trials(t.workload)) for t in cut.now + cut.other}
        limits = kernels.certain_gain, self._place, seconds
        return JointRequest(mod, part.constants, cut.ways, trials, *limits)


def local_worker(meters: Iterable[Any]) -> Worker | None:
    """The process of the first meter that measures on this machine."""
    return next((meter.worker for meter in meters if isinstance(meter, LocalMeter)), None)
