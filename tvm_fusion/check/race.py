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
from typing import TYPE_CHECKING, Any

from ..plan.decide.caution import Verdict
from ..plan.decide.decide import caution_of, taken_apart
from ..plan.decide.joint_interval import times_apart, whole_ratio
from ..plan.differ import clusters
from ..plan.plan import PlannedGroup
from ..plan.refusal import Refusal, RefusalCode
from .contest import Sampler, measured, slower
from .sequential import Budget, Duel, Winner, paired, settle

if TYPE_CHECKING:
    from ..compilation.compiler import Job
    from ..runtime.build.build import Built
    from ..transform.apply.materialize import Materialized

logger = logging.getLogger(__name__)

WHOLE = ("the whole module",)


def not_slower(
    job: Job, built: Built, materialized: Materialized, unfused: Built, budget: Budget
) -> tuple[Built, Materialized, Duel | None]:
    """Times the fused module beside the unfused one, and cuts fusions until it is not slower.

    Parameters
    ----------
    job : Job
        Its plan loses the fusions that are cut, and gets the last duel as evidence. A plan that the
        caller gave is timed and left as it is.
    built, materialized
        The fused module.
    unfused : Built
    budget : Budget
        Where it ends before the modules are told apart, the interval of the model decides (see
        the module docstring).

    Returns
    -------
    tuple
        The build that is left, what it was made from, and the last duel, fused first; None for a
        budget that did not reach, and where the unfused module is left.
    """
    count, lost, inputs = 1, None, job.inputs
    while True:
        found = settle(sampler((built, unfused), inputs), budget)
        if found is None or found.winner is not Winner.SECOND or job.given:
            break
        lost, worst = found, _least_sure(job, count)
        if not worst:
            break
        _cut(job, worst, found)
        count *= 2
        built, materialized = job.build_fused()
    if not job.given and not _may_stay(job, found, lost):
        return *_unfused(job, found or lost), None
    if found is not None:
        job.plan = replace(job.plan, evidence=measured(found))
    return built, materialized, found


def _cut(job: Job, worst: Sequence[tuple[PlannedGroup, ...]], found: Duel) -> None:
    names = [tuple(dict.fromkeys(op for g in cluster for op in g.ops)) for cluster in worst]
    for ops in names:
        logger.warning("the module is slower than unfused: %s is cut", "+".join(ops))
    groups = [g for cluster in worst for g in cluster]
    reasons = [slower(found, ops) for ops in names]
    job.plan = taken_apart(job.graph, job.plan, groups, job.alone, reasons)


def _may_stay(job: Job, found: Duel | None, lost: Duel | None) -> bool:
    """Whether the fused module is used after the last look (`found`), and an earlier one that it
    lost.
    """
    if found is not None and found.winner is not Winner.NEITHER:
        return found.winner is Winner.FIRST
    if lost is not None:
        return False
    apart, caution = times_apart(job.alone), caution_of(job.hw, job.policy)
    unfused_us = job.whole_plan.predicted_us
    return whole_ratio(job.graph, job.plan, apart, caution, unfused_us).verdict is Verdict.SURE


def _unfused(job: Job, last: Duel | None) -> tuple[Built, Materialized]:
    """The module as it is, for a job whose fused one is slower, or not known to be faster."""
    reason = _unmeasured(job) if last is None else slower(last, WHOLE)
    logger.warning("the unfused module is used: %s", reason.why)
    job.use_whole()
    job.plan = replace(job.plan, refusals=(*job.plan.refusals, reason))
    return job.build_fused()


def _unmeasured(job: Job) -> Refusal:
    return Refusal(
        RefusalCode.UNDECIDED,
        WHOLE,
        "the budget ended before the modules were timed, and the prediction is too close to call",
        (("budget_s", job.policy.measure_budget_s),),
    )


def sampler(built: Sequence[Built], inputs: Sequence[Any]) -> Sampler:
    """Times two builds on the same inputs in pairs, in microseconds a call."""
    from ..runtime.calls.compiled_module import CompiledModule
    from ..runtime.timing.timing import time_modules

    modules = dict(zip("ab", map(CompiledModule.of, built), strict=True))

    def times(swapped: bool, rounds: int):
        order = "ba" if swapped else "ab"
        found = time_modules({k: modules[k] for k in order}, inputs, rounds, float("inf"))
        return found["a"].values_us, found["b"].values_us

    return lambda count: paired(times, count)


def _least_sure(job: Job, count: int) -> list[tuple[PlannedGroup, ...]]:
    """Fusions of the plan, at most `count`: those with the highest possible ratio first."""
    found = {
        c: max(g.evidence.high for g in c if g.evidence)
        for c in clusters(job.graph, job.plan)
        if any(g.evidence for g in c)
    }
    return sorted(found, key=lambda c: (-found[c], c[0].ops))[:count]
