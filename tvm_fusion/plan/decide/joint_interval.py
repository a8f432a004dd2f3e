"""What the intervals of a plan's groups say together: of one fusion, of the whole plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ...ir.graph import FusionGraph
from ..differ import clusters
from ..plan import Evidence, FusionPlan, PlannedGroup
from .caution import LAUNCH, Caution, Ratio, Timed, is_corrected, ratio_of


def times_apart(alone: FusionPlan) -> dict[str, float]:
    """The predicted time of every operator that is a launch of its own, by name."""
    free = ("view", "opaque")
    return {g.ops[0]: g.predicted_us for g in alone.groups if g.kernel_class not in free}


def judge(
    cluster: Iterable[PlannedGroup], apart: Mapping[str, float], caution: Caution
) -> Ratio | None:
    """The interval of the time of some groups over that of their operators apart.

    Parameters
    ----------
    cluster : iterable of PlannedGroup
        Groups that recompute each other's operators.
    apart : mapping of str to float
        Time of every operator by itself (`times_apart`).
    caution : Caution

    Returns
    -------
    Ratio or None
        None if nothing is fused.
    """
    cluster = tuple(cluster)
    apart_us = sum({op: apart[op] for g in cluster for op in g.ops if op in apart}.values())
    if apart_us <= 0 or not any(is_fusion(g, apart) for g in cluster):
        return None
    return ratio_of(launches_of(cluster, apart, caution), apart_us)


def charged_us(
    groups: Iterable[PlannedGroup], apart: Mapping[str, float], caution: Caution
) -> float:
    """The time of some groups at the upper end of what it may be, in microseconds."""
    groups = tuple(groups)
    total = 0.0
    for g, launch in zip(groups, launches_of(groups, apart, caution), strict=True):
        total += launch.time_us + (caution.charge_of(launch) if is_fusion(g, apart) else 0.0)
    return total


def is_fusion(group: PlannedGroup, apart: Mapping[str, float]) -> bool:
    """Whether a group computes several operators that are launches of their own."""
    return sum(op in apart for op in group.ops) > 1


def launches_of(
    groups: Iterable[PlannedGroup], apart: Mapping[str, float], caution: Caution
) -> list[Timed]:
    """Each group as its caution sees it; the factor of one operator is 1."""
    found = []
    for g in groups:
        corrected = is_corrected(g.predicted_us, g.analytic_us)
        factor = caution.factor(g.kernel_class, corrected) if is_fusion(g, apart) else 1.0
        found.append(Timed(g.predicted_us, g.terms.get(LAUNCH, 0.0), factor, g.common_us))
    return found


def judged_whole(plan: FusionPlan, apart: Mapping[str, float], caution: Caution) -> FusionPlan:
    """The plan with the evidence of all its groups together, by the model."""
    ratio = judge(plan.groups, apart, caution)
    return replace(plan, evidence=ratio and by_model(ratio, caution))


def measured_whole(
    graph: FusionGraph, plan: FusionPlan, apart: Mapping[str, float], caution: Caution
) -> FusionPlan:
    """The plan with the evidence of all its groups together, those that were timed by their
    times; "measured" only if all fusions were.
    """
    ratio = whole_ratio(graph, plan, apart, caution, sum(apart.values()))
    fused = [c for c in clusters(graph, plan) if judge(c, apart, caution)]
    if not fused:
        return replace(plan, evidence=None)
    evidence = by_model(ratio, caution)
    if all(_timed(c) for c in fused):
        evidence = replace(evidence, kind="measured")
    return replace(plan, evidence=evidence)


def whole_ratio(
    graph: FusionGraph,
    plan: FusionPlan,
    apart: Mapping[str, float],
    caution: Caution,
    unfused_us: float,
) -> Ratio:
    """The interval of a plan's time over `unfused_us`.

    What was timed takes its measured share of its operators' time; where it was timed beside sure
    fusions, that is an upper bound.

    Parameters
    ----------
    graph : FusionGraph
    plan : FusionPlan
    apart : mapping of str to float
        Time of every operator by itself (`times_apart`).
    caution : Caution
    unfused_us : float
        Predicted time of what the plan is compared with.
    """
    value = low = high = 0.0
    for cluster in clusters(graph, plan):
        timed = _timed(cluster)
        if timed is not None:
            base = sum({op: apart[op] for g in cluster for op in g.ops if op in apart}.values())
            part = Ratio(base * timed.ratio, base * timed.low, base * timed.high)
        else:
            part = ratio_of(launches_of(cluster, apart, caution), 1.0)
        value, low, high = value + part.value, low + part.low, high + part.high
    scale = max(unfused_us, 1e-9)
    return Ratio(value / scale, low / scale, high / scale)


def _timed(cluster: Iterable[PlannedGroup]) -> Evidence | None:
    """The measurement of a cluster, which its groups share."""
    found = (g.evidence for g in cluster if g.evidence is not None)
    return next((e for e in found if e.kind == "measured"), None)


def by_model(ratio: Ratio, caution: Caution) -> Evidence:
    """An interval of the model as evidence."""
    kind = "prediction" if caution.is_none else "model"
    numbers = (round(x, 4) for x in (ratio.value, ratio.low, ratio.high))
    return Evidence(kind, ratio.verdict.value, *numbers)
