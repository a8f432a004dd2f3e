"""Jobs: the public functions of one model on their way into one executable.

    functions -> a Job each: plan, write -> [joined] -> one build -> [each settled and checked]

Each function is planned, checked and, where it is wrong or slower, repaired by itself, as the only
function of a model is. Where one gave way, all are joined and built again, and checked as they are
in that build.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import tvm

from ..config import Policy, load_policy, resolve_target
from ..errors import InputError, PlanError
from ..frontends import load_functions
from ..plan.plan import FusionPlan
from ..plan.refusal import RefusalCode
from ..report.function_reports import FunctionReports
from ..report.progress import stages
from ..transform.apply.pack_constants import PackConstants
from ..transform.apply.tuned_parts import TunedParts
from ..transform.functions.entries import Names, joined
from ..transform.functions.unique_names import FreshNames
from .job import Finished, Job, PlanLike, Wishes, read_plan

if TYPE_CHECKING:
    from ..report.facts import Report
    from ..runtime.build.build import Built
    from ..runtime.calls.compiled_functions import CompiledFunctions
    from ..transform.apply.materialize import Materialized

Plans = PlanLike | Mapping[str, PlanLike]
Step = dict[str, tuple["Built", "Materialized"]]


@dataclass
class Jobs:
    """The functions of one model on their way through the stages.

    Attributes
    ----------
    jobs : dict of str to Job
        By function; one of the name `main` for a model of one function.
    """

    jobs: dict[str, Job]
    _names: dict[str, Names] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: Any,
        target: Any,
        policy: Any,
        plan: Plans = None,
        example_inputs: Any = None,
        dynamic_shapes: Any = None,
        database: Any = None,
        use_current: bool = False,
    ) -> Jobs:
        """Jobs for a model of any kind; what a caller may have mistyped is checked before the model
        is read. `use_current` takes the database of `with database:` where none is given.
        """
        tvm_target, hw = resolve_target(target)
        policy, given = load_policy(policy), _read_plans(plan)
        stages.info("reading the model")
        tuned = None
        if database is not None or use_current:
            tuned = TunedParts(database).of(tvm_target, hw)
        mods = load_functions(model, example_inputs, dynamic_shapes=dynamic_shapes)
        plans = _plan_of_each(given, list(mods))
        jobs = {}
        for name, mod in mods.items():
            with _named(name):
                jobs[name] = Job.from_module(mod, tvm_target, hw, policy, plans[name], tuned, name)
        return cls(jobs)

    @property
    def only(self) -> Job | None:
        """The job of a model of one function; None where there are several."""
        return next(iter(self.jobs.values())) if len(self.jobs) == 1 else None

    @property
    def policy(self) -> Policy:
        """That of all functions."""
        return next(iter(self.jobs.values())).policy

    def compile(
        self, verify: bool | str, measure: bool, time: bool = False, cuda_graph: Any = None
    ) -> CompiledFunctions:
        """Builds all functions, and settles, checks and times each; parameters as for
        `compiler.compile`, whose budgets they share.
        """
        from ..runtime.calls.compiled_functions import CompiledFunctions

        wishes = Wishes(verify, measure, time, cuda_graph, 1 / len(self.jobs))
        settled = {}
        for name, job in self.jobs.items():
            with _named(name):
                settled[name] = job.settled(wishes)
        stages.info("building the kernels")
        built = self._built({})
        found = {n: job.finished(*built[n], *settled[n]) for n, job in self.jobs.items()}
        if any(found[name].built is not built[name][0] for name in found):
            found = self._finished_again(found)
        compiled = CompiledFunctions.of(
            {name: one.built for name, one in found.items()},
            {name: job.plan for name, job in self.jobs.items()},
        )
        for name, job in self.jobs.items():
            job.tell(compiled[name], found[name])
            compiled[name].report = _as_built(compiled[name].report, self._names[name])
        compiled.report = FunctionReports({n: one.report for n, one in compiled.items()})
        return compiled

    def _finished_again(self, found: Mapping[str, Finished]) -> dict[str, Finished]:
        """All functions as they are after some gave way, in one build that is checked again."""
        from ..check.compiled import checked_again
        from ..check.reproducer import wrong_numbers

        alone = {n: one.checked.alone for n, one in found.items() if one.checked is not None}
        built = self._built({name: mod for name, mod in alone.items() if mod is not None})
        again = {}
        for name, one in found.items():
            parts, checked = built[name], one.checked
            if checked is not None:
                checked = checked_again(checked, *parts)
                if not checked.verification.passed and one.wishes.verify != "report":
                    raise wrong_numbers(self.jobs[name], checked)
            again[name] = replace(one, built=parts[0], materialized=parts[1], checked=checked)
        return again

    def _built(self, alone: Mapping[str, tvm.IRModule]) -> Step:
        """Builds the plans of all functions, or what TVM `alone` makes of some; groups that do not
        compile are cut until all are built.
        """
        from ..runtime.build.build import KernelBuildError, build_entries
        from .kernels_ahead import KernelsOfAll, kernels_ahead

        first = next(iter(self.jobs.values()))
        while True:
            fresh = FreshNames(self.jobs)
            with kernels_ahead(first.target, first.hw, first.policy) as ahead:
                shared = KernelsOfAll(ahead, fresh)
                written = {
                    name: job.write_unpacked(None if name in alone else shared.of(name))
                    for name, job in self.jobs.items()
                }
                parts = {name: alone.get(name, mod) for name, (mod, _) in written.items()}
                mod, names = joined(parts, shared.names, fresh)
                mod = tvm.transform.Sequential([PackConstants()])(mod)
                if ahead is not None:
                    _ = [job.whole for job in self.jobs.values()]  # planned while nvcc works
                how = {"plan_memory": not alone, "ahead": ahead}
                try:
                    built = build_entries(mod, list(written), first.target, **how)
                except KernelBuildError as error:
                    if not self._cut(written, names, error.failures):
                        raise
                else:
                    self._names = names
                    return {n: (_own(built[n], names[n]), written[n][1]) for n in written}

    def _cut(
        self,
        written: Mapping[str, tuple[tvm.IRModule, Materialized]],
        names: Mapping[str, Names],
        failures: Mapping[str, str],
    ) -> bool:
        """Cuts in each function the groups whose PrimFuncs failed; whether anything changed."""
        changed = False
        for function, job in self.jobs.items():
            own = {n: failures[new] for n, new in names[function].items() if new in failures}
            changed |= job.cut_failed(written[function][1], own, RefusalCode.BUILD)
        return changed


def _own(built: Built, names: Names) -> Built:
    """What was built of one function, its PrimFuncs by the names that it knows."""
    kernels = {name: built.kernels[new] for name, new in names.items() if new in built.kernels}
    plain = {name: built.plain[new] for name, new in names.items() if new in built.plain}
    return replace(built, kernels=kernels, plain=plain)


def _as_built(report: Report, names: Names) -> Report:
    """The report of a function, its PrimFuncs by the names that they have in the executable."""

    def renamed(found: Any) -> tuple[Any, ...]:
        return tuple(replace(one, name=names.get(one.name, one.name)) for one in found)

    plain = {names.get(name, name): how for name, how in report.plain.items()}
    groups, layouts = renamed(report.groups), renamed(report.layouts)
    return replace(report, groups=groups, layouts=layouts, plain=plain)


def _read_plans(plan: Plans) -> FusionPlan | dict[str, FusionPlan | None] | None:
    """A plan, or plans by function, of any form that callers may give."""
    if not isinstance(plan, Mapping) or "groups" in plan:
        return read_plan(plan)
    return {str(name): read_plan(one) for name, one in plan.items()}


def _plan_of_each(given: Any, functions: list[str]) -> dict[str, FusionPlan | None]:
    if not isinstance(given, dict):
        if given is not None and len(functions) > 1:
            raise PlanError(
                f"one plan was given for a model of several functions ({', '.join(functions)}): "
                "give a plan for each, by name"
            )
        return dict.fromkeys(functions, given)
    strange = sorted(set(given) - set(functions))
    if strange:
        raise PlanError(
            f"a plan for {', '.join(strange)}, but the functions of the model are "
            f"{', '.join(functions)}"
        )
    return {name: given.get(name) for name in functions}


@contextmanager
def _named(function: str) -> Iterator[None]:
    """Errors of the caller's within say which function they are about."""
    try:
        yield
    except InputError as error:
        if function == "main":
            raise
        raise type(error)(f"function {function}: {error}") from error
