"""Running sums, products, extrema and logarithms of sums on a GPU, as blocks that the kernels of
scans compute.

    R.cumsum(x, 1), x: (m, n)      S[i, j] = sum over k < n of (k <= j ? x[i, k] : 0)

What stands before and behind can be fused with such a block (`kernels.scan`), which goes once
through each row. Few long rows fill no device: they are taken apart, and what the parts before
come to is added to the scan of each.

    R.cumsum(x, 1), x: (2, 1000000)      parts = R.reshape(x, (2, 64, 15625)), padded
                                         before = exclusive R.cumsum(R.sum(parts, 2), 1)
                                         R.add(before, R.cumsum(parts, 2))

What TVM has no operator for is a function of loops, which says of itself which scan it is; where
it also tells places, these are the largest so far of the places at which an extremum stands.

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
from tvm.ir import GlobalVar, IRModule, Op
from tvm.relax import op
from tvm.relax.expr_functor import PyExprMutator, mutator

from ...ir.blocks import log_add
from ..functions.functions import rewrite_functions, static_shape, where_changed

ROWS = 128
"""Rows that fill a device, each a block; where rows are neighbours in memory, `SIDE` times as many.
An estimate: a block of 1024 threads for nearly every multiprocessor of an H200."""
SIDE = 4
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
        if not _has_known_length(x, axis):
            return call
        self.changed = True
        if axis is None:
            axis, x = 0, self._emit(op.reshape(x, (math.prod(static_shape(x)),)))
        return self._scanned(
            x, int(axis) % x.ty.ndim, call.op.name, bool(call.attrs.exclusive), dtype
        )

    def _opened(self, call: relax.Call) -> relax.Expr:
        """A function of loops that says of itself which scan it is."""
        func = self.mod[call.args[0]] if isinstance(call.args[0], GlobalVar) else None
        attrs = getattr(func, "attrs", None)
        name = str(attrs[SCAN_NAME]) if attrs and SCAN_NAME in attrs else None
        x = call.args[1].fields[0] if name is not None else None
        if x is None or not x.ty.ndim or not _has_known_length(x, 0) or 0 in static_shape(x):
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
            x = self._emit(op.nn.pad(x, width))  # of any value: nothing of these places is taken
        x = self._emit(op.reshape(x, (outer, parts, part, inner)))
        local = self._scan(x, 2, name, exclusive)
        if kind.reduce is not None:
            totals = self._emit(kind.reduce(x, [2], keepdims=True))
        else:
            local = self._emit(local)
            totals = self._emit(op.strided_slice(local, [2], [part - 1], [part]))
        before = self._emit(self._scanned(totals, 1, name, True, str(x.ty.dtype)))
        whole = self._emit(self._cast(self._emit(self._combined(kind, before, local)), dtype))
        whole = self._emit(op.reshape(whole, (outer, parts * part, inner)))
        if parts * part > length:
            whole = self._emit(op.strided_slice(whole, [1], [0], [length]))
        return op.reshape(whole, shape)

    def _combined(self, kind: Kind, before: relax.Expr, local: relax.Expr) -> relax.Expr:
        """What stands before a part with its own scan."""
        if kind.combine is not None:
            return kind.combine(before, local)

        def combined(a: te.Tensor, b: te.Tensor) -> te.Tensor:
            def element(outer, part, k, inner):
                return kind.step(a(outer, part, 0, inner), b(outer, part, k, inner))

            return te.compute(b.shape, element, name="combined")

        return self.builder_.call_te(combined, before, local)

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


def _has_known_length(x: relax.Expr, axis: int | None) -> bool:
    """Whether what is scanned, all of x without an axis, is of known length, and x not empty."""
    if not isinstance(x.ty.shape, relax.ShapeExpr):
        return False
    extents = list(x.ty.shape.values)
    if not extents or any(isinstance(n, tirx.IntImm) and int(n) == 0 for n in extents):
        return False
    along = extents if axis is None else [extents[int(axis)]]
    return all(isinstance(n, tirx.IntImm) for n in along)


def scanned(x: te.Tensor, axis: int, kind: Kind, exclusive: bool = False) -> te.Tensor:
    """Each element of x with all before it along an axis, as `ir.blocks.read_scan` reads it."""
    k, neutral = te.reduce_axis((0, x.shape[axis]), "k"), kind.neutral(x.dtype)

    def element(*at: tirx.Var) -> tirx.PrimExpr:
        place = at[axis]
        counts = k.var < place if exclusive else k.var <= place
        value = x(*at[:axis], k.var, *at[axis + 1 :])
        return kind.reducer(tirx.if_then_else(counts, value, neutral), axis=k)

    return te.compute(x.shape, element, name="scan")


def parts_of(shape: tuple[int, ...], axis: int) -> int:
    """How many parts of a row are scanned side by side."""
    rows, length, inner = math.prod(shape) // shape[axis], shape[axis], shape[axis + 1 :]
    apart = math.prod(inner) == 1
    wanted = ROWS * (1 if apart else SIDE) // max(1, rows)
    shortest = SHORTEST_PART if apart else SHORTEST_PART // 4
    return max(1, min(wanted, length // shortest))


class Kind:
    """A scan.

    Attributes
    ----------
    step : what it makes of two elements.
    neutral : what changes nothing, of an element type.
    combine : `step` as an operator, where there is one.
    reduce : the reduction of the same kind, where there is one.
    reducer : that in TE.
    """

    def __init__(
        self,
        step: Callable[[tirx.PrimExpr, tirx.PrimExpr], tirx.PrimExpr],
        neutral: Callable[[str], tirx.PrimExpr],
        combine: Callable | None = None,
        reduce: Callable | None = None,
    ) -> None:
        self.step, self.neutral, self.combine, self.reduce = step, neutral, combine, reduce
        self.reducer = te.comm_reducer(step, neutral, "combined")


def _always(value: float) -> Callable[[str], tirx.PrimExpr]:
    return lambda dtype: tirx.const(value, dtype)


def _least(dtype: str) -> tirx.PrimExpr:
    return tirx.const(-math.inf, dtype) if "float" in str(dtype) else tirx.min_value(dtype)


def _largest(dtype: str) -> tirx.PrimExpr:
    return tirx.const(math.inf, dtype) if "float" in str(dtype) else tirx.max_value(dtype)


SCANS = {
    "relax.cumsum": Kind(lambda a, b: a + b, _always(0), op.add, op.sum),
    "relax.cumprod": Kind(lambda a, b: a * b, _always(1), op.multiply, op.prod),
    "relax.cummax": Kind(lambda a, b: tirx.Max(a, b), _least, op.maximum),
    "relax.cummin": Kind(lambda a, b: tirx.Min(a, b), _largest, op.minimum),
    "relax.logcumsumexp": Kind(log_add, _least),
}
"""By what they are called; TVM has operators of the first two."""
EXTREMA = ("relax.cummax", "relax.cummin")
SCAN_NAME, SCAN_AXIS = "tvm_fusion.scan", "tvm_fusion.scan_axis"
"""Attributes of a function of loops: the key of `SCANS` that it computes, along which axis."""
