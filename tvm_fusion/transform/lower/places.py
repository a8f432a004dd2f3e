"""Legalizations of operators that read or write at indices.

On a CPU an index is read as it is given, and checked where it is used (`runtime.build.guards`):

    R.take(x, ids, axis=0)      y[i, j] = x[ids[i], j]

On a GPU, where nothing can be raised, the nearest element is read in its place:

    R.take(x, ids, axis=0)      y[i, j] = x[min(max(ids[i], 0), n - 1), j]

Takes that clip or wrap indices by themselves are left to TVM. What writes at indices is looked at
when it is lowered, but for `scatter_elements`, whose places TVM puts together from the indices of
all axes: one beyond its own axis would be another element of the tensor.

    for r, n in ...:                        for r, n in ...:
        i = r * 5 + ids[r, n]                   assert -5 <= ids[r, n] < 5      on a GPU: if
        y[i // 5, i % 5] = u[r, n]              y[i // 5, i % 5] = u[r, n]
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import relax, te, tirx, topi
from tvm.ir import Call, Expr, Op, StringImm, TensorLoad

from .legalizers import Legalizer


def reads_at_indices(target: tvm.target.Target) -> dict[str, Legalizer]:
    """For `relax.transform.LegalizeOps`."""
    clipped = target.kind.name != "llvm"

    def place(index: Expr, extent: Expr) -> Expr:
        if not clipped:
            return index
        ends = tirx.const(0, str(index.ty.dtype)), tirx.Cast(str(index.ty.dtype), extent - 1)
        return tirx.min(tirx.max(ends[0], index), ends[1])

    def take(builder: relax.BlockBuilder, call: Call) -> relax.Expr:
        x, index = call.args
        tensors = all(isinstance(arg.ty, relax.TensorType) for arg in (x, index))
        if str(call.attrs.mode) != "fast" or not tensors or x.ty.ndim == -1 or index.ty.ndim == -1:
            return Op.get("relax.take").get_attr("FLegalize")(builder, call)
        axis = 0 if call.attrs.axis is None else int(call.attrs.axis) % x.ty.ndim

        def taken(x: te.Tensor, index: te.Tensor) -> te.Tensor:
            end = axis + len(index.shape)
            shape = [*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]]

            def at(*to: Expr) -> Expr:
                read = place(index(*to[axis:end]), x.shape[axis])
                return x(*to[:axis], read, *to[end:])

            return te.compute(shape, at, name="T_take", tag=topi.tag.INJECTIVE)

        return builder.call_te(taken, x, index, primfunc_name_hint="take")

    def gather(builder: relax.BlockBuilder, call: Call) -> relax.Expr:
        axis = int(call.attrs.axis) % call.args[0].ty.ndim

        def gathered(x: te.Tensor, index: te.Tensor) -> te.Tensor:
            def at(*to: Expr) -> Expr:
                read = place(index(*to), x.shape[axis])
                return x(*to[:axis], read, *to[axis + 1 :])

            return te.compute(index.shape, at, name="T_gather", tag=topi.tag.INJECTIVE)

        return builder.call_te(gathered, *call.args, primfunc_name_hint="gather")

    def gather_nd(builder: relax.BlockBuilder, call: Call) -> relax.Expr:
        batch = int(call.attrs.batch_dims)

        def gathered(x: te.Tensor, index: te.Tensor) -> te.Tensor:
            *points, count = index.shape
            end = batch + int(count)

            def at(*to: Expr) -> Expr:
                point, rest = to[: len(points)], to[len(points) :]
                read = [
                    place(index(*point, n), extent) for n, extent in enumerate(x.shape[batch:end])
                ]
                return x(*to[:batch], *read, *rest)

            shape = [*points, *x.shape[end:]]
            return te.compute(shape, at, name="T_gather_nd", tag=topi.tag.INJECTIVE)

        return builder.call_te(gathered, *call.args, primfunc_name_hint="gather_nd")

    def scatter(builder: relax.BlockBuilder, call: Call) -> relax.Expr:
        aside = relax.BlockBuilder()  # a function that is replaced is not found again
        made = Op.get("relax.scatter_elements").get_attr("FLegalize")(aside, call)
        gvar, *rest = made.args
        func = _within_its_axis(aside.get()[gvar], int(call.attrs.axis), clipped)
        found = builder.add_func(func, "scatter_elements")
        return Call(made.op, [found, *rest], made.attrs, made.ty_args)

    return {
        "relax.take": take,
        "relax.gather_elements": gather,
        "relax.gather_nd": gather_nd,
        "relax.scatter_elements": scatter,
    }


def _within_its_axis(func: tirx.PrimFunc, axis: int, dropped: bool) -> tirx.PrimFunc:
    """TVM's `scatter_elements`: what is beyond the axis is an error, or not written."""
    data, places = func.params[:2]
    axis %= len(data.ty.shape)
    extent = data.ty.shape[axis]

    def store(node: tirx.BufferStore) -> tirx.Stmt:
        loads = [load for index in node.indices for load in _loads_of(index, places)]
        if not loads:
            return node
        size = tirx.Cast(str(loads[0].ty.dtype), extent)
        inside = tirx.And(0 - size <= loads[0], loads[0] < size)
        if dropped:
            return tirx.IfThenElse(inside, node, None)
        count = int(extent) if isinstance(extent, tirx.IntImm) else extent
        told = f"scatter_elements: an index along axis {axis}, which has {count} elements"
        message = [StringImm(f"{told}, is out of range")]
        return tirx.SeqStmt([tirx.AssertStmt(inside, StringImm("OutOfRange"), message), node])

    return func.with_body(tvm_ffi.structural_map(func.body, [(tirx.BufferStore, store)]))


def _loads_of(expr: Expr, buffer: tirx.Var) -> list[TensorLoad]:
    found: list[TensorLoad] = []

    def load(node: TensorLoad) -> None:
        if node.source.same_as(buffer):
            found.append(node)

    tvm_ffi.structural_walk(expr, [(TensorLoad, load)])
    return found
