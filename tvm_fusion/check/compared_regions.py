"""Measures what the model cannot decide: the fusions in doubt.

A region in doubt is one where the plan of the least predicted time (hopeful) differs from the plan
of the fusions that surely gain (careful). Both are built as a module of their own and timed end to
end, pair by pair (`sequential`). The hopeful groups are taken if they are clearly faster; on a tie,
or when the budget is spent, the region stays as it is. Regions of equal structure are timed once.

Does not handle: regions with symbolic extents or opaque operators, which stay as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import tvm

from ..config import HardwareProfile, Policy
from ..errors import BuildError, TargetError, TvmFusionError
from ..flow.planned import Planned
from ..host.stages import stepped
from ..ir.graph import FusionGraph
from ..plan.decide.caution import measured_whole, unfused_times
from ..plan.decide.decide import caution_of, hopeful_plan, with_evidence
from ..plan.differ import Region, exchanged, regions
from ..plan.plan import Evidence, FusionPlan, PlannedGroup
from ..plan.refusal import Refusal, RefusalCode
from ..runtime.timing.plan_timing import PlanTimes
from ..runtime.timing.timing import has_torch_cuda
from ..transform.apply.region_module import RegionModule, region_module
from ..transform.apply.write_kernels import Tuned
from .inputs import random_inputs
from .kept_samples import keep
from .plan_runner import PlanRunner
from .sequential import STANDARD_ERRORS, Budget, Comparison, Pair, Winner, paired, settle

logger = logging.getLogger(__name__)

Sampler = Callable[[int], Sequence[Pair]]


def settle_regions(planned: Planned, budget: Budget) -> FusionPlan:
    """A plan with its regions in doubt settled by measurements, the most valuable first.

    Parameters
    ----------
    planned : Planned
    budget : Budget
        For all regions together; those it does not reach stay as they are.
    """
    plan = planned.plan
    hopeful = hopeful_plan(planned.graph, planned.hw, planned.policy)
    known: dict[tuple, Comparison | None] = {}
    found = list(regions(planned.graph, plan, hopeful))
    for region in stepped("fusions in doubt timed", found, len(found)):
        if (part := part_of(planned, region)) is None:
            continue
        key = _structure(part, region)
        if key not in known:
            known[key] = compared(planned, part, region, budget)
        if known[key] is not None:
            plan = settled(planned.graph, plan, region, known[key])
    return whole(planned, plan)


def whole(planned: Planned, plan: FusionPlan) -> FusionPlan:
    """A plan with what was measured of its parts in its evidence, if its groups are others now."""
    if plan.groups == planned.plan.groups:
        return plan
    caution = caution_of(planned.hw, planned.policy)
    return measured_whole(planned.graph, plan, unfused_times(planned.alone), caution)


def part_of(planned: Planned, region: Region) -> RegionModule | None:
    """A region as a module of its own, with the views that its groups hold; None where it has none
    (see `region_module`).
    """
    number = {op.name: op.id for op in planned.graph.ops}
    held = {number[n] for g in (*region.careful, *region.hopeful) for n in g.ops}
    return region_module(planned.low, planned.graph, region.ops, held - set(region.ops))


def compared(
    planned: Planned, part: RegionModule, region: Region, budget: Budget
) -> Comparison | None:
    """Times a region's hopeful groups (first) beside its careful ones (second).

    None if one of them cannot be built, or the budget does not reach.
    """
    if budget.left_s <= 0:
        return None
    sides = (region.hopeful, region.careful)
    try:
        return timed(part, sides, planned.hw, planned.policy, planned.target, budget)
    except TvmFusionError as error:  # of one candidate: its region stays as it is
        logger.warning("a region in doubt cannot be timed: %s", error)
        return None


def timed(
    part: RegionModule,
    sides: Sequence[Sequence[PlannedGroup]],
    hw: HardwareProfile,
    policy: Policy,
    target: tvm.target.Target,
    budget: Budget,
    tuned: Tuned | None = None,
) -> Comparison | None:
    """Times two ways to group a part of a model, on random inputs and the constants of the model.

    Parameters
    ----------
    part : RegionModule
    sides : two sequences of PlannedGroup
    hw, policy, target
    budget : Budget
    tuned : Tuned, optional
        Has kernels that tuning chose; without it the times are kept (`kept_samples`).

    Returns
    -------
    Comparison or None
        None where the budget does not reach.

    Raises
    ------
    BuildError
        A kernel cannot be built.
    TargetError
        There is no such device, or no torch to time kernels with.
    """
    if hw.kind == "cuda" and not has_torch_cuda():
        raise TargetError(
            "kernels are timed through torch's profiler, and there is no such torch"
            "; install torch for CUDA"
        )
    if hw.kind == "llvm":
        part = part.with_constants()
    runner = PlanRunner(part.mod, part.graph, hw, policy, target, tuned)
    plans = [part.plan(groups, hw.name, policy.name) for groups in sides]
    if failed := runner.build(plans):
        raise BuildError(next(iter(failed.values())))
    inputs = random_inputs(runner.low["main"])
    for position, value in part.constants.items():
        inputs[position] = value
    runner.set_inputs(inputs)
    sample = PlanSampler(runner, plans)
    found = settle(sample, budget)
    if found is not None and tuned is None:
        keep(runner, plans, sample.latest)
    return found


class PlanSampler:
    """Times two plans in pairs, in microseconds from the first launch to the end of the last.

    `latest` are the times of each plan in the last batch.
    """

    def __init__(self, runner: PlanRunner, plans: Sequence[FusionPlan]) -> None:
        self.runner, self.plans = runner, list(plans)
        self.latest: list[PlanTimes] = []

    def __call__(self, count: int) -> Sequence[Pair]:
        return paired(self._times, count)

    def _times(self, swapped: bool, rounds: int) -> tuple[Sequence[float], Sequence[float]]:
        step = -1 if swapped else 1
        self.latest = self.runner.time(self.plans[::step], repeats=rounds, warmup=1)[::step]
        first, second = self.latest
        return first.spans_us, second.spans_us


def settled(graph: FusionGraph, plan: FusionPlan, region: Region, found: Comparison) -> FusionPlan:
    """The plan after a region's two ways were timed, hopeful against careful.

    What the model said of the hopeful groups gives way to what was measured.
    """
    plan = replace(plan, refusals=_outside(plan.refusals, region))
    fused = tuple(dict.fromkeys(op for g in region.hopeful for op in g.ops if len(g.ops) > 1))
    if found.winner is not Winner.FIRST:
        return replace(plan, refusals=(*plan.refusals, slower(found, fused)))
    taken = exchanged(graph, plan, region.careful, region.hopeful)
    if taken is None:
        return replace(plan, refusals=(*plan.refusals, _circle(found, fused)))
    evidence = measured(found)
    return with_evidence(taken, dict.fromkeys((g.ops for g in region.hopeful), evidence))


def settled_apart(
    graph: FusionGraph, plan: FusionPlan, region: Region, found: Comparison
) -> FusionPlan:
    """The plan after fusions of it (careful) were timed beside their operators (hopeful, first)."""
    together = Comparison(found.second, found.first, -found.difference, found.error, found.pairs)
    if found.winner is not Winner.FIRST:
        evidence = measured(together)
        return with_evidence(plan, dict.fromkeys((g.ops for g in region.careful), evidence))
    apart = exchanged(graph, plan, region.careful, region.hopeful)
    if apart is None:
        return plan
    reason = slower(together, tuple(dict.fromkeys(op for g in region.careful for op in g.ops)))
    return replace(apart, refusals=(*apart.refusals, reason))


def measured(found: Comparison) -> Evidence:
    """A comparison of together (first) and apart (second) as evidence."""
    verdict = {Winner.FIRST: "sure", Winner.SECOND: "losing", Winner.NEITHER: "undecided"}
    apart, width = found.second, STANDARD_ERRORS * found.error
    together = apart - found.difference
    ratios = (together / apart, (together - width) / apart, (together + width) / apart)
    return Evidence(
        "measured",
        verdict[found.winner],
        *(round(r, 4) for r in ratios),
        together_us=round(found.first, 3),
        apart_us=round(found.second, 3),
        error_us=round(found.error, 4),
        samples=found.pairs,
    )


def slower(found: Comparison, where: tuple[str, ...]) -> Refusal:
    """Why a fusion that was timed is not taken."""
    lost = found.winner is Winner.SECOND
    return Refusal(
        RefusalCode.SLOWER if lost else RefusalCode.UNDECIDED,
        where,
        f"{_measured_times(found)}: " + ("slower" if lost else "no clear gain"),
        _numbers(found),
    )


def _circle(found: Comparison, where: tuple[str, ...]) -> Refusal:
    """Why a fusion that was measured to be faster is not taken after all."""
    why = (
        f"{_measured_times(found)}: faster, but beside other fusions of the plan groups would wait "
        "for each other in a circle"
    )
    return Refusal(RefusalCode.CYCLE, where, why, _numbers(found))


def _measured_times(found: Comparison) -> str:
    return f"measured together {found.first:.1f} us, apart {found.second:.1f} us"


def _numbers(found: Comparison) -> tuple[tuple[str, float], ...]:
    return (
        ("apart_us", round(found.second, 3)),
        ("error_us", round(found.error, 4)),
        ("pairs", found.pairs),
        ("together_us", round(found.first, 3)),
    )


def _structure(part: RegionModule, region: Region) -> tuple:
    """Equal for regions that are computed alike in both plans."""
    number = {op.name: op.id for op in part.graph.ops}
    sides = (
        tuple((g.kernel_class, tuple(number[n] for n in g.ops)) for g in side)
        for side in (region.careful, region.hopeful)
    )
    return part.graph.fingerprint(), *sides


def _outside(refusals: tuple[Refusal, ...], region: Region) -> tuple[Refusal, ...]:
    """Refusals but those of fusions within one of the region's hopeful groups."""
    groups = [set(g.ops) for g in region.hopeful]

    def within(refusal: Refusal) -> bool:
        ends = {end for place in refusal.where for end in place.split("..")}
        return any(ends <= ops for ops in groups)

    return tuple(r for r in refusals if not within(r))
