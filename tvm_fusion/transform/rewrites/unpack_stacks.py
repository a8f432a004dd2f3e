"""Parts of packed integers that are stacked, as one shift by a vector.

    low = bitwise_and(q, 15)
    high = right_shift(q, 4)                                 # q is uint8 [N, K / 2]
    both = concat((expand_dims(low, 2), expand_dims(high, 2)), axis=2)

becomes

    both = bitwise_and(right_shift(expand_dims(q, 2), [0, 4]), 15)

which a kernel computes for each element from its own word, without a condition on where it stands.
Parts that stand one behind the other are stacked in front of their axis, and reshaped.

Does not handle: signed integers that are shifted up first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call
from tvm.relax import Expr, op
from tvm.relax.expr_functor import PyExprMutator, mutator

from ...ir.weights import numbers
from ..decompose.opening import dtype_of, shape_of
from .factors import is_call, is_constant


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """``(source >> shift) & (2^bits - 1)``."""

    source: Expr
    shift: int
    bits: int


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.UnpackStacks")
class UnpackStacks:
    """A module pass over opened modules; one without such stacks is returned as it is."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        rewriter = _Rewriter(mod)
        for gvar, func in mod.functions_items():
            if isinstance(func, relax.Function):
                rewriter.builder_.update_func(gvar, rewriter.visit_expr(func))
        if not rewriter.found:
            return mod
        return relax.transform.DeadCodeElimination()(rewriter.builder_.finalize())


@mutator
class _Rewriter(PyExprMutator):
    found = False  # whether anything was rewritten

    def visit_call_(self, call: Call) -> Expr:
        call = super().visit_call_(call)
        if not is_call(call, "concat", "stack") or not isinstance(call.args[0], relax.Tuple):
            return call
        fields = call.args[0].fields
        parts = [self._part(field, call) for field in fields]
        if is_call(call, "concat") and None in parts:
            parts = [self._bits(field) for field in fields]
        if len(parts) < 2 or any(part is None for part in parts):
            return call
        first = parts[0]
        alike = all(p.source.same_as(first.source) and p.bits == first.bits for p in parts)
        if not alike or [p.shift for p in parts] != [i * first.bits for i in range(len(parts))]:
            return call
        self.found = True
        dtype, axis = dtype_of(first.source), self._axis(call)
        shifts = np.arange(len(parts)) * first.bits
        shape = [len(parts), *[1] * (len(shape_of(first.source)) - axis)]
        emit = self.builder_.emit
        source = emit(op.expand_dims(first.source, axis))
        moved = emit(op.right_shift(source, relax.const(shifts.reshape(shape).astype(dtype))))
        both = op.bitwise_and(moved, relax.const((1 << first.bits) - 1, dtype))
        if len(shape_of(call)) > len(shape_of(first.source)):
            return both
        return op.reshape(emit(both), shape_of(call))

    def _axis(self, call: Call) -> int:
        """The axis of the result along which the parts lie."""
        axis = 0 if call.attrs.axis is None else int(call.attrs.axis)
        return axis % len(shape_of(call))

    def _part(self, expr: Expr, call: Call) -> Part | None:
        """A stacked tensor as bits of another; in a `concat`, it has been given an axis for it."""
        if is_call(call, "concat"):
            value = self._value(expr)
            if not is_call(value, "expand_dims", "reshape"):
                return None
            axis, shape = self._axis(call), list(shape_of(expr))
            source = value.args[0]
            if int(shape[axis]) != 1 or list(shape_of(source)) != shape[:axis] + shape[axis + 1 :]:
                return None
            expr = source
        return self._bits(expr)

    def _bits(self, expr: Expr) -> Part | None:
        value, mask, shift = self._value(expr), None, 0
        if is_call(value, "bitwise_and"):
            mask, expr = _number(value.args[1]), value.args[0]
            if mask is None or mask <= 0 or mask & (mask + 1):
                return None
            value = self._value(expr)
        if is_call(value, "right_shift"):
            shift, expr = _number(value.args[1]), value.args[0]
        dtype = dtype_of(expr)
        if shift is None or shift < 0 or not dtype.startswith(("uint", "int")):
            return None
        left = tvm.DataType(dtype).bits - shift
        if mask is None:
            return Part(expr, shift, left) if shift and dtype.startswith("uint") else None
        bits = mask.bit_length()
        return Part(expr, shift, bits) if bits <= left else None

    def _value(self, expr: Expr) -> Expr | None:
        return self.lookup_binding(expr) if isinstance(expr, relax.Var) else expr


def _number(expr: Expr) -> int | None:
    """The one integer of a constant."""
    if not is_constant(expr):
        return None
    array = expr.value
    return int(numbers(expr).reshape(-1)[0]) if array.numel() == 1 else None
