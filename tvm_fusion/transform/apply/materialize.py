"""Materialize: the plan's groups become fused PrimFuncs.

Before::

    lv = R.call_tir(cls.exp, (x,), ...)
    lv1 = R.call_tir(cls.tanh, (lv,), ...)

After, for the group (lv, lv1)::

    lv1 = R.call_tir(cls.fused_exp_tanh, (x,), ...)      # one PrimFunc with both blocks

Each group is first a Relax function with attribute `Primitive`, which TVM's FuseTIR turns into one
PrimFunc; an operator that stands in several groups is copied into each (rematerialisation). FuseTIR
keeps only the first of two reads of one buffer, so the read and write regions of every block are
computed again afterwards. What callers may give for a symbolic size stands at the PrimFunc
(`ir.extents.SIZES_ATTR`), since a kernel is written from that alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx

from ...errors import PlanError
from ...ir.extents import (
    Bounds,
    bounds_of,
    bounds_within,
    hints_of,
    symbols_of,
    with_known_sizes,
)
from ...ir.graph import FusionGraph, OpKind, bits
from ...plan.differ import in_order
from ...plan.group_view import GroupView
from ...plan.plan import FusionPlan, PlannedGroup
from ..functions.functions import with_functions
from .place_parts import place_parts

# Read and write regions of blocks, computed again from their bodies.


def fix_regions(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Computes the read and write regions of every block again from its body."""

    def rebuild(block):
        if block.name_hint == "root":
            return block
        buffers: dict = {}

        def load(e) -> None:
            buffers[e.source] = e.source

        def store(s) -> None:
            buffers[s.buffer] = s.buffer

        both = [(tvm.ir.TensorLoad, load), (tirx.BufferStore, store)]
        tvm_ffi.structural_walk(block.body, both)
        if block.init is not None:
            tvm_ffi.structural_walk(block.init, both)
        reads, writes = s_tir.analysis.get_sblock_read_write_region(block, buffers)
        return s_tir.SBlock(
            block.iter_vars,
            reads,
            writes,
            block.name_hint,
            block.body,
            block.init,
            block.alloc_buffers,
            block.match_buffers,
            block.annotations,
            block.span,
        )

    return func.with_body(tvm_ffi.structural_map(func.body, [(s_tir.SBlock, rebuild)]))


MAX_NAME = 60


@dataclass(frozen=True, slots=True)
class Materialized:
    """The module after fusion, and which of its PrimFuncs computes which group.

    `groups` has one group for each PrimFunc, `functions` a PrimFunc for each group (by its
    operators): equal groups share one.
    """

    mod: tvm.IRModule
    groups: dict[str, PlannedGroup]
    functions: dict[tuple[str, ...], str]


def materialize(mod: tvm.IRModule, graph: FusionGraph, plan: FusionPlan) -> Materialized:
    """Applies a plan.

    Parameters
    ----------
    mod : IRModule
        The module the graph was read from (after LegalizeOps). It is left unchanged.
    graph : FusionGraph
    plan : FusionPlan
        Checked against the graph.

    Raises
    ------
    PlanError
        The plan belongs to another module.
    """
    plan.check(graph)
    rewriter = Rewriter(mod, graph, plan)
    fused = relax.transform.FuseTIR()(rewriter.run())
    fused = with_functions(
        fused,
        {
            g: fix_regions(f)
            if g.name_hint in rewriter.groups and isinstance(f, tirx.PrimFunc)
            else f
            for g, f in fused.functions.items()
        },
    )
    fused = relax.transform.DeadCodeElimination([plan.function])(fused)
    fused = place_parts(fused, plan.function)
    called = {
        b.var.name: b.value.args[0].name_hint
        for block in fused[plan.function].body.blocks
        for b in block.bindings
        if _is_call_tir(b.value)
    }
    functions = {g.ops: called[r] for r, g in rewriter.results.items() if r in called}
    groups = {functions[g.ops]: g for g in rewriter.groups.values() if g.ops in functions}
    fused = with_sizes(fused)
    for group in rewriter.results.values():  # of equal groups some have placed tensors
        if group.ops in functions:
            groups.setdefault(functions[group.ops], group)
    return Materialized(fused, groups, functions)


def with_sizes(mod: tvm.IRModule) -> tvm.IRModule:
    """A module whose PrimFuncs note which values their symbolic sizes have in all calls, as far as
    its functions have bounds.
    """
    found: dict[tvm.ir.GlobalVar, dict[tirx.Var, Bounds]] = {}
    for _, func in mod.functions_items():
        if isinstance(func, relax.Function):
            _note_sizes(mod, func, found)
    functions = dict(mod.functions_items())
    known = {gvar: with_known_sizes(functions[gvar], sizes) for gvar, sizes in found.items()}
    if all(func.same_as(functions[gvar]) for gvar, func in known.items()):
        return mod
    return with_functions(mod, {**functions, **known})


def _note_sizes(
    mod: tvm.IRModule, func: relax.Function, found: dict[tvm.ir.GlobalVar, dict[tirx.Var, Bounds]]
) -> None:
    """Adds the sizes that a function calls PrimFuncs with to those that are `found`."""
    named = bounds_of(func)
    given = {s for p in func.params for s in relax.analysis.tir_vars_in_type(p.ty)}
    hints, known = hints_of(func), {}
    for symbol in given:
        if symbol.name in named or symbol.name in hints:
            bounds = named.get(symbol.name, Bounds())
            known[symbol] = replace(bounds, hints=hints.get(symbol.name, ()))

    def visit(call: relax.Expr) -> None:
        if not isinstance(call, relax.Call):
            return
        for gvar in (a for a in call.args if isinstance(a, tvm.ir.GlobalVar)):
            sizes = _sizes(mod[gvar], call, known, given) if _is_call_tir(call) else {}
            before = found.get(gvar, sizes)
            found[gvar] = {s: b.or_of(before[s]) for s, b in sizes.items() if s in before}

    relax.analysis.post_order_visit(func.body, visit)


def _sizes(
    callee: tvm.ir.BaseFunc,
    call: relax.Call,
    known: Mapping[tirx.Var, Bounds],
    given: Set[tirx.Var],
) -> dict[tirx.Var, Bounds]:
    """The bounds of a PrimFunc's sizes in a call of it, as far as the `given` ones say them."""
    found: dict[tirx.Var, Bounds] = {}
    if not known or not isinstance(callee, tirx.PrimFunc):
        return found
    values = call.args[1]
    values = values.fields if isinstance(values, relax.Tuple) else [values]
    results = call.ty.fields if isinstance(call.ty, relax.TupleType) else [call.ty]
    buffers = [p for p in callee.params if isinstance(p.ty, tirx.BufferType)]
    tensors = [v.ty for v in values if not isinstance(v.ty, tvm.ir.PrimType)]  # others are numbers
    for param, ty in zip(buffers, [*tensors, *results], strict=True):
        for own, extent in zip(param.ty.shape, ty.shape.values, strict=True):
            if isinstance(own, tirx.Var) and given >= set(symbols_of([extent])):
                found.setdefault(own, bounds_within(extent, known))
    return found


def group_views(graph: FusionGraph, plan: FusionPlan) -> list[GroupView]:
    """The plan's groups as views of the graph, in order."""
    number = {op.name: op.id for op in graph.ops}
    members = [frozenset(number[n] for n in g.ops) for g in plan.groups]
    read = {
        t
        for ops in members
        for op in ops
        for t in graph.ops[op].inputs
        if graph.tensors[t].producer not in ops
    }
    read |= {t.id for t in graph.tensors if t.is_output}
    views = []
    for g, ops in zip(plan.groups, members, strict=True):
        copies = frozenset(number[n] for n in g.recomputed)
        written = (t for op in sorted(ops - copies) for t in graph.ops[op].outputs if t in read)
        views.append(GroupView(graph, tuple(sorted(ops)), tuple(written), bits(copies)))
    return views


def _ordered(graph: FusionGraph, plan: FusionPlan) -> list[tuple[GroupView, PlannedGroup]]:
    """Views with their groups, each after those that write what it reads (a hand-made plan may be
    in any order).
    """
    groups = in_order(graph, plan.groups)
    if groups is None:
        raise PlanError(
            "the plan cannot run: groups depend on each other in a circle; take one of them apart"
        )
    views = group_views(graph, replace(plan, groups=groups))
    return list(zip(views, groups, strict=True))


@dataclass
class Rewriter:
    mod: tvm.IRModule
    graph: FusionGraph
    plan: FusionPlan
    groups: dict[str, PlannedGroup] = field(default_factory=dict)
    results: dict[str, PlannedGroup] = field(default_factory=dict)  # by name of the call's Var
    env: dict = field(default_factory=dict)  # old Var -> new Expr
    bindings: list = field(default_factory=list)

    def __post_init__(self) -> None:
        func = self.mod[self.plan.function]
        self.builder = relax.BlockBuilder(self.mod)
        by_name = {b.var.name: b for block in func.body.blocks for b in block.bindings}
        self.op_binding = {op.id: by_name[op.name] for op in self.graph.ops}
        op_vars = {hash(b.var) for b in self.op_binding.values()}
        self.alias = {
            hash(b.var): b
            for block in func.body.blocks
            for b in block.bindings
            if hash(b.var) not in op_vars
        }

    def run(self) -> tvm.IRModule:
        func = self.mod[self.plan.function]
        ordered = _ordered(self.graph, self.plan)
        blocks = []
        for region, block in enumerate(func.body.blocks):
            self.bindings = []
            for view, group in ordered:
                if self.graph.ops[view.ops[0]].region == region:
                    self._emit(view, group)
            for b in block.bindings:
                if hash(b.var) in self.alias and hash(b.var) not in self.env_keys:
                    self._emit_alias(b)
            kind = (
                relax.DataflowBlock
                if isinstance(block, relax.DataflowBlock)
                else relax.BindingBlock
            )
            blocks.append(kind(self.bindings))
        body = relax.SeqExpr(blocks, self._new(func.body.body))
        new = relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)
        self.builder.update_func(self.mod.get_global_var(self.plan.function), new)
        return relax.transform.Normalize()(self.builder.get())

    @property
    def env_keys(self) -> set[int]:
        return {hash(v) for v in self.env}

    # ---- expressions of the outer function
    def _new(self, e):
        """The expression with every old Var replaced; an alias it needs is emitted first."""
        if isinstance(e, relax.Var):
            if e not in self.env and hash(e) in self.alias:
                self._emit_alias(self.alias[hash(e)])
            return self.env.get(e, e)
        if isinstance(e, relax.TupleGetItem):
            whole = self._new(e.tuple_value)
            return (
                whole.fields[e.index]
                if isinstance(whole, relax.Tuple)
                else relax.TupleGetItem(whole, e.index)
            )
        return rebuild(e, self._new)

    def _emit_alias(self, binding) -> None:
        value = self._new(binding.value)
        if isinstance(value, relax.Var) and isinstance(binding.var, relax.DataflowVar):
            self.env[binding.var] = value
        else:
            self._bind(binding.var, value)

    def _bind(self, var, value) -> None:
        new = type(var)(var.name, var.ty)
        self.env[var] = new
        self.bindings.append(relax.VarBinding(new, value))

    # ---- groups
    def _emit(self, view: GroupView, group: PlannedGroup) -> None:
        kinds = {self.graph.ops[i].kind for i in view.ops}
        if len(view.ops) == 1:
            binding = self.op_binding[view.ops[0]]
            if isinstance(binding, relax.MatchCast):
                new = type(binding.var)(binding.var.name, binding.var.ty)
                value = self._new(binding.value)
                self.env[binding.var] = new
                self.bindings.append(relax.MatchCast(new, value, binding.ty))
                return
            if kinds == {OpKind.CALL_TIR}:
                self.groups.setdefault(binding.value.args[0].name_hint, group)
                self.results[binding.var.name] = group
            self._bind(binding.var, self._new(binding.value))
            self._emit_projections(binding.var)
            return
        self._emit_fused(view, group)

    def _emit_projections(self, var) -> None:
        """The fields of a tuple, right behind it: their place then does not depend on who reads
        them first.
        """
        for binding in self.alias.values():
            value = binding.value
            if isinstance(value, relax.TupleGetItem) and value.tuple_value.same_as(var):
                self._emit_alias(binding)

    def primitive(self, view: GroupView):
        """The group's outputs as (binding Var, field), and its Primitive function with its inputs
        and symbols.
        """
        outputs = [self._output(t) for t in view.outputs]
        return outputs, Primitive(self, view, outputs).build()

    def _emit_fused(self, view: GroupView, group: PlannedGroup) -> None:
        outputs, (primitive, inputs, symbols) = self.primitive(view)
        name = "fused_" + "_".join(self.graph.ops[i].func for i in view.ops)
        gvar = self.builder.add_func(primitive, name[:MAX_NAME])
        self.groups[gvar.name_hint] = group
        call = relax.Call(gvar, [*(self._new(v) for v in inputs), *symbols])
        if len(outputs) == 1:
            new = _fresh(outputs[0], self.graph, view.outputs[0])
            self.results[new.name] = group
            self.bindings.append(relax.VarBinding(new, call))
            results = [new]
        else:
            fields = relax.TupleType([_type_of(o) for o in outputs])
            whole = relax.DataflowVar(f"{outputs[0][0].name}_outputs", fields)
            self.bindings.append(relax.VarBinding(whole, call))
            self.results[whole.name] = group
            results = []
            for i, (old, tensor) in enumerate(zip(outputs, view.outputs, strict=True)):
                new = _fresh(old, self.graph, tensor)
                self.bindings.append(relax.VarBinding(new, relax.TupleGetItem(whole, i)))
                results.append(new)
        self._remember(view, outputs, results)

    def _remember(self, view: GroupView, outputs, results) -> None:
        """Old Vars of the group's outputs -> new ones; a tuple-valued binding becomes the tuple of
        its new fields.
        """
        fields: dict = {}
        for (var, index), new in zip(outputs, results, strict=True):
            if index is None:
                self.env[var] = new
            else:
                fields.setdefault(var, {})[index] = new
        for var, found in fields.items():
            unused = next(iter(found.values()))  # fields that nobody reads outside the group
            width = len(var.ty.fields)
            self.env[var] = relax.Tuple([found.get(i, unused) for i in range(width)])

    def _output(self, tensor: int):
        """(binding Var, field or None) of a tensor."""
        op = self.graph.tensors[tensor].producer
        var = self.op_binding[op].var
        if isinstance(var.ty, relax.TupleType):
            return var, self.graph.ops[op].outputs.index(tensor)
        return var, None


def _type_of(output):
    var, index = output
    return var.ty if index is None else var.ty.fields[index]


def _fresh(output, graph: FusionGraph, tensor: int):
    """The new Var of a group output: visible outside its dataflow block if the old one was."""
    var, index = output
    if index is None:
        return type(var)(var.name, var.ty)
    return relax.DataflowVar(graph.tensors[tensor].name.replace(".", "_"), _type_of(output))


def _is_call_tir(e) -> bool:
    return isinstance(e, relax.Call) and getattr(e.op, "name", "") == "relax.call_tir"


# ---- The Relax function with attribute `Primitive` of one group, which FuseTIR makes one PrimFunc.


class Primitive:
    """The Relax function with attribute `Primitive` of one group."""

    def __init__(self, outer: Rewriter, view: GroupView, outputs: list):
        self.outer, self.view, self.outputs = outer, view, outputs
        self.members = {hash(outer.op_binding[i].var) for i in view.ops}
        self.inner: dict = {}
        self.params: list = []
        self.inputs: list = []
        self.bindings: list = []

    def build(self):
        whole_outputs = {hash(var) for var, index in self.outputs if index is None}
        for i in self.view.ops:
            binding = self.outer.op_binding[i]
            value = self._new(binding.value)
            kind = relax.Var if hash(binding.var) in whole_outputs else relax.DataflowVar
            self.inner[binding.var] = kind(binding.var.name, binding.var.ty)
            self.bindings.append(relax.VarBinding(self.inner[binding.var], value))
        results = [self._result(var, index) for var, index in self.outputs]
        body = results[0] if len(results) == 1 else relax.Tuple(results)
        ty = results[0].ty if len(results) == 1 else relax.TupleType([r.ty for r in results])
        func = self._function(self.params, body, ty)
        symbols = list(relax.analysis.free_symbolic_vars(func))
        if symbols:
            shape = relax.Var("tir_vars", relax.ShapeType(symbols))
            func = self._function([*self.params, shape], body, ty)
        func = relax.utils.copy_with_new_vars(func)
        return func, self.inputs, [relax.ShapeExpr(symbols)] if symbols else []

    def _function(self, params, body, ty):
        seq = relax.SeqExpr(
            [relax.DataflowBlock(self.bindings)], self.outer.builder.normalize(body)
        )
        return relax.Function(params, seq, ty, True).with_attr("Primitive", True)

    def _result(self, var, index):
        if index is None:
            return self.inner[var]
        out = relax.Var(f"{var.name}_{index}", var.ty.fields[index])
        self.bindings.append(relax.VarBinding(out, relax.TupleGetItem(self.inner[var], index)))
        return out

    def _new(self, e):
        if isinstance(e, relax.Var) and not isinstance(e, relax.GlobalVar):
            return self._var(e)
        if isinstance(e, tvm.ir.GenericConst):
            return self._input(e, f"constant{len(self.params)}")
        if isinstance(e, relax.TupleGetItem) and self._is_inside(e.tuple_value):
            return relax.TupleGetItem(self._new(e.tuple_value), e.index)
        return rebuild(e, self._new)

    def _var(self, var):
        if isinstance(var.ty, tvm.ir.PrimType):
            return var  # a symbol: it comes in through `tir_vars`
        if var in self.inner:
            return self.inner[var]
        binding = self.outer.alias.get(hash(var))
        if binding is not None and self._is_inside(binding.value):
            value = self._new(binding.value)
            if isinstance(value, relax.Var):
                self.inner[var] = value
            else:
                self.inner[var] = relax.DataflowVar(var.name, var.ty)
                self.bindings.append(relax.VarBinding(self.inner[var], value))
            return self.inner[var]
        return self._input(var, var.name)

    def _is_inside(self, e) -> bool:
        """Whether an alias leads to a member of the group."""
        if isinstance(e, relax.TupleGetItem):
            return self._is_inside(e.tuple_value)
        if isinstance(e, relax.Var):
            if hash(e) in self.members:
                return True
            binding = self.outer.alias.get(hash(e))
            return binding is not None and self._is_inside(binding.value)
        return False

    def _input(self, e, name: str):
        source = self._source(e)
        if source not in self.inner:
            self.inner[source] = relax.Var(name, e.ty)
            self.params.append(self.inner[source])
            self.inputs.append(source)
        return self.inner[source]

    def _source(self, e):
        """The Var or constant behind plain renamings, so that one tensor is one parameter."""
        while isinstance(e, relax.Var) and hash(e) in self.outer.alias:
            value = self.outer.alias[hash(e)].value
            if not isinstance(value, (relax.Var, tvm.ir.GenericConst)):
                return e
            e = value
        return e


def rebuild(e, f):
    """An expression with `f` applied to its children; in branches and functions, to the variables
    that they take from outside.
    """
    if isinstance(e, relax.Tuple):
        return relax.Tuple([f(x) for x in e.fields])
    if isinstance(e, relax.TupleGetItem):
        return relax.TupleGetItem(f(e.tuple_value), e.index)
    if isinstance(e, relax.Call):
        return relax.Call(e.op, [f(a) for a in e.args], e.attrs, e.ty_args, e.span)
    if isinstance(e, relax.If | relax.Function):
        return with_variables(e, {var: f(var) for var in relax.analysis.free_vars(e)})
    return e


def with_variables(e: relax.Expr, values: Mapping[relax.Var, relax.Expr]) -> relax.Expr:
    """An expression with other values for variables that it takes from outside."""
    replacing = _Replacing()
    replacing.values = values
    return replacing.visit_expr(e)


@relax.expr_functor.mutator
class _Replacing(relax.PyExprMutator):
    values: Mapping[relax.Var, relax.Expr]

    def visit_var_(self, var: relax.Var) -> relax.Expr:
        return self.values.get(var, var)

    def visit_dataflow_var_(self, var: relax.DataflowVar) -> relax.Expr:
        return self.values.get(var, var)
