"""Rewrite arithmetic, comparisons and reductions of booleans into forms that TVM can build.

LLVM code generation of TVM 0.27 stops at an addition of booleans and emits an invalid comparison
for `equal` of booleans; reductions find no smallest boolean. Models exported from PyTorch hold all
of these in the code that makes attention masks.

Before:
    lv: R.Tensor((n,), "bool") = R.add(a, b)
    lv1: R.Tensor((n,), "bool") = R.equal(a, b)
    lv2: R.Tensor((1,), "bool") = R.max(a, axis=[0], keepdims=True)

After:
    lv: R.Tensor((n,), "bool") = R.logical_or(a, b)
    lv_: R.Tensor((n,), "bool") = R.logical_xor(a, b)
    lv1: R.Tensor((n,), "bool") = R.logical_not(lv_)
    lv2_: R.Tensor((1,), "int8") = R.max(R.astype(a, "int8"), axis=[0], keepdims=True)
    lv2: R.Tensor((1,), "bool") = R.astype(lv2_, "bool")

Types stay as they were, so a cumulative sum that is typed bool says "any so far". Does not handle:
subtraction, division and powers of booleans (no framework defines them), and call_tir.
"""

from collections.abc import Callable

import tvm
from tvm import relax
from tvm.ir import IRModule, Op
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..functions.functions import rewrite_functions, where_changed

_or, _and = relax.op.logical_or, relax.op.logical_and
_xor, _not = relax.op.logical_xor, relax.op.logical_not

# Boolean algebra, false < true: a + b and max are or, a * b and min are and.
BOOLEAN_FORM: dict[str, Callable[[relax.Expr, relax.Expr], relax.Expr]] = {
    "relax.add": _or,
    "relax.maximum": _or,
    "relax.multiply": _and,
    "relax.minimum": _and,
    "relax.not_equal": _xor,
    "relax.equal": lambda a, b: _not(_xor(a, b)),
    "relax.less": lambda a, b: _and(_not(a), b),
    "relax.less_equal": lambda a, b: _or(_not(a), b),
    "relax.greater": lambda a, b: _and(a, _not(b)),
    "relax.greater_equal": lambda a, b: _or(a, _not(b)),
}

# Computed on integers wide enough for the operator, then narrowed to the type it had.
INTEGER_FORM: dict[str, str] = {
    "relax.max": "int8",
    "relax.min": "int8",
    "relax.argmax": "int8",
    "relax.argmin": "int8",
    "relax.cumsum": "int32",
    "relax.cumprod": "int32",
}


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.FixBoolArithmetic")
class FixBoolArithmetic:
    """A module pass: arithmetic on booleans becomes logic, or is done on integers."""

    def transform_module(self, mod: IRModule, _ctx: tvm.transform.PassContext) -> IRModule:
        """Rewrite the Relax functions that hold such an operator; leave the others as they are."""
        rewriter = _Rewriter(mod)
        rewrite = where_changed(rewriter)
        return rewrite_functions(mod, rewriter.builder_, rewrite, opaque=True)


@mutator
class _Rewriter(PyExprMutator):
    def __init__(self, mod: IRModule) -> None:
        super().__init__(mod)
        self.changed = False

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if not isinstance(call.op, Op) or not call.args or not all(map(_is_bool, call.args)):
            return call
        if call.op.name in BOOLEAN_FORM:
            self.changed = True
            return BOOLEAN_FORM[call.op.name](*call.args)
        if call.op.name in INTEGER_FORM and not _has_dtype(call.attrs):
            self.changed = True
            return self._on_integers(call, INTEGER_FORM[call.op.name])
        return call

    def _on_integers(self, call: relax.Call, dtype: str) -> relax.Expr:
        """The same operator on widened operands, narrowed again where the result was boolean."""
        args = [self.builder_.emit(relax.op.astype(arg, dtype)) for arg in call.args]
        result = self.builder_.emit(relax.Call(call.op, args, call.attrs))
        return relax.op.astype(result, "bool") if _is_bool(call) else result


def _is_bool(expr: relax.Expr) -> bool:
    return isinstance(expr.ty, relax.TensorType) and expr.ty.dtype == "bool"


def _has_dtype(attrs: tvm.ir.Attrs) -> bool:
    """Whether the operator was told to accumulate in a type of its own (cumsum, cumprod)."""
    return getattr(attrs, "dtype", None) is not None
