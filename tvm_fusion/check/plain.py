"""A module as TVM alone lowers it: what results are held against, and what is left to run where no
kernel of this package gives right numbers.

    model -> DispatchSampling, DispatchSortScan, LegalizeOps -> one PrimFunc an operator, its loops
    as TVM made them

No kernel class, schedule, rewrite, legalization or memory plan of this package has a part in it:
what it shared with a module it could not tell wrong. Tensors without elements are dropped
(`DropEmpty`), loops whose iterations meet run in order (`OrderedWrites`), medians on a GPU are the
sorts that they are (`OpenMedians`), argmax of a row without any number above the least is its first
place and maxima start from infinity (`from_infinity`), indices are read as they are
given (`reads_at_indices`), and what else TVM 0.27 cannot lower is computed in a wider type,
operator by operator:

    Before                                      After
    y: bfloat16 = R.power(x, p)                 y_: float32 = R.power(astype(x), astype(p))
                                                y: bfloat16 = R.astype(y_, "bfloat16")
    m: bool = R.max(mask)                       m_: int32 = R.max(R.astype(mask, "int32"))
                                                m: bool = R.astype(m_, "bool")
"""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.ir import Call, Op
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..runtime.build.build import Built, build
from ..transform.functions.unique_names import UniqueNames
from ..transform.lower.drop_empty import DropEmpty
from ..transform.lower.legalizers import (
    BOTH,
    UNSIGNED_SIGNS,
    from_infinity,
    needs_float32,
)
from ..transform.lower.ordered_writes import OrderedWrites
from ..transform.lower.places import reads_at_indices
from ..transform.lower.sorts import OpenMedians, WidenSorts
from ..transform.pipeline import public

LLVM = tvm.target.Target({"kind": "llvm"})

# What TVM cannot lower of halves beside `HALF_OPERATORS`, by the dtype of the first operand: it
# adds up in the half type, or refuses.
_NO_HALVES = {
    "relax.nn.instance_norm": ("bfloat16",),
    "relax.nn.layer_norm": ("bfloat16",),
    "relax.floor_mod": ("bfloat16",),
    "relax.mod": ("bfloat16",),
}

# LLVM code generation stops at sums of booleans, and reductions find no smallest one.
_NO_BOOLEANS = frozenset(
    f"relax.{name}"
    for name in (
        *("add", "subtract", "multiply", "maximum", "minimum"),
        *("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"),
        *("max", "min", "sum", "prod", "mean", "cumsum", "cumprod", "argmax", "argmin"),
    )
)


def plain_module(mod: tvm.IRModule, target: tvm.target.Target) -> tvm.IRModule:
    """Lower a Relax module with TVM's own passes.

    Parameters
    ----------
    mod : IRModule
        With a function `main`.
    target : Target
        Decides how sorts, scans and sampling are dispatched.

    Returns
    -------
    IRModule
        Calls of unscheduled PrimFuncs, of packed functions, and shape arithmetic. Constants stay as
        they are.
    """
    passes = [
        UniqueNames(),  # names are identifiers: CUDA kernels take them over
        DropEmpty(),
        WidenOperators(),
        WidenSorts() if target.kind.name == "llvm" else OpenMedians(),
        relax.backend.DispatchSampling(),
        relax.backend.DispatchSortScan(),
        relax.transform.LegalizeOps(
            {
                **from_infinity(target.kind.name),
                **UNSIGNED_SIGNS,
                **reads_at_indices(target),
            }
        ),
        OrderedWrites(),
        relax.transform.ConvertToDataflow(min_size=1),
        relax.transform.DeadCodeElimination(["main"]),
    ]
    with target:
        return tvm.transform.Sequential(passes)(public(mod))


def plain_build(mod: tvm.IRModule, target: tvm.target.Target) -> Built:
    """Build a module of `plain_module`: on a GPU with DLight's schedules, on a CPU as the loops
    stand, with memory planned by TVM.
    """
    return build(mod, target, plan_memory=False)


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.WidenOperators")
class WidenOperators:
    """See the module docstring; what TVM can lower stays as it is."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Rewrite the Relax functions of a copy of the module."""
        out = mod.clone()
        for gvar, func in mod.functions_items():
            if isinstance(func, relax.Function):
                out.update_func(gvar, _Widener(mod).visit_expr(func))
        return out


@mutator
class _Widener(PyExprMutator):
    def visit_call_(self, call: Call) -> relax.Expr:
        call = super().visit_call_(call)
        wide = _wide_dtype(call)
        if wide is None:
            return call
        arguments = [self._cast(a, wide) for a in call.args]
        found = self.builder_.emit(Call(call.op, arguments, call.attrs, call.ty_args))
        if not isinstance(call.ty, relax.TupleType):
            return self._cast(found, str(call.ty.dtype), call.ty)
        fields = [
            self._cast(self.builder_.emit(relax.TupleGetItem(found, i)), str(ty.dtype), ty)
            for i, ty in enumerate(call.ty.fields)
        ]
        return self.builder_.normalize(relax.Tuple(fields))

    def _cast(self, value: relax.Expr, dtype: str, like: relax.Type | None = None) -> relax.Expr:
        """A tensor that is not of `dtype`, and narrow or meant to be, as `dtype`."""
        ty = value.ty
        narrow = (*BOTH, "bool")
        if not isinstance(ty, relax.TensorType) or str(ty.dtype) == dtype:
            return value
        if like is None and str(ty.dtype) not in narrow:
            return value
        return self.builder_.emit(relax.op.astype(value, dtype))


def _wide_dtype(call: Call) -> str | None:
    """The dtype to compute a call in; None where TVM lowers it as it is."""
    if not isinstance(call.op, Op) or not call.args:
        return None
    ty = call.args[0].ty
    dtype = str(ty.dtype) if isinstance(ty, relax.TensorType) else ""
    if not dtype:
        return None
    if dtype in _NO_HALVES.get(call.op.name, ()) or needs_float32(call):
        return "float32"
    return "int32" if dtype == "bool" and call.op.name in _NO_BOOLEANS else None
