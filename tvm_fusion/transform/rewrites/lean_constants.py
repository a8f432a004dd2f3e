"""Constants that cost more to read than to widen or to compute.

Constant folding widens the gamma of a half-precision norm ahead, and evaluates an `arange` of class
numbers: every row would read them. Of the shifts that take packed words apart a kernel knows only
what it computes itself. A mask that hides later keys says so only where it is computed of indices.

    scale(x, const(float32 [4096], exact in float16))  ->  scale(x, astype(const(float16 [4096])))
    equal(label, const([0, 1, 2, ...]))                ->  equal(label, call_tir(arange, ()))
    add(scores, const(0 where j <= i, else -inf))      ->  add(scores, call_tir(band, ()))

What is added is fused where the constant is read. Looked at are constants with one axis longer than
1 (row and column vectors, not the operands of matrix products), and matrices that are a `Band`.
"""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import tvm
from tvm import relax, te, tirx
from tvm.ir import Expr
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..lower.bands import banded

LEAST_ELEMENTS = 64  # below, a cast costs more than it saves
HALVES = (np.float16, ml_dtypes.bfloat16)


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.LeanConstants")
class LeanConstants:
    """A module pass over legalized modules; the operators it adds are to be legalized."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        rewriter = _Rewriter(mod)
        for gvar, func in mod.functions_items():
            if isinstance(func, relax.Function):
                rewriter.builder_.update_func(gvar, rewriter.visit_expr(func))
        return rewriter.builder_.finalize()


@mutator
class _Rewriter(PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if call.op != tvm.ir.Op.get("relax.call_tir"):
            return call
        function, tensors, *rest = call.args
        fields = [self._lean(field) for field in tensors.fields]
        if all(new.same_as(old) for new, old in zip(fields, tensors.fields, strict=True)):
            return call
        args = [function, relax.Tuple(fields), *rest]
        return relax.Call(call.op, args, call.attrs, call.ty_args, call.span)

    def _lean(self, tensor: relax.Expr) -> relax.Expr:
        value = tensor.value if isinstance(tensor, tvm.ir.Constant) else None
        if not isinstance(value, tvm.runtime.Tensor):
            return tensor
        array = value.numpy()
        if array.size != max(array.shape, default=1):
            band = banded(array)
            return tensor if band is None else self._emitted(array, band.element, "band")
        if array.size < 2:
            return tensor
        steps = progression(array)
        if steps is not None:
            return self._computed(array, *steps)
        half = exact_half(array) if array.size >= LEAST_ELEMENTS else None
        if half is None:
            return tensor
        dtype = "float16" if half.dtype == np.float16 else "bfloat16"
        return self.builder_.emit(relax.op.astype(relax.const(half, dtype), "float32"))

    def _computed(self, array: np.ndarray, start: int, step: int) -> relax.Expr:
        """The numbers of `array`, by the place along its one long axis."""
        axis, dtype = int(np.argmax(array.shape)), str(array.dtype)

        def at(*index: tirx.Var) -> Expr:
            return tirx.const(start, dtype) + index[axis].astype(dtype) * tirx.const(step, dtype)

        return self._emitted(array, at, "arange")

    def _emitted(self, array: np.ndarray, at: Callable[..., Expr], name: str) -> relax.Expr:
        """A tensor of the array's shape with the element `at(*index)`."""

        def elements() -> te.Tensor:
            return te.compute(array.shape, at, name=name)

        return self.builder_.emit_te(elements, primfunc_name_hint=name)


def progression(array: np.ndarray) -> tuple[int, int] | None:
    """(first, step) of integers that are evenly spaced, in memory order; else None.

    Nothing that is computed from them leaves the dtype.
    """
    if array.dtype.kind not in "iu":
        return None
    numbers = array.reshape(-1).astype(np.int64)
    step = int(numbers[1] - numbers[0])
    limit = np.iinfo(array.dtype).max
    if array.dtype.kind == "u" and (step < 0 or numbers[0] < 0):
        return None
    even = step != 0 and bool(np.all(np.diff(numbers) == step))
    if not even or abs(step) * (numbers.size - 1) > limit:
        return None
    return int(numbers[0]), step


def exact_half(array: np.ndarray) -> np.ndarray | None:
    """float32 numbers in float16 or bfloat16, if that changes no value; else None."""
    if array.dtype != np.float32:
        return None
    for kind in HALVES:
        with np.errstate(over="ignore"):
            half = array.astype(kind)
        if np.array_equal(half.astype(np.float32), array):
            return half
    return None
