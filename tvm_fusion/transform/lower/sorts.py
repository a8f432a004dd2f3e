"""Medians on a GPU, opened into sorts; and sorts of narrow types on a CPU, done in wider ones.

TVM's runtime takes the two bytes of a bfloat16 for the four of a float32, reads and writes beyond
the tensors, and orders the wrong numbers; it refuses integers of 8 bits.

    Before                                          After
    lv: R.Tensor((n,), "bfloat16") = R.sort(x)      lv_: R.Tensor((n,), "float32") = R.astype(x)
                                                    lv1_: R.Tensor((n,), "float32") = R.sort(lv_)
                                                    lv: R.Tensor((n,), "bfloat16") = R.astype(lv1_)

Every bfloat16 is a float32, and every int8 an int32, so order, ties and values stay. Does not
handle: sorts inside of vision operators.
"""

import math

import tvm
from tvm import relax
from tvm.ir import IRModule, Op
from tvm.relax import op
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..functions.functions import rewrite_functions, static_shape, where_changed

# Medians on a GPU, opened into the sort that they are: TVM's own legalization calls a sort of the
# host, which no kernel can.
#
#     Before                          After
#     R.median(x, axis=[1])           order = R.argsort(x, axis=1)
#                                     at = R.strided_slice(order, axes=[1], [(n - 1) // 2], [...])
#                                     (R.squeeze(R.gather_elements(x, at, 1), 1), R.squeeze(at, 1))
#
# Does not handle: extents that are symbolic, or medians over several axes or none in a list.


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.OpenMedians")
class OpenMedians:
    """See the module docstring. Runs before DispatchSortScan; a module without medians is returned
    as it is.
    """

    def transform_module(self, mod: IRModule, _ctx: tvm.transform.PassContext) -> IRModule:
        """Rewrite the Relax functions that hold a median."""
        rewriter = _Opener(mod)
        rewrite = where_changed(rewriter)
        return rewrite_functions(mod, rewriter.builder_, rewrite, opaque=True)


@mutator
class _Opener(PyExprMutator):
    def __init__(self, mod: IRModule) -> None:
        super().__init__(mod)
        self.changed = False

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if not isinstance(call.op, Op) or call.op.name != "relax.median":
            return call
        extents = static_shape(call.args[0])
        axes = call.attrs.axis
        if extents is None or (axes is not None and len(axes) != 1):
            return call
        self.changed = True
        if axes is not None:
            return self._along(call, int(axes[0]) % len(extents), extents)
        flat = self._emit(op.reshape(call.args[0], (math.prod(extents),)))
        value, _ = self._middle(flat, 0, math.prod(extents))
        return op.reshape(value, call.ty.shape)

    def _along(self, call: relax.Call, axis: int, extents: tuple[int, ...]) -> relax.Expr:
        found = self._middle(call.args[0], axis, extents[axis])
        if not call.attrs.keepdims:
            found = tuple(self._emit(op.squeeze(x, [axis])) for x in found)
        return relax.Tuple(found)

    def _middle(self, x: relax.Expr, axis: int, extent: int) -> tuple[relax.Expr, relax.Expr]:
        """The lower of the two medians along an axis, and where it stands; the axis is kept."""
        order = self._emit(op.argsort(x, axis, descending=False, dtype="int64"))
        middle = (extent - 1) // 2
        at = self._emit(op.strided_slice(order, [axis], [middle], [middle + 1]))
        return self._emit(op.gather_elements(x, at, axis)), at

    def _emit(self, expr: relax.Expr) -> relax.Expr:
        return self.builder_.emit(expr)


SORTS = ("relax.argsort", "relax.sort", "relax.topk")
WIDE = {"bfloat16": "float32", "int8": "int32", "uint8": "int32", "bool": "int32"}


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.WidenSorts")
class WidenSorts:
    """See the module docstring. Runs before DispatchSortScan; a module without such sorts is
    returned as it is.
    """

    def transform_module(self, mod: IRModule, _ctx: tvm.transform.PassContext) -> IRModule:
        """Rewrite the Relax functions that hold such a sort."""
        rewriter = _Widener(mod)
        rewrite = where_changed(rewriter)
        return rewrite_functions(mod, rewriter.builder_, rewrite, opaque=True)


@mutator
class _Widener(PyExprMutator):
    def __init__(self, mod: IRModule) -> None:
        super().__init__(mod)
        self.changed = False

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if not isinstance(call.op, Op) or call.op.name not in SORTS:
            return call
        narrow = _dtype(call.args[0])
        if narrow not in WIDE:
            return call
        self.changed = True
        wide = self.builder_.emit(relax.op.astype(call.args[0], WIDE[narrow]))
        found = self.builder_.emit(relax.Call(call.op, [wide], call.attrs))
        if not isinstance(call.ty, relax.TupleType):
            return relax.op.astype(found, narrow) if _dtype(call) == narrow else found
        values, indices = (self.builder_.emit(relax.TupleGetItem(found, n)) for n in range(2))
        return relax.Tuple([self.builder_.emit(relax.op.astype(values, narrow)), indices])


def _dtype(expr: relax.Expr) -> str:
    return str(expr.ty.dtype) if isinstance(expr.ty, relax.TensorType) else ""
