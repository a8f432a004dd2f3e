"""The whole fused module against the unfused one: never slower, whatever the parts measured.

If the fused module is clearly slower, its fusions are cut, those least sure to gain first, twice as
many each time; if that does not help, the unfused module is what is returned.

Without a verdict (no clear difference, or a budget that ends before the first look) the unfused
module is the default. The fused one stays only if it needs no verdict: if the interval of its
predicted time, with what was measured of single fusions, excludes a loss against the unfused
module. Once it was measured slower, its prediction counts no more.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..flow.planned import BuiltPlan, Planned
from ..plan.decide.caution import Verdict, unfused_times, whole_ratio
from ..plan.decide.decide import caution_of, taken_apart
from ..plan.differ import clusters
from ..plan.plan import PlannedGroup
from ..plan.refusal import Refusal, RefusalCode
from ..runtime.build.build import Built
from ..runtime.calls.compiled_module import CompiledModule
from ..runtime.timing.timing import time_modules
from .checked_sizes import drawn_inputs
from .compared_regions import Sampler, measured, slower
from .sequential import Budget, Comparison, Winner, paired, settle

logger = logging.getLogger(__name__)

WHOLE = ("the whole module",)


def not_slower(
    made: BuiltPlan, unfused: Built, budget: Budget
) -> tuple[BuiltPlan, Comparison | None]:
    """Times the fused module beside the unfused one, and cuts fusions until it is not slower.

    Parameters
    ----------
    made : BuiltPlan
        The fused module. A plan that the caller gave is timed and left as it is.
    unfused : Built
    budget : Budget
        Where it ends before the modules are told apart, the interval of the model decides (see
        the module docstring).

    Returns
    -------
    tuple
        What is left, with the last comparison as evidence of its plan, and that, fused first; None
        for a budget that did not reach, and where the unfused module is left.
    """
    count, lost, inputs = 1, None, drawn_inputs(made.planned.mod)
    while True:
        planned = made.planned
        found = settle(sampler((made.built, unfused), inputs), budget)
        if found is None or found.winner is not Winner.SECOND or planned.given:
            break
        lost, worst = found, _least_sure(planned, count)
        if not worst:
            break
        count *= 2
        made = _cut(planned, worst, found).build()
    if not planned.given and not _may_stay(planned, found, lost):
        return _unfused(planned, found or lost), None
    if found is not None:
        plan = replace(planned.plan, evidence=measured(found))
        made = replace(made, planned=replace(planned, plan=plan))
    return made, found


def _cut(planned: Planned, worst: Sequence[tuple[PlannedGroup, ...]], found: Comparison) -> Planned:
    names = [tuple(dict.fromkeys(op for g in cluster for op in g.ops)) for cluster in worst]
    for ops in names:
        logger.warning("the module is slower than unfused: %s is cut", "+".join(ops))
    groups = [g for cluster in worst for g in cluster]
    reasons = [slower(found, ops) for ops in names]
    plan = taken_apart(planned.graph, planned.plan, groups, planned.alone, reasons)
    return replace(planned, plan=plan)


def _may_stay(planned: Planned, found: Comparison | None, lost: Comparison | None) -> bool:
    """Whether the fused module is used after the last look (`found`), and an earlier one that it
    lost.
    """
    if found is not None and found.winner is not Winner.NEITHER:
        return found.winner is Winner.FIRST
    if lost is not None:
        return False
    apart, caution = unfused_times(planned.alone), caution_of(planned.hw, planned.policy)
    unfused_us = planned.whole.alone.predicted_us
    ratio = whole_ratio(planned.graph, planned.plan, apart, caution, unfused_us)
    return ratio.verdict is Verdict.SURE


def _unfused(planned: Planned, last: Comparison | None) -> BuiltPlan:
    """The module as it is, where the fused one is slower, or not known to be faster."""
    reason = _unmeasured(planned) if last is None else slower(last, WHOLE)
    logger.warning("the unfused module is used: %s", reason.why)
    unfused = planned.as_it_is()
    plan = replace(unfused.plan, refusals=(*unfused.plan.refusals, reason))
    return replace(unfused, plan=plan).build()


def _unmeasured(planned: Planned) -> Refusal:
    return Refusal(
        RefusalCode.UNDECIDED,
        WHOLE,
        "the budget ended before the modules were timed, and the prediction is too close to call",
        (("budget_s", planned.policy.measure_budget_s),),
    )


def sampler(built: Sequence[Built], inputs: Sequence[Any]) -> Sampler:
    """Times two builds on the same inputs in pairs, in microseconds a call."""
    modules = dict(zip("ab", map(CompiledModule.of, built), strict=True))

    def times(swapped: bool, rounds: int):
        order = "ba" if swapped else "ab"
        found = time_modules({k: modules[k] for k in order}, inputs, rounds, float("inf"))
        return found["a"].values_us, found["b"].values_us

    return lambda count: paired(times, count)


def _least_sure(planned: Planned, count: int) -> list[tuple[PlannedGroup, ...]]:
    """Fusions of the plan, at most `count`: those with the highest possible ratio first."""
    found = {
        c: max(g.evidence.high for g in c if g.evidence)
        for c in clusters(planned.graph, planned.plan)
        if any(g.evidence for g in c)
    }
    return sorted(found, key=lambda c: (-found[c], c[0].ops))[:count]
