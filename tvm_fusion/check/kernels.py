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

import contextlib
import logging
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import tvm
from tvm import relax
from tvm.ir import Call

from ..errors import DividedByZero, OutOfRange
from ..flow.planned import BuiltPlan
from ..host.stages import stage, stepped
from ..ir.parts import part_of
from ..ir.weights import numbers, weight_of
from ..plan.plan import FREE
from ..runtime.build.build import Built
from ..transform.apply.pack_constants import arguments_of
from ..transform.apply.region_module import GroupModules, group_modules
from ..transform.functions.functions import has_branches
from ..transform.functions.unique_names import FreshNames
from .allowance import Reference
from .arrays.programs import device_in_torch, let_go, on_arrays
from .checked_sizes import LONG, drawn_inputs, points_of_run, symbols_of
from .compiled import Checked
from .reference import Run, build_references, runner
from .verify import Verification, judge_outputs

logger = logging.getLogger(__name__)

_CALL_TIR = tvm.ir.Op.get("relax.call_tir")
_CARRY_ON = 0  # what an instrument of the virtual machine returns

Arrays = list[Any]
"""Of NumPy, or tensors of torch on a GPU."""


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
        with stage("running the module"):
            seen = _seen(made.built, drawn_inputs(made.planned.mod), counts)
    except (OutOfRange, DividedByZero) as error:
        logger.info("kernels are not checked one by one: %s", error)
        return None
    if seen is None:
        return None
    with stage("reading the references"):
        errors, runs = {}, _Runs(cases, made.planned.target)
    for name in stepped("kernels checked", wanted, len(wanted)):
        taken, given = seen[name]
        values = [
            _constant(e) if isinstance(e, tvm.ir.GenericConst) else x
            for e, x in zip(calls[name], taken, strict=True)
        ]
        alone = cases[name].unfused
        values = _parts(values, [p.ty for p in alone["main"].params])
        given = _parts(given, _results(alone["main"].ret_ty))
        found = judge_outputs(given, runs.reference(name, values), name)
        if not found.passed:
            logger.warning("kernel %s: %s", name, found.why)
            return None
        errors[name] = found
    seen.clear()
    let_go(device_in_torch(made.planned.target.kind.name))
    each = {name: one.worst_error for name, one in errors.items()}
    return Checked(made, _of_all(errors), each, kernels=len(wanted))


def _constant(constant: tvm.ir.GenericConst) -> Any:
    weight = weight_of(constant)
    there = None if weight is None else weight.given()
    return numbers(constant) if there is None else _array(there)


def _array(tensor: tvm.runtime.Tensor) -> Any:
    """A tensor of TVM as an array, or where it lies on a GPU, for torch, if that is loaded."""
    if tensor.device.type == "cuda" and device_in_torch("cuda") == "cuda":
        with contextlib.suppress(RuntimeError, BufferError):  # a dtype that torch does not take
            return sys.modules["torch"].from_dlpack(tensor)
    return tensor.numpy()


def _copied(tensors: Sequence[Any]) -> Arrays:
    """Copies of tensors, once all that was launched is done; None of anything else."""
    arrays = [_array(x) if isinstance(x, tvm.runtime.Tensor) else None for x in tensors]
    torch = sys.modules.get("torch")
    if torch is None or not any(isinstance(x, torch.Tensor) for x in arrays):
        return arrays
    torch.cuda.synchronize()
    copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in arrays]
    torch.cuda.synchronize()
    return copies


def _results(ty: relax.Type) -> Sequence[relax.Type]:
    return ty.fields if isinstance(ty, relax.TupleType) else [ty]


def _parts(arrays: Arrays, types: Sequence[relax.Type]) -> Arrays:
    """What a kernel has to do with of larger tensors (`ir.parts`)."""
    return [part_of(x, ty.shape.values) for x, ty in zip(arrays, types, strict=True)]


class _Runs:
    """The operators of each kernel in float64: on arrays, and compiled, all in one executable, for
    those that it takes.
    """

    def __init__(self, cases: Mapping[str, GroupModules], target: tvm.target.Target) -> None:
        self._cases, self._target = cases, target
        mod, entries = _joined(cases)
        found = on_arrays(mod, list(entries.values()), target)
        self._on_arrays = {name: found[e] for name, e in entries.items() if e in found}

    @cached_property
    def _compiled(self) -> dict[str, Run]:
        """Of those that are not computed on arrays."""
        mod, entries = _joined({n: c for n, c in self._cases.items() if n not in self._on_arrays})
        built = build_references(mod, list(entries.values()), self._target)
        return {name: built[entry] for name, entry in entries.items()}

    def reference(self, name: str, values: Sequence[Any]) -> Reference:
        """The reference of a kernel on what it took."""
        found = Reference(self._cases[name].unfused, values, self._target)
        if name in self._on_arrays:
            return found.with_arrays(self._on_arrays[name])
        return found.with_exact(self._compiled[name])


def _joined(cases: Mapping[str, GroupModules]) -> tuple[tvm.IRModule, dict[str, str]]:
    """The operators of all kernels in one module, and what computes each there."""
    functions: dict[tvm.ir.GlobalVar, tvm.ir.BaseFunc] = {}
    for case in cases.values():
        functions |= {g: f for g, f in case.unfused.functions_items() if g.name_hint != "main"}
    fresh = FreshNames(gvar.name_hint for gvar in functions)
    entries = {name: fresh("main") for name in cases}
    for name, case in cases.items():
        main = case.unfused["main"].with_attr("global_symbol", entries[name])
        functions[tvm.ir.GlobalVar(entries[name])] = main
    return tvm.IRModule(functions), entries


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

    def look(_function: Any, name: str, before: bool, _result: Any, *arguments: Any) -> int:
        if name in counts and name not in given:
            count = counts[name]
            if before:
                taken[name] = _copied(arguments[:count])
            else:
                given[name] = _copied(arguments[count:])
        return _CARRY_ON

    runner(built, look=look)(inputs)
    whole = all(
        name in given and all(x is not None for x in (*taken[name], *given[name]))
        for name in counts
    )
    return {name: (taken[name], given[name]) for name in counts} if whole else None
