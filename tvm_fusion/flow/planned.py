"""A function of a model on its way to kernels, one value an arrow:

    Source       a module whose `main` it is, and what it is compiled for
      Lowered      its operators, and their graph        (lower, build_graph)
      Planned      and the plan that computes them       (best_plan, or a plan that is given)
      WrittenPlan  the module of the plan's kernels      (materialize, write_kernels, PackConstants)
      BuiltPlan    and what was built of it              (build)

Nothing here changes: a plan that loses a group is another `Planned`, and what was written or built
has the plan that it was made of in the end, without the groups that could not be.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import tvm

from ..config import HardwareProfile, Policy
from ..cost.analytic import pays_early
from ..cost.probe import can_probe, probe
from ..errors import PlanError
from ..host.stages import stage
from ..ir import convention, origins
from ..ir.convention import Convention
from ..ir.extents import with_hints
from ..ir.graph import FusionGraph, build_graph
from ..ir.origins import Origins
from ..kernels import registry
from ..plan.decide.caution import LAUNCH, measured_whole, unfused_times
from ..plan.decide.decide import caution_of, without
from ..plan.decide.predicted_again import predicted_again
from ..plan.decide.probing import facts, in_doubt
from ..plan.legality import Evaluator
from ..plan.plan import FALLBACK, STOCK, UNWRITTEN, FusionPlan, PlannedGroup
from ..plan.refusal import Refusal, RefusalCode
from ..plan.search.search import unfused_plan
from ..runtime.build.build import Built, KernelBuildError, build, memory_of
from ..runtime.calls.call_memory import MemoryPlan
from ..transform.apply.materialize import Materialized, materialize
from ..transform.apply.pack_constants import PackConstants, packable_arguments
from ..transform.apply.write_kernels import (
    CLASS_ATTR,
    Ahead,
    Tuned,
    Written,
    wanted_kernels,
    write_kernels,
)
from ..transform.functions.devices import Part
from ..transform.functions.each_function import EachFunction
from ..transform.functions.function_apart import own_functions
from ..transform.functions.functions import (
    FUSE,
    MATERIALIZE,
    PACK_CONSTANTS,
    WRITE_KERNELS,
    has_branches,
    is_enabled,
    result_of,
    with_functions,
)
from ..transform.layouts.memory_formats import MemoryFormats
from ..transform.pipeline import lower
from ..transform.rewrites.rewrites import known_rewrites
from .kernel_writers import current_writers
from .kernels_ahead import begin_kernels, kernels_ahead
from .variants import best_plan

logger = logging.getLogger(__name__)

PlanLike = FusionPlan | str | Path | dict[str, Any] | None


@dataclass(frozen=True, eq=False)
class Source:
    """A function of a model as `main` of a module, and what it is compiled for; `function` is its
    name in the model, `origins` is what is known of its variables there, `convention` what its
    callers see that `main` does not say.
    """

    mod: tvm.IRModule
    target: tvm.target.Target
    hw: HardwareProfile
    policy: Policy
    function: str = "main"
    origins: Origins = field(default_factory=dict)
    convention: Convention | None = None

    @cached_property
    def whole(self) -> Lowered:
        """What runs without this package: composite operators are not opened."""
        low = lower(self.mod, self.target, decompose=False)
        return Lowered(low, build_graph(low), self.hw, self.policy, opened=False)


@dataclass(frozen=True, eq=False)
class Lowered:
    """The operators of a function: a module after `LegalizeOps`, and its graph."""

    mod: tvm.IRModule
    graph: FusionGraph
    hw: HardwareProfile
    policy: Policy
    opened: bool = True

    @cached_property
    def alone(self) -> FusionPlan:
        """The plan with nothing fused."""
        plan = unfused_plan(self.graph, self.hw, self.policy)
        return plan if self.opened else replace(plan, opened=False)


@dataclass(frozen=True, eq=False)
class Planned:
    """A function with a plan.

    Attributes
    ----------
    source : Source
    lowered : Lowered
    plan : FusionPlan
    given : bool
        The plan is the caller's.
    tuned : Tuned or None
        What tuning chose.
    fuses_beside : bool
        Whether what the plan does not see is fused as well, each piece by itself: branches, and
        private functions that stay calls.
    cuts : mapping of tuple of str to str
        Why groups gave way, by operator.
    begun : Materialized or None
        The plan applied, where its kernels were begun before it was known to be the last one; for
        who applies it next.
    """

    source: Source
    lowered: Lowered
    plan: FusionPlan
    given: bool = False
    tuned: Tuned | None = None
    fuses_beside: bool = True
    cuts: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    begun: Materialized | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(
        cls,
        mod: tvm.IRModule,
        target: tvm.target.Target,
        hw: HardwareProfile,
        policy: Policy,
        plan: PlanLike = None,
        tuned: Tuned | None = None,
        function: str = "main",
    ) -> Planned:
        """The function `main` of a module with the plan that is given, else the one that tuning
        settled, else the best that is found.
        """
        mod, known = origins.taken_from(mod)
        mod, seen = convention.taken_from(mod)
        mod = with_hints(mod, policy.sizes)
        source, given = Source(mod, target, hw, policy, function, known, seen), read_plan(plan)
        of_caller = given is not None
        if of_caller:
            given.check_made_for(hw.name, policy.name, hw.host)
        elif tuned is not None:
            given = tuned.plan(mod, hw, policy)
        if given is None:
            with stage("planning"):
                best: list[Planned] = []  # so far

                def told(low: tvm.IRModule, graph: FusionGraph, plan: FusionPlan) -> None:
                    best[:] = [cls(source, Lowered(low, graph, hw, policy), plan, tuned=tuned)]
                    best[0]._begin_kernels()

                low, graph, plan = best_plan(mod, target, hw, policy, told)
            if best and best[0].low is low and best[0].plan == plan:
                return best[0]
            return cls(source, Lowered(low, graph, hw, policy), plan, tuned=tuned)
        if given.opened:
            low = lower(mod, target, hw=hw, rewrites=known_rewrites(given.rewrites, policy))
        else:
            low = lower(mod, target, decompose=False)
        graph = build_graph(low)
        given.check(graph, registry.names())
        lowered = Lowered(low, graph, hw, policy, given.opened)
        found = cls(source, lowered, given, given=True, tuned=tuned)
        return found._predicted_again() if of_caller else found

    def _predicted_again(self) -> Planned:
        """With predictions that are the cost model's; says which were others."""
        graph, hw, policy = self.graph, self.hw, self.policy
        parts = lambda: self.alone, caution_of(hw, policy)
        again = predicted_again(graph, Evaluator(graph, hw, policy), self.plan, *parts)
        if again.changed and policy.probe != "off" and can_probe(hw):
            # what was compiled for the plan changed what it predicts
            near = in_doubt(graph, self.plan, hw, policy)
            probed = facts(probe(self.low, graph, near, hw, policy, self.target))
            evaluator = Evaluator(graph, hw, policy, probed=probed)
            again = predicted_again(graph, evaluator, self.plan, *parts)
        again.tell()
        return replace(self, plan=again.plan)

    # ---- what it is made of
    @property
    def mod(self) -> tvm.IRModule:
        """The module that was planned."""
        return self.source.mod

    @property
    def formats(self) -> MemoryFormats | None:
        """What it takes and gives with channels last, None where nothing: for signatures as callers
        see them.
        """
        return MemoryFormats.of_module(self.mod)

    @property
    def target(self) -> tvm.target.Target:
        """What it is compiled for."""
        return self.source.target

    @property
    def hw(self) -> HardwareProfile:
        """The profile of the target's device."""
        return self.source.hw

    @property
    def policy(self) -> Policy:
        """What fusions are accepted, and what budgets there are."""
        return self.source.policy

    @property
    def low(self) -> tvm.IRModule:
        """The lowered module."""
        return self.lowered.mod

    @property
    def graph(self) -> FusionGraph:
        """Its operators."""
        return self.lowered.graph

    @property
    def alone(self) -> FusionPlan:
        """The plan of the same operators with nothing fused."""
        return self.lowered.alone

    @property
    def whole(self) -> Lowered:
        """The model as it is: its plan `alone` is what runs without this package."""
        return self.source.whole

    def as_it_is(self) -> Planned:
        """The same with the model as it is, nothing fused."""
        return replace(self, lowered=self.whole, plan=self.whole.alone)

    # ---- groups that give way
    def groups_of(
        self, materialized: Materialized, functions: Collection[str]
    ) -> list[PlannedGroup]:
        """The groups of the plan that PrimFuncs compute, by their names (equal groups share
        one).
        """
        return [g for g in self.plan.groups if materialized.functions.get(g.ops) in functions]

    def cut(
        self, group: PlannedGroup, code: RefusalCode, why: str, kernel_class: str | None = None
    ) -> Planned:
        """With a group taken apart; a single operator gets `kernel_class`, by default the fallback
        class, then TVM's own code.
        """
        why = why.strip().splitlines()[-1] if why.strip() else code.value
        logger.warning("group %s falls back: %s", "+".join(group.ops), why)
        if len(group.ops) > 1:
            reason = Refusal(code, group.ops, why)
            plan = without(self.graph, self.plan, group, self.alone, reason)
            plan = plan if plan.evidence is None else self._judged_again(plan)
        else:
            plan = self.plan.with_class(group.ops[0], kernel_class or _next_class(group))
        cuts = {(op,): f"{code.value}: {why}" for op in group.ops}
        return replace(self, plan=plan, cuts={**self.cuts, **cuts})

    def _judged_again(self, plan: FusionPlan) -> FusionPlan:
        """The plan with the evidence of the groups that are left."""
        caution = caution_of(self.hw, self.policy)
        return measured_whole(self.graph, plan, unfused_times(self.alone), caution)

    # ---- what is made of it
    def fused_functions(self, mark_classes: bool = False) -> tvm.IRModule:
        """The module with the plan's groups as PrimFuncs without schedules, which name their kernel
        classes for `WriteKernels` if that is asked for.
        """
        found = self._materialized()
        if not mark_classes:
            return found.mod
        marked = dict(found.mod.functions_items())
        for name, group in found.groups.items():
            if group.kernel_class not in UNWRITTEN:
                gvar = found.mod.get_global_var(name)
                marked[gvar] = marked[gvar].with_attr(CLASS_ATTR, group.kernel_class)
        return with_functions(found.mod, marked)

    def fuse(self) -> tvm.IRModule:
        """The module with the plan's kernels written, not built."""
        return self.write().mod

    def write(self, ahead: Ahead | None = None) -> WrittenPlan:
        """Writes the plan's kernels; groups that cannot be written are cut until all are."""
        found = self.write_unpacked(ahead)
        return replace(found, mod=tvm.transform.Sequential([PackConstants()])(found.mod))

    def write_unpacked(self, ahead: Ahead | None = None) -> WrittenPlan:
        """As `write`, the constants as they were."""
        planned, changed = self, True
        while changed:
            if ahead is not None:
                ahead.forget()
            materialized = planned._materialized()
            written = planned._written(materialized, ahead)
            made = WrittenPlan(planned, written.mod, materialized)
            planned, changed = made.without(written.failures, RefusalCode.WRITER)
        return replace(made, planned=planned)._with_pieces_beside()

    def build(self) -> BuiltPlan:
        """Writes and builds the plan; groups that do not compile are cut until it builds.

        Raises
        ------
        BuildError
            It does not build even without fusion.
        """
        planned = self
        while True:
            with kernels_ahead(self.target, self.hw, self.policy) as ahead:
                written = planned.write(ahead)
                try:
                    return written.built(build(written.mod, self.target, ahead=ahead))
                except KernelBuildError as error:
                    planned, changed = written.without(error.failures, RefusalCode.BUILD)
                    if not changed:
                        raise

    def build_unfused(self) -> Built:
        """Builds the model as it is: one kernel an operator, written by the same kernel classes."""
        whole = self.whole
        return Planned(self.source, whole, whole.alone, fuses_beside=False).build().built

    def unfused_memory(self) -> MemoryPlan:
        """The memory that `build_unfused` takes; nothing is built."""
        whole = self.whole
        return memory_of(materialize(whole.mod, whole.graph, whole.alone).mod, self.target)

    def _materialized(self) -> Materialized:
        """The plan applied; where that stage is disabled, the lowered module as it is."""
        if self.begun is not None:
            begun = self.begun
            object.__setattr__(self, "begun", None)
            return begun

        def apply(mod: tvm.IRModule) -> Materialized:
            return materialize(mod, self.graph, self.plan)

        found = result_of(MATERIALIZE, self.low, apply, lambda done: done.mod)
        return Materialized(self.low, {}, {}) if found is None else found

    def _written(self, materialized: Materialized, ahead: Ahead | None) -> Written:
        """The kernels of a module; where that stage is disabled, the module as it is."""

        def apply(mod: tvm.IRModule) -> Written:
            classes, *known = self._known_of(mod, materialized)
            with self.target:
                return write_kernels(mod, classes, self.hw, self.policy, ahead, *known)

        found = result_of(WRITE_KERNELS, materialized.mod, apply, lambda done: done.mod)
        return Written(materialized.mod, {}) if found is None else found

    def _begin_kernels(self) -> None:
        """Has other processes, where there are any, begin with the kernels of the plan."""
        if current_writers() is None:
            return
        try:
            materialized = self._materialized()
            object.__setattr__(self, "begun", materialized)
            classes, *known = self._known_of(materialized.mod, materialized)
            with self.target:
                wanted = wanted_kernels(materialized.mod, classes, self.policy, *known)
                begin_kernels(wanted, self.target, self.hw, self.policy)
        except Exception as error:  # a gain of time: those of the last plan are written anyway
            logger.info("no kernels are begun before all is planned: %r", error)

    def _known_of(self, mod: tvm.IRModule, materialized: Materialized) -> tuple[Any, ...]:
        """What is known of the kernels of a module: their classes, those that tuning chose, their
        constants, and which are launched early.
        """
        classes = {name: g.kernel_class for name, g in materialized.groups.items()}
        constants = packable_arguments(mod, self.hw) if is_enabled(PACK_CONSTANTS) else {}
        return classes, self.tuned, constants, self._early(materialized)

    def _early(self, materialized: Materialized) -> dict[str, bool]:
        """The PrimFuncs whose kernels may be launched early, and whether they are predicted to be
        short enough; none where there is one launch.
        """
        launches = [g for g in self.plan.groups if g.predicted_us > 0]
        if self.hw.kind != "cuda" or len(launches) < 2:
            return {}
        longest: dict[str, float] = {}
        for group in launches:
            name = materialized.functions.get(group.ops)
            if name is not None:
                body_us = group.predicted_us - group.terms.get(LAUNCH, 0.0)
                longest[name] = max(longest.get(name, 0.0), body_us)
        return {name: pays_early(body_us, self.hw) for name, body_us in longest.items()}


@dataclass(frozen=True, eq=False, slots=True)
class WrittenPlan:
    """The module of a plan's kernels.

    Attributes
    ----------
    planned : Planned
        With the plan that was written.
    mod : IRModule
    materialized : Materialized
        The same before kernels were written.
    beside : frozenset of str
        The kernels of pieces that the plan does not see (`Planned.fuses_beside`).
    """

    planned: Planned
    mod: tvm.IRModule
    materialized: Materialized
    beside: frozenset[str] = frozenset()

    def without(self, failures: Mapping[str, str], code: RefusalCode) -> tuple[Planned, bool]:
        """The plan without the groups whose PrimFuncs failed, by name and why; whether it is
        another one.
        """
        planned = self.planned
        for group in planned.groups_of(self.materialized, failures):
            planned = planned.cut(group, code, failures[self.materialized.functions[group.ops]])
        beside = bool(self.beside & failures.keys())
        if beside:
            planned = replace(planned, fuses_beside=False)
        return planned, beside or planned.plan != self.planned.plan

    def built(self, built: Built) -> BuiltPlan:
        """With what was built of the module."""
        return BuiltPlan(self.planned, built, self.materialized, self.beside)

    def _with_pieces_beside(self) -> WrittenPlan:
        """The same with its branches and other functions fused, where there are any."""
        own = own_functions(self.mod)
        several = len(own) > 1 or has_branches(self.mod["main"])
        if not self.planned.fuses_beside or not several:
            return self
        before = {gvar.name_hint for gvar in self.mod.get_global_vars()}
        mod = EachFunction.of(FUSE, self.mod, self.planned.target).changed(self._fused_piece)
        names = frozenset(gvar.name_hint for gvar in mod.get_global_vars())
        return replace(self, mod=mod, beside=names - before)

    def _fused_piece(self, name: str, mod: tvm.IRModule, part: Part) -> tvm.IRModule | None:
        if name == "main" or not part.alone:
            return None
        own = self.planned
        return Planned.of(mod, own.target, own.hw, own.policy, tuned=own.tuned).fuse()


@dataclass(frozen=True, eq=False, slots=True)
class BuiltPlan:
    """What was built of a plan; attributes as of `WrittenPlan`."""

    planned: Planned
    built: Built
    materialized: Materialized
    beside: frozenset[str] = frozenset()


def _next_class(group: PlannedGroup) -> str:
    """What to try after the class of a single operator failed."""
    return STOCK if group.kernel_class in (FALLBACK, STOCK) else FALLBACK


def read_plan(plan: PlanLike) -> FusionPlan | None:
    """A plan of any form that callers may give; raises PlanError."""
    if plan is None or isinstance(plan, FusionPlan):
        return plan
    if isinstance(plan, str | Path):
        return FusionPlan.load(plan)
    if isinstance(plan, Mapping):
        return FusionPlan.from_dict(dict(plan))
    raise PlanError(f"plan: a FusionPlan, its file or its dict, not a {type(plan).__name__}")
