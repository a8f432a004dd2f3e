"""Which of the fusions that look faster are taken: those whose predicted gain is surely one.

Two searches say it. The *hopeful* plan minimises predicted time. A fusion of it is judged by the
interval of together / apart (`Caution`): it is sure, undecided or losing. What is not sure is taken
apart, but not all of it may have to be: the *careful* search minimises

    sum over launches of T(launch)                      one operator
                         T(launch) + (f - 1) * body     several operators (`Caution.charge_us`)

where f is the factor by which the ratio may be worse than predicted. A fusion pays there only if it
gains at the upper end of its interval, and where a large group is in doubt, those of its pieces are
found that are not: between two fused groups and the one that joins them the charge cancels and the
prediction decides. Region by region the better of both plans by that charged time is taken. (The
careful search alone is not enough: the charge is due with the first two operators of a long chain,
and steps that gain little one by one stop there.)

Where the hopeful plan differs from the result, the region stays as the result has it, unless
`check.contest` measures that the hopeful groups are faster.

Does not handle: a fusion that pays only together with another one far from it (regions are settled
one by one), or one that loses although each of its parts was measured to gain; the measurement of
the whole module at the end is for these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..config import HardwareProfile, Policy
from ..cost.learned import load_residual
from ..cost.probe import GroupKey
from ..ir.graph import FusionGraph
from ..kernels.base import Refusal, RefusalCode, Resources
from .caution import LAUNCH, Caution, Ratio, Verdict, is_corrected, ratio_of
from .differ import clusters, exchanged, regions
from .plan import Evidence, FusionPlan, PlannedGroup
from .search import search, unfused_plan

Names = frozenset[tuple[str, ...]]
SAME_US = 1e-6  # times this close are the same


def decide(
    graph: FusionGraph,
    hw: HardwareProfile,
    policy: Policy,
    forbidden: Names = frozenset(),
    caution: Caution | None = None,
    probed: Mapping[GroupKey, Resources] | None = None,
) -> FusionPlan:
    """The plan of the fusions that surely gain, each with its evidence.

    Parameters
    ----------
    graph : FusionGraph
    hw : HardwareProfile
    policy : Policy
    forbidden : frozenset of tuples of str
        Groups that may not be used.
    caution : Caution or None
        None takes that of the policy and of the device's residual (`caution_of`).
    probed : mapping of `cost.probe.group_key` to Resources, optional
        What groups were found to need.
    """
    caution = caution or caution_of(hw, policy)
    alone = unfused_plan(graph, hw, policy)
    hopeful = search(graph, hw, policy, forbidden, probed=probed)
    sure = cut_unsure(graph, hopeful, alone, caution)
    apart = times_apart(alone)
    if _shapes(sure) == _shapes(hopeful):
        return _judged_whole(sure, apart, caution)
    careful = cut_unsure(
        graph, search(graph, hw, policy, forbidden, caution, probed), alone, caution
    )
    plan = _cheapest(graph, careful, sure, apart, caution)
    return _judged_whole(_with_doubts(plan, sure.refusals), apart, caution)


def _with_doubts(plan: FusionPlan, refusals: Iterable[Refusal]) -> FusionPlan:
    """The plan with the refusals of undecided fusions that it has not done after all."""
    groups = [frozenset(g.ops) for g in plan.groups]
    doubts = (r for r in refusals if r.code is RefusalCode.UNDECIDED and r not in plan.refusals)
    left = tuple(r for r in doubts if not any(ops.issuperset(r.where) for ops in groups))
    return replace(plan, refusals=(*plan.refusals, *left))


def _judged_whole(plan: FusionPlan, apart: Mapping[str, float], caution: Caution) -> FusionPlan:
    ratio = judge(plan.groups, apart, caution)
    return replace(plan, evidence=ratio and _by_model(ratio, caution))


def _cheapest(
    graph: FusionGraph,
    first: FusionPlan,
    second: FusionPlan,
    apart: Mapping[str, float],
    caution: Caution,
) -> FusionPlan:
    """Region by region the plan of less charged time, the first on a tie."""
    better = [
        region
        for region in regions(graph, first, second)
        if charged_us(region.hopeful, apart, caution)
        < charged_us(region.careful, apart, caution) - SAME_US
    ]
    out = [g for region in better for g in region.careful]
    into = [g for region in better for g in region.hopeful]
    together = exchanged(graph, first, out, into)
    if together is not None:
        return together
    plan = first
    for region in better:  # some of them would wait for each other: those that still fit
        plan = exchanged(graph, plan, region.careful, region.hopeful) or plan
    return plan


def charged_us(
    groups: Iterable[PlannedGroup], apart: Mapping[str, float], caution: Caution
) -> float:
    """The time of some groups at the upper end of what it may be, in microseconds."""
    return sum(
        launch_us + (time_us - launch_us) * factor
        for time_us, launch_us, factor in _launches(groups, apart, caution)
    )


def _launches(
    groups: Iterable[PlannedGroup], apart: Mapping[str, float], caution: Caution
) -> list[tuple[float, float, float]]:
    """Time, launch and factor of each group; the factor of one operator is 1."""
    found = []
    for g in groups:
        fused = sum(op in apart for op in g.ops) > 1
        corrected = is_corrected(g.predicted_us, g.analytic_us)
        factor = caution.factor(g.kernel_class, corrected) if fused else 1.0
        found.append((g.predicted_us, g.terms.get(LAUNCH, 0.0), factor))
    return found


def _shapes(plan: FusionPlan) -> set[tuple[str, ...]]:
    return {g.ops for g in plan.groups}


def caution_of(hw: HardwareProfile, policy: Policy) -> Caution:
    """The caution that a policy asks for on a device, by its learned residual if it has one."""
    return Caution.of(policy, load_residual(hw) if policy.learned else None)


def hopeful_plan(
    graph: FusionGraph, hw: HardwareProfile, policy: Policy, forbidden: Names = frozenset()
) -> FusionPlan:
    """The plan of least predicted time, whatever the predictions are worth."""
    return search(graph, hw, policy, forbidden)


def cut_unsure(
    graph: FusionGraph, plan: FusionPlan, alone: FusionPlan, caution: Caution
) -> FusionPlan:
    """The plan with its evidence; fusions that are not sure to gain taken apart.

    The search leaves none of them where each of its moves lowered the charged time of the groups
    it touched; a plan from elsewhere may hold some.
    """
    apart = times_apart(alone)
    evidence: dict[tuple[str, ...], Evidence] = {}
    unsure, refusals = [], []
    for cluster in clusters(graph, plan):
        ratio = judge(cluster, apart, caution)
        if ratio is None:
            continue
        if ratio.verdict is Verdict.SURE:
            evidence |= dict.fromkeys((g.ops for g in cluster), _by_model(ratio, caution))
        else:
            unsure += cluster
            refusals.append(_refusal(cluster, ratio, apart))
    plan = taken_apart(graph, plan, unsure, alone, refusals) if unsure else plan
    return with_evidence(plan, evidence)


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
    if apart_us <= 0 or all(sum(op in apart for op in g.ops) < 2 for g in cluster):
        return None
    return ratio_of(_launches(cluster, apart, caution), apart_us)


def taken_apart(
    graph: FusionGraph,
    plan: FusionPlan,
    groups: Iterable[PlannedGroup],
    alone: FusionPlan,
    reasons: Iterable[Refusal],
) -> FusionPlan:
    """The plan with the operators of some groups one by one, and the reasons among its refusals.

    `groups` holds whole clusters: with a group all that recompute its operators.
    """
    groups = tuple(groups)
    names = {op for g in groups for op in g.ops}
    single = [g for g in alone.groups if g.ops[0] in names and g.kernel_class != "view"]
    cut = exchanged(graph, plan, groups, single)
    if cut is None:
        raise AssertionError("a plan that can run cannot when some of its groups are taken apart")
    return replace(cut, refusals=(*cut.refusals, *reasons))


def without(
    graph: FusionGraph,
    plan: FusionPlan,
    group: PlannedGroup,
    alone: FusionPlan,
    reason: Refusal,
) -> FusionPlan:
    """The plan with the operators that one group owns one by one.

    What it recomputed is then read from the group that owns it. Where that one would wait for its
    readers, all groups that recompute each other's operators are taken apart.
    """
    others = [g for g in plan.groups if g.ops != group.ops]
    elsewhere = {op for g in others for op in g.ops if op not in g.recomputed}
    own = set(group.ops) - elsewhere
    single = [g for g in alone.groups if g.ops[0] in own and g.kernel_class != "view"]
    cut = exchanged(graph, plan, [group], single)
    if cut is None:
        cluster = next(c for c in clusters(graph, plan) if group.ops in {g.ops for g in c})
        return taken_apart(graph, plan, cluster, alone, [reason])
    return replace(cut, refusals=(*cut.refusals, reason))


def with_evidence(plan: FusionPlan, evidence: Mapping[tuple[str, ...], Evidence]) -> FusionPlan:
    """The plan with evidence, by operators, for groups that hold several."""
    groups = tuple(
        replace(g, evidence=evidence[g.ops]) if g.ops in evidence and len(g.ops) > 1 else g
        for g in plan.groups
    )
    return replace(plan, groups=groups)


def _by_model(ratio: Ratio, caution: Caution) -> Evidence:
    kind = "prediction" if caution.is_none else "model"
    numbers = (round(x, 4) for x in (ratio.value, ratio.low, ratio.high))
    return Evidence(kind, ratio.verdict.value, *numbers)


def _refusal(
    cluster: tuple[PlannedGroup, ...], ratio: Ratio, apart: Mapping[str, float]
) -> Refusal:
    names = tuple(dict.fromkeys(op for g in cluster for op in g.ops))
    apart_us = sum(apart.get(op, 0.0) for op in names)
    together_us = ratio.value * apart_us
    doubt = ratio.verdict is Verdict.UNDECIDED
    return Refusal(
        RefusalCode.UNDECIDED if doubt else RefusalCode.NOT_PROFITABLE,
        names,
        f"together {together_us:.1f} us, at most {ratio.high * apart_us:.1f}, apart "
        f"{apart_us:.1f} us" + (": too close to call without a measurement" if doubt else ""),
        (("apart_us", round(apart_us, 3)), ("together_us", round(together_us, 3))),
    )
