"""softmax and log_softmax.

    softmax(x)     -> e / sum(e)              with e = exp(x - max(x))
    log_softmax(x) -> s - log(sum(exp(s)))    with s = x - max(x)

Half tensors are widened to float32 at the entry and rounded at the exit.
"""

from tvm.ir import Call
from tvm.relax import Expr, op

from .opening import Opening, Rule, dtype_of


def emit_softmax(o: Opening, x: Expr, axis: int) -> Expr:
    """The softmax of `x` in the type of `x`."""
    top = o.emit("max", op.max(x, axis, keepdims=True))
    shifted = o.emit("shifted", op.subtract(x, top))
    exponential = o.emit("exp", op.exp(shifted))
    total = o.emit("sum", op.sum(exponential, axis, keepdims=True))
    return o.emit("out", op.divide(exponential, total))


def _softmax(o: Opening, call: Call) -> Expr:
    (x,) = call.args
    result = emit_softmax(o, o.widen("in", x), int(call.attrs.axis))
    return o.narrow("half", result, dtype_of(x))


def _log_softmax(o: Opening, call: Call) -> Expr:
    (x,) = call.args
    axis = int(call.attrs.axis)
    wide = o.widen("in", x)
    top = o.emit("max", op.max(wide, axis, keepdims=True))
    shifted = o.emit("shifted", op.subtract(wide, top))
    exponential = o.emit("exp", op.exp(shifted))
    total = o.emit("sum", op.sum(exponential, axis, keepdims=True))
    log_total = o.emit("log", op.log(total))
    result = o.emit("out", op.subtract(shifted, log_total))
    return o.narrow("half", result, dtype_of(x))


RULES: dict[str, Rule] = {
    "relax.nn.softmax": _softmax,
    "relax.nn.log_softmax": _log_softmax,
}
