"""Vectors of weights that are exact in half precision are kept, and read, in half precision.

Constant folding widens the gamma of a half-precision norm ahead, and every row would read twice the
bytes of it.

    lv = call_tir(scale, (x, const(float32 [4096])))
    ->  w = astype(const(float16 [4096]), "float32")    lv = call_tir(scale, (x, w))

The cast is then fused where the vector is read. Only constants with one axis longer than 1 are
looked at: row and column vectors, not the operands of matrix products.
"""

import ml_dtypes
import numpy as np
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

LEAST_ELEMENTS = 64  # below, a cast costs more than it saves
HALVES = (np.float16, ml_dtypes.bfloat16)


@tvm.transform.module_pass(opt_level=0, name="NarrowConstants")
class NarrowConstants:
    """A module pass over legalized modules; the casts it adds are to be legalized."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        narrower = _Narrower(mod)
        for gvar, func in mod.functions_items():
            if isinstance(func, relax.Function):
                narrower.builder_.update_func(gvar, narrower.visit_expr(func))
        return narrower.builder_.finalize()


@mutator
class _Narrower(PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if call.op != tvm.ir.Op.get("relax.call_tir"):
            return call
        function, tensors, *rest = call.args
        fields = [self._narrowed(field) for field in tensors.fields]
        if all(new.same_as(old) for new, old in zip(fields, tensors.fields, strict=True)):
            return call
        args = [function, relax.Tuple(fields), *rest]
        return relax.Call(call.op, args, call.attrs, call.ty_args, call.span)

    def _narrowed(self, tensor: relax.Expr) -> relax.Expr:
        value = tensor.value if isinstance(tensor, tvm.ir.Constant) else None
        half = exact_half(value.numpy()) if isinstance(value, tvm.runtime.Tensor) else None
        if half is None:
            return tensor
        dtype = "float16" if half.dtype == np.float16 else "bfloat16"
        return self.builder_.emit(relax.op.astype(relax.const(half, dtype), "float32"))


def exact_half(array: np.ndarray) -> np.ndarray | None:
    """A float32 vector in float16 or bfloat16, if that changes no value; else None."""
    longest = max(array.shape, default=1)
    if array.dtype != np.float32 or array.size != longest or array.size < LEAST_ELEMENTS:
        return None
    for kind in HALVES:
        with np.errstate(over="ignore"):
            half = array.astype(kind)
        if np.array_equal(half.astype(np.float32), array):
            return half
    return None
