"""argmax and argmin of rows without an element above the least number: the first place, where TVM's
own legalization gives -1.

    Before                          After
    y[i] = index[i]                 y[i] = max(index[i], 0)

A row of zeros of uint8 has none, nor has one of masked scores, all of them minus infinity: TVM
starts from index -1 and the least finite number, and between equal numbers the lower index wins.
(Its schedules find the reduction by that start, so it stays.)

Integers of 8 bits are compared as int32: the last steps of TVM's reduction of them on a GPU go
through shared memory without a barrier, those of 32 bits through shuffles.

Does not handle: the least finite float beside minus infinities; the first place is given, not its.
"""

from functools import partial

import tvm_ffi
from tvm import relax, te, tirx, topi
from tvm.ir import Call

from .half_operators import Legalizer

EXTREMA = {"relax.argmax": topi.argmax, "relax.argmin": topi.argmin}
NARROW = ("int8", "uint8", "bool")


def _legalize(name: str, builder: relax.BlockBuilder, call: Call) -> relax.Expr:
    """The call of TVM's kernel, with the first place for none."""
    dtype, axis, keepdims = str(call.args[0].ty.dtype), call.attrs.axis, call.attrs.keepdims

    def extremum(x: te.Tensor) -> te.Tensor:
        x = topi.cast(x, "int32") if dtype in NARROW else x
        return EXTREMA[name](x, axis, keepdims)

    hint = name.removeprefix("relax.")
    made = builder.call_te(extremum, call.args[0], primfunc_name_hint=hint)
    gvar, *arguments = made.args  # sizes come after the tensors where no tensor has them
    mended = builder.add_func(_from_the_first(builder.get()[gvar]), gvar.name_hint)
    return Call(made.op, [mended, *arguments], made.attrs, made.ty_args)


def _from_the_first(func: tirx.PrimFunc) -> tirx.PrimFunc:
    _, result = func.params[:2]

    def store(node: tirx.BufferStore) -> tirx.BufferStore:
        if not node.buffer.same_as(result):
            return node
        return tirx.BufferStore(node.buffer, tirx.max(node.value, 0), node.indices)

    return func.with_body(tvm_ffi.structural_map(func.body, [(tirx.BufferStore, store)]))


LEGALIZERS: dict[str, Legalizer] = {name: partial(_legalize, name) for name in EXTREMA}
"""For `relax.transform.LegalizeOps`."""
