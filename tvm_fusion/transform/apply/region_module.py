"""A part of a model as a module of its own, to be planned, built and timed in several ways.

Before, in `main` of the model (the region is b, c)::

    a = exp(x);  b = tanh(a);  c = add(b, w);  d = exp(c)

After::

    def main(a, w):  b = tanh(a);  c = add(b, w);  return c
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax, tirx

from ...ir.extents import bounds_attrs
from ...ir.graph import FusionGraph, OpKind, bits, build_graph
from ...ir.weights import numbers
from ...plan.differ import exchanged
from ...plan.group_view import GroupView
from ...plan.plan import FusionPlan, PlannedGroup
from ..functions.function_apart import called
from .materialize import Rewriter, fix_regions, group_views, with_sizes


@dataclass(frozen=True, slots=True)
class RegionModule:
    """Operators of a model as a module.

    Attributes
    ----------
    mod : IRModule
        Its `main` computes them; bindings have the names they have in the model.
    graph : FusionGraph
    constants : dict of int to array
        Values of those parameters, by position, that are constants of the model.
    """

    mod: tvm.IRModule
    graph: FusionGraph
    constants: dict[int, Any]

    def with_constants(self) -> RegionModule:
        """The same with its constants in place, so that kernels may take them packed."""
        params = self.mod["main"].params
        tensors = {params[i]: tvm.runtime.tensor(value) for i, value in self.constants.items()}
        bound = relax.transform.BindParams("main", tensors)(self.mod)
        return RegionModule(bound, build_graph(bound), {})

    def plan(self, groups: Iterable[PlannedGroup], device: str, policy: str) -> FusionPlan:
        """The plan of these groups of the model for this module."""
        empty = FusionPlan("main", self.graph.fingerprint(), device, policy, ())
        plan = exchanged(self.graph, empty, (), groups)
        if plan is None:
            raise AssertionError("groups of a plan that can run form a circle in a part of it")
        return plan


def region_module(
    mod: tvm.IRModule, graph: FusionGraph, ops: Iterable[int], views: Iterable[int] = ()
) -> RegionModule | None:
    """Takes operators out of a model.

    Parameters
    ----------
    mod : IRModule
        The module after LegalizeOps that the graph was read from; left unchanged.
    graph : FusionGraph
    ops : iterable of int
        Operators of one dataflow block.
    views : iterable of int
        Views that groups of interest hold; those between the operators come by themselves.

    Returns
    -------
    RegionModule or None
        None if an operator is opaque or has symbolic extents, or they lie in several blocks.
    """
    wanted = set(ops)
    chosen = [graph.ops[i] for i in wanted]
    if any(op.kind is OpKind.OPAQUE for op in chosen) or len({op.region for op in chosen}) != 1:
        return None
    members = wanted | _views_inside(graph, wanted) | set(views)
    outputs = [
        t for i in sorted(wanted) for t in graph.ops[i].outputs if _leaves(graph, t, members)
    ]
    view = GroupView(graph, tuple(sorted(members)), tuple(outputs), bits(()))
    empty = FusionPlan(graph.function, graph.fingerprint(), "", "", ())
    _, (primitive, inputs, symbols) = Rewriter(mod, graph, empty).primitive(view)
    if symbols or any(relax.analysis.tir_vars_in_type(p.ty) for p in primitive.params):
        return None
    functions = {g: f for g, f in mod.functions.items() if isinstance(f, tirx.PrimFunc)}
    part = tvm.IRModule(functions)
    part["main"] = primitive.without_attr("Primitive").with_attr("global_symbol", "main")
    part = relax.transform.DeadCodeElimination(["main"])(part)
    constants = {i: numbers(e) for i, e in enumerate(inputs) if isinstance(e, tvm.ir.GenericConst)}
    return RegionModule(part, build_graph(part), constants)


def _views_inside(graph: FusionGraph, ops: set[int]) -> set[int]:
    """Views on the way from one of the operators to another."""
    found: set[int] = set()
    for op in graph.ops:
        if op.kind is OpKind.VIEW and any(p in ops | found for p in graph.producers(op.id)):
            found.add(op.id)
    return {v for v in found if _reaches(graph, v, ops, found)}


def _reaches(graph: FusionGraph, view: int, ops: set[int], views: set[int]) -> bool:
    readers = graph.consumers(view)
    return any(c in ops or (c in views and _reaches(graph, c, ops, views)) for c in readers)


def _leaves(graph: FusionGraph, tensor: int, members: set[int]) -> bool:
    """Whether something outside reads a tensor, itself or through views that stay inside."""
    t = graph.tensors[tensor]
    return t.is_output or any(
        c not in members
        or (
            graph.ops[c].kind is OpKind.VIEW
            and any(_leaves(graph, out, members) for out in graph.ops[c].outputs)
        )
        for c in t.consumers
    )


# ---- One group by itself, fused and unfused: what per-group checks run.


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


def groups_alone(
    mod: tvm.IRModule, graph: FusionGraph, plan: FusionPlan, groups: Iterable[PlannedGroup]
) -> Iterator[tuple[tvm.IRModule, tuple]]:
    """The operators of each of some groups as `main` of a module, and the values of its parameters
    as `GroupModules` has them.
    """
    for primitive, inputs, functions in _taken_out(mod, graph, plan, groups):
        yield _unfused(primitive, functions), inputs


def group_modules(
    mod: tvm.IRModule, graph: FusionGraph, plan: FusionPlan, group: PlannedGroup
) -> GroupModules:
    """Takes one group with several operators out of a module, fused and unfused."""
    ((primitive, inputs, functions),) = _taken_out(mod, graph, plan, [group])
    builder = relax.BlockBuilder(tvm.IRModule(functions))
    gvar = builder.add_func(primitive, "kernel")
    params = [relax.Var(p.name, p.ty) for p in primitive.params]
    with builder.function("main", params, bounds_attrs(mod[plan.function])):
        with builder.dataflow():
            result = builder.emit_output(relax.Call(gvar, params))
        builder.emit_func_output(result)
    fused = relax.transform.DeadCodeElimination(["main"])(relax.transform.FuseTIR()(builder.get()))
    name = next(g.name_hint for g, f in fused.functions.items() if isinstance(f, tirx.PrimFunc))
    fused.update_func(fused.get_global_var(name), fix_regions(fused[name]))
    return GroupModules(with_sizes(fused), _unfused(primitive, functions), name, inputs)


def _taken_out(
    mod: tvm.IRModule, graph: FusionGraph, plan: FusionPlan, groups: Iterable[PlannedGroup]
) -> Iterator[tuple[relax.Function, tuple, dict[tvm.ir.GlobalVar, tvm.ir.BaseFunc]]]:
    """Each group as a function, the values of its parameters, and the PrimFuncs that it calls."""
    rewriter, views = Rewriter(mod, graph, plan), group_views(graph, plan)
    for group in groups:
        _, (primitive, inputs, symbols) = rewriter.primitive(views[plan.groups.index(group)])
        yield primitive, (*inputs, *symbols), {g: mod[g] for g in called(primitive)}


def _unfused(
    primitive: relax.Function, functions: Mapping[tvm.ir.GlobalVar, tvm.ir.BaseFunc]
) -> tvm.IRModule:
    plain = primitive.without_attr("Primitive").with_attr("global_symbol", "main")
    return tvm.IRModule({**functions, tvm.ir.GlobalVar("main"): plain})
