"""Cuts of a plan that tuning may decide otherwise: their kernels are tuned, too.

A fusion is contested where the plan of least predicted time differs from the plan, and where the
interval of a fusion's gain comes near a loss: a tuned kernel of one operator may win then. After
tuning both ways of each are run with their tuned kernels (`joint`), and the other way is taken if
it is clearly faster. Where they are not run, the sums of the times of single kernels decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...check import compared_regions
from ...check.sequential import Comparison, Winner
from ...config import HardwareProfile, Policy
from ...ir.graph import FusionGraph
from ...plan.decide.decide import hopeful_plan, with_evidence, without
from ...plan.differ import Region, exchanged, regions
from ...plan.plan import Evidence, FusionPlan, PlannedGroup
from ...plan.refusal import Refusal, RefusalCode
from .task_state import Rival, TaskState
from .tasks import Task

CLOSE = 0.85  # fusions whose time may be more than this share of their operators' are contested


@dataclass(frozen=True, slots=True)
class Contested:
    """One cut that may be made otherwise.

    Attributes
    ----------
    region : Region
        `careful` are the groups of the plan, `hopeful` the others.
    plan : FusionPlan
        The plan with the other groups.
    joins : bool
        Whether the other way fuses more; else it takes a fusion apart.
    """

    region: Region
    plan: FusionPlan
    joins: bool


def contested(
    graph: FusionGraph,
    plan: FusionPlan,
    alone: FusionPlan,
    hw: HardwareProfile,
    policy: Policy,
) -> list[Contested]:
    """The contested cuts of a plan, each as another plan of the same graph."""
    return list(_joined(graph, plan, hw, policy)) + list(_apart(graph, plan, alone))


def _joined(
    graph: FusionGraph, plan: FusionPlan, hw: HardwareProfile, policy: Policy
) -> Iterator[Contested]:
    """Regions where the prediction would fuse more."""
    for region in regions(graph, plan, hopeful_plan(graph, hw, policy)):
        other = exchanged(graph, plan, region.careful, region.hopeful)
        if other is not None:
            yield Contested(region, other, joins=True)


def _apart(graph: FusionGraph, plan: FusionPlan, alone: FusionPlan) -> Iterator[Contested]:
    """Fusions whose gain is small, taken apart."""
    reason = Refusal(RefusalCode.SLOWER, (), "measured apart")
    for group in plan.groups:
        if group.evidence is None or group.evidence.high < CLOSE:
            continue
        other = without(graph, plan, group, alone, reason)
        for region in regions(graph, plan, other):
            yield Contested(region, replace(other, refusals=plan.refusals), joins=False)


@dataclass(frozen=True, slots=True)
class Weighed:
    """A contested cut whose kernels were all measured.

    Attributes
    ----------
    cut : Contested
    now, other : tuple of Task
        Of each launch of the plan's groups, and of the other ones.
    now_us, other_us : float
        Times of their kernels, each measured by itself, and of their launches.
    """

    cut: Contested
    now: tuple[Task, ...]
    other: tuple[Task, ...]
    now_us: float
    other_us: float


def weighed(
    cuts: Iterable[Contested],
    tasks: Sequence[Sequence[Task]],
    us_of: Callable[[Task], float | None],
    launch_us: float,
) -> list[Weighed]:
    """The cuts whose kernels were all measured.

    Parameters
    ----------
    cuts : iterable of Contested
    tasks : sequence of sequences of Task
        Of the plan, and of each cut's plan.
    us_of : callable
        Measured time of a task's kernel; None where it was not measured.
    launch_us : float
        What a launch costs beside its kernel.
    """
    found = []
    for cut, now, other in sides_of(cuts, tasks):
        times = [[us_of(task) for task in side] for side in (now, other)]
        if None not in times[0] and None not in times[1]:
            found.append(Weighed(cut, now, other, *(sum(t) + launch_us * len(t) for t in times)))
    return found


def sides_of(
    cuts: Iterable[Contested], tasks: Sequence[Sequence[Task]]
) -> Iterator[tuple[Contested, tuple[Task, ...], tuple[Task, ...]]]:
    """The cuts with the tasks of the plan's launches and of the other ones; those with a launch
    that is no task are left out. `tasks` are those of the plan, and of each cut's plan.
    """
    first, *others = (_by_group(found) for found in tasks)
    for cut, of_cut in zip(cuts, others, strict=True):
        now, other = _side(cut.region.careful, first), _side(cut.region.hopeful, of_cut)
        if now is not None and other is not None:
            yield cut, now, other


def _by_group(tasks: Iterable[Task]) -> dict[tuple[str, ...], Task]:
    return {ops: task for task in tasks for ops in task.groups}


def _side(
    groups: Iterable[PlannedGroup], tasks: Mapping[tuple[str, ...], Task]
) -> tuple[Task, ...] | None:
    found = [tasks.get(g.ops) for g in groups if g.kernel_class != "view"]
    return None if None in found else tuple(found)


def settled(
    graph: FusionGraph,
    plan: FusionPlan,
    cuts: Iterable[tuple[Weighed, Comparison | None]],
    certain_gain: float,
) -> FusionPlan:
    """The plan with those cuts made otherwise that are measured to be faster so.

    Of cuts that exclude each other the one that saves most is taken.

    Parameters
    ----------
    graph, plan
    cuts : iterable of (Weighed, Comparison or None)
        The other way (first) against that of the plan (second), run with all their launches; None
        where the sums decide.
    certain_gain : float
        Share by which the other way must be faster by the sums.
    """
    for one, found in sorted(cuts, key=lambda c: -_saved_us(*c)):
        if not _covers(plan, one.cut.region.careful):
            continue
        if found is not None:
            plan = _by_comparison(graph, plan, one.cut, found)
        elif one.other_us < (1 - certain_gain) * one.now_us:
            plan = _by_sums(graph, plan, one)
    return plan


def _saved_us(one: Weighed, found: Comparison | None) -> float:
    return one.now_us - one.other_us if found is None else found.difference


def _covers(plan: FusionPlan, groups: Iterable[PlannedGroup]) -> bool:
    """Whether the groups are still those of the plan: another cut may have changed them."""
    return {g.ops for g in groups} <= {g.ops for g in plan.groups}


def _by_comparison(
    graph: FusionGraph, plan: FusionPlan, cut: Contested, found: Comparison
) -> FusionPlan:
    """The plan after both ways of a cut were run."""
    region = cut.region
    if cut.joins:
        return compared_regions.settled(graph, plan, region, found)
    joint = Comparison(found.second, found.first, -found.difference, found.error, found.pairs)
    if found.winner is not Winner.FIRST:
        evidence = compared_regions.measured(joint)
        return with_evidence(plan, dict.fromkeys((g.ops for g in region.careful), evidence))
    apart = exchanged(graph, plan, region.careful, region.hopeful)
    if apart is None:
        return plan
    reason = compared_regions.slower(joint, _members(region.careful))
    return replace(apart, refusals=(*apart.refusals, reason))


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
    reason = Refusal(
        RefusalCode.SLOWER,
        _members(region.careful),
        f"tuned kernels take {now:.1f} us together and {other:.1f} us apart",
        (("apart_us", round(other, 3)), ("together_us", round(now, 3))),
    )
    return replace(changed, refusals=(*changed.refusals, reason))


def _members(groups: Iterable[PlannedGroup]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(op for g in groups for op in g.ops))


def rivals_of(
    cuts: Iterable[Contested],
    tasks: Sequence[Sequence[Task]],
    states: Iterable[TaskState],
    launch_us: float,
) -> list[Rival]:
    """The rivals of contested cuts, but those with a kernel that nothing can write.

    Parameters
    ----------
    cuts : iterable of Contested
    tasks : sequence of sequences of Task
        Of the plan, and of each cut's plan.
    states : iterable of TaskState
        Of these tasks, each once.
    launch_us : float
    """
    by_key = {state.task.key: state for state in states}
    rivals = []
    for _, now, other in sides_of(cuts, tasks):
        sides = [tuple(by_key.get(task.key) for task in side) for side in (now, other)]
        if None not in sides[0] and None not in sides[1]:
            rivals.append(Rival(*sides, launch_us))
    return rivals
