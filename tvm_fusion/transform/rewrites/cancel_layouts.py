"""CancelLayouts: permutations and reshapes that undo each other, taken out.

    permute_dims(reshape(permute_dims(x, ...), ...), ...)  ->  x, a reshape of x, or one permutation
    permute_dims(x: [B, 1, S, D], (0, 2, 1, 3))            ->  reshape(x): nothing moves
    permute_dims(relu(permute_dims(x, NHWC) * s), NCHW)    ->  relu(x * reshape(s, [C, 1, 1]))

Chains of permutations, reshapes and copies are read as one `Relabeling` and written in the fewest
operators. Connected pointwise operators of one shape are computed in that order of axes in which
the fewest permutations are left around them: operands that are broadcast are reshaped, constants
permuted at compile time. A function never has more permutations than before, and without something
to take out stays as it is. One permutation that is left is for the planner: kernels absorb it in
their addressing.

Does not handle: permutations that only a reduction, product, slice or concatenation separates;
pointwise operators of which a part would rather have another order than the rest.
"""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax import Expr, Var
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..functions.functions import is_opaque
from .factors import is_constant
from .layout_turns import Source, Turn, Turns, operand_key
from .readers import Parts

MOST_ROUNDS = 100  # each takes out a permutation or shortens a chain


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.CancelLayouts")
class CancelLayouts:
    """See the module docstring. Runs before LegalizeOps; a module with nothing to take out is
    returned as it is.
    """

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        for _ in range(MOST_ROUNDS):
            found = {gvar: _cancelled(mod, func) for gvar, func in mod.functions_items()}
            changed = {gvar: func for gvar, func in found.items() if func is not None}
            if not changed:
                break
            mod = mod.clone()
            for gvar, func in changed.items():
                mod.update_func(gvar, func)
            mod = relax.transform.CanonicalizeBindings()(mod)  # what became another's name
        return mod


def _cancelled(mod: tvm.IRModule, func: tvm.ir.BaseFunc) -> relax.Function | None:
    """The function with a part of what can be taken out gone, or None."""
    if not isinstance(func, relax.Function) or is_opaque(func):
        return None
    if not isinstance(func.body, relax.SeqExpr):
        return None
    survey = Turns(func)
    shorter = survey.shorter()
    turns = [] if shorter else survey.turns()
    return _Rewriter(mod).rewritten(func, shorter, turns) if shorter or turns else None


@mutator
class _Rewriter(PyExprMutator):
    """Replaces the bindings of layout operators, and of pointwise ones that are turned."""

    def rewritten(
        self, func: relax.Function, shorter: dict[Var, Source], turns: list[Turn]
    ) -> relax.Function:
        self.parts = Parts(self.builder_, func)
        self.sources = dict(shorter)
        self.turns: dict[Var, Turn] = {}
        self.turned: dict[Var, Var] = {}
        self.made: dict[tuple, Expr] = {}
        for turn in turns:
            self.sources |= turn.sinks
            self.turns |= dict.fromkeys(turn.members, turn)
        found = self.parts.tagged(self.visit_expr(func))
        return relax.analysis.remove_all_unused(found)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        var = binding.var
        if var in self.sources:
            source = self.sources[var]
            base = self.turned[source.base] if source.turned else self.visit_expr(source.base)
            value = self.parts.relabeled(base, source.relabeling, var.name)
            self.parts.finish(self.visit_var_def(var), value)
        elif var in self.turns:
            self._turn(var, binding.value, self.turns[var])
        else:
            super().visit_var_binding_(binding)

    def _turn(self, var: Var, call: relax.Call, turn: Turn) -> None:
        args = [self._operand(arg, turn, var.name) for arg in call.args]
        call = relax.Call(call.op, args, call.attrs, call.ty_args, call.span)
        if var not in turn.kept:
            call = self.builder_.normalize(call)
            self.turned[var] = type(var)(var.name, call.ty)
            self.parts.finish(self.turned[var], call)
            return
        self.turned[var] = self.parts.bind(var.name, "turned", call)
        value = self.parts.relabeled(self.turned[var], turn.order.inverse(), var.name)
        self.parts.finish(self.visit_var_def(var), value)

    def _operand(self, arg: Expr, turn: Turn, name: str) -> Expr:
        if isinstance(arg, Var) and self.turns.get(arg) is turn:
            return self.turned[arg]
        key = operand_key(arg)
        if key not in turn.operands:
            return self.visit_expr(arg)
        if (id(turn), key) not in self.made:
            source = turn.operands[key]
            base = self.visit_expr(source.base)
            value = self.parts.relabeled(base, source.relabeling, name)
            if not isinstance(value, Var) and not is_constant(value):
                value = self.parts.bind(name, "operand", value)
            self.made[id(turn), key] = value
        return self.made[id(turn), key]
