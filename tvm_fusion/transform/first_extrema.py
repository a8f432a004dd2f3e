"""argmax and argmin of rows without an element above the least number: the first place, where TVM's
own legalization gives -1.

    Before                          After
    y[i] = index[i]                 y[i] = max(index[i], 0)

A row of zeros of uint8 has none, nor has one of masked scores, all of them minus infinity: TVM
starts from index -1 and the least finite number, and between equal numbers the lower index wins.
(Its schedules find the reduction by that start, so it stays.)

Does not handle: the least finite float beside minus infinities; the first place is given, not its.
"""

from collections.abc import Callable
from functools import partial

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import Call

Legalizer = Callable[[relax.BlockBuilder, Call], relax.Expr]
NAMES = ("relax.argmax", "relax.argmin")


def _legalize(name: str, builder: relax.BlockBuilder, call: Call) -> relax.Expr:
    """The call of TVM's kernel, with the first place for none."""
    made = tvm.ir.Op.get(name).get_attr("FLegalize")(builder, call)
    if not isinstance(made, Call) or made.op.name != "relax.call_tir":
        return made
    gvar, inputs = made.args
    mended = _from_the_first(builder.get()[gvar])
    return relax.call_tir(builder.add_func(mended, gvar.name_hint), inputs, made.ty_args[0])


def _from_the_first(func: tirx.PrimFunc) -> tirx.PrimFunc:
    result = func.params[-1]

    def store(node: tirx.BufferStore) -> tirx.BufferStore:
        if not node.buffer.same_as(result):
            return node
        return tirx.BufferStore(node.buffer, tirx.max(node.value, 0), node.indices)

    return func.with_body(tvm_ffi.structural_map(func.body, [(tirx.BufferStore, store)]))


LEGALIZERS: dict[str, Legalizer] = {name: partial(_legalize, name) for name in NAMES}
"""For `relax.transform.LegalizeOps`."""
