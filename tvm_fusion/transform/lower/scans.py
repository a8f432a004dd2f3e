"""Running sums, products, extrema and logarithms of sums on a GPU, as blocks that the kernels of
scans compute.

    R.cumsum(x, 1), x: (m, n)      S[i, j] = sum over k < n of (k <= j ? x[i, k] : 0)

What stands before and behind can be fused with such a block (`kernels.scan`), which goes once
through each row.

What TVM has no operator for is a function of loops, which says of itself which scan it is; where
it also tells places, these are the largest so far of the places at which an extremum stands.

TVM's own kernels give wrong numbers on an H200 (products, and sums along other axes than the last
one), or read what other threads of a warp write without waiting for them.

Sums of halves are taken in float32. Does not handle: several axes as one where one is symbolic.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import tvm
from tvm import relax, te, tirx
from tvm.ir import GlobalVar, IRModule, Op
from tvm.relax import op
from tvm.relax.expr_functor import PyExprMutator, mutator

from ...ir.blocks import log_add
from ..functions.functions import rewrite_functions, static_shape, where_changed

WIDER = {"float16": "float32", "bfloat16": "float32"}


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.OpenScans")
class OpenScans:
    """See the module docstring. Runs before DispatchSortScan; a module without such scans is
    returned as it is.
    """

    def transform_module(self, mod: IRModule, _ctx: tvm.transform.PassContext) -> IRModule:
        """Rewrite the Relax functions that hold a scan."""
        rewriter = _Opener(mod)
        rewrite = where_changed(rewriter)
        return rewrite_functions(mod, rewriter.builder_, rewrite, opaque=True)


@mutator
class _Opener(PyExprMutator):
    def __init__(self, mod: IRModule) -> None:
        super().__init__(mod)
        self.changed, self.mod = False, mod

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if not isinstance(call.op, Op):
            return call
        if call.op.name == "relax.call_tir":
            return self._opened(call)
        if call.op.name not in SCANS:
            return call
        x, dtype, axis = call.args[0], str(call.ty.dtype), call.attrs.axis
        if x.ty.ndim == 0 and not call.attrs.exclusive:  # of which TVM's kernels have no axis
            self.changed = True
            return self._cast(x, dtype)
        if not _is_read(x, axis):
            return call
        self.changed = True
        if axis is None:
            flat = x if x.ty.ndim == 1 else op.reshape(x, (math.prod(static_shape(x)),))
            axis, x = 0, self._emit(flat)
        return self._scanned(
            x, int(axis) % x.ty.ndim, call.op.name, bool(call.attrs.exclusive), dtype
        )

    def _opened(self, call: relax.Call) -> relax.Expr:
        """A function of loops that says of itself which scan it is."""
        func = self.mod[call.args[0]] if isinstance(call.args[0], GlobalVar) else None
        attrs = getattr(func, "attrs", None)
        name = str(attrs[SCAN_NAME]) if attrs and SCAN_NAME in attrs else None
        x = call.args[1].fields[0] if name is not None else None
        if x is None or not x.ty.ndim or not _is_read(x, 0):
            return call
        self.changed = True
        axis, dtype = int(attrs[SCAN_AXIS]), str(x.ty.dtype)
        found = self._emit(self._scanned(x, axis, name, False, dtype))
        return found if name not in EXTREMA else self._with_places(x, found, axis)

    def _with_places(self, x: relax.Expr, values: relax.Expr, axis: int) -> relax.Expr:
        """Running extrema, and where the last of equal ones stands, or the last NaN.

        That is the last place so far whose element is what the extremum is there.
        """

        def marked(x: te.Tensor, values: te.Tensor) -> te.Tensor:
            def place(*at: tirx.Var) -> tirx.PrimExpr:
                here = x(*at)
                own = tirx.EQ(here, values(*at))
                if str(x.dtype).startswith(("float", "bfloat")):
                    own = tirx.Or(own, tirx.isnan(here))
                return tirx.Select(own, at[axis].astype("int32"), tirx.const(0, "int32"))

            return te.compute(x.shape, place, name="place")

        own = self._emit(self.builder_.call_te(marked, x, values, primfunc_name_hint="places"))
        places = self._scanned(own, axis, "relax.cummax", False, "int32")
        return relax.Tuple([values, self._cast(self._emit(places), "int64")])

    def _scanned(
        self, x: relax.Expr, axis: int, name: str, exclusive: bool, dtype: str
    ) -> relax.Expr:
        """The scan of x along an axis as `dtype`."""
        x = self._cast(x, WIDER.get(dtype, dtype))
        return self._cast(self._scan(x, axis, name, exclusive), dtype)

    def _scan(self, x: relax.Expr, axis: int, name: str, exclusive: bool) -> relax.Expr:
        kind = SCANS[name]

        def scan(x: te.Tensor) -> te.Tensor:
            return scanned(x, axis, kind, exclusive)

        hint = name.removeprefix("relax.")
        return self._emit(self.builder_.call_te(scan, x, primfunc_name_hint=hint))

    def _cast(self, x: relax.Expr, dtype: str) -> relax.Expr:
        return x if str(x.ty.dtype) == dtype else self._emit(op.astype(x, dtype))

    def _emit(self, expr: relax.Expr) -> relax.Expr:
        return self.builder_.emit(expr)


def _is_read(x: relax.Expr, axis: int | None) -> bool:
    """Whether what is scanned can be read as one axis, and x is not known to be empty."""
    if not isinstance(x.ty.shape, relax.ShapeExpr):
        return False
    extents = list(x.ty.shape.values)
    if not extents or any(isinstance(n, tirx.IntImm) and int(n) == 0 for n in extents):
        return False
    one = axis is not None or len(extents) == 1
    return one or all(isinstance(n, tirx.IntImm) for n in extents)


def scanned(x: te.Tensor, axis: int, kind: Kind, exclusive: bool = False) -> te.Tensor:
    """Each element of x with all before it along an axis, as `ir.blocks.read_scan` reads it."""
    k, neutral = te.reduce_axis((0, x.shape[axis]), "k"), kind.neutral(x.dtype)

    def element(*at: tirx.Var) -> tirx.PrimExpr:
        place = at[axis]
        counts = k.var < place if exclusive else k.var <= place
        value = x(*at[:axis], k.var, *at[axis + 1 :])
        return kind.reducer(tirx.if_then_else(counts, value, neutral), axis=k)

    return te.compute(x.shape, element, name="scan")


class Kind:
    """A scan.

    Attributes
    ----------
    step : what it makes of two elements.
    neutral : what changes nothing, of an element type.
    reducer : `step` in TE.
    """

    def __init__(
        self,
        step: Callable[[tirx.PrimExpr, tirx.PrimExpr], tirx.PrimExpr],
        neutral: Callable[[str], tirx.PrimExpr],
    ) -> None:
        self.step, self.neutral = step, neutral
        self.reducer = te.comm_reducer(step, neutral, "combined")


def _always(value: float) -> Callable[[str], tirx.PrimExpr]:
    return lambda dtype: tirx.const(value, dtype)


def _least(dtype: str) -> tirx.PrimExpr:
    return tirx.const(-math.inf, dtype) if "float" in str(dtype) else tirx.min_value(dtype)


def _largest(dtype: str) -> tirx.PrimExpr:
    return tirx.const(math.inf, dtype) if "float" in str(dtype) else tirx.max_value(dtype)


SCANS = {
    "relax.cumsum": Kind(lambda a, b: a + b, _always(0)),
    "relax.cumprod": Kind(lambda a, b: a * b, _always(1)),
    "relax.cummax": Kind(lambda a, b: tirx.Max(a, b), _least),
    "relax.cummin": Kind(lambda a, b: tirx.Min(a, b), _largest),
    "relax.logcumsumexp": Kind(log_add, _least),
}
"""By what they are called; TVM has operators of the first two."""
EXTREMA = ("relax.cummax", "relax.cummin")
SCAN_NAME, SCAN_AXIS = "tvm_fusion.scan", "tvm_fusion.scan_axis"
"""Attributes of a function of loops: the key of `SCANS` that it computes, along which axis."""
