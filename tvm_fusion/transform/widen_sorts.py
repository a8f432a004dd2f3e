"""Sorts of bfloat16 on a CPU, done in float32: TVM's runtime takes the two bytes of an element for
the four of a float32, reads and writes beyond the tensors, and orders the wrong numbers.

    Before                                          After
    lv: R.Tensor((n,), "bfloat16") = R.sort(x)      lv_: R.Tensor((n,), "float32") = R.astype(x)
                                                    lv1_: R.Tensor((n,), "float32") = R.sort(lv_)
                                                    lv: R.Tensor((n,), "bfloat16") = R.astype(lv1_)

Every bfloat16 is a float32, so order, ties and values stay. Does not handle: `median`, which
`half_operators` legalizes, and sorts inside of vision operators.
"""

import tvm
from tvm import relax
from tvm.ir import IRModule, Op
from tvm.relax.expr_functor import PyExprMutator, mutator

from .functions import rewrite_functions, where_changed

SORTS = ("relax.argsort", "relax.sort", "relax.topk")


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
        if (
            not isinstance(call.op, Op)
            or call.op.name not in SORTS
            or not _is_bfloat16(call.args[0])
        ):
            return call
        self.changed = True
        wide = self.builder_.emit(relax.op.astype(call.args[0], "float32"))
        found = self.builder_.emit(relax.Call(call.op, [wide], call.attrs))
        if not isinstance(call.ty, relax.TupleType):
            return relax.op.astype(found, "bfloat16") if _is_bfloat16(call) else found
        values, indices = (self.builder_.emit(relax.TupleGetItem(found, n)) for n in range(2))
        return relax.Tuple([self.builder_.emit(relax.op.astype(values, "bfloat16")), indices])


def _is_bfloat16(expr: relax.Expr) -> bool:
    return isinstance(expr.ty, relax.TensorType) and expr.ty.dtype == "bfloat16"
