"""Which rewrites of a module's graph to keep: each is planned, and those that gain stay."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import tvm
from tvm import relax

from ..config import HardwareProfile, Policy
from ..host.collector import uncollected
from ..host.logs import topic
from ..host.stages import stage, stepped
from ..ir.graph import FusionGraph, build_graph
from ..plan.decide.caution import LAUNCH
from ..plan.decide.decide import decide
from ..plan.decide.probing import probed_plan
from ..plan.plan import FusionPlan, PlannedGroup
from ..transform.pipeline import legalize, lower, open_composites, rewrite
from ..transform.rewrites.rewrites import REWRITES, candidates
from . import kernel_writers
from .few_layers import FewLayers, few_layers
from .plan_cache import Kept

logger = topic("plan")

Told = Callable[[tvm.IRModule, FusionGraph, FusionPlan], None]
"""Is told of a plan that may not be the last: of what lowered module, and of what graph."""

# Share of a module's predicted time that a rewrite of its graph has to save; what the same
# instructions take before and after (`PlannedGroup.common_us`) does not count.
LEAST_REWRITE_GAIN = 0.01

# Of that least gain: where a model of few layers is as near to it, the whole one decides, unless
# the few were seen to take for theirs what the whole takes, to `SAME` of it.
CLOSE = 0.5
SAME = 1e-9


@dataclass(frozen=True, slots=True)
class _Device:
    target: tvm.target.Target
    hw: HardwareProfile
    policy: Policy


@dataclass(frozen=True, eq=False)
class _Variant:
    """A module with some rewrites: opened, and what comes of it when somebody asks; `few` where it
    has a few layers of those that it stands for. `told` hears of plans that are like its own.
    """

    opened: tvm.IRModule
    to: _Device
    rewrites: tuple[str, ...] = ()
    few: FewLayers | None = None
    told: Told | None = None

    @cached_property
    def lowered(self) -> tuple[tvm.IRModule, FusionGraph]:
        """Lowered, and as a graph."""
        with stage("lowering"):
            low = legalize(self.opened, self.to.target, self.to.hw)
            return low, build_graph(low)

    @property
    def graph(self) -> FusionGraph:
        """The graph that is planned."""
        return self.lowered[1]

    @cached_property
    def plan(self) -> FusionPlan:
        """Planned."""
        low, graph = self.lowered
        told = self.told and partial(self.told, low, graph)
        with stage("deciding"):
            found = decide(graph, self.to.hw, self.to.policy, told=told)
        return replace(found, rewrites=self.rewrites)

    def rewritten(self, name: str) -> _Variant | None:
        """The variant with one more rewrite; None if that finds nothing to do."""
        opened = rewrite(self.opened, name, self.to.target, self.to.hw)
        if opened.same_as(self.opened):
            return None
        return replace(self, opened=opened, rewrites=(*self.rewrites, name), told=None)

    @property
    def counts(self) -> Iterable[float]:
        """How many launches each group of the plan stands for."""
        if self.few is None:
            return [1] * len(self.plan.groups)
        return self.few.counts(self.graph, self.plan)

    @cached_property
    def us(self) -> float:
        """The predicted time."""
        groups = self.plan.groups
        return sum(n * g.predicted_us for n, g in zip(self.counts, groups, strict=True))

    @cached_property
    def least_gain_us(self) -> float:
        """What a rewrite has to save on top of it."""
        pairs = zip(self.counts, self.plan.groups, strict=True)
        return LEAST_REWRITE_GAIN * sum(n * (g.predicted_us - g.common_us) for n, g in pairs)

    def may_gain(self, on: _Variant) -> bool:
        """Whether the rewrites beyond those of another variant can save enough: those that make
        nothing faster but the launches that they change save no more than these take behind their
        starts.
        """
        more = self.rewrites[len(on.rewrites) :]
        return not all(REWRITES[name].local for name in more) or (
            self._changed_us(on) > on.least_gain_us
        )

    def needed_us(self, on: _Variant) -> float:
        """What the rewrites beyond those of another variant have to save on top of it."""
        more = self.rewrites[len(on.rewrites) :]
        least_us = max((REWRITES[name].least_us for name in more), default=0.0)
        if not least_us:
            return on.least_gain_us
        launches = sum(count for count, _ in self._changed_launches(on)[1])
        return max(on.least_gain_us, least_us * max(launches, 1))

    def _changed_us(self, on: _Variant) -> float:
        """What the launches of another variant take whose operators are others in this one."""
        names, launches = self._changed_launches(on)
        if not names <= {op.name for op in on.graph.ops}:
            return math.inf
        return sum(n * (g.predicted_us - g.terms.get(LAUNCH, 0.0)) for n, g in launches)

    def _changed_launches(self, on: _Variant) -> tuple[set[str], list[tuple[float, PlannedGroup]]]:
        """What another variant computes otherwise, and its launches that do, with their counts."""
        names = _changed(on.opened["main"], self.opened["main"])
        pairs = zip(on.counts, on.plan.groups, strict=True)
        return names, [(count, group) for count, group in pairs if not names.isdisjoint(group.ops)]


def _changed(before: relax.Function, after: relax.Function) -> set[str]:
    """The variables of a function that another one, made of it, computes in another way or not at
    all; those that are made of constants alone are computed by nobody.
    """
    values = {b.var: b.value for block in after.body.blocks for b in block.bindings}
    return {
        b.var.name
        for block in before.body.blocks
        for b in block.bindings
        if not b.value.same_as(values.get(b.var)) and relax.analysis.free_vars(b.value)
    }


@uncollected()
def best_plan(
    mod: tvm.IRModule,
    target: tvm.target.Target,
    hw: HardwareProfile,
    policy: Policy,
    told: Told | None = None,
) -> tuple[tvm.IRModule, FusionGraph, FusionPlan]:
    """Return the lowered module, its graph and its plan, with those rewrites of the opened graph by
    which the predicted time falls. While it is searched for, `told` gets the best plan so far each
    time that there is one; of a model of many equal layers that of a few.

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
    low, graph, plan = searched_plan(mod, target, hw, policy, told)
    if kept is not None:
        kept.keep(graph, plan)
    return low, graph, plan


def searched_plan(
    mod: tvm.IRModule,
    target: tvm.target.Target,
    hw: HardwareProfile,
    policy: Policy,
    told: Told | None = None,
) -> tuple[tvm.IRModule, FusionGraph, FusionPlan]:
    """As `best_plan`, searched for. Of a model of many equal layers rewrites are tried on a few,
    and on all where these do not tell.
    """
    kernel_writers.begin(mod, target, hw, policy)
    opened = open_composites(mod, target, hw=hw)
    search = _Search(_Variant(opened, _Device(target, hw, policy)), few_layers(opened), told)
    best = search.best()
    low, graph = best.lowered
    plan, _ = probed_plan(low, graph, best.plan, hw, policy, target)
    return low, graph, replace(plan, rewrites=best.rewrites)


class _Search:
    """The rewrites of a module that gain.

    Attributes
    ----------
    wholes : dict of tuple of str to _Variant
        The module with some rewrites.
    few : _Variant or None
        The module of few layers, on which rewrites are tried; None: on the whole one.
    """

    def __init__(self, whole: _Variant, few: FewLayers | None, told: Told | None) -> None:
        self.wholes = {(): whole}
        self.few = None if few is None else replace(whole, opened=few.mod, few=few)
        self._told, self._latest = told, None

    def best(self) -> _Variant:
        """The whole module with the rewrites that gain."""
        best, passed_over = self.few or self.wholes[()], None
        if kernel_writers.current_writers() is not None:
            best = replace(best, told=self._told)
        names = candidates(best.to.hw, best.to.policy)
        for name in stepped("rewrites tried", names, len(names)):
            bases = [base for base in (best, passed_over) if base is not None]
            tried = [base.rewritten(name) for base in bases]
            tried = [variant for variant in tried if variant is not None]
            if not tried:
                continue
            self._tell(best)
            hopeful = [variant for variant in tried if variant.may_gain(best)]
            if not hopeful:
                logger.info("%s: left, it changes launches of little time only", name)
                passed_over = tried[0]
                continue
            found = min(hopeful, key=lambda variant: variant.us)
            gains = self._gains(name, best, found)
            best, passed_over = (found, None) if gains else (best, tried[0])
            self._tell(best)
        return self._whole(best)

    def _tell(self, best: _Variant) -> None:
        """This is the best variant so far, and is planned in any case."""
        if self._told is not None and best is not self._latest:
            self._latest = best
            self._told(*best.lowered, best.plan)

    def _gains(self, name: str, best: _Variant, found: _Variant) -> bool:
        """Whether a variant saves enough; of few layers the whole ones decide if it is close."""
        gain_us, needed_us = best.us - found.us, found.needed_us(best)
        gains = gain_us > needed_us
        close = found.few is not None and abs(gain_us - needed_us) < CLOSE * needed_us
        if close and not self._is_exact(found if gains else best):  # it is likely the plan's
            return self._gains(name, self._whole(best), self._whole(found))
        verdict = "kept" if gains else "left"
        logger.info("%s: %.1f us -> %.1f us, %s", name, best.us, found.us, verdict)
        return gains

    def _is_exact(self, variant: _Variant) -> bool:
        """Whether few layers tell the predicted time of the whole module."""
        return abs(variant.us - self._whole(variant).us) <= SAME * variant.us

    def _whole(self, variant: _Variant) -> _Variant:
        """The whole module with the rewrites of a variant."""
        if variant.few is None:
            return variant
        done = ()
        for name in variant.rewrites:
            before, done = self.wholes[done], (*done, name)
            if done not in self.wholes:
                self.wholes[done] = before.rewritten(name) or before
        return self.wholes[done]
