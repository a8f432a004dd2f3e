"""The Relax function with attribute `Primitive` of one group, which FuseTIR makes one PrimFunc."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import tvm
from tvm import relax

from ...plan.group_view import GroupView

if TYPE_CHECKING:
    from .materialize import Rewriter


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
