"""Job: one model on its way through the stages of `tvm_fusion.compilation.compiler`."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tvm

from ..config import HardwareProfile, Policy
from ..cost.learned.learned import unused_residual
from ..errors import InputError, PlanError
from ..ir.graph import FusionGraph, build_graph
from ..kernels import registry
from ..plan.decide.decide import caution_of, without
from ..plan.decide.joint_interval import measured_whole, times_apart
from ..plan.plan import FALLBACK, FREE, STOCK, UNWRITTEN, FusionPlan, PlannedGroup
from ..plan.refusal import Refusal, RefusalCode
from ..plan.search.search import unfused_plan
from ..report.progress import stages
from ..transform.apply.materialize import Materialized, materialize
from ..transform.apply.pack_constants import PackConstants, packable_arguments
from ..transform.apply.write_kernels import CLASS_ATTR, Tuned, Written, write_kernels
from ..transform.functions.devices import Part
from ..transform.functions.each_function import EachFunction
from ..transform.functions.function_apart import own_functions
from ..transform.functions.functions import has_branches, with_functions
from ..transform.functions.named_stages import (
    FUSE,
    MATERIALIZE,
    PACK_CONSTANTS,
    WRITE_KERNELS,
    is_enabled,
    result_of,
)
from ..transform.lower.lower import lower
from ..transform.rewrites.rewrites import known_rewrites
from .variants import best_plan

if TYPE_CHECKING:
    from ..check.compiled import Checked
    from ..check.sequential import Budget
    from ..report.assemble import Probed
    from ..report.facts import Report
    from ..report.times import TimeReport
    from ..runtime.build.build import Built
    from ..runtime.calls.call_memory import MemoryPlan
    from ..runtime.calls.compiled_module import CompiledModule
    from ..transform.apply.write_kernels import Ahead

logger = logging.getLogger(__name__)

# Share of the budget for measurements that single fusions may take; the rest is for the module.
CONTEST_SHARE = 0.8

PlanLike = FusionPlan | str | Path | dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a caller wants to be done with a build: `verify`, `measure`, `time` and `cuda_graph` of
    `compiler.compile`, and the share of the policy's budgets that there is for it.
    """

    verify: bool | str = False
    measure: bool = False
    time: bool = False
    cuda_graph: Any = None
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Finished:
    """A build that was settled and checked, as `Wishes` asked for it.

    Attributes
    ----------
    built, materialized, unfused, checked, times
        As for `report.assemble.built_report`.
    wishes : Wishes
        What could be done of what was asked for.
    """

    built: Built
    materialized: Materialized
    unfused: Built | None
    checked: Checked | None
    times: Mapping[str, TimeReport]
    wishes: Wishes


@dataclass
class Job:
    """One function of a model on its way through the stages.

    Attributes
    ----------
    mod : IRModule
        Its `main` is the function.
    function : str
        The name of the function in the model.
    fuses_beside : bool
        Whether what the plan does not see is fused as well, each piece by itself: branches, and
        private functions that stay calls.
    """

    mod: tvm.IRModule
    target: tvm.target.Target
    hw: HardwareProfile
    policy: Policy
    low: tvm.IRModule
    graph: FusionGraph
    plan: FusionPlan
    cuts: dict[tuple[str, ...], str] = field(default_factory=dict)
    given: bool = False  # the plan is the caller's
    tuned: Tuned | None = None
    function: str = "main"
    fuses_beside: bool = True
    _beside: frozenset[str] = frozenset()  # the kernels of these pieces
    _alone: FusionPlan | None = None
    _whole: tuple[tvm.IRModule, FusionGraph, FusionPlan] | None = None

    @classmethod
    def of(
        cls,
        model,
        target,
        policy,
        plan,
        example_inputs,
        dynamic_shapes,
        database=None,
    ) -> Job:
        """The job of a model of one function; otherwise as `Jobs.of`.

        Raises
        ------
        InputError
            The model has several functions.
        """
        from .jobs import Jobs

        jobs = Jobs.of(model, target, policy, plan, example_inputs, dynamic_shapes, database)
        if jobs.only is None:
            raise InputError(f"the model has several functions: {', '.join(jobs.jobs)}")
        return jobs.only

    @classmethod
    def from_module(
        cls,
        mod: tvm.IRModule,
        target: tvm.target.Target,
        hw: HardwareProfile,
        policy: Policy,
        plan: PlanLike = None,
        tuned: Tuned | None = None,
        function: str = "main",
    ) -> Job:
        given = read_plan(plan)
        if given is None and tuned is not None:
            given = tuned.plan(mod, hw, policy)
        if given is None:
            stages.info("planning")
            found = best_plan(mod, target, hw, policy)
            return cls(mod, target, hw, policy, *found, tuned=tuned, function=function)
        if given.opened:
            low = lower(mod, target, hw=hw, rewrites=known_rewrites(given.rewrites, policy))
        else:
            low = lower(mod, target, decompose=False)
        graph = build_graph(low)
        given.check(graph, registry.names())
        how = {"given": True, "tuned": tuned, "function": function}
        return cls(mod, target, hw, policy, low, graph, given, **how)

    @property
    def alone(self) -> FusionPlan:
        """The plan of the same primitives with nothing fused."""
        if self._alone is None:
            self._alone = unfused_plan(self.graph, self.hw, self.policy)
        return self._alone

    @property
    def whole_plan(self) -> FusionPlan:
        """What runs without this package: each operator of the model by itself, composites
        whole.
        """
        return self.whole[2]

    @property
    def whole(self) -> tuple[tvm.IRModule, FusionGraph, FusionPlan]:
        """The module, graph and plan behind `whole_plan`."""
        if self._whole is None:
            low = lower(self.mod, self.target, decompose=False)
            graph = build_graph(low)
            self._whole = low, graph, unfused_plan(graph, self.hw, self.policy)
        return self._whole

    @property
    def inputs(self) -> list[Any]:
        """Random inputs for checks and timing; symbolic extents at a small odd size."""
        return self.drawn(0)

    def drawn(self, number: int, lowered: tvm.IRModule | None = None) -> list[Any]:
        """Other random inputs; some are extreme near the ends of each axis (`inputs.is_extreme`).
        Symbolic sizes are those of `check.checked_sizes`, quick for a `lowered` model where it is
        given.
        """
        from ..check.checked_sizes import checked_sizes
        from ..check.inputs import is_extreme, random_inputs

        main = self.mod["main"]
        sizes = checked_sizes(main, number, lowered)
        return random_inputs(main, number, sizes, extreme=is_extreme(number))

    def compile(
        self,
        verify: bool | str,
        measure: bool,
        time: bool = False,
        cuda_graph: Any = None,
    ) -> CompiledModule:
        """Builds, settles, checks and times; parameters as for `compiler.compile`."""
        from ..runtime.calls.compiled_module import CompiledModule

        wishes, budget = self.settled(Wishes(verify, measure, time, cuda_graph))
        stages.info("building the kernels")
        finished = self.finished(*self.build_fused(), wishes, budget)
        compiled = CompiledModule.of(finished.built, self.plan)
        self.tell(compiled, finished)
        return compiled

    def settled(self, wishes: Wishes) -> tuple[Wishes, Budget | None]:
        """Settles fusions in doubt before anything is built; what can be done of the wishes, and
        what is left for measurements.
        """
        from ..check.sequential import Budget

        wanted = wishes.verify or wishes.measure or wishes.time
        if wanted and not (self.has_device() and self.has_inputs()):
            wishes = replace(wishes, verify=False, measure=False, time=False)
        budget = self.budget().share(wishes.share) if wishes.measure else None
        if wishes.measure and not self.given:
            self.contest(budget.share(CONTEST_SHARE))
        elif wishes.verify and not self.given and self.settles():
            self.contest(Budget(wishes.share * self.policy.settle_budget_s))
        return wishes, budget

    def finished(
        self, built: Built, materialized: Materialized, wishes: Wishes, budget: Budget | None
    ) -> Finished:
        """Settles, checks and times a build as far as that is wished for.

        Raises
        ------
        VerificationError
            Its numbers are wrong whatever is compiled.
        """
        from ..check.compiled import check_compiled, time_builds
        from ..check.reproducer import wrong_numbers

        timed = wishes.measure or wishes.time
        checked = None
        if timed:
            stages.info("building the unfused module")
        unfused = self.build_unfused() if timed else None
        if wishes.measure:
            stages.info("timing the fused module beside the unfused one")
            built, materialized = self.race(built, materialized, unfused, budget)
        if wishes.verify:
            stages.info("checking the results against float64")
            every_group = wishes.verify in ("groups", "report")
            checked = check_compiled(self, built, materialized, every_group)
            if not checked.verification.passed and wishes.verify != "report":
                raise wrong_numbers(self, checked)
            built, materialized = checked.built, checked.materialized
        if timed:
            stages.info("timing the fused module beside the unfused one")
        times = time_builds(built, unfused, self.inputs) if timed else {}
        return Finished(built, materialized, unfused, checked, times, wishes)

    def tell(self, compiled: CompiledModule, finished: Finished) -> None:
        """Gives the function that was compiled its CUDA graphs and its report."""
        from ..report.assemble import built_report
        from ..report.call_cost import with_calls

        wishes, unfused = finished.wishes, finished.unfused
        compiled.cuda_graph = wishes.cuda_graph
        parts = (finished.built, finished.materialized, unfused, finished.checked, finished.times)
        report = built_report(self, *parts)
        timed = wishes.measure or wishes.time
        inputs = self.inputs if wishes.verify or timed else None
        memory = unfused.memory if unfused is not None else self.unfused_memory()
        compiled.report = with_calls(report, compiled, memory, inputs, timed)

    @property
    def unlearned(self) -> str | None:
        """Why the device's learned residual is not used, if it has one that is not."""
        return unused_residual(self.hw) if self.policy.learned else None

    def planned_report(self, found: Probed | None = None) -> Report:
        """The report of the plan, with what is known of its kernels; nothing is built."""
        from ..report.assemble import planned_report, tuned_groups

        tuned = tuned_groups(self)
        return planned_report(self.graph, self.plan, self.whole_plan, found, self.unlearned, tuned)

    def has_device(self) -> bool:
        """Whether this machine can run what is built; says so where it cannot."""
        exists = tvm.runtime.device_from_target(self.target).exist
        if not exists:
            kind = self.target.kind.name
            logger.warning("no %s device here: neither run, nor checked, nor measured", kind)
        return exists

    def has_inputs(self) -> bool:
        """Whether values can be drawn for all inputs; says so where they cannot."""
        from ..check.inputs import has_values, objects

        main = self.mod["main"]
        unknown = objects(main)
        if not unknown and has_values(main):
            return True
        kernels = sum(group.kernel_class not in FREE for group in self.plan.groups)
        if kernels:
            values = ", ".join(unknown)
            logger.warning(
                "%s: %s: none of its %d kernels is run, checked or measured here. To check them, "
                "call it beside `tvm.compile` of the model, each with objects of its own",
                self.function,
                f"no values can be drawn for {values}" if unknown else "it returns an object",
                kernels,
            )
        return False

    def settles(self) -> bool:
        """Whether doubts are settled by measurements that nobody asked for: on the CPU of this
        machine, whose kernels are built in a moment.
        """
        codes = {refusal.code for refusal in self.plan.refusals}
        wanted = self.hw.host and self.policy.settle_budget_s > 0
        return bool(wanted) and RefusalCode.UNDECIDED in codes

    def budget(self) -> Budget:
        """The time for measurements, from now on."""
        from ..check.sequential import Budget

        return Budget(self.policy.measure_budget_s)

    def contest(self, budget: Budget) -> None:
        """Settles the fusions in doubt by measurements."""
        from ..check.contest import contest

        stages.info("timing the fusions in doubt")
        self.plan = contest(self, budget)

    def race(
        self, built: Built, materialized: Materialized, unfused: Built, budget: Budget
    ) -> tuple[Built, Materialized]:
        """Times the module beside the unfused one; cuts fusions until it is not slower."""
        from ..check.race import not_slower

        built, materialized, _ = not_slower(self, built, materialized, unfused, budget)
        return built, materialized

    def use_whole(self) -> None:
        """Goes on with the model as it is, nothing fused."""
        self.low, self.graph, plan = self.whole
        self.plan = self._alone = replace(plan, opened=False)

    def build_fused(self) -> tuple[Built, Materialized]:
        """Builds the plan; groups that do not compile are cut until it builds."""
        from ..runtime.build.build import KernelBuildError, build
        from .kernels_ahead import kernels_ahead

        while True:
            with kernels_ahead(self.target, self.hw, self.policy) as ahead:
                written, materialized = self.write(ahead)
                if ahead is not None:
                    _ = self.whole  # the report compares with it: planned while nvcc works
                try:
                    return build(written, self.target, ahead=ahead), materialized
                except KernelBuildError as error:
                    if not self.cut_failed(materialized, error.failures, RefusalCode.BUILD):
                        raise

    def fuse(self) -> tvm.IRModule:
        """The module with the plan's kernels written, not built."""
        return self.write()[0]

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

    def write(self, ahead: Ahead | None = None) -> tuple[tvm.IRModule, Materialized]:
        """Writes the plan's kernels; groups that cannot be written are cut until all are."""
        written, materialized = self.write_unpacked(ahead)
        return tvm.transform.Sequential([PackConstants()])(written), materialized

    def write_unpacked(self, ahead: Ahead | None = None) -> tuple[tvm.IRModule, Materialized]:
        """As `write`, the constants as they were."""
        while True:
            if ahead is not None:
                ahead.forget()
            materialized = self._materialized()
            written = self._written(materialized, ahead)
            if not self.cut_failed(materialized, written.failures, RefusalCode.WRITER):
                return self._with_pieces_beside(written.mod), materialized

    def _with_pieces_beside(self, mod: tvm.IRModule) -> tvm.IRModule:
        """The module with its branches and other functions fused, where there are any."""
        self._beside = frozenset()
        own = own_functions(mod)
        if not self.fuses_beside or (len(own) == 1 and not has_branches(mod["main"])):
            return mod
        before = {gvar.name_hint for gvar in mod.get_global_vars()}
        mod = EachFunction.of(FUSE, mod, self.target).changed(self._fused_piece)
        self._beside = frozenset(g.name_hint for g in mod.get_global_vars()) - before
        return mod

    def _fused_piece(self, name: str, mod: tvm.IRModule, part: Part) -> tvm.IRModule | None:
        if name == "main" or not part.alone:
            return None
        return Job.from_module(mod, self.target, self.hw, self.policy, tuned=self.tuned).fuse()

    def without_pieces_beside(self) -> bool:
        """Leaves branches and other functions to TVM from now on; whether that changes anything."""
        self.fuses_beside = False
        return bool(self._beside)

    def _materialized(self) -> Materialized:
        """The plan applied; where that stage is disabled, the lowered module as it is."""

        def apply(mod: tvm.IRModule) -> Materialized:
            return materialize(mod, self.graph, self.plan)

        found = result_of(MATERIALIZE, self.low, apply, lambda done: done.mod)
        return Materialized(self.low, {}, {}) if found is None else found

    def _written(self, materialized: Materialized, ahead: Ahead | None) -> Written:
        """The kernels of a module; where that stage is disabled, the module as it is."""
        classes = {name: g.kernel_class for name, g in materialized.groups.items()}

        def apply(mod: tvm.IRModule) -> Written:
            constants = packable_arguments(mod, self.hw) if is_enabled(PACK_CONSTANTS) else {}
            with self.target:
                return write_kernels(
                    mod, classes, self.hw, self.policy, ahead, self.tuned, constants
                )

        found = result_of(WRITE_KERNELS, materialized.mod, apply, lambda done: done.mod)
        return Written(materialized.mod, {}) if found is None else found

    def build_unfused(self) -> Built:
        """Builds the model as it is: one kernel an operator, written by the same kernel classes."""
        low, graph, plan = self.whole
        parts = (self.mod, self.target, self.hw, self.policy, low, graph, plan)
        return Job(*parts, fuses_beside=False, _whole=self.whole).build_fused()[0]

    def unfused_memory(self) -> MemoryPlan:
        """The memory that `build_unfused` takes; nothing is built."""
        from ..runtime.build.build import memory_of

        return memory_of(materialize(*self.whole).mod, self.target)

    def cut_failed(
        self, materialized: Materialized, failures: Mapping[str, str], code: RefusalCode
    ) -> bool:
        """Cuts all groups whose PrimFunc failed; whether anything changed."""
        before = self.plan
        for group in self.groups_of(materialized, failures):
            self.cut(group, code, failures[materialized.functions[group.ops]])
        beside = self._beside & failures.keys() and self.without_pieces_beside()
        return self.plan != before or bool(beside)

    def groups_of(
        self, materialized: Materialized, functions: Collection[str]
    ) -> list[PlannedGroup]:
        """The groups of the plan that PrimFuncs compute, by their names (equal groups share
        one).
        """
        return [g for g in self.plan.groups if materialized.functions.get(g.ops) in functions]

    def _judged_again(self, plan: FusionPlan) -> FusionPlan:
        """The plan with the evidence of the groups that are left."""
        caution = caution_of(self.hw, self.policy)
        return measured_whole(self.graph, plan, times_apart(self.alone), caution)

    def cut(
        self, group: PlannedGroup, code: RefusalCode, why: str, kernel_class: str | None = None
    ) -> None:
        """Takes a group apart; gives a single operator `kernel_class`, by default the fallback
        class, then TVM's own code.
        """
        why = why.strip().splitlines()[-1] if why.strip() else code.value
        logger.warning("group %s falls back: %s", "+".join(group.ops), why)
        for op in group.ops:
            self.cuts[(op,)] = f"{code.value}: {why}"
        if len(group.ops) > 1:
            reason = Refusal(code, group.ops, why)
            plan = without(self.graph, self.plan, group, self.alone, reason)
            self.plan = plan if plan.evidence is None else self._judged_again(plan)
        else:
            self.plan = self.plan.with_class(group.ops[0], kernel_class or _next_class(group))


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
