"""The functions of a module one by one, as the stages want them; and back.

Every Relax function is looked at by itself, private and nested ones too, and so are the branches of
an `If`. Operators on several virtual devices are looked at device by device. Functions that belong
to others (`Composite`, `Codegen`, `Primitive`) stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax
from tvm.ir import Call, GlobalVar
from tvm.relax.expr_functor import PyExprMutator, mutator

from ...errors import InputError, TvmFusionError
from ..apply.materialize import with_variables
from .devices import Part, device_of, parts_of
from .function_apart import (
    ENTRY,
    FunctionApart,
    has_dataflow,
    own_functions,
    put_back,
    without_unused,
)
from .functions import expressions_of, has_branches, with_functions

Change = Callable[[str, tvm.IRModule, Part], tvm.IRModule | None]
"""Given a piece's name, a module whose `main` it is, and its device, the module changed; or None
where it stays."""


@dataclass(frozen=True, slots=True)
class EachFunction:
    """The pieces of a module: what of a function is planned together.

    Attributes
    ----------
    stage : str
        The pass that looks at it; errors name it.
    before : IRModule
        The module.
    pieces : dict of str to (GlobalVar, Part)
        By name: that of the function, of a branch after its function, and `name@cuda:0` where
        results of one function lie on several virtual devices.
    """

    stage: str
    before: tvm.IRModule
    pieces: dict[str, tuple[tvm.ir.GlobalVar, Part]]
    _lifted: tvm.IRModule
    _branches: tuple[str, ...]

    @classmethod
    def of(cls, stage: str, mod: tvm.IRModule, target: Any) -> EachFunction:
        """Take a module apart for a pass; `target` as for `Fuse`.

        Raises
        ------
        TargetError
            See `devices.device_of`.
        """
        if not own_functions(mod):
            return cls(stage, mod, {}, mod, ())
        with errors_named(mod, stage):
            device = device_of(target, mod)
        lifted, branches = lift_branches(_without_nesting(mod))
        pieces = {}
        for gvar in own_functions(lifted):
            for part in parts_of(lifted[gvar], device):
                place = "" if part.alone else f"@{part.label}"
                pieces[f"{gvar.name_hint}{place}"] = gvar, part
        return cls(stage, mod, pieces, lifted, branches)

    def changed(self, change: Change) -> tvm.IRModule:
        """The module with each piece changed; `before` itself where none is."""
        mod, found = self._lifted, False
        for name, (gvar, part) in self.pieces.items():
            apart = FunctionApart.of(mod, gvar)
            with errors_named(self.before, f"{self.stage}, function {name}"):
                seen = HiddenCalls.of(apart.mod, ENTRY, lambda ty, part=part: not part.holds(ty))
                new = change(name, seen.mod, part)
                if new is None:
                    continue
                new = seen.shown(new, ENTRY)
            if not has_dataflow(mod[gvar]):  # passes that want none may come next
                new = relax.transform.ToNonDataflow()(new)
            mod, found = put_back(mod, apart, new, part.target if part.place else None), True
        if not found:
            return self.before
        return without_unused(inline_branches(mod, self._branches), self.before)


@contextmanager
def errors_named(mod: tvm.IRModule, where: str) -> Iterator[None]:
    """Errors within say where they are from; those of a module that is not well formed say that it
    is not. (Notes of an error are lost where it leaves a pass.)
    """
    try:
        yield
    except InputError as error:
        raise type(error)(f"{where}: {error}") from error
    except TvmFusionError:
        raise
    except Exception as error:
        try:
            relax.analysis.well_formed(mod)
        except Exception as why:
            reason = str(why).strip().splitlines()[-1]
            raise InputError(
                f"{where}: the module is not well formed: {reason}. "
                "Look for the pass that made it so with relax.analysis.well_formed"
            ) from error
        raise


def _without_nesting(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with functions inside of functions as functions of their own."""
    bodies = (mod[gvar].body for gvar in own_functions(mod))
    nested = any(expressions_of(body, relax.Function) for body in bodies)
    return relax.transform.LambdaLift()(mod) if nested else mod


# ---- Branches as functions of their own, so that what they compute is planned, too; and back.
#
# Before::
#
#     if c:
#         d = R.multiply(b, b)
#         r = R.tanh(d)
#     else:
#         r = b
#
# Lifted::
#
#     if c:
#         r = cls.main_branch(b)
#     else:
#         r = b
#
# A branch that calls nothing stays. Symbols that no argument's shape gives come as a shape.

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


# ---- Calls that one planning of a function is not to touch, out of its sight; and back.
#
# Before::
#
#     d: R.Tensor((4, 4), "float32", "cuda:0") = R.matmul(c, w)
#
# Hidden::
#
#     d: R.Tensor((4, 4), "float32", "cuda:0") = R.call_pure_packed("tvm_fusion.hidden0", c, w)
#
# They stay what they were: no kernel holds them, and they are neither opened nor legalized. What
# they read and write keeps its place in the order of the function.

_PREFIX = "tvm_fusion.hidden"
_PACKED = "relax.call_pure_packed"


@dataclass(slots=True)
class HiddenCalls:
    """A module with calls hidden.

    Attributes
    ----------
    mod : IRModule
    calls : list of Call
        What the stand-ins were, by number.
    """

    mod: tvm.IRModule
    calls: list[Call] = field(default_factory=list)

    @classmethod
    def of(cls, mod: tvm.IRModule, name: str, hides: Callable[[Any], bool]) -> HiddenCalls:
        """Hide the calls in a function whose result's type `hides` holds of."""
        hidden = cls(mod)
        hiding = _Hiding(mod)
        hiding.hides, hiding.calls = hides, hidden.calls
        gvar = mod.get_global_var(name)
        func = hiding.visit_expr(mod[gvar])
        if hidden.calls:
            hiding.builder_.update_func(gvar, func)
            hidden.mod = hiding.builder_.get()
        return hidden

    def shown(self, mod: tvm.IRModule, name: str) -> tvm.IRModule:
        """A module made of `self.mod`, with the calls back."""
        if not self.calls:
            return mod
        showing = _Showing(mod)
        showing.calls = self.calls
        gvar = mod.get_global_var(name)
        showing.builder_.update_func(gvar, showing.visit_expr(mod[gvar]))
        return showing.builder_.get()


@mutator
class _Hiding(PyExprMutator):
    hides: Callable[[Any], bool]
    calls: list[Call]

    def visit_call_(self, call: Call) -> relax.Expr:
        call = super().visit_call_(call)
        if not isinstance(call.op, tvm.ir.Op) or not self.hides(call.ty):
            return call
        stand_in = relax.ExternFunc(f"{_PREFIX}{len(self.calls)}")
        self.calls.append(call)
        packed = tvm.ir.Op.get(_PACKED)
        return Call(packed, [stand_in, *call.args], None, [call.ty], call.span)


@mutator
class _Showing(PyExprMutator):
    calls: list[Call]

    def visit_call_(self, call: Call) -> relax.Expr:
        call = super().visit_call_(call)
        number = _number_of(call)
        if number is None:
            return call
        old = self.calls[number]
        return Call(old.op, list(call.args)[1:], old.attrs, old.ty_args, old.span)


def _number_of(call: Call) -> int | None:
    """The number of a stand-in; None for other calls."""
    if getattr(call.op, "name", "") != _PACKED:
        return None
    symbol = str(getattr(call.args[0], "global_symbol", ""))
    return int(symbol.removeprefix(_PREFIX)) if symbol.startswith(_PREFIX) else None
