"""One cell of the table: a module, a place, a target."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax

from tvm_fusion.ir.reader import has_opaque_pattern
from tvm_fusion.transform import Fuse

from ..runtime_cases import H200_CONFIG as CUDA
from .modules import Case, cases
from .places import PLACES

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
    planned : dict of str to int
        Groups of the plan of each function.
    """

    kernels: int
    launches: dict[str, int]
    stock: dict[str, int]
    planned: dict[str, int]


def run_cell(module: str, place: str, target: str) -> Outcome:
    """Put `Fuse` at a place, build the module, and compare with NumPy where it runs."""
    made = tvm.target.Target(TARGETS[target])
    case, where = cases(TARGETS[target])[module], PLACES[place]
    planned: dict[str, int] = {}

    def note(fused) -> None:
        planned[fused.name] = len(fused.plan.groups)

    with made:
        before = tvm.transform.Sequential(where.before(made))(case.make())
        fused = Fuse(made, on_plan=note)(before)
        if place == "twice":
            again = Fuse(made)(fused)
            tvm.ir.assert_structural_equal(again, fused)
        relax.analysis.well_formed(fused)
        after = tvm.transform.Sequential(where.after(made))(fused)
        stock = tvm.transform.Sequential([*where.before(made), *_stock_fusion()])(case.make())
    executable = tvm.compile(after, made)
    if target == "llvm":
        _check_numbers(executable, case)
    return Outcome(_kernels(fused), launches(fused), launches(stock), planned)


def _stock_fusion() -> list[tvm.transform.Pass]:
    t = relax.transform
    return [t.LegalizeOps(), t.AnnotateTIROpPattern(), t.FoldConstant(), t.FuseOps(), t.FuseTIR()]


def _check_numbers(executable: tvm.runtime.Executable, case: Case) -> None:
    vm = relax.VirtualMachine(executable, tvm.cpu())
    for name, call in case.calls.items():
        inputs, wanted = call(np.random.default_rng())
        given = vm[name](*map(tvm.runtime.tensor, inputs))
        given = [given] if isinstance(given, tvm.runtime.Tensor) else list(given)
        assert len(given) == len(wanted)
        for ours, reference in zip(given, wanted, strict=True):
            np.testing.assert_allclose(ours.numpy(), reference, rtol=1e-4, atol=1e-5)


def _called_prim_funcs(func: relax.Function, mod: tvm.IRModule) -> list[str]:
    """The PrimFuncs that a function calls, once a call; those of reshapes launch nothing."""
    found: list[str] = []

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Call) and getattr(expr.op, "name", "") == "relax.call_tir":
            name = expr.args[0].name_hint
            if not relax.analysis.has_reshape_pattern(mod[name]):
                found.append(name)

    relax.analysis.post_order_visit(func, visit)
    return found


def launches(mod: tvm.IRModule) -> dict[str, int]:
    """How many PrimFuncs each Relax function calls."""
    return {
        gvar.name_hint: len(_called_prim_funcs(func, mod))
        for gvar, func in mod.functions_items()
        if isinstance(func, relax.Function) and not (func.attrs and "Primitive" in func.attrs)
    }


def _kernels(mod: tvm.IRModule) -> int:
    functions = [f for _, f in mod.functions_items() if isinstance(f, relax.Function)]
    called = {name for func in functions for name in _called_prim_funcs(func, mod)}
    return sum(has_opaque_pattern(mod[name]) for name in called)
