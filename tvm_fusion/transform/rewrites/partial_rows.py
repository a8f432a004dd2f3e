"""PartialRows: reductions over the rows of a matrix product's result become two stages, the first
of which the product's own kernel can do.

    h = matmul(x, W) + r                     # [M, 4096]
    s = R.sum(h * h, axis=[-1])
->  s_view = R.reshape(h * h, (M, 32, 128))
    s_part = R.sum(s_view, axis=[-1])        # of runs of columns: in the product's epilogue
    s      = R.sum(s_part, axis=[-1])        # reads M x 32 numbers

The runs are as wide as what divides the tiles of the kernels (see `kernels.gemm.partials`). Sums
are taken in float32 only.

Does not handle (left alone): sums over other axes or of half tensors, rows that are no multiple of
a run, statistics that come back to the elements they were made of (see `row_origins`), devices
whose kernels do not write partial results.
"""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax import op
from tvm.relax.expr_functor import PyExprMutator, mutator

from ...config import HardwareProfile
from ...kernels.gemm.partials import WIDTHS, writes_partials
from ..decompose.opening import shape_of
from ..functions.functions import rewrite_functions
from .readers import Parts
from .row_origins import columns_of, row_reductions

_REDUCE = {"relax.sum": op.sum, "relax.max": op.max}


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.PartialRows")
class PartialRows:
    """See the module docstring.

    Parameters
    ----------
    hw : HardwareProfile
        The device; one without such kernels leaves the module as it is.
    returning : bool
        Split reductions whose results come back to their rows, too.
    """

    def __init__(self, hw: HardwareProfile, returning: bool = False) -> None:
        self.hw, self.returning = hw, returning

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        if not writes_partials(self.hw):
            return mod
        splitter = _Splitter(mod)

        def split(func: relax.Function) -> relax.Function | None:
            return splitter.split_function(func, self.returning)

        return rewrite_functions(mod, splitter.builder_, split)


def run_width(columns: int | None) -> int | None:
    """The columns of a run in rows of so many, if there is more than one run."""
    fitting = (width for width in WIDTHS if columns and columns % width == 0 and columns > width)
    return next(fitting, None)


@mutator
class _Splitter(PyExprMutator):
    """Replaces the binding of a reduction by those of its two stages."""

    def split_function(self, func: relax.Function, returning: bool) -> relax.Function | None:
        """The function with its reductions split, or None where there was nothing to split."""
        self.wanted, self.changed = row_reductions(func, returning), False
        if not self.wanted:
            return None
        self.parts = Parts(self.builder_, func)
        split = self.visit_expr(func)
        return self.parts.tagged(split) if self.changed else None

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        call = binding.value
        width = None
        if binding.var in self.wanted:
            width = run_width(columns_of(call.args[0]))
        if width is None:
            super().visit_var_binding_(binding)
            return
        self.changed = True
        reduce, name = _REDUCE[call.op.name], binding.var.name
        *rows, columns = shape_of(call.args[0])
        view = [*rows, int(columns) // width, width]
        view = self.parts.bind(name, "view", op.reshape(self.visit_expr(call.args[0]), view))
        part = self.parts.bind(name, "part", reduce(view, [-1]))
        last = reduce(part, call.attrs.axis, bool(call.attrs.keepdims))
        self.parts.finish(self.visit_var_def(binding.var), last)
