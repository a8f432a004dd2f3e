"""Attention on [batch, sequence, heads, width] tensors.

    attention(q, k, v, bias) -> permute(matmul(softmax(mask(matmul(q', k') * scale + bias)), v'))

q', k' and v' are permuted to [batch, heads, ...]; a permute that undoes the one that made the
operand cancels it. The scores and the softmax are float32, the probabilities are rounded to the
type of v before the second product. The causal mask is one pointwise PrimFunc that compares
indices, so no mask is stored and both lengths may be symbolic.
Does not handle: sliding windows, key heads that differ from query heads, a symbolic width without
a scale, attention_var_len (left alone).
"""

import math
from collections.abc import Callable

import tvm_ffi
from tvm import te, tirx
from tvm.ir import Call
from tvm.relax import Expr, op

from .opening import Opening, Rule, compute_dtype, dtype_of, shape_of
from .softmax import emit_softmax


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


def _scale(call: Call, width) -> float | None:
    if call.attrs.scale is not None:
        return float(call.attrs.scale.value)
    return 1.0 / math.sqrt(int(width)) if isinstance(width, tirx.IntImm) else None


def _attention(o: Opening, call: Call) -> Expr | None:
    query, key, value, *bias = call.args
    shapes = [shape_of(tensor) for tensor in (query, key, value)]
    if call.attrs.window_size is not None or None in shapes:
        return None
    if not all(tvm_ffi.structural_equal(shape[2], shapes[0][2]) for shape in shapes):
        return None
    scale = _scale(call, shapes[0][3])
    if scale is None:
        return None
    dtype = dtype_of(query)
    wide = compute_dtype(dtype)

    q = o.permute("q", query, [0, 2, 1, 3])
    k = o.permute("k", key, [0, 2, 3, 1])
    v = o.permute("v", value, [0, 2, 1, 3])
    scores = o.emit("qk", op.matmul(q, k, out_dtype=wide))
    scores = o.emit("scaled", op.multiply(scores, o.const(scale, scores)))
    if bias:
        scores = o.emit("biased", op.add(scores, o.widen("bias", bias[0])))
    if call.attrs.causal_mask is not None:
        mask = _causal_mask(str(call.attrs.causal_mask) == "BottomRight")
        masked = o.builder.call_te(mask, scores, primfunc_name_hint="causal_mask")
        scores = o.emit("masked", masked)
    weights = o.narrow("weights", emit_softmax(o, scores, axis=3), dtype)
    mixed = o.emit("pv", op.matmul(weights, v, out_dtype=wide))
    return o.permute("out", o.narrow("half", mixed, dtype), [0, 2, 1, 3])


RULES: dict[str, Rule] = {
    "relax.nn.attention": _attention,
    "relax.nn.attention_bias": _attention,
}
