"""Branches as functions of their own, so that what they compute is planned, too; and back.

Before::

    if c:
        d = R.multiply(b, b)
        r = R.tanh(d)
    else:
        r = b

Lifted::

    if c:
        r = cls.main_branch(b)
    else:
        r = b

A branch that calls nothing stays. Symbols that no argument's shape gives come as a shape.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import tvm
from tvm import relax
from tvm.ir import Call, GlobalVar
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..apply.primitive import with_variables
from .function_apart import own_functions
from .functions import has_branches, with_functions

_NUMBER_ATTR = "tvm_fusion.branch"


def lift_branches(mod: tvm.IRModule) -> tuple[tvm.IRModule, tuple[str, ...]]:
    """The module with each branch that calls something as a private function, and their names."""
    lifter = _Lifter(mod)
    lifter.lifted = []
    for gvar in own_functions(mod):
        lifter.name = f"{gvar.name_hint}_branch"
        if has_branches(mod[gvar]):
            lifter.builder_.update_func(gvar, lifter.visit_expr(mod[gvar]))
    return (lifter.builder_.get() if lifter.lifted else mod), tuple(lifter.lifted)


def inline_branches(mod: tvm.IRModule, lifted: Collection[str]) -> tvm.IRModule:
    """The module with functions of `lift_branches` in their places again.

    `relax.Function.inline_functions` gives each its own symbols, unknown to the function around it.
    """
    if not lifted:
        return mod
    inliner = _Inliner()
    inliner.branches = {name: mod[name] for name in lifted}
    functions = {}
    for gvar, func in mod.functions_items():
        if gvar.name_hint in inliner.branches:
            continue
        if isinstance(func, relax.Function) and has_branches(func):
            func = inliner.visit_expr(func)
        functions[gvar] = func
    return with_functions(mod, functions)


@mutator
class _Lifter(PyExprMutator):
    name: str
    lifted: list[str]

    def visit_if_(self, op: relax.If) -> relax.Expr:
        parts = [self._lift(self.visit_expr(b)) for b in (op.true_branch, op.false_branch)]
        return relax.If(self.visit_expr(op.cond), *parts)

    def _lift(self, branch: relax.SeqExpr) -> relax.SeqExpr:
        bindings = [b for block in branch.blocks for b in block.bindings]
        if not any(isinstance(getattr(b, "value", None), Call) for b in bindings):
            return branch
        params = list(relax.analysis.free_vars(branch))
        impure = relax.Function(params, branch, branch.ty, is_pure=False)
        pure = not relax.analysis.contains_impure_call(impure)
        func = relax.Function(params, branch, branch.ty, pure)
        arguments: list[relax.Expr] = list(params)
        symbols = relax.analysis.free_symbolic_vars(func)
        if symbols:
            shape = relax.Var("symbols", relax.ShapeType(list(symbols)))
            func = relax.Function([*params, shape], branch, branch.ty, pure)
            arguments.append(relax.ShapeExpr(list(symbols)))
        # The builder makes one function of equal ones, and each has variables of its own.
        func = func.with_attr(_NUMBER_ATTR, len(self.lifted))
        gvar = self.builder_.add_func(func, self.name)
        self.lifted.append(gvar.name_hint)
        result = self.builder_.normalize(relax.Call(gvar, arguments))
        var = relax.Var("result", branch.ty)
        return relax.SeqExpr([relax.BindingBlock([relax.VarBinding(var, result)])], var)


@mutator
class _Inliner(PyExprMutator):
    branches: Mapping[str, relax.Function]

    def visit_seq_expr_(self, op: relax.SeqExpr) -> relax.Expr:
        first = op.blocks[0].bindings[0] if op.blocks else None
        call = getattr(first, "value", None)
        if isinstance(call, Call) and isinstance(call.op, GlobalVar):
            func = self.branches.get(call.op.name_hint)
            if func is not None:
                values = dict(zip(func.params, map(self.visit_expr, call.args), strict=True))
                return self.visit_expr(with_variables(func.body, values))
        return super().visit_seq_expr_(op)
