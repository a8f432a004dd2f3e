"""softmax and log_softmax; attention; losses.

    softmax(x)     -> e / sum(e)              with e = exp(x - max(x))
    log_softmax(x) -> s - log(sum(exp(s)))    with s = x - max(x)

Half tensors are widened to float32 at the entry and rounded at the exit.
"""

import math
from collections.abc import Callable

import tvm_ffi
from tvm import relax, te, tirx
from tvm.ir import Call
from tvm.relax import Expr, op

from .opening import Opening, Rule, compute_dtype, dtype_of, shape_of


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


_SOFTMAX: dict[str, Rule] = {
    "relax.nn.softmax": _softmax,
    "relax.nn.log_softmax": _log_softmax,
}


# ---- Attention on [batch, sequence, heads, width] tensors.
#
#     attention(q, k, v, bias) -> permute(matmul(softmax(mask(matmul(q', k') * scale + bias)), v'))
#
# q', k' and v' are permuted to [batch, heads, ...]; a permute that undoes the one that made the
# operand cancels it. The scores and the softmax are float32, the probabilities are rounded to the
# type of v before the second product. The causal mask is one pointwise PrimFunc that compares
# indices, so no mask is stored and both lengths may be symbolic.
# Does not handle: sliding windows, key heads that differ from query heads, attention_var_len (left
# alone).


def _causal_mask(bottom_right: bool) -> Callable[[te.Tensor], te.Tensor]:
    """Scores with every key after the last visible one set to the lowest finite value."""

    def mask(scores: te.Tensor) -> te.Tensor:
        queries, keys = scores.shape[-2:]
        offset = tirx.abs(queries - keys) if bottom_right else 0
        lowest = tirx.min_value(scores.dtype)

        def select(*index):
            visible = index[-1] <= index[-2] + offset
            return tirx.if_then_else(visible, scores(*index), lowest)

        return te.compute(scores.shape, select, name="causal_mask")

    return mask


def _scaled(o: Opening, call: Call, scores: Expr, width: tirx.Expr) -> Expr:
    """Scores times the scale, which is 1 / sqrt(width) by default."""
    if call.attrs.scale is not None:
        return op.multiply(scores, o.const(float(call.attrs.scale.value), scores))
    if isinstance(width, tirx.IntImm):
        return op.multiply(scores, o.const(1.0 / math.sqrt(int(width)), scores))
    return o.builder.call_te(_scaled_by, scores, width, primfunc_name_hint="scaled")


def _scaled_by(scores: te.Tensor, width: tirx.Var) -> te.Tensor:
    """Scores over the root of a symbolic width."""
    root = tirx.sqrt(tirx.Cast(scores.dtype, width))
    return te.compute(scores.shape, lambda *index: scores(*index) / root, name="scaled")


def _attention(o: Opening, call: Call) -> Expr | None:
    query, key, value, *bias = call.args
    shapes = [shape_of(tensor) for tensor in (query, key, value)]
    if call.attrs.window_size is not None or None in shapes:
        return None
    if not all(tvm_ffi.structural_equal(shape[2], shapes[0][2]) for shape in shapes):
        return None
    dtype = dtype_of(query)
    wide = compute_dtype(dtype)

    q = o.permute("q", query, [0, 2, 1, 3])
    k = o.permute("k", key, [0, 2, 3, 1])
    v = o.permute("v", value, [0, 2, 1, 3])
    scores = o.emit("qk", op.matmul(q, k, out_dtype=wide))
    scores = o.emit("scaled", _scaled(o, call, scores, shapes[0][3]))
    if bias:
        scores = o.emit("biased", op.add(scores, o.widen("bias", bias[0])))
    if call.attrs.causal_mask is not None:
        mask = _causal_mask(str(call.attrs.causal_mask) == "BottomRight")
        masked = o.builder.call_te(mask, scores, primfunc_name_hint="causal_mask")
        scores = o.emit("masked", masked)
    weights = o.narrow("weights", emit_softmax(o, scores, axis=3), dtype)
    mixed = o.emit("pv", op.matmul(weights, v, out_dtype=wide))
    return o.permute("out", o.narrow("half", mixed, dtype), [0, 2, 1, 3])


def fails_whole(call: Call) -> bool:
    """Whether TVM cannot legalize the operator itself: attention over a number of keys that is an
    expression (`n + 1`, after a cache was appended to), which it takes for two that differ.
    """
    shape = shape_of(call.args[1]) if call.op.name in _ATTENTION else None
    return shape is not None and not isinstance(shape[1], tirx.IntImm | tirx.Var)


_ATTENTION: dict[str, Rule] = {
    "relax.nn.attention": _attention,
    "relax.nn.attention_bias": _attention,
}


# ---- Losses.
#
#     nll_loss(p, t, w)   -> loss = where(t != ignore, -p[t] * w[t], 0)
#                            none: loss; sum: sum(loss); mean: sum(loss) / sum(where(..., w[t], 0))
#     cross_entropy_with_logits(p, y) -> -mean over the batch of sum(p * y)
#
# p[t] is one gather of one element a row, and the label is replaced by 0 where it is ignored, so
# that nothing is read out of bounds. A gather that is inlined into log_softmax's last subtraction
# reads one logit a row: log_softmax and the loss become one kernel that reads the logits once.
# Half predictions are gathered as they are and widened afterwards.


def _nll_loss(o: Opening, call: Call) -> Expr | None:
    predictions, targets, *weights = call.args
    shape, target_shape = shape_of(predictions), shape_of(targets)
    if shape is None or target_shape is None:
        return None
    dtype, reduction = dtype_of(predictions), str(call.attrs.reduction)
    class_axis = 0 if len(shape) == 1 else 1
    wide = compute_dtype(dtype)

    ignored = relax.const(int(call.attrs.ignore_index), dtype_of(targets))
    valid = o.emit("valid", op.not_equal(targets, ignored))
    label = o.where("label", valid, targets, 0)
    index = o.emit("index", op.expand_dims(label, class_axis))
    gathered = o.emit("gathered", op.gather_elements(predictions, index, class_axis))
    picked = o.widen("picked", o.emit("picked", op.squeeze(gathered, class_axis)))
    loss = o.emit("negative", op.negative(picked))
    weight = None
    if weights:
        taken = o.emit("taken", op.take(weights[0], label, axis=0, mode="clip"))
        weight = o.widen("weight", taken)
        loss = o.emit("weighted", op.multiply(loss, weight))
    loss = o.where("loss", valid, loss, 0.0)

    if reduction != "none" and target_shape:
        loss = o.emit("total", op.sum(loss))
    if reduction == "mean":
        if weight is None:
            count = o.emit("weights", op.astype(valid, wide))
        else:
            count = o.where("weights", valid, weight, 0.0)
        if target_shape:
            count = o.emit("weight_total", op.sum(count))
        loss = o.emit("mean", op.divide(loss, count))
    return o.narrow("half", loss, dtype)


def _cross_entropy_with_logits(o: Opening, call: Call) -> Expr | None:
    predictions, labels = call.args
    shape = shape_of(predictions)
    if not shape:
        return None
    product = o.emit("product", op.multiply(o.widen("in", predictions), o.widen("labels", labels)))
    if len(shape) == 1:
        result = o.emit("total", op.sum(product))
    else:
        rows = o.emit("rows", op.sum(product, axis=list(range(1, len(shape)))))
        result = o.mean("mean", rows, [0], keepdims=False)
    return o.narrow("half", o.emit("out", op.negative(result)), dtype_of(predictions))


_LOSSES: dict[str, Rule] = {
    "relax.nn.nll_loss": _nll_loss,
    "relax.nn.cross_entropy_with_logits": _cross_entropy_with_logits,
}


RULES = _SOFTMAX | _ATTENTION | _LOSSES
