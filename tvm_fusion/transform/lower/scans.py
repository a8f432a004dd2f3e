"""Running sums and products on a GPU, as blocks that the kernels of scans compute.

    R.cumsum(x, 1), x: (m, n)      S[i, j] = sum over k < n of (k <= j ? x[i, k] : 0)

What stands before and behind can be fused with such a block (`kernels.scan`), which goes once
through each row. Few long rows fill no device: they are taken apart, and what the parts before
come to is added to the scan of each.

    R.cumsum(x, 1), x: (2, 1000000)      parts = R.reshape(x, (2, 128, 7816)), padded
                                         before = exclusive R.cumsum(R.sum(parts, 2), 1)
                                         R.add(before, R.cumsum(parts, 2))

TVM's own kernels give wrong numbers on an H200 (products, and sums along other axes than the last
one), or read what other threads of a warp write without waiting for them.

Sums of halves are taken in float32. A symbolic number of rows is taken for many. Does not handle:
axes of symbolic length.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import tvm
from tvm import relax, te, tirx
from tvm.ir import IRModule, Op
from tvm.relax import op
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..functions.functions import rewrite_functions, static_shape, where_changed

ROWS = 128
"""Rows that fill a device, each a block; where rows are neighbours in memory, `SIDE` times as many.
An estimate: a block of 1024 threads for nearly every multiprocessor of an H200."""
SIDE = 32
SHORTEST_PART = 2048
"""Elements: shorter rows are walked through in less time than two more launches take. Where rows
are neighbours, a quarter."""
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
        self.changed = False

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if not isinstance(call.op, Op) or call.op.name not in SCANS:
            return call
        x, dtype, axis = call.args[0], str(call.ty.dtype), call.attrs.axis
        if not _has_known_length(x, axis):
            return call
        self.changed = True
        if axis is None:
            axis, x = 0, self._emit(op.reshape(x, (math.prod(static_shape(x)),)))
        return self._scanned(
            x, int(axis) % x.ty.ndim, call.op.name, bool(call.attrs.exclusive), dtype
        )

    def _scanned(
        self, x: relax.Expr, axis: int, name: str, exclusive: bool, dtype: str
    ) -> relax.Expr:
        """The scan of x along an axis as `dtype`, in parts where that fills the device better."""
        shape = static_shape(x)
        x = self._cast(x, WIDER.get(dtype, dtype))
        parts = 1 if shape is None else parts_of(shape, axis)
        if parts == 1:
            return self._cast(self._scan(x, axis, name, exclusive), dtype)
        kind, length = SCANS[name], shape[axis]
        outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
        part = -(-length // parts)
        x = self._emit(op.reshape(x, (outer, length, inner)))
        if parts * part > length:
            width = [0, 0, 0, parts * part - length, 0, 0]
            x = self._emit(op.nn.pad(x, width, pad_value=kind.neutral))
        x = self._emit(op.reshape(x, (outer, parts, part, inner)))
        totals = self._emit(kind.reduce(x, [2], keepdims=True))
        before = self._emit(self._scanned(totals, 1, name, True, str(x.ty.dtype)))
        local = self._scan(x, 2, name, exclusive)
        whole = self._emit(self._cast(self._emit(kind.combine(before, local)), dtype))
        whole = self._emit(op.reshape(whole, (outer, parts * part, inner)))
        if parts * part > length:
            whole = self._emit(op.strided_slice(whole, [1], [0], [length]))
        return op.reshape(whole, shape)

    def _scan(self, x: relax.Expr, axis: int, name: str, exclusive: bool) -> relax.Expr:
        kind = SCANS[name]

        def scan(x: te.Tensor) -> te.Tensor:
            return scanned(x, axis, kind.reducer, kind.neutral, exclusive)

        hint = name.removeprefix("relax.")
        return self._emit(self.builder_.call_te(scan, x, primfunc_name_hint=hint))

    def _cast(self, x: relax.Expr, dtype: str) -> relax.Expr:
        return x if str(x.ty.dtype) == dtype else self._emit(op.astype(x, dtype))

    def _emit(self, expr: relax.Expr) -> relax.Expr:
        return self.builder_.emit(expr)


def _has_known_length(x: relax.Expr, axis: int | None) -> bool:
    """Whether what is scanned, all of x without an axis, is of known length, and x not empty."""
    if not isinstance(x.ty.shape, relax.ShapeExpr):
        return False
    extents = list(x.ty.shape.values)
    if not extents or any(isinstance(n, tirx.IntImm) and int(n) == 0 for n in extents):
        return False
    along = extents if axis is None else [extents[int(axis)]]
    return all(isinstance(n, tirx.IntImm) for n in along)


def scanned(
    x: te.Tensor, axis: int, reducer: Callable, neutral: float, exclusive: bool = False
) -> te.Tensor:
    """Each element of x with all before it along an axis, as `ir.blocks.read_scan` reads it."""
    k = te.reduce_axis((0, x.shape[axis]), "k")

    def element(*at: tirx.Var) -> tirx.PrimExpr:
        place = at[axis]
        counts = k.var < place if exclusive else k.var <= place
        value = x(*at[:axis], k.var, *at[axis + 1 :])
        return reducer(tirx.if_then_else(counts, value, tirx.const(neutral, x.dtype)), axis=k)

    return te.compute(x.shape, element, name="scan")


def parts_of(shape: tuple[int, ...], axis: int) -> int:
    """How many parts of a row are scanned side by side."""
    rows, length, inner = math.prod(shape) // shape[axis], shape[axis], shape[axis + 1 :]
    apart = math.prod(inner) == 1
    wanted = ROWS * (1 if apart else SIDE) // max(1, rows)
    shortest = SHORTEST_PART if apart else SHORTEST_PART // 4
    return max(1, min(wanted, length // shortest))


class _Kind:
    """A scan: what combines two elements, and changes nothing; the reduction of the same kind."""

    def __init__(
        self, combine: Callable, neutral: float, reduce: Callable, reducer: Callable
    ) -> None:
        self.combine, self.neutral, self.reduce, self.reducer = combine, neutral, reduce, reducer


_PRODUCT = te.comm_reducer(lambda a, b: a * b, lambda dtype: tirx.const(1, dtype), "product")
SCANS = {
    "relax.cumsum": _Kind(op.add, 0, op.sum, te.sum),
    "relax.cumprod": _Kind(op.multiply, 1, op.prod, _PRODUCT),
}
