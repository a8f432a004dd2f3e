"""Each distinct kernel of a build beside float64, on the inputs of one of its uses: the check of
models whose layers repeat, of which all in float64 would take longer than compiling.

    main:   a = k1(x, w1);  b = k2(a);  c = k1(b, w2)     one run of what was built: of each kernel
                                                         the first call is copied, and its results
    k1:     (x, w1) -> a      beside its operators in float64, on x and w1
    k2:     (a) -> b

Kernels run as they were built, in the memory of the module. What they do not show is whether the
right numbers go from one to the next: for that the module as a whole is compared with the framework
that it comes from (`check.source`), and where there is none, with all of it in float64.

A function that no plan has to do with (a scan of pairs) is one of the kernels, and so is one that
writes into what it is given (`call_tir_inplace`, a cache): all of what it leaves there is compared.

Does not handle: symbolic sizes, branches, calls that are no kernels, packed functions that write.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tvm
from tvm import relax
from tvm.ir import Call

from ..errors import DividedByZero, OutOfRange
from ..flow.planned import BuiltPlan
from ..host.stages import stage, stepped
from ..ir.graph import OpKind
from ..ir.parts import part_of
from ..ir.weights import numbers, weight_of
from ..plan.plan import FREE
from ..runtime.build.build import Built
from ..transform.apply.pack_constants import arguments_of
from ..transform.apply.region_module import groups_alone
from ..transform.functions.functions import has_branches
from ..transform.functions.unique_names import FreshNames
from .allowance import Reference
from .arrays.programs import IN_PLACE, device_in_torch, let_go, on_arrays
from .bounds.rounded_products import with_rounded_products
from .checked_sizes import SHORT, draw_count, drawn_inputs, is_extreme, points_of_run, symbols_of
from .compiled import Checked
from .reference import Run, build_references, runner
from .verify import Verification, judge_outputs

logger = logging.getLogger(__name__)

_CALL_TIR = tvm.ir.Op.get("relax.call_tir")
_IN_PLACE = tvm.ir.Op.get(IN_PLACE)
_CARRY_ON = 0  # what an instrument of the virtual machine returns

Arrays = list[Any]
"""Of NumPy, or tensors of torch on a GPU."""


def takes_long(made: BuiltPlan) -> bool:
    """Whether float64 of a module takes longer than that of its kernels, and these can be checked
    one by one.
    """
    main = made.planned.low["main"]
    if made.beside or has_branches(main) or symbols_of(made.planned.mod["main"]):
        return False
    return points_of_run(made.planned.low) > SHORT


def kernels_checked(made: BuiltPlan) -> Checked | None:
    """The verdict on the kernels of a build.

    Returns
    -------
    Checked or None
        None where a kernel is wrong, or what is to be known of one is not: the module is to be
        checked as a whole.
    """
    calls = _first_calls(made.materialized.mod)
    cases = None if calls is None else _cases(made, calls)
    if cases is None:
        return None
    mod, low = made.planned.mod, made.planned.low
    try:
        with stage("running the module"):
            drawn = [drawn_inputs(mod, number, low) for number in range(draw_count(low))]
            seen = _seen(made.built, drawn, cases, calls)
    except (OutOfRange, DividedByZero) as error:
        logger.info("kernels are not checked one by one: %s", error)
        return None
    if seen is None:
        return None
    with stage("reading the references"):
        errors, runs = {}, _Runs(cases, made.planned.target)
    for name in stepped("kernels checked", cases, len(cases)):
        found = _of_all([_judged(name, cases[name], calls[name], *s, runs) for s in seen.pop(name)])
        if not found.passed:
            return None
        errors[name] = found
    let_go(device_in_torch(made.planned.target.kind.name))
    each = {name: one.worst_error for name, one in errors.items()}
    return Checked(made, _of_all(list(errors.values())), each, kernels=len(cases))


def _judged(
    name: str,
    case: _Case,
    call: _Call,
    number: int,
    taken: Arrays,
    given: Arrays,
    runs: _Runs,
) -> Verification:
    """The verdict on one call of a kernel."""
    values = [
        _constant(e) if _is_constant(e) else x for e, x in zip(call.arguments, taken, strict=True)
    ]
    main = case.alone["main"]
    values = _parts(values, [p.ty for p in main.params])
    given = _parts(given, _results(main.ret_ty))
    reference = runs.reference(name, values)
    reference.ceiling = not is_extreme(number)
    found = judge_outputs(given, reference, name)
    if not found.passed:
        logger.warning("kernel %s: %s", name, found.why)
    return found


@dataclass(frozen=True, slots=True)
class _Call:
    """The first call of a kernel in `main`: its arguments, and by place those that it writes into;
    its results are behind the arguments where that is -1.
    """

    arguments: list[relax.Expr]
    written: tuple[int, ...] | None
    of: Call

    @property
    def results(self) -> list[int] | None:
        """The places of its results among all that the kernel gets; None if all are behind."""
        if self.written is None:
            return None
        behind = itertools.count(len(self.arguments))
        return [i if i >= 0 else next(behind) for i in self.written]


@dataclass(frozen=True, slots=True)
class _Case:
    """The operators of a kernel as `main`, and where its results are (`_Call.results`)."""

    alone: tvm.IRModule
    count: int
    results: list[int] | None


def _cases(made: BuiltPlan, calls: Mapping[str, _Call]) -> dict[str, _Case] | None:
    """What each kernel is to compute, by its name; None where that is not known of one, or there
    are none. Views are no kernels: nothing runs.
    """
    low, graph, plan = made.planned.low, made.planned.graph, made.planned.plan
    policy = made.planned.policy
    planned = made.materialized.groups
    groups = {n: g for n, g in planned.items() if g.kernel_class not in FREE}
    free = planned.keys() | {op.func for op in graph.ops if op.kind is OpKind.VIEW}
    others = {n: c for n, c in calls.items() if c.written is not None or n not in free}
    if not calls.keys() - others.keys() >= groups.keys():
        return None
    cases = {}
    for name, (alone, inputs) in zip(
        groups, groups_alone(low, graph, plan, groups.values()), strict=True
    ):
        whole, read = len(_results(calls[name].of.ty)), _read(alone["main"])
        if read is None and whole != len(_results(alone["main"].ret_ty)):
            return None
        results = None if read is None else [len(inputs) + number for number in read]
        cases[name] = _Case(with_rounded_products(alone, policy), len(inputs), results)
    for name, call in others.items():
        alone = _function_alone(low, name, call)
        if alone is None:
            return None
        cases[name] = _Case(alone, len(call.arguments), call.results)
    known = all(len(calls[name].arguments) == case.count for name, case in cases.items())
    return cases if known and cases else None


def _read(main: relax.Function) -> list[int] | None:
    """Which results of an operator that is a kernel by itself something reads: it gives all that it
    has (`split`). None where a group is several operators, or has one result.
    """
    bindings = [b for block in main.body.blocks for b in block.bindings]
    bound = {b.var: b.value for b in bindings}
    whole = bound.get(main.body.body, main.body.body)
    leaves = whole.fields if isinstance(whole, relax.Tuple) else [main.body.body]
    fields = [bound.get(leaf) for leaf in leaves]
    alone = sum(isinstance(b.value, Call) for b in bindings) == 1
    if not alone or not all(isinstance(field, relax.TupleGetItem) for field in fields):
        return None
    return [field.index for field in fields]


def _function_alone(low: tvm.IRModule, name: str, call: _Call) -> tvm.IRModule | None:
    """A function that is no group's, as the model was lowered, and a call of it; no plan changes
    its name.
    """
    gvar = next((g for g in low.get_global_vars() if g.name_hint == name), None)
    if gvar is None:
        return None
    params = [relax.Var(f"x{i}", e.ty) for i, e in enumerate(call.arguments)]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            again = Call(call.of.op, [gvar, relax.Tuple(params)], call.of.attrs, call.of.ty_args)
            result = builder.emit_output(again)
        builder.emit_func_output(result)
    return tvm.IRModule({gvar: low[gvar], tvm.ir.GlobalVar("main"): builder.get()["main"]})


def _is_constant(argument: relax.Expr) -> bool:
    return isinstance(argument, tvm.ir.GenericConst)


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

    def __init__(self, cases: Mapping[str, _Case], target: tvm.target.Target) -> None:
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
        found = Reference(self._cases[name].alone, values, self._target)
        if name in self._on_arrays:
            return found.with_arrays(self._on_arrays[name])
        return found.with_exact(self._compiled[name])


def _joined(cases: Mapping[str, _Case]) -> tuple[tvm.IRModule, dict[str, str]]:
    """The operators of all kernels in one module, and what computes each there."""
    functions: dict[tvm.ir.GlobalVar, tvm.ir.BaseFunc] = {}
    for case in cases.values():
        functions |= {g: f for g, f in case.alone.functions_items() if g.name_hint != "main"}
    fresh = FreshNames(gvar.name_hint for gvar in functions)
    entries = {name: fresh("main") for name in cases}
    for name, case in cases.items():
        main = case.alone["main"].with_attr("global_symbol", entries[name])
        functions[tvm.ir.GlobalVar(entries[name])] = main
    return tvm.IRModule(functions), entries


def _of_all(found: Sequence[Verification]) -> Verification:
    worst = max((one.worst_error for one in found), default=0.0)
    not_finite = max((one.not_finite for one in found), default=0.0)
    return Verification("kernels", all(one.passed for one in found), (), worst, not_finite)


def _first_calls(mod: tvm.IRModule) -> dict[str, _Call] | None:
    """What each PrimFunc takes where `main` calls it first; None where something else is called
    that computes.
    """
    found: dict[str, _Call] = {}
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            call = getattr(binding, "value", None)
            if not isinstance(call, Call):
                continue
            if call.op not in (_CALL_TIR, _IN_PLACE):
                if not _only_moves(call):
                    return None
                continue
            in_place = call.op == _IN_PLACE
            written = tuple(map(int, call.attrs.inplace_indices)) if in_place else None
            found.setdefault(call.args[0].name_hint, _Call(arguments_of(call), written, call))
    return found


def _only_moves(call: Call) -> bool:
    name = call.op.name if isinstance(call.op, tvm.ir.Op) else ""
    return name in ("relax.reshape", "relax.memory.view", "relax.memory.ensure_zero_offset")


def _seen(
    built: Built,
    inputs: Sequence[Sequence[Any]],
    cases: Mapping[str, _Case],
    calls: Mapping[str, _Call],
) -> dict[str, list[tuple[int, Arrays, Arrays]]] | None:
    """Of each kernel what its first call took (None for constants) and gave, on each of some inputs
    by number; None where that is not tensors alone.
    """
    taken: dict[str, Arrays] = {}
    given: dict[str, Arrays] = {}
    varies = {n: [not _is_constant(e) for e in calls[n].arguments] for n in cases}

    def look(_function: Any, name: str, before: bool, _result: Any, *arguments: Any) -> int:
        rest = arguments
        for part in built.joined.get(name, ()):
            look_at(part, before, rest[: cases[part].count])
            rest = rest[cases[part].count :]
        if name in cases:
            look_at(name, before, arguments)
        return _CARRY_ON

    def look_at(name: str, before: bool, arguments: Sequence[Any]) -> None:
        case = cases[name]
        if before and name not in taken:
            own = arguments[: case.count]
            taken[name] = _copied(
                [x if v else None for x, v in zip(own, varies[name], strict=True)]
            )
        elif not before and name not in given:
            places = range(case.count, len(arguments)) if case.results is None else case.results
            given[name] = _copied([arguments[i] for i in places])

    run = runner(built, look=look)
    found: dict[str, list[tuple[int, Arrays, Arrays]]] = {name: [] for name in cases}
    for number, values in enumerate(inputs):
        taken.clear()
        given.clear()
        run(values)
        for name in cases:
            if name not in given or any(x is None for x in given[name]):
                return None
            if any(x is None and v for x, v in zip(taken[name], varies[name], strict=True)):
                return None
            found[name].append((number, taken[name], given[name]))
    return found
