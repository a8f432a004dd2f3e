"""Activations and contractions that are more than one operation.

    silu(x)      -> x * sigmoid(x)
    gelu(x)      -> x * (erf(x * sqrt(1/2)) * 0.5 + 0.5)
    gelu_tanh(x) -> x * sigmoid(2u),  u = sqrt(2/pi) * (x + 0.044715 x^3)

The last is the same function: 0.5 * (1 + tanh(u)) = sigmoid(2u), without the cancellation that
1 + tanh(u) suffers for negative x. Half tensors are computed in float32 and rounded once.
Does not handle: leakyrelu, prelu, relu, relu6 and softplus, which are one operation already, and
selu (left alone).
"""

import math

from tvm.ir import Call
from tvm.relax import Expr, op

from .opening import HALF_DTYPES, Opening, Rule, dtype_of


def _silu(o: Opening, call: Call) -> Expr:
    (x,) = call.args
    wide = o.widen("in", x)
    gate = o.emit("sigmoid", op.sigmoid(wide))
    return o.narrow("half", o.emit("out", op.multiply(wide, gate)), dtype_of(x))


def _gelu(o: Opening, call: Call) -> Expr:
    (x,) = call.args
    wide = o.widen("in", x)
    scaled = o.emit("scaled", op.multiply(wide, o.const(math.sqrt(0.5), wide)))
    erf = o.emit("erf", op.erf(scaled))
    half_erf = o.emit("half_erf", op.multiply(erf, o.const(0.5, wide)))
    gate = o.emit("gate", op.add(half_erf, o.const(0.5, wide)))
    return o.narrow("half", o.emit("out", op.multiply(wide, gate)), dtype_of(x))


def _gelu_tanh(o: Opening, call: Call) -> Expr:
    (x,) = call.args
    wide = o.widen("in", x)
    slope = 2.0 * math.sqrt(2.0 / math.pi)
    square = o.emit("square", op.multiply(wide, wide))
    cubic = o.emit("cubic", op.multiply(square, o.const(slope * 0.044715, wide)))
    factor = o.emit("factor", op.add(cubic, o.const(slope, wide)))
    argument = o.emit("argument", op.multiply(wide, factor))
    gate = o.emit("sigmoid", op.sigmoid(argument))
    return o.narrow("half", o.emit("out", op.multiply(wide, gate)), dtype_of(x))


_ACTIVATIONS: dict[str, Rule] = {
    "relax.nn.silu": _silu,
    "relax.nn.gelu": _gelu,
    "relax.nn.gelu_tanh": _gelu_tanh,
}


# ---- Half-precision products that accumulate in float32, as the vendor libraries do.
#
#     matmul(a: half, b: half) -> half(matmul(a, b, out_dtype=float32))      (conv1d, 2d, 3d alike)
#
# The cast is a pointwise epilogue. A product that asks for float32 already is left alone.

_CONVOLUTIONS = {
    "relax.nn.conv1d": op.nn.conv1d,
    "relax.nn.conv2d": op.nn.conv2d,
    "relax.nn.conv3d": op.nn.conv3d,
}


def _accumulates_in_half(call: Call) -> bool:
    return dtype_of(call) in HALF_DTYPES and dtype_of(call.args[0]) in HALF_DTYPES


def _matmul(o: Opening, call: Call) -> Expr | None:
    if not _accumulates_in_half(call):
        return None
    wide = o.emit("wide", op.matmul(*call.args, out_dtype="float32"))
    return o.narrow("half", wide, dtype_of(call))


def _convolution(o: Opening, call: Call) -> Expr | None:
    if not _accumulates_in_half(call):
        return None
    attrs = call.attrs
    product = _CONVOLUTIONS[call.op.name](
        *call.args,
        strides=attrs.strides,
        padding=attrs.padding,
        dilation=attrs.dilation,
        groups=attrs.groups,
        data_layout=attrs.data_layout,
        kernel_layout=attrs.kernel_layout,
        out_layout=attrs.out_layout,
        out_dtype="float32",
    )
    return o.narrow("half", o.emit("wide", product), dtype_of(call))


_CONTRACTIONS: dict[str, Rule] = {
    "relax.matmul": _matmul,
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
}


RULES = _ACTIVATIONS | _CONTRACTIONS
