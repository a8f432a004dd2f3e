"""Which rewrites of a module's graph to keep: each is planned, and those that gain stay."""

from __future__ import annotations

from dataclasses import dataclass, replace

import tvm

from ..config import HardwareProfile, Policy
from ..host.collector import uncollected
from ..host.logs import topic
from ..host.stages import stage, stepped
from ..ir.graph import FusionGraph, build_graph
from ..plan.decide.decide import decide
from ..plan.decide.probing import probed_plan
from ..plan.plan import FusionPlan
from ..transform.pipeline import legalize, lower, open_composites, rewrite
from ..transform.rewrites.rewrites import candidates
from .plan_cache import Kept

logger = topic("plan")

# Share of a module's predicted time that a rewrite of its graph has to save; what the same
# instructions take before and after (`PlannedGroup.common_us`) does not count.
LEAST_REWRITE_GAIN = 0.01


@dataclass(frozen=True)
class _Variant:
    """A module with some rewrites: opened, lowered, as a graph, planned."""

    opened: tvm.IRModule
    low: tvm.IRModule
    graph: FusionGraph
    plan: FusionPlan

    @classmethod
    def of(cls, opened, rewrites, target, hw, policy) -> _Variant:
        with stage("lowering"):
            low = legalize(opened, target, hw)
            graph = build_graph(low)
        with stage("deciding"):
            plan = decide(graph, hw, policy)
        return cls(opened, low, graph, replace(plan, rewrites=rewrites))

    def rewritten(self, name, target, hw, policy) -> _Variant | None:
        """The variant with one more rewrite; None if that finds nothing to do."""
        opened = rewrite(self.opened, name, target, hw)
        if opened.same_as(self.opened):
            return None
        return self.of(opened, (*self.plan.rewrites, name), target, hw, policy)


@uncollected()
def best_plan(
    mod: tvm.IRModule, target: tvm.target.Target, hw: HardwareProfile, policy: Policy
) -> tuple[tvm.IRModule, FusionGraph, FusionPlan]:
    """Return the lowered module, its graph and its plan, with those rewrites of the opened graph by
    which the predicted time falls.

    Each is tried on top of those kept before, and on top of the last one that did not gain by
    itself: some pay only together. A module that was planned before is not planned again
    (`plan_cache`).
    """
    kept = Kept.of(mod, target, hw, policy)
    if kept is not None and kept.found is not None:
        low = lower(mod, target, hw=hw, rewrites=kept.found.rewrites)
        graph = build_graph(low)
        if kept.fits(graph):
            return low, graph, kept.found
    low, graph, plan = searched_plan(mod, target, hw, policy)
    if kept is not None:
        kept.keep(graph, plan)
    return low, graph, plan


def searched_plan(
    mod: tvm.IRModule, target: tvm.target.Target, hw: HardwareProfile, policy: Policy
) -> tuple[tvm.IRModule, FusionGraph, FusionPlan]:
    """As `best_plan`, searched for."""
    best = _Variant.of(open_composites(mod, target, hw=hw), (), target, hw, policy)
    passed_over = None
    names = candidates(hw, policy)
    for name in stepped("rewrites tried", names, len(names)):
        bases = [base for base in (best, passed_over) if base is not None]
        tried = [base.rewritten(name, target, hw, policy) for base in bases]
        tried = [variant for variant in tried if variant is not None]
        if not tried:
            continue
        found = min(tried, key=lambda variant: variant.plan.predicted_us)
        gains = found.plan.predicted_us < best.plan.predicted_us - _least_gain_us(best.plan)
        before, after = best.plan.predicted_us, found.plan.predicted_us
        logger.info("%s: %.1f us -> %.1f us, %s", name, before, after, "kept" if gains else "left")
        best, passed_over = (found, None) if gains else (best, tried[0])
    plan, _ = probed_plan(best.low, best.graph, best.plan, hw, policy, target)
    return best.low, best.graph, replace(plan, rewrites=best.plan.rewrites)


def _least_gain_us(plan: FusionPlan) -> float:
    """What a rewrite has to save on top of a plan."""
    return LEAST_REWRITE_GAIN * sum(g.predicted_us - g.common_us for g in plan.groups)
