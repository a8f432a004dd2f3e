"""One group by itself, fused and unfused: what per-group checks run."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax, tirx

from ...ir.graph import FusionGraph
from ...plan.plan import FusionPlan, PlannedGroup
from .block_regions import fix_regions
from .materialize import Rewriter, group_views


@dataclass(frozen=True, slots=True)
class GroupModules:
    """One group by itself: `main` of `unfused` calls its operators, `main` of `fused` its one fused
    PrimFunc `kernel`.

    `inputs` are the values of the parameters in terms of the original module: Vars and constants,
    then possibly a ShapeExpr.
    """

    fused: tvm.IRModule
    unfused: tvm.IRModule
    kernel: str
    inputs: tuple


def group_modules(
    mod: tvm.IRModule, graph: FusionGraph, plan: FusionPlan, group: PlannedGroup
) -> GroupModules:
    """Takes one group with several operators out of a module, fused and unfused."""
    rewriter = Rewriter(mod, graph, plan)
    view = group_views(graph, plan)[plan.groups.index(group)]
    _, (primitive, inputs, symbols) = rewriter.primitive(view)
    functions = {g: f for g, f in mod.functions.items() if isinstance(f, tirx.PrimFunc)}
    unfused = tvm.IRModule(functions)
    plain = primitive.without_attr("Primitive").with_attr("global_symbol", "main")
    unfused["main"] = plain
    unfused = relax.transform.DeadCodeElimination(["main"])(unfused)
    builder = relax.BlockBuilder(tvm.IRModule(functions))
    gvar = builder.add_func(primitive, "kernel")
    params = [relax.Var(p.name, p.ty) for p in primitive.params]
    with builder.function("main", params):
        with builder.dataflow():
            result = builder.emit_output(relax.Call(gvar, params))
        builder.emit_func_output(result)
    fused = relax.transform.DeadCodeElimination(["main"])(relax.transform.FuseTIR()(builder.get()))
    name = next(g.name_hint for g, f in fused.functions.items() if isinstance(f, tirx.PrimFunc))
    fused.update_func(fused.get_global_var(name), fix_regions(fused[name]))
    return GroupModules(fused, unfused, name, (*inputs, *symbols))
