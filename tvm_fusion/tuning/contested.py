"""Cuts of a plan that tuning may decide otherwise: their kernels are tuned, too.

A fusion is contested where the plan of least predicted time differs from the plan, and where the
interval of a fusion's gain comes near a loss: a tuned kernel of one operator may win then. After
tuning both ways of each are compared by their measured times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from ..config import HardwareProfile, Policy
from ..ir.graph import FusionGraph
from ..kernels.base import Refusal, RefusalCode
from ..plan.decide import hopeful_plan, without
from ..plan.differ import Region, exchanged, regions
from ..plan.plan import Evidence, FusionPlan, PlannedGroup

CLOSE = 0.85  # fusions whose time may be more than this share of their operators' are contested

Time = Callable[[PlannedGroup], float | None]


@dataclass(frozen=True, slots=True)
class Contested:
    """One cut that may be made otherwise.

    Attributes
    ----------
    region : Region
        `careful` are the groups of the plan, `hopeful` the others.
    plan : FusionPlan
        The plan with the other groups.
    """

    region: Region
    plan: FusionPlan


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
            yield Contested(region, other)


def _apart(graph: FusionGraph, plan: FusionPlan, alone: FusionPlan) -> Iterator[Contested]:
    """Fusions whose gain is small, taken apart."""
    reason = Refusal(RefusalCode.SLOWER, (), "measured apart")
    for group in plan.groups:
        if group.evidence is None or group.evidence.high < CLOSE:
            continue
        other = without(graph, plan, group, alone, reason)
        for region in regions(graph, plan, other):
            yield Contested(region, replace(other, refusals=plan.refusals))


def settled(
    graph: FusionGraph,
    plan: FusionPlan,
    cuts: Iterable[Contested],
    time_of: Time,
    launch_us: float,
    certain_gain: float,
) -> FusionPlan:
    """The plan with those cuts made otherwise that are measured to be faster so.

    Parameters
    ----------
    graph, plan
    cuts : iterable of Contested
    time_of : callable
        Measured microseconds of a group's kernel; None where it was not measured.
    launch_us : float
        What a launch costs beside its kernel.
    certain_gain : float
        Share by which the other way must be faster.
    """
    for cut in cuts:
        now = _time(cut.region.careful, time_of, launch_us)
        other = _time(cut.region.hopeful, time_of, launch_us)
        if now is None or other is None or other >= (1 - certain_gain) * now:
            continue
        changed = exchanged(graph, plan, cut.region.careful, cut.region.hopeful)
        if changed is not None and _covers(plan, cut.region.careful):
            plan = _with_reason(changed, cut.region, now, other)
    return plan


def _covers(plan: FusionPlan, groups: Iterable[PlannedGroup]) -> bool:
    """Whether the groups are still those of the plan: an earlier cut may have changed them."""
    return {g.ops for g in groups} <= {g.ops for g in plan.groups}


def _time(groups: Iterable[PlannedGroup], time_of: Time, launch_us: float) -> float | None:
    times = [time_of(g) for g in groups]
    return None if None in times else sum(times) + launch_us * len(times)


def _with_reason(plan: FusionPlan, region: Region, now: float, other: float) -> FusionPlan:
    """The changed plan: its fusions with what was measured, the one undone as refused."""
    verdict = Evidence(
        "measured",
        "sure",
        *(round(other / now, 4),) * 3,
        together_us=round(other, 3),
        apart_us=round(now, 3),
    )
    fused = {g.ops for g in region.hopeful if len(g.ops) > 1}
    groups = tuple(replace(g, evidence=verdict) if g.ops in fused else g for g in plan.groups)
    if fused:
        return replace(plan, groups=groups)
    where = tuple(op for g in region.careful for op in g.ops)
    reason = Refusal(
        RefusalCode.SLOWER,
        where,
        f"tuned kernels take {now:.1f} us together and {other:.1f} us apart",
        (("apart_us", round(other, 3)), ("together_us", round(now, 3))),
    )
    return replace(plan, groups=groups, refusals=(*plan.refusals, reason))
