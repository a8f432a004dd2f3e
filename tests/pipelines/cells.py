"""One cell of the table: a module, a place, a target."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import tvm
from tvm import relax

import tvm_fusion
from tvm_fusion.ir.reader import has_opaque_pattern
from tvm_fusion.transform import Fuse

from ..support.runtime_cases import H200_CONFIG as CUDA
from .modules import Case, cases
from .places import PLACES

Groups = tuple[tuple[tuple[str, ...], str], ...]
"""The bindings of each launch, and its kernel class."""

LLVM = {"kind": "llvm", "num-cores": 2, "mcpu": "haswell"}
TARGETS = {"llvm": LLVM, "cuda": CUDA}


@dataclass(frozen=True)
class Outcome:
    """What a cell gave.

    Attributes
    ----------
    kernels : int
        PrimFuncs of ours that functions call.
    launches, stock : dict of str to int
        PrimFuncs that each function calls behind `Fuse`, and behind TVM's own fusion there.
    planned, alone : dict of str to Groups
        The groups that `Fuse` plans for functions, and that `tvm_fusion.compile` does for each as a
        module of its own; those without branches or calls of other functions.
    """

    kernels: int
    launches: dict[str, int]
    stock: dict[str, int]
    planned: dict[str, Groups]
    alone: dict[str, Groups]


def run_cell(module: str, place: str, target: str) -> Outcome:
    """Put `Fuse` at a place, build the module, and compare with NumPy where it runs."""
    made = tvm.target.Target(TARGETS[target])
    case, where = cases(TARGETS[target])[module], PLACES[place]
    planned: dict[str, Groups] = {}

    def note(fused) -> None:
        planned[fused.name] = tuple((g.ops, g.kernel_class) for g in fused.plan.groups)

    with made:
        before = tvm.transform.Sequential(where.before(made))(case.make())
        fused = Fuse(made, on_plan=note)(before)
        if place == "twice":
            again = Fuse(made)(fused)
            tvm.ir.assert_structural_equal(again, fused)
        relax.analysis.well_formed(fused)
        after = tvm.transform.Sequential(where.after(made))(fused)
        stock = tvm.transform.Sequential([*where.before(made), *stock_fusion()])(case.make())
    rest = tvm.transform.Sequential([]) if where.whole else "default"
    executable = tvm.compile(after, made, relax_pipeline=rest)
    device = device_of(target)
    if device is not None:
        _check_numbers(executable, case, device)
    names = [gvar.name_hint for gvar in before.get_global_vars() if _stands_alone(before[gvar])]
    planned = {name: groups for name, groups in planned.items() if name in names}
    alone = {name: _groups_alone(before, name, target) for name in planned}
    return Outcome(_kernels(fused), launches(fused), launches(stock), planned, alone)


def _stands_alone(func: tvm.ir.BaseFunc) -> bool:
    """Whether a function is one of Relax without branches that calls only PrimFuncs."""
    if not isinstance(func, relax.Function):
        return False
    found = []

    def look(expr: relax.Expr) -> None:
        own_call = isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.GlobalVar)
        if own_call or isinstance(expr, relax.If | relax.Function):
            found.append(expr)

    relax.analysis.post_order_visit(func.body, look)
    return not found


def _groups_alone(mod: tvm.IRModule, name: str, target: str) -> Groups:
    functions = {g: f for g, f in mod.functions_items() if isinstance(f, tvm.tirx.PrimFunc)}
    functions[name] = mod[name].with_attr("global_symbol", name)
    apart = tvm.IRModule(functions, global_infos=mod.global_infos)
    return _explained(tvm.ir.save_json(apart), target)


@cache
def _explained(text: str, target: str) -> Groups:
    """The plan of a module; many places have the same one."""
    report = tvm_fusion.explain(tvm.ir.load_json(text), tvm.target.Target(TARGETS[target]))
    return tuple((tuple(g["ops"]), g["kernel_class"]) for g in report.plan["groups"])


def stock_fusion() -> list[tvm.transform.Pass]:
    """The passes by which TVM fuses operators."""
    t = relax.transform
    return [t.LegalizeOps(), t.AnnotateTIROpPattern(), t.FoldConstant(), t.FuseOps(), t.FuseTIR()]


def device_of(target: str) -> tvm.runtime.Device | None:
    """Where the cells of a target run; None where no such device is."""
    if target == "llvm":
        return tvm.cpu()
    device = tvm.cuda(0)
    return device if device.exist and device.compute_version == "9.0" else None


def _check_numbers(
    executable: tvm.runtime.Executable, case: Case, device: tvm.runtime.Device
) -> None:
    vm = relax.VirtualMachine(executable, device)
    for name, call in case.calls.items():
        inputs, wanted = call(np.random.default_rng())
        given = vm[name](*(tvm.runtime.tensor(x, device) for x in inputs))
        given = [given] if isinstance(given, tvm.runtime.Tensor) else list(given)
        assert len(given) == len(wanted)
        for ours, reference in zip(given, wanted, strict=True):
            np.testing.assert_allclose(ours.numpy(), reference, rtol=1e-4, atol=1e-5)


def _called_prim_funcs(func: relax.Function, mod: tvm.IRModule, views: bool = False) -> list[str]:
    """The PrimFuncs that a function calls, once a call; those of reshapes launch nothing and count
    with `views` only.
    """
    found: list[str] = []

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Call) and getattr(expr.op, "name", "") == "relax.call_tir":
            name = expr.args[0].name_hint
            if views or not relax.analysis.has_reshape_pattern(mod[name]):
                found.append(name)

    relax.analysis.post_order_visit(func, visit)
    return found


def launches(mod: tvm.IRModule, views: bool = False) -> dict[str, int]:
    """How many PrimFuncs each Relax function calls, reshapes only with `views`."""
    return {
        gvar.name_hint: len(_called_prim_funcs(func, mod, views))
        for gvar, func in mod.functions_items()
        if isinstance(func, relax.Function) and not (func.attrs and "Primitive" in func.attrs)
    }


def _kernels(mod: tvm.IRModule) -> int:
    functions = [f for _, f in mod.functions_items() if isinstance(f, relax.Function)]
    called = {name for func in functions for name in _called_prim_funcs(func, mod)}
    return sum(has_opaque_pattern(mod[name]) for name in called)
