"""One function from its plan to what a caller gets: settled by measurements, built, never slower,
right, timed, and told of.

    Planned -> [settle regions] -> build -> [not slower] -> [check] -> [times] -> Finished -> report

What stands in brackets is done where it is wished for and where there is a device for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import tvm

from ..check import index_checks
from ..check.checked_sizes import drawn_inputs
from ..check.compared_module import not_slower
from ..check.compared_regions import settle_regions
from ..check.compiled import Checked, check_compiled, wrong_numbers
from ..check.example_inputs import example_inputs
from ..check.index_checks import IndexChecks
from ..check.inputs import has_values, objects
from ..check.kernels import kernels_checked, takes_long
from ..check.sequential import Budget
from ..check.source import Original, source_check
from ..check.source_onnx import onnx_check
from ..errors import VerificationError
from ..flow.planned import BuiltPlan, Planned
from ..host.stages import stage
from ..plan.plan import FREE
from ..plan.refusal import RefusalCode
from ..report.assemble import built_report, calls_of, verification_of
from ..report.facts import Comparison, Verification
from ..report.screen import Report
from ..runtime.build.build import Built
from ..runtime.calls.call_memory import MemoryPlan
from ..runtime.calls.compiled_module import KEEPS, CompiledModule
from ..runtime.calls.launch_count import count_launches
from ..runtime.timing.timing import FUSED, UNFUSED, TimeReport, time_modules
from ..transform.functions.loop_function import ends_by_data
from ..tuning.session.lookup import OtherKernels, configuration
from .observed import observe_built, observe_plan
from .spilled import with_less_spilled

logger = logging.getLogger(__name__)

# Share of the budget for measurements that single fusions may take; the rest is for the module.
CONTEST_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a caller wants to be done with a build: `verify`, `measure`, `time` and `cuda_graph` of
    `compiler.compile`, the share of the policy's budgets that there is for it, and whether the
    whole is compared with the framework that it comes from, so that a large model needs no more
    than a check of each of its kernels; what it comes from, for its example inputs.
    """

    verify: bool | str = False
    measure: bool = False
    time: bool = False
    cuda_graph: Any = None
    share: float = 1.0
    beside: bool = False
    original: Original | None = field(default=None, repr=False)  # of no key

    @property
    def timed(self) -> bool:
        """Whether the module is timed beside the unfused one."""
        return self.measure or self.time


@dataclass(frozen=True, slots=True)
class Settled:
    """A plan whose fusions in doubt are settled, what can be done of what was wished for, and what
    is left for measurements.
    """

    planned: Planned
    wishes: Wishes
    budget: Budget | None


@dataclass(frozen=True, slots=True)
class Finished:
    """A build that was settled and checked, as it was wished for.

    Attributes
    ----------
    made : BuiltPlan
    unfused : Built or None
        The module to compare with.
    checked : Checked or None
    times : mapping of str to TimeReport
    wishes : Wishes
        What could be done of what was asked for.
    """

    made: BuiltPlan
    unfused: Built | None
    checked: Checked | None
    times: Mapping[str, TimeReport]
    wishes: Wishes


def compile_function(planned: Planned, wishes: Wishes) -> CompiledModule:
    """Builds, settles, checks and times a function."""
    one = settled(planned, wishes)
    observe_plan(one.planned)
    with stage("building the kernels"):
        made = with_less_spilled(one.planned.build())
    done = finished(made, one)
    compiled = CompiledModule.of(done.made.built, done.made.planned.plan)
    compiled.settle_weights()
    tell(compiled, done)
    return compiled


def settled(planned: Planned, wishes: Wishes) -> Settled:
    """Settles fusions in doubt before anything is built."""
    policy, share = planned.policy, wishes.share
    wanted = wishes.verify or wishes.timed
    if wanted and not (has_device(planned) and has_inputs(planned)):
        wishes = replace(wishes, verify=False, measure=False, time=False)
    budget = Budget(policy.measure_budget_s).share(share) if wishes.measure else None
    if not planned.given:
        if wishes.measure:
            planned = contested(planned, budget.share(CONTEST_SHARE))
        elif wishes.verify and _settles(planned):
            planned = contested(planned, Budget(share * policy.settle_budget_s))
    return Settled(planned, wishes, budget)


def contested(planned: Planned, budget: Budget) -> Planned:
    """With the fusions in doubt settled by measurements."""
    return replace(planned, plan=settle_regions(planned, budget))


def finished(made: BuiltPlan, one: Settled) -> Finished:
    """Settles, checks and times a build as far as that is wished for.

    Raises
    ------
    VerificationError
        Its numbers are wrong whatever is compiled.
    """
    wishes, checked, unfused = one.wishes, None, None
    if wishes.timed:
        with stage("building the unfused module"):
            unfused = made.planned.build_unfused()
    if wishes.measure:
        with stage("timing the fused module beside the unfused one"):
            made, _ = not_slower(made, unfused, one.budget)
    if wishes.verify:
        with stage("loading the kernels"):  # and computing weights: the first call does else
            made.built.machine()
        with stage("checking the results against float64"):
            checked = _checked(made, wishes)
        refuse_wrong(checked, wishes)
        made = checked.made
    times = {}
    if wishes.timed:
        times = _timed(made.built, unfused, _inputs(made, checked))
    return Finished(made, unfused, checked, times, wishes)


def _inputs(made: BuiltPlan, checked: Checked | None) -> Sequence[Any]:
    """To run a build with: those that it was checked on, which the model takes."""
    return drawn_inputs(made.planned.mod) if checked is None else checked.inputs


def _checked(made: BuiltPlan, wishes: Wishes) -> Checked:
    if wishes.verify is True and wishes.beside and takes_long(made):
        found = kernels_checked(made)
        if found is not None:
            return found
    examples = partial(example_inputs, made.planned, wishes.original)
    return check_compiled(made, OtherKernels, wishes.verify in ("groups", "report"), examples)


def refuse_wrong(checked: Checked, wishes: Wishes) -> None:
    """Raises VerificationError for wrong numbers, unless they are wished for in the report."""
    if not checked.verification.passed and wishes.verify != "report":
        raise wrong_numbers(checked, configuration)


@dataclass(frozen=True, slots=True)
class Told:
    """What a report takes beside the plan and what was built of it.

    Attributes
    ----------
    cuts : mapping of tuple of str to str
        See `Planned.cuts`.
    errors : mapping of str to float, optional
        Of groups that were checked on their own.
    times : mapping of str to TimeReport
    peak_bytes : int or None
    calls : mapping of str to Any
        See `calls_of`.
    launches : int, optional
        Of the unfused module, if that was built.
    memory : MemoryPlan, optional
        The same.
    """

    cuts: Mapping[tuple[str, ...], str]
    errors: Mapping[str, float] | None
    times: Mapping[str, TimeReport]
    peak_bytes: int | None
    calls: Mapping[str, Any]
    launches: int | None = None
    memory: MemoryPlan | None = None

    def report(
        self, made: BuiltPlan, verification: Verification | None, launches: int | None = None
    ) -> Report:
        """The report; it compares with the plan of the unfused model, which is made now. Of a
        module that was loaded it is given the `launches`.
        """
        known = self.launches, verification, self.errors, self.times, launches
        found = built_report(made, *known)
        apart = made.planned.unfused_memory() if self.memory is None else self.memory
        memory = Comparison(self.peak_bytes, apart.peak_bytes())
        return replace(found, memory=memory, **self.calls)


def tell(
    compiled: CompiledModule, done: Finished, renamed: Callable[[Report], Report] | None = None
) -> None:
    """Gives the function that was compiled its CUDA graphs, its report, and the signature that
    callers see. The report is made when it is read: it compares with the plan of the unfused model.
    """
    wishes, unfused, planned = done.wishes, done.unfused, done.made.planned
    convention = planned.source.convention
    if convention is not None and convention.keeps:
        compiled.uncapturable = KEEPS
    compiled.cuda_graph = wishes.cuda_graph
    compiled.verification = verification_of(done.checked)
    inputs = _inputs(done.made, done.checked) if wishes.verify or wishes.timed else None
    made = done.made  # not `done` itself, which holds float64 results and the unfused module
    compiled.told = told = Told(
        planned.cuts,
        done.checked.group_errors if done.checked is not None else None,
        done.times,
        compiled.peak_memory_bytes,
        calls_of(compiled, inputs, wishes.timed),
        None if unfused is None else count_launches(unfused),
        None if unfused is None else unfused.memory,
    )

    def report(compiled: CompiledModule) -> Report:
        found = told.report(made, compiled.verification)
        return found if renamed is None else renamed(found)

    compiled.report = report
    compiled.signature = compiled.signature.in_formats(planned.formats)
    compiled.follow(convention)
    if index_checks.wanted_for(planned.target):
        compiled.index_checks = IndexChecks.of(planned.mod, planned.target, planned.source.origins)
    observe_built(made, lambda: report(compiled))


def hold_to_source(
    compiled: CompiledModule, planned: Planned, original: Original, reported: bool
) -> None:
    """Compares a model of PyTorch with PyTorch, and one of ONNX with its reference; what is found
    is in the report.

    Raises
    ------
    VerificationError
        The imported model is another function, and that is not only to be `reported`.
    """
    checked = compiled.verification
    here = tvm.runtime.device_from_target(planned.target).exist
    if ends_by_data(planned.mod):
        original = replace(original, with_special=False)
    elif here and checked is None:  # no values can be drawn
        return
    try:
        sure = checked is None or not checked.kernels
        with stage("comparing with the framework"):
            found = source_check(compiled, planned, original, here, sure)
            if found is None and here:
                found = onnx_check(compiled, planned, original.model)
    except VerificationError as error:
        if checked is None or not reported:
            raise
        checked = replace(checked, passed=False, source_failure=str(error))
    else:
        if found is None or checked is None:
            return
        checked = replace(
            checked, source=found.name, source_error=found.error, source_note=found.note
        )
    compiled.verification = checked


def has_device(planned: Planned) -> bool:
    """Whether this machine can run what is built; says so where it cannot."""
    exists = tvm.runtime.device_from_target(planned.target).exist
    if not exists:
        kind = planned.target.kind.name
        logger.warning("no %s device here: neither run, nor checked, nor measured", kind)
    return exists


def has_inputs(planned: Planned) -> bool:
    """Whether values can be drawn for all inputs; says so where they cannot."""
    main = planned.mod["main"]
    if ends_by_data(planned.mod):
        logger.info("a loop of it may have no end with drawn values: none are drawn")
        return False
    unknown = objects(main)
    if not unknown and has_values(main):
        return True
    kernels = sum(group.kernel_class not in FREE for group in planned.plan.groups)
    if kernels:
        values = ", ".join(unknown)
        logger.warning(
            "%s: %s: none of its %d kernels is run, checked or measured here. To check them, "
            "call it beside `tvm.compile` of the model, each with objects of its own",
            planned.source.function,
            f"no values can be drawn for {values}" if unknown else "it returns an object",
            kernels,
        )
    return False


def _settles(planned: Planned) -> bool:
    """Whether doubts are settled by measurements that nobody asked for: on the CPU of this machine,
    whose kernels are built in a moment.
    """
    codes = {refusal.code for refusal in planned.plan.refusals}
    wanted = planned.hw.host and planned.policy.settle_budget_s > 0
    return bool(wanted) and RefusalCode.UNDECIDED in codes


def _timed(fused: Built, unfused: Built, inputs: Sequence[Any]) -> dict[str, TimeReport]:
    """Times both modules on the same inputs, interleaved."""
    modules = {FUSED: CompiledModule.of(fused), UNFUSED: CompiledModule.of(unfused)}
    return {name: TimeReport.of(t) for name, t in time_modules(modules, inputs).items()}
