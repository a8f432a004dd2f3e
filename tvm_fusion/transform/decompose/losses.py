"""Losses.

    nll_loss(p, t, w)   -> loss = where(t != ignore, -p[t] * w[t], 0)
                           none: loss; sum: sum(loss); mean: sum(loss) / sum(where(..., w[t], 0))
    cross_entropy_with_logits(p, y) -> -mean over the batch of sum(p * y)

p[t] is one gather of one element a row, and the label is replaced by 0 where it is ignored, so
that nothing is read out of bounds. A gather that is inlined into log_softmax's last subtraction
reads one logit a row: log_softmax and the loss become one kernel that reads the logits once.
Half predictions are gathered as they are and widened afterwards.
"""

from tvm import relax
from tvm.ir import Call
from tvm.relax import Expr, op

from .opening import Opening, Rule, compute_dtype, dtype_of, shape_of


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


RULES: dict[str, Rule] = {
    "relax.nn.nll_loss": _nll_loss,
    "relax.nn.cross_entropy_with_logits": _cross_entropy_with_logits,
}
