"""The functions of one model on their way into one executable.

    functions -> each planned, settled, written -> [joined] -> one build -> [each settled, checked]

Each function is planned, checked and, where it is wrong or slower, repaired by itself, as the only
function of a model is. Where one gave way, all are joined and built again, and checked as they are
in that build.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import tvm

from ..check.compiled import checked_again
from ..flow.functions import errors_naming
from ..flow.kernels_ahead import KernelsOfAll, kernels_ahead
from ..flow.planned import BuiltPlan, Planned, WrittenPlan
from ..host.stages import stage
from ..plan.refusal import RefusalCode
from ..report.screen import FunctionReports, Report
from ..runtime.build.build import Built, KernelBuildError, build_entries
from ..runtime.calls.compiled_module import CompiledFunctions, CompiledModule
from ..transform.apply.pack_constants import PackConstants
from ..transform.functions.entries import Names, joined
from ..transform.functions.unique_names import FreshNames
from .observed import observe_plan
from .one_function import Finished, Wishes, compile_function, finished, refuse_wrong, settled, tell
from .spilled import planned_with_less_spilled


@dataclass(frozen=True, slots=True)
class BuiltTogether:
    """Functions in one executable, and what the PrimFuncs of each are called there."""

    functions: Mapping[str, BuiltPlan]
    names: Mapping[str, Names]


def compile_functions(
    functions: Mapping[str, Planned], wishes: Wishes
) -> CompiledModule | CompiledFunctions:
    """Builds all functions of a model, and settles, checks and times each; they share the budgets
    of the policy.
    """
    if len(functions) == 1:
        (planned,) = functions.values()
        return compile_function(planned, wishes)
    each = {}
    for name, planned in functions.items():
        with errors_naming(name):
            each[name] = settled(planned, replace(wishes, share=1 / len(functions)))
            observe_plan(each[name].planned)
    with stage("building the kernels"):
        built = build_together({name: one.planned for name, one in each.items()})
        built = _with_less_spilled(built)
    found = {name: finished(made, each[name]) for name, made in built.functions.items()}
    if any(found[name].made.built is not made.built for name, made in built.functions.items()):
        built, found = _finished_again(found)
    compiled = CompiledFunctions.of(
        {name: one.made.built for name, one in found.items()},
        {name: one.made.planned.plan for name, one in found.items()},
    )
    for name, one in found.items():
        compiled[name].settle_weights()
        tell(compiled[name], one, partial(_as_built, names=built.names[name]))
    compiled.report = _of_each
    return compiled


def _with_less_spilled(built: BuiltTogether) -> BuiltTogether:
    """The same, with other configurations for kernels that spill; see `spilled`."""
    functions = built.functions.items()
    planned = {name: planned_with_less_spilled(made) for name, made in functions}
    if all(planned[name] is made.planned for name, made in functions):
        return built
    return build_together(planned)


def _of_each(compiled: CompiledFunctions) -> FunctionReports:
    return FunctionReports({name: one.report for name, one in compiled.items()})


def _finished_again(found: Mapping[str, Finished]) -> tuple[BuiltTogether, dict[str, Finished]]:
    """All functions as they are after some gave way, in one build that is checked again."""
    alone = {n: one.checked.alone for n, one in found.items() if one.checked is not None}
    built = build_together(
        {name: one.made.planned for name, one in found.items()},
        {name: mod for name, mod in alone.items() if mod is not None},
    )
    again = {}
    for name, one in found.items():
        made, checked = built.functions[name], one.checked
        if checked is not None:
            checked = checked_again(checked, made)
            refuse_wrong(checked, one.wishes)
        again[name] = replace(one, made=made, checked=checked)
    return built, again


def build_together(
    functions: Mapping[str, Planned], alone: Mapping[str, tvm.IRModule] | None = None
) -> BuiltTogether:
    """Builds the plans of all functions, or what TVM `alone` makes of some; groups that do not
    compile are cut until all are built.
    """
    alone = alone or {}
    first = next(iter(functions.values()))
    while True:
        fresh = FreshNames(functions)
        with kernels_ahead(first.target, first.hw, first.policy) as ahead:
            shared = KernelsOfAll(ahead, fresh)
            written = {
                name: planned.write_unpacked(None if name in alone else shared.of(name))
                for name, planned in functions.items()
            }
            parts = {name: alone.get(name, one.mod) for name, one in written.items()}
            mod, names = joined(parts, shared.names, fresh)
            mod = tvm.transform.Sequential([PackConstants()])(mod)
            how = {"plan_memory": not alone, "ahead": ahead}
            try:
                built = build_entries(mod, list(written), first.target, **how)
            except KernelBuildError as error:
                functions, changed = _without(written, names, error.failures)
                if not changed:
                    raise
            else:
                made = {n: one.built(_own(built[n], names[n])) for n, one in written.items()}
                return BuiltTogether(made, names)


def _without(
    written: Mapping[str, WrittenPlan],
    names: Mapping[str, Names],
    failures: Mapping[str, str],
) -> tuple[dict[str, Planned], bool]:
    """Each function without the groups whose PrimFuncs failed; whether any is another."""
    left, changed = {}, False
    for function, one in written.items():
        own = {n: failures[new] for n, new in names[function].items() if new in failures}
        left[function], other = one.without(own, RefusalCode.BUILD)
        changed |= other
    return left, changed


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
