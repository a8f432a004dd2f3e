"""Each distinct kernel of a build beside float64, on the inputs of one of its uses: the check of
models whose layers repeat, of which all in float64 would take longer than compiling.

    main:   a = k1(x, w1);  b = k2(a);  c = k1(b, w2)     one run of what was built: of each kernel
                                                         the first call is copied, and its results
    k1:     (x, w1) -> a      beside its operators in float64, on x and w1
    k2:     (a) -> b

Kernels run as they were built, in the memory of the module. What they do not show is whether the
right numbers go from one to the next: for that the module as a whole is compared with the framework
that it comes from (`check.source`), and where there is none, with all of it in float64.

Does not handle: symbolic sizes, branches, calls that are no kernels, tensors that are written to.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call

from ..errors import DividedByZero, OutOfRange
from ..flow.planned import BuiltPlan
from ..host.stages import stepped
from ..ir.parts import part_of
from ..ir.weights import numbers
from ..plan.plan import FREE
from ..runtime.build.build import Built
from ..transform.apply.pack_constants import arguments_of
from ..transform.apply.region_module import GroupModules, group_modules
from ..transform.functions.functions import has_branches
from ..transform.functions.unique_names import FreshNames
from .allowance import Reference
from .checked_sizes import LONG, drawn_inputs, points_of_run, symbols_of
from .compiled import Checked
from .reference import Run, build_references, runner
from .verify import Verification, judge_outputs

logger = logging.getLogger(__name__)

_CALL_TIR = tvm.ir.Op.get("relax.call_tir")
_CARRY_ON = 0  # what an instrument of the virtual machine returns

Arrays = list[np.ndarray]


def takes_long(made: BuiltPlan) -> bool:
    """Whether float64 of a module takes seconds, and its kernels can be checked one by one."""
    main = made.planned.low["main"]
    if made.beside or has_branches(main) or symbols_of(made.planned.mod["main"]):
        return False
    return points_of_run(made.planned.low) > LONG


def kernels_checked(made: BuiltPlan) -> Checked | None:
    """The verdict on the kernels of a build.

    Returns
    -------
    Checked or None
        None where a kernel is wrong, or what is to be known of one is not: the module is to be
        checked as a whole.
    """
    wanted = [n for n, g in made.materialized.groups.items() if g.kernel_class not in FREE]
    calls = _first_calls(made.materialized.mod)
    if calls is None or not calls.keys() >= set(wanted):
        return None
    cases = {name: _case(made, name) for name in wanted}
    counts = {name: len(case.inputs) for name, case in cases.items()}
    if any(len(calls[name]) != count for name, count in counts.items()):
        return None
    try:
        seen = _seen(made.built, drawn_inputs(made.planned.mod), counts)
    except (OutOfRange, DividedByZero) as error:
        logger.info("kernels are not checked one by one: %s", error)
        return None
    if seen is None:
        return None
    errors, exact = {}, _exact(cases, made.planned.target)
    for name in stepped("kernels checked", wanted, len(wanted)):
        taken, given = seen[name]
        values = [
            numbers(e) if isinstance(e, tvm.ir.GenericConst) else x
            for e, x in zip(calls[name], taken, strict=True)
        ]
        alone = cases[name].unfused
        values = _parts(values, [p.ty for p in alone["main"].params])
        given = _parts(given, _results(alone["main"].ret_ty))
        reference = Reference(alone, values, made.planned.target)
        found = judge_outputs(given, reference.with_exact(exact[name]), name)
        if not found.passed:
            logger.warning("kernel %s: %s", name, found.why)
            return None
        errors[name] = found
    each = {name: one.worst_error for name, one in errors.items()}
    return Checked(made, _of_all(errors), each, kernels=len(wanted))


def _results(ty: relax.Type) -> Sequence[relax.Type]:
    return ty.fields if isinstance(ty, relax.TupleType) else [ty]


def _parts(arrays: Arrays, types: Sequence[relax.Type]) -> Arrays:
    """What a kernel has to do with of larger tensors (`ir.parts`)."""
    return [part_of(x, ty.shape.values) for x, ty in zip(arrays, types, strict=True)]


def _exact(cases: Mapping[str, GroupModules], target: tvm.target.Target) -> dict[str, Run]:
    """The operators of each kernel in float64, all in one executable."""
    functions: dict[tvm.ir.GlobalVar, tvm.ir.BaseFunc] = {}
    for case in cases.values():
        functions |= {g: f for g, f in case.unfused.functions_items() if g.name_hint != "main"}
    fresh = FreshNames(gvar.name_hint for gvar in functions)
    entries = {name: fresh("main") for name in cases}
    for name, case in cases.items():
        main = case.unfused["main"].with_attr("global_symbol", entries[name])
        functions[tvm.ir.GlobalVar(entries[name])] = main
    built = build_references(tvm.IRModule(functions), list(entries.values()), target)
    return {name: built[entry] for name, entry in entries.items()}


def _of_all(found: Mapping[str, Verification]) -> Verification:
    worst = max((one.worst_error for one in found.values()), default=0.0)
    not_finite = max((one.not_finite for one in found.values()), default=0.0)
    return Verification("kernels", True, (), worst, not_finite)


def _case(made: BuiltPlan, name: str) -> GroupModules:
    planned = made.planned
    group = made.materialized.groups[name]
    return group_modules(planned.low, planned.graph, planned.plan, group)


def _first_calls(mod: tvm.IRModule) -> dict[str, list[relax.Expr]] | None:
    """What each PrimFunc takes where `main` calls it first; None where something else is called
    that computes.
    """
    found: dict[str, list[relax.Expr]] = {}
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            call = getattr(binding, "value", None)
            if not isinstance(call, Call):
                continue
            if call.op != _CALL_TIR:
                if not _only_moves(call):
                    return None
                continue
            found.setdefault(call.args[0].name_hint, arguments_of(call))
    return found


def _only_moves(call: Call) -> bool:
    name = call.op.name if isinstance(call.op, tvm.ir.Op) else ""
    return name in ("relax.reshape", "relax.memory.view", "relax.memory.ensure_zero_offset")


def _seen(
    built: Built, inputs: Sequence[Any], counts: Mapping[str, int]
) -> dict[str, tuple[Arrays, Arrays]] | None:
    """Of each kernel what its first call took and gave; None where that is not tensors alone."""
    taken: dict[str, Arrays] = {}
    given: dict[str, Arrays] = {}

    def copied(tensors: Sequence[Any]) -> Arrays:
        return [x.numpy() if isinstance(x, tvm.runtime.Tensor) else None for x in tensors]

    def look(_function: Any, name: str, before: bool, _result: Any, *arguments: Any) -> int:
        if name in counts and name not in given:
            count = counts[name]
            if before:
                taken[name] = copied(arguments[:count])
            else:
                given[name] = copied(arguments[count:])
        return _CARRY_ON

    runner(built, look=look)(inputs)
    whole = all(
        name in given and all(x is not None for x in (*taken[name], *given[name]))
        for name in counts
    )
    return {name: (taken[name], given[name]) for name in counts} if whole else None
