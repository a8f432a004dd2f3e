"""Running sums and products on a GPU: rows in parallel, long ones in parts.

    R.cumsum(x, 1), x: (m, 1000)      local = cumsum of each of 16 parts of 64 elements
                                      before = cumsum of local's last elements, moved by one
                                      R.add(local, before), 0 before the first part

A thread goes through a part of a row. TVM's own kernels give wrong numbers on an H200 (products,
and sums along other axes than the last one), or read what other threads of a warp write without
waiting for them.

Sums of halves are taken in float32. Does not handle: symbolic extents, scans that leave out the
element itself.
"""

from __future__ import annotations

import math

import tvm
from tvm import relax, tirx
from tvm.ir import IRModule, Op
from tvm.relax import op
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.script import tirx as T

from ..functions.functions import rewrite_functions, static_shape, where_changed

SCANS = {"relax.cumsum": (op.add, 0), "relax.cumprod": (op.multiply, 1)}
PART = 64
"""Elements that a thread goes through where rows are longer than two of these."""
THREADS = 128
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
        extents = static_shape(call.args[0])
        if not extents or 0 in extents or call.attrs.exclusive:
            return call
        self.changed = True
        x, dtype = call.args[0], str(call.ty.dtype)
        axis = call.attrs.axis
        if axis is None:
            extents, axis = (math.prod(extents),), 0
        axis = int(axis) % len(extents)
        shape = math.prod(extents[:axis]), extents[axis], math.prod(extents[axis + 1 :])
        x = self._emit(op.astype(op.reshape(x, shape), WIDER.get(dtype, dtype)))
        found = self._scanned(x, call.op.name)
        return op.reshape(self._emit(op.astype(found, dtype)), call.ty.shape)

    def _scanned(self, x: relax.Expr, name: str) -> relax.Expr:
        """The scan of x along the middle one of three axes."""
        combine, neutral = SCANS[name]
        outer, length, inner = static_shape(x)
        if length <= 2 * PART:
            return self._run(x, name)
        parts = -(-length // PART)
        if parts * PART > length:
            width = [0, 0, 0, parts * PART - length, 0, 0]
            x = self._emit(op.nn.pad(x, width, pad_value=neutral))
        x = self._emit(op.reshape(x, (outer * parts, PART, inner)))
        local = self._emit(op.reshape(self._run(x, name), (outer, parts, PART, inner)))
        ends = self._emit(op.strided_slice(local, [2], [PART - 1], [PART]))
        totals = self._scanned(self._emit(op.reshape(ends, (outer, parts, inner))), name)
        before = self._emit(op.strided_slice(totals, [1], [0], [parts - 1]))
        before = self._emit(op.nn.pad(before, [0, 0, 1, 0, 0, 0], pad_value=neutral))
        before = self._emit(op.reshape(before, (outer, parts, 1, inner)))
        whole = self._emit(combine(local, before))
        whole = self._emit(op.reshape(whole, (outer, parts * PART, inner)))
        return self._emit(op.strided_slice(whole, [1], [0], [length]))

    def _run(self, x: relax.Expr, name: str) -> relax.Expr:
        shape, dtype = static_shape(x), str(x.ty.dtype)
        short = name.removeprefix("relax.")
        kernel = scan_kernel(shape, dtype, short == "cumprod")
        gvar = self.builder_.add_func(kernel, f"{short}_rows")
        return self._emit(relax.call_tir(gvar, [x], relax.TensorType(shape, dtype)))

    def _emit(self, expr: relax.Expr) -> relax.Expr:
        return self.builder_.emit(expr)


def scan_kernel(shape: tuple[int, int, int], dtype: str, is_product: bool) -> tirx.PrimFunc:
    """A kernel for the running sums, or products, along the middle axis: a thread for each row."""
    outer, length, inner = shape
    rows = outer * inner
    blocks, first = -(-rows // THREADS), int(is_product)

    @T.prim_func(private=True, s_tir=True)
    def scan(
        x: T.Buffer((outer, length, inner), dtype), result: T.Buffer((outer, length, inner), dtype)
    ):
        T.func_attr({"tirx.is_scheduled": True})
        for block in T.thread_binding(blocks, thread="blockIdx.x"):
            for thread in T.thread_binding(THREADS, thread="threadIdx.x"):
                with T.sblock():
                    total = T.sblock_alloc_buffer((1,), dtype, scope="local")
                    row: T.let[T.int64] = T.int64(block) * THREADS + T.int64(thread)
                    if row < rows:
                        total[0] = T.Cast(dtype, first)
                        for i in T.serial(length):
                            if is_product:
                                total[0] = total[0] * x[row // inner, i, row % inner]
                            else:
                                total[0] = total[0] + x[row // inner, i, row % inner]
                            result[row // inner, i, row % inner] = total[0]

    return scan
