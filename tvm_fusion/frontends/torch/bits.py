"""Converters for what looks at the bits of numbers: `copysign`, and `view` as another type.

x.view(int32)   of float32   ->  y[...] = reinterpret("int32", x[...])
x.view(int16)   of float16   ->  integer arithmetic on the bits of float32(x)   (`half_bits`)
x.view(uint8)   of int32     ->  y[..., 4 j + k] = uint8(x[..., j] >> 8 k)
x.view(int32)   of int16     ->  y[..., j] = x[..., 2 j] | x[..., 2 j + 1] << 16

The payload of a NaN of float16 changes where it passes through float32.
"""

from __future__ import annotations

import math
from functools import partial, reduce

import torch
from torch import fx
from tvm import relax, te, tirx
from tvm.ir import Expr

from tvm_fusion.errors import FrontendError

from ...kernels.program.expr import HALF_DTYPES, bits_of, is_integer
from ...kernels.program.half_bits import half_bits, half_of_bits
from .importer import Importer


def _copysign(importer: Importer, node: fx.Node) -> relax.Expr:
    """The magnitude of a with the sign of b, which zeros and NaN have, too."""
    dtype, sign = importer.dtype_of(node), node.args[1]
    if not isinstance(sign, fx.Node):
        magnitude = importer.emit(relax.op.abs(importer.operand(node.args[0], dtype)))
        negative = math.copysign(1, sign) < 0
        return importer.emit(relax.op.negative(magnitude)) if negative else magnitude
    wide = "float32" if dtype in HALF_DTYPES else dtype
    bits = [_mapped(importer, importer.operand(arg, wide), _as_bits) for arg in node.args[:2]]
    integer, highest = str(bits[0].ty.dtype), -(1 << bits_of(wide) - 1)
    masks = (relax.const(mask, integer) for mask in (~highest, highest))
    parts = [importer.emit(relax.op.bitwise_and(*of)) for of in zip(bits, masks, strict=True)]
    result = importer.emit(relax.op.bitwise_or(*parts))
    return importer.cast(_mapped(importer, result, partial(_of_bits, wide)), dtype)


def _view_as(importer: Importer, node: fx.Node) -> relax.Expr:
    """view(dtype): bytes that lie behind one another are elements of the last axis."""
    x, (before, after) = importer.value_of(node.args[0]), (node.args[0].meta["val"], node.args[1])
    if after == torch.bool or before.is_complex() or after.is_complex:
        raise FrontendError(f"{before.dtype} viewed as {after}: take real numbers, no booleans")
    dtype = importer.dtype_of(node)
    x = importer.cast(x, "int8") if before.dtype == torch.bool else x
    x = _mapped(importer, x, _as_bits)
    wide, narrow = bits_of(str(x.ty.dtype)), bits_of(dtype)
    if narrow < wide:
        x = importer.block_builder.emit_te(_parts, x, narrow, primfunc_name_hint="view")
    elif narrow > wide:
        x = importer.block_builder.emit_te(_joined, x, narrow, primfunc_name_hint="view")
    if is_integer(dtype):
        return importer.cast(x, dtype)
    x = _mapped(importer, x, partial(_of_bits, dtype))
    return importer.cast(x, dtype)


def _mapped(importer: Importer, x: relax.Expr, function: object) -> relax.Expr:
    """A function of the bits of each element."""

    def elements(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *at: function(x(*at)), name="bits")

    return importer.block_builder.emit_te(elements, x, primfunc_name_hint="reinterpret")


def _as_bits(x: Expr) -> Expr:
    """An element's bits as a signed integer of its size."""
    dtype = str(x.ty.dtype)
    integer = f"int{bits_of(dtype)}"
    if dtype in HALF_DTYPES:
        word = tirx.reinterpret("uint32", tirx.Cast("float32", x))
        return tirx.Cast(integer, half_bits(dtype, word))
    if is_integer(dtype):
        return x if dtype == integer else tirx.Cast(integer, x)
    return tirx.reinterpret(integer, x)


def _of_bits(dtype: str, bits: Expr) -> Expr:
    """The number of bits; that of a half in float32."""
    if dtype in HALF_DTYPES:
        return half_of_bits(dtype, bits)
    return tirx.reinterpret(dtype, bits)


def _parts(x: te.Tensor, width: int) -> te.Tensor:
    """Elements of `width` bits, the lowest bits first."""
    count = bits_of(str(x.dtype)) // width

    def part(*at: Expr) -> Expr:
        *outer, last = at
        by = tirx.Cast(str(x.dtype), last % count * width)
        return tirx.Cast(f"int{width}", x(*outer, last // count) >> by)

    return te.compute((*x.shape[:-1], x.shape[-1] * count), part, name="parts")


def _joined(x: te.Tensor, width: int) -> te.Tensor:
    """Elements of `width` bits, each of several."""
    part = bits_of(str(x.dtype))
    count = width // part

    def whole(*at: Expr) -> Expr:
        *outer, last = at
        words = (tirx.Cast(f"uint{part}", x(*outer, last * count + i)) for i in range(count))
        moved = (
            tirx.Cast(f"uint{width}", word) << tirx.const(i * part, f"uint{width}")
            for i, word in enumerate(words)
        )
        return tirx.Cast(f"int{width}", reduce(lambda a, b: a | b, moved))

    return te.compute((*x.shape[:-1], x.shape[-1] // count), whole, name="joined")


CONVERTERS = {
    "view.dtype": _view_as,
    "copysign.Tensor": _copysign,
    "copysign.Scalar": _copysign,
}
