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
`check.compared_regions` measures that the hopeful groups are faster.

Does not handle: a fusion that pays only together with another one far from it (regions are settled
one by one), or one that loses although each of its parts was measured to gain; the measurement of
the whole module at the end is for these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from ...config import HardwareProfile, Policy
from ...cost.learned.learned import load_residual
from ...cost.probe import GroupKey
from ...cost.traffic import Resources
from ...ir.graph import FusionGraph
from ..differ import clusters, exchanged, regions
from ..explain.reasons import with_layout_reasons
from ..plan import Evidence, FusionPlan, PlannedGroup
from ..refusal import Refusal, RefusalCode
from ..search.search import search, unfused_plan
from .caution import (
    LAUNCH,
    Caution,
    Ratio,
    Verdict,
    by_model,
    charged_us,
    judge,
    judged_whole,
    unfused_times,
)

Names = frozenset[tuple[str, ...]]
SAME_US = 1e-6  # times this close are the same


def decide(
    graph: FusionGraph,
    hw: HardwareProfile,
    policy: Policy,
    forbidden: Names = frozenset(),
    caution: Caution | None = None,
    probed: Mapping[GroupKey, Resources] | None = None,
    told: Callable[[FusionPlan], None] | None = None,
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
    told : callable, optional
        Is given a plan that is like the last one, as soon as there is one (see `search`).
    """
    caution = caution or caution_of(hw, policy)
    alone = unfused_plan(graph, hw, policy)
    hopeful = search(graph, hw, policy, forbidden, probed=probed, told=told)
    sure = cut_unsure(graph, hopeful, alone, caution)
    unfused = unfused_times(alone)
    if _shapes(sure) == _shapes(hopeful):
        return with_layout_reasons(graph, hw, policy, judged_whole(sure, unfused, caution))
    careful = cut_unsure(
        graph, search(graph, hw, policy, forbidden, caution, probed), alone, caution
    )
    plan = _cheapest(graph, careful, sure, unfused, caution)
    plan = judged_whole(_with_doubts(plan, sure.refusals), unfused, caution)
    return with_layout_reasons(graph, hw, policy, plan)


def _with_doubts(plan: FusionPlan, refusals: Iterable[Refusal]) -> FusionPlan:
    """The plan with the refusals of undecided fusions that it has not done after all."""
    groups = [frozenset(g.ops) for g in plan.groups]
    doubts = (r for r in refusals if r.code is RefusalCode.UNDECIDED and r not in plan.refusals)
    left = tuple(r for r in doubts if not any(ops.issuperset(r.where) for ops in groups))
    return replace(plan, refusals=(*plan.refusals, *left))


def _cheapest(
    graph: FusionGraph,
    first: FusionPlan,
    second: FusionPlan,
    unfused: Mapping[str, float],
    caution: Caution,
) -> FusionPlan:
    """Region by region the plan of less charged time, the first on a tie."""
    better = [
        region
        for region in regions(graph, first, second)
        if charged_us(region.hopeful, unfused, caution)
        < charged_us(region.careful, unfused, caution) - SAME_US
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


def _shapes(plan: FusionPlan) -> set[tuple[str, ...]]:
    return {g.ops for g in plan.groups}


def caution_of(hw: HardwareProfile, policy: Policy) -> Caution:
    """The caution that a policy asks for on a device, by its learned residual if it has one."""
    residual = load_residual(hw) if policy.learned else None
    return Caution.of(policy, residual, guessed=hw.guessed)


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
    unfused = unfused_times(alone)
    evidence: dict[tuple[str, ...], Evidence] = {}
    unsure, refusals = [], []
    for cluster in clusters(graph, plan):
        ratio = judge(cluster, unfused, caution)
        if ratio is None:
            continue
        little = ratio.verdict is Verdict.SURE and caution.gains_too_little(ratio)
        if ratio.verdict is Verdict.SURE and not little:
            evidence |= dict.fromkeys((g.ops for g in cluster), by_model(ratio, caution))
        else:
            unsure += cluster
            refusals.append(_refusal(cluster, ratio, unfused, caution.min_gain if little else None))
    plan = taken_apart(graph, plan, unsure, alone, refusals) if unsure else plan
    return with_evidence(plan, evidence)


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


def _refusal(
    cluster: tuple[PlannedGroup, ...],
    ratio: Ratio,
    unfused: Mapping[str, float],
    min_gain: float | None,
) -> Refusal:
    """Why a fusion is not taken; `min_gain` where it surely gains, but less than that."""
    names = tuple(dict.fromkeys(op for g in cluster for op in g.ops))
    apart_us = sum(unfused.get(op, 0.0) for op in names)
    together_us = ratio.value * apart_us
    doubt = ratio.verdict is Verdict.UNDECIDED
    said = ": too close to call without a measurement" if doubt else ""
    numbers = {
        "apart_us": apart_us,
        "launch_us": max(g.terms.get(LAUNCH, 0.0) for g in cluster),
        "launches_saved": len([op for op in names if op in unfused]) - len(cluster),
        "together_us": together_us,
    }
    if min_gain is not None:
        said, numbers["min_gain"] = f": saves less than {min_gain:.1%}", min_gain
    return Refusal(
        RefusalCode.UNDECIDED if doubt else RefusalCode.NOT_PROFITABLE,
        names,
        f"together {together_us:.1f} us, at most {ratio.high * apart_us:.1f}, apart "
        f"{apart_us:.1f} us{said}",
        tuple((name, round(value, 3)) for name, value in sorted(numbers.items())),
    )
