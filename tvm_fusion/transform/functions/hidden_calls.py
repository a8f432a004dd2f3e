"""Calls that one planning of a function is not to touch, out of its sight; and back.

Before::

    d: R.Tensor((4, 4), "float32", "cuda:0") = R.matmul(c, w)

Hidden::

    d: R.Tensor((4, 4), "float32", "cuda:0") = R.call_pure_packed("tvm_fusion.hidden0", c, w)

They stay what they were: no kernel holds them, and they are neither opened nor legalized. What they
read and write keeps its place in the order of the function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax
from tvm.ir import Call
from tvm.relax.expr_functor import PyExprMutator, mutator

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
