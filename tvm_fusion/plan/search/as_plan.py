"""From a solution to the plan that users see: names, predicted times, and why not more."""

from __future__ import annotations

from ...ir.graph import OpKind
from ..explain.unmerged import reasons_apart
from ..legality import Costed, Evaluator
from ..plan import FusionPlan, PlannedGroup
from ..refusal import Refusal
from .solution import Launch, Solution, copies, costed, is_opaque, is_view, members_of


def plan_from(evaluator: Evaluator, launches: Solution, explain: bool = True) -> FusionPlan:
    """The plan of a solution.

    Parameters
    ----------
    evaluator : Evaluator
    launches : Solution
    explain : bool
        Whether to say of neighbours why they stayed apart.
    """
    graph = evaluator.graph
    recomputed = copies(graph, launches)
    groups = tuple(
        _planned(evaluator, launch, bitset)
        for launch, bitset in zip(launches, recomputed, strict=True)
    )
    refusals = tuple(reasons_apart(evaluator, launches, recomputed)) if explain else ()
    names = (graph.function, graph.fingerprint(), evaluator.hw.name, evaluator.policy.name)
    return FusionPlan(*names, groups, refusals, measured=evaluator.hw.measured)


def _planned(evaluator: Evaluator, launch: Launch, recomputed: int) -> PlannedGroup:
    graph = evaluator.graph
    members = members_of(launch.members)
    names = tuple(graph.ops[i].name for i in members)
    copied = tuple(n for i, n in zip(members, names, strict=True) if recomputed >> i & 1)
    if is_view(graph, launch):
        return PlannedGroup(names, "view")
    if is_opaque(graph, launch):
        return PlannedGroup(names, "opaque")
    found = costed(evaluator, launch, recomputed)
    if isinstance(found, Refusal):
        raise AssertionError(f"{', '.join(names)} of the final plan are refused: {found.why}")
    alone = [_alone(evaluator, i) for i in members if not recomputed >> i & 1]
    return PlannedGroup(
        names,
        found.kernel.name,
        copied,
        round(found.estimate.time_us, 4),
        round(sum(c.time_us for c in alone if c), 4),
        float(found.bytes),
        float(sum(c.bytes for c in alone if c)),
        {k: round(v, 4) for k, v in sorted(found.estimate.terms.items())},
        *(_rounded(getattr(found.estimate, k)) for k in ("analytic_us", "low_us", "high_us")),
        assumed_l2=evaluator.assumed_l2(found),
        common_us=round(evaluator.common_us(found), 4),
    )


def _rounded(time_us: float | None) -> float | None:
    return None if time_us is None else round(time_us, 4)


def _alone(evaluator: Evaluator, op: int) -> Costed | None:
    if evaluator.graph.ops[op].kind is not OpKind.CALL_TIR:
        return None
    found = evaluator.alone(op)
    return None if isinstance(found, Refusal) else found
