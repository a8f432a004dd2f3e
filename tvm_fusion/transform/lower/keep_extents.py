"""KeepExtents: an index of a part of a tensor is looked up among those of the part, on a CPU.

    y = x[1:3]                      y = x[1:3]
    z = take(y, ids, axis=0)        i = take(R.const([0, 1]), ids, axis=0)
                                    z = take(y, i, axis=0)

One kernel of both reads x[ids[n] + 1], of which it is checked that it is an element of x
(`runtime.build.guards`): an index that is beyond y may be. It is none of the constant. Padding,
repetition and broadcasting make such parts, too, also behind reshapes, concatenation and what
computes element by element.

Does not handle: axes of symbolic extent; `gather_nd`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import Call, Expr
from tvm.relax.expr_functor import PyExprMutator, mutator

from ...ir.weights import numbers
from ..functions.functions import (
    expressions_of,
    operator_name,
    rewrite_functions,
    where_changed,
)
from ..rewrites.factors import is_one

_PARTS = {
    f"relax.{name}"
    for name in ("strided_slice", "dynamic_strided_slice", "nn.pad", "repeat", "split", "tile")
}
_TAKES = ("relax.take", "relax.gather_elements")
_MOVES = {
    f"relax.{name}"
    for name in ("reshape", "permute_dims", "squeeze", "expand_dims", "flip", "concat", "stack")
}
_PRODUCTS = ("relax.matmul", "relax.nn.conv1d", "relax.nn.conv2d", "relax.nn.conv3d")


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.KeepExtents")
class KeepExtents:
    """A module pass; idempotent. A module without such an index is returned as it is."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        rewriter = _Rewriter(mod)
        keep = where_changed(rewriter)

        def rewrite(func: relax.Function) -> relax.Function | None:
            return keep(func) if _takes(func) else None

        return rewrite_functions(mod, rewriter.builder_, rewrite, opaque=True)


@mutator
class _Rewriter(PyExprMutator):
    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self.changed = False
        self._whole: set[Expr] = set()  # which no part is among the origins of

    def visit_call_(self, call: Call) -> Expr:
        call = super().visit_call_(call)
        if operator_name(call) not in _TAKES:
            return call
        x, index = call.args
        tensors = all(isinstance(arg.ty, relax.TensorType) for arg in (x, index))
        if not tensors or x.ty.ndim < 1 or call.attrs.axis is None or self._is_looked_up(index):
            return call
        extent = x.ty.shape[int(call.attrs.axis) % x.ty.ndim] if x.ty.shape else None
        clips = operator_name(call) == "relax.take" and str(call.attrs.mode) != "fast"
        if clips or not isinstance(extent, tirx.IntImm) or not self._is_part(x):
            return call
        self.changed = True
        places = relax.const(np.arange(int(extent)), "int64")
        found = self.builder_.emit(relax.op.take(places, index, axis=0))
        return Call(call.op, [x, found], call.attrs, call.ty_args)

    def _is_looked_up(self, index: Expr) -> bool:
        value = self._value(index)
        places = value.args[0] if operator_name(value) == "relax.take" else None
        if not isinstance(places, tvm.ir.GenericConst) or str(places.ty.dtype) != "int64":
            return False
        known = numbers(places)
        return known.ndim == 1 and np.array_equal(known, np.arange(known.size))

    def _is_part(self, x: Expr) -> bool:
        """Whether a kernel may read elements beyond this tensor in its place."""
        waiting, seen = [x], set()
        while waiting:
            tensor = waiting.pop()
            if tensor in seen or tensor in self._whole:
                continue
            seen.add(tensor)
            origins = self._origins(tensor)
            if origins is None:
                return True
            waiting.extend(origins)
        self._whole |= seen
        return False

    def _origins(self, x: Expr) -> Sequence[Expr] | None:
        """The tensors whose elements a kernel may read in place of one; None where it is a part."""
        value = self._value(x)
        if isinstance(value, relax.TupleGetItem):
            return [value.tuple_value]
        if isinstance(value, relax.Tuple):
            return value.fields
        name = operator_name(value)
        if name in _PARTS:
            return None
        if not name or name in _PRODUCTS:
            return ()
        kinds = (relax.TensorType, relax.TupleType)
        operands = [arg for arg in value.args if isinstance(arg.ty, kinds)]
        # A reshape may have merged the axis that was repeated, so that any of them counts.
        if name == "relax.broadcast_to" and not _same_shape(operands[0], value):
            return None
        if name not in _TAKES and name not in _MOVES:
            operands = [arg for arg in operands if _broadcasts(arg, value)]
        return operands

    def _value(self, expr: Expr) -> Expr | None:
        return self.lookup_binding(expr) if isinstance(expr, relax.Var) else expr


def _takes(func: relax.Function) -> bool:
    return any(operator_name(call) in _TAKES for call in expressions_of(func, Call))


def _same_shape(a: Expr, b: Expr) -> bool:
    shapes = [getattr(expr.ty, "shape", None) for expr in (a, b)]
    return all(shapes) and tvm_ffi.structural_equal(*map(list, shapes))


def _broadcasts(operand: Expr, result: Expr) -> bool:
    """Whether an operand may be read element by element, with axes of extent 1 repeated."""
    shapes = [getattr(expr.ty, "shape", None) for expr in (operand, result)]
    if not all(shapes) or len(shapes[0]) > len(shapes[1]):
        return False
    pairs = zip(reversed(list(shapes[0])), reversed(list(shapes[1])), strict=False)
    return all(is_one(a) or tvm_ffi.structural_equal(a, b) for a, b in pairs)
