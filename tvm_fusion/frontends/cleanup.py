"""What TVM's importers leave behind, put in order.

Before:
    lv: R.Tensor((2, 4)) = R.broadcast_to(x, R.shape([2, 4]))     # x is R.Tensor((2, 4)) already
    lv1: R.Tensor((2, 2, 4)) = R.stack((x, y), axis=0)
    lv2: R.Tensor((2, 4)) = R.sum(lv1, axis=[0])                  # the Sum of ONNX
    lv3: R.Shape = R.call_packed("vm.builtin.tensor_to_shape", n) # inside a dataflow block

After:
    lv2: R.Tensor((2, 4)) = R.add(x, y)
    lv3: R.Shape = R.call_pure_packed("vm.builtin.tensor_to_shape", n)
"""

import functools

import tvm_ffi
from tvm import relax
from tvm.ir import IRModule, Op
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvm_fusion.transform.functions.functions import with_functions

SHAPE_READER = "vm.builtin.tensor_to_shape"

# What they do is told by the type of their result; nothing, if that is the type of their operand.
CONVERSIONS = ("relax.broadcast_to", "relax.reshape", "relax.astype")

# Reductions over tensors stacked for them, as operators on two tensors.
PAIRWISE = {
    "relax.sum": relax.op.add,
    "relax.max": relax.op.maximum,
    "relax.min": relax.op.minimum,
}


def cleaned(mod: IRModule) -> IRModule:
    """The module without dead code and conversions that change nothing, its calls declared pure.

    Parameters
    ----------
    mod : IRModule
        Fresh from an importer: `main` is all that counts.
    """
    mod = with_functions(mod, mod.functions)
    mod["main"] = _Cleaner(mod).visit_expr(mod["main"])
    return relax.transform.DeadCodeElimination()(relax.transform.CanonicalizeBindings()(mod))


@mutator
class _Cleaner(PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if isinstance(call.op, relax.ExternFunc) and call.op.global_symbol == SHAPE_READER:
            return relax.op.call_pure_packed(SHAPE_READER, *call.args, ty_args=list(call.ty_args))
        if _changes_nothing(call):
            return call.args[0]
        stacked = self._reduced_stack(call)
        if stacked is None:
            return call
        pairwise = PAIRWISE[call.op.name]
        return functools.reduce(lambda a, b: self.builder_.normalize(pairwise(a, b)), stacked)

    def _reduced_stack(self, call: relax.Call) -> list[relax.Expr] | None:
        """The tensors that a reduction is given in a stack of its own; None for other calls."""
        if not isinstance(call.op, Op) or call.op.name not in PAIRWISE or call.attrs.keepdims:
            return None
        source = call.args[0]
        stack = self.lookup_binding(source) if isinstance(source, relax.Var) else source
        if not isinstance(stack, relax.Call) or stack.op != Op.get("relax.stack"):
            return None
        axis = 0 if stack.attrs.axis is None else int(stack.attrs.axis)
        same = call.attrs.axis is not None and [int(a) for a in call.attrs.axis] == [axis]
        return list(stack.args[0]) if same and isinstance(stack.args[0], relax.Tuple) else None


def _changes_nothing(call: relax.Call) -> bool:
    if not isinstance(call.op, Op) or call.op.name not in CONVERSIONS:
        return False
    return tvm_ffi.structural_equal(call.ty, call.args[0].ty)
