"""Weights that constant folding leaves alone: inputs of `main` until `BindWeights` makes them
constants again.

    matmul(x, permute_dims(const))   ->   matmul(x, permute_dims(weight)), weight: an input

FoldConstant would evaluate what is computed from them, and undo how they are stored.
"""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.ir import Call
from tvm.relax import Expr, Var
from tvm.relax.expr_functor import PyExprMutator

from ...config import HardwareProfile
from ..decompose.opening import dtype_of
from ..functions.unique_names import FreshNames
from .constant_weights import identity
from .readers import Readers

WEIGHTS_ATTR = "tvm_fusion.weights"


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.BindWeights")
class BindWeights:
    """Makes hidden weights constants again; runs after FoldConstant."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        if not mod.attrs or WEIGHTS_ATTR not in mod.attrs:
            return mod
        tensors = dict(mod.attrs[WEIGHTS_ATTR])
        return relax.transform.BindParams("main", tensors)(mod.without_attr(WEIGHTS_ATTR))


class Hider(PyExprMutator):
    """Replaces constants of `main` by inputs. Subclasses (to be decorated with `mutator`) give
    `rewritten`.
    """

    def rewritten(self, call: Call) -> Expr | None:
        """What stands for a call, made with `hidden`; None: the call as it is."""
        raise NotImplementedError

    def visit_call_(self, call: Call) -> Expr:
        new = self.rewritten(call)
        return super().visit_call_(call) if new is None else new

    def hidden(self, constant: Expr, kind: object, tensor) -> Var:
        """The input that stands for a constant: one for all its readers of a `kind`, with the value
        `tensor()`.
        """
        key = (identity(constant), kind)
        if key not in self.inputs:
            name = self.fresh("weight")
            self.tensors[name] = value = tensor()
            self.inputs[key] = Var(name, relax.TensorType(value.shape, dtype_of(constant)))
        return self.inputs[key]

    def hide(self, mod: tvm.IRModule) -> tvm.IRModule:
        """The module with its weights hidden; itself where none is to be."""
        main = mod["main"]
        if not isinstance(main.body, relax.SeqExpr):
            return mod
        self.readers, self.fresh = Readers(main), FreshNames.beside(main)
        self.tensors: dict[str, tvm.runtime.Tensor] = {}
        self.inputs: dict[tuple, Var] = {}
        body = self.visit_expr(main.body)
        if not self.tensors:
            return mod
        params = [*main.params, *self.inputs.values()]
        func = relax.Function(params, body, main.ret_ty, main.is_pure, main.attrs, main.span)
        self.builder_.update_func(
            mod.get_global_var("main"), relax.analysis.remove_all_unused(func)
        )
        before = dict(mod.attrs[WEIGHTS_ATTR]) if mod.attrs and WEIGHTS_ATTR in mod.attrs else {}
        return self.builder_.finalize().with_attr(WEIGHTS_ATTR, {**before, **self.tensors})


def on_gpu(hw: HardwareProfile | None, mod: tvm.IRModule) -> bool:
    """Whether weights are stored for a device: those of `main` on a GPU."""
    has_main = any(gvar.name_hint == "main" for gvar in mod.get_global_vars())
    return hw is not None and hw.kind != "llvm" and has_main
