"""Half-precision products that accumulate in float32, as the vendor libraries do.

    matmul(a: half, b: half) -> half(matmul(a, b, out_dtype=float32))      (conv1d, 2d, 3d alike)

The cast is a pointwise epilogue. A product that asks for float32 already is left alone.
"""

from tvm.ir import Call
from tvm.relax import Expr, op

from .opening import HALF_DTYPES, Opening, Rule, dtype_of

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


RULES: dict[str, Rule] = {
    "relax.matmul": _matmul,
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
}
