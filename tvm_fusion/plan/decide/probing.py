"""The plan again, with what ptxas says of the groups that come near a limit of the device.

Registers and code of a kernel are estimated from its DAG. Where the estimate is near the limit, the
choice between one kernel and two hangs on it: those groups of the plan are compiled, and the graph
is planned with the facts, until no new group is in doubt. Groups that turn out not to compile are
not used.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import tvm

from ...config import HardwareProfile, Policy
from ...cost.probe import (
    Candidate,
    GroupKey,
    Probed,
    ProbeFailure,
    can_probe,
    candidates_of,
    group_key,
    probe,
)
from ...cost.traffic import Resources
from ...ir.graph import FusionGraph
from ...transform.apply.materialize import group_views
from ..group_view import GroupView
from ..legality import Costed, Evaluator
from ..plan import FusionPlan
from .decide import decide

logger = logging.getLogger(__name__)

ROUNDS = 3


def probed_plan(
    low: tvm.IRModule,
    graph: FusionGraph,
    plan: FusionPlan,
    hw: HardwareProfile,
    policy: Policy,
    target: tvm.target.Target | None = None,
) -> tuple[FusionPlan, Probed]:
    """Replans with facts, where estimates are near a limit and there is an nvcc.

    Parameters
    ----------
    low : IRModule
    graph : FusionGraph
        Read from `low`.
    plan : FusionPlan
        What `decide` found.
    hw : HardwareProfile
    policy : Policy
        `probe` "off" returns the plan as it is.
    target : Target, optional

    Returns
    -------
    FusionPlan
        Of the plans of all rounds the one that takes least, by the facts; `plan` if nothing is in
        doubt.
    Probed
        What was found out.
    """
    found: Probed = {}
    if policy.probe == "off" or not can_probe(hw):
        return plan, found
    seen, candidate = [plan], plan
    for _ in range(ROUNDS):
        doubtful = [g for g in in_doubt(graph, candidate, hw, policy) if g.key not in found]
        if not doubtful:
            break
        logger.info("%d groups are near a limit of the device: compiled to see", len(doubtful))
        found |= probe(low, graph, doubtful, hw, policy, target)
        failed = frozenset(key[0] for key in found if isinstance(found[key], ProbeFailure))
        candidate = decide(graph, hw, policy, failed, probed=facts(found))
        if any(_shape(candidate) == _shape(other) for other in seen):
            break
        seen.append(candidate)
    if not found:
        return plan, found
    rest = [g for p in seen for g in in_doubt(graph, p, hw, policy) if g.key not in found]
    found |= probe(low, graph, rest, hw, policy, target)
    best = min(seen, key=lambda p: _time_us(graph, p, hw, policy, found))
    failed = frozenset(key[0] for key in found if isinstance(found[key], ProbeFailure))
    again = decide(graph, hw, policy, failed, probed=facts(found)) if rest else candidate
    return (again if _shape(again) == _shape(best) else best), found


def facts(found: Probed) -> Mapping[GroupKey, Resources]:
    """Without the failures."""
    return {key: r for key, r in found.items() if isinstance(r, Resources)}


def in_doubt(
    graph: FusionGraph, plan: FusionPlan, hw: HardwareProfile, policy: Policy
) -> list[Candidate]:
    """The groups of a plan whose estimated registers or code are above `policy.probe_share` of the
    device's limits. Those of a class with its own model of time are not asked.
    """
    evaluator = Evaluator(graph, hw, policy)
    return [c for c in candidates_of(graph, plan) if _near_limit(evaluator, c.view, policy)]


def _near_limit(evaluator: Evaluator, view: GroupView, policy: Policy) -> bool:
    costed = evaluator.group(view.ops, view.outputs, view.duplicated)
    if not isinstance(costed, Costed) or costed.fit.seconds is not None:
        return False
    hw = evaluator.hw
    estimated = guessed(costed, hw)
    return (
        estimated.registers_per_thread > policy.probe_share * hw.max_registers_per_thread
        or estimated.code_bytes > policy.probe_share * hw.instruction_cache_bytes
    )


def guessed(costed: Costed, hw: HardwareProfile) -> Resources:
    """The resources that the class of a group estimates, before anything is compiled."""
    return costed.kernel.resources(costed.view, costed.fit, hw)


def _shape(plan: FusionPlan) -> frozenset[tuple[tuple[str, ...], tuple[str, ...]]]:
    return frozenset((g.ops, g.recomputed) for g in plan.groups)


def _time_us(
    graph: FusionGraph, plan: FusionPlan, hw: HardwareProfile, policy: Policy, found: Probed
) -> float:
    """Predicted time of a plan by the facts; infinite if a group of it does not compile."""
    evaluator = Evaluator(graph, hw, policy, probed=facts(found))
    total = 0.0
    for view, group in zip(group_views(graph, plan), plan.groups, strict=True):
        if isinstance(found.get(group_key(view)), ProbeFailure):
            return float("inf")
        if group.kernel_class in ("view", "opaque"):
            continue
        costed = evaluator.group(view.ops, view.outputs, view.duplicated)
        total += costed.estimate.time_us if isinstance(costed, Costed) else group.predicted_us
    return total
