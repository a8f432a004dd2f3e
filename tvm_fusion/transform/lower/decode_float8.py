"""DecodeFloat8: widen 8-bit floats by their bits, on CPUs.

TVM 0.27's own code for them reads zero, subnormal numbers and NaN as other numbers.

    Cast(float16, e4m3)  ->  the 7 bits of exponent and mantissa moved to those of a float32, times
                             2^120 for the difference of the exponents' biases; NaN; the sign
    Cast(float16, e5m2)  ->  the upper half of a float16

Does not handle: casts of vectors, and other 8-bit floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import tvm
from tvm import tirx
from tvm.ir import Expr

from ..functions.functions import rewritten

_MAGNITUDE, _SIGN = 0x7F, 0x80
_E4M3_NAN = 0x7F
_E4M3_REBIAS = 2.0**120
_MANTISSA_SHIFT = 23 - 3  # from 3 bits of mantissa to 23


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.DecodeFloat8")
class DecodeFloat8:
    """See the module docstring."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return `mod` with the casts of its PrimFuncs written out."""
        return rewritten(mod, RULES)


def _decoded(cast: tirx.Cast) -> Expr:
    decode = _DECODERS.get(str(cast.value.ty.dtype))
    if decode is None or str(cast.ty.dtype) == str(cast.value.ty.dtype):
        return cast
    wide = decode(tirx.reinterpret("uint8", cast.value))
    dtype = str(cast.ty.dtype)
    return wide if str(wide.ty.dtype) == dtype else tirx.Cast(dtype, wide)


def _from_e4m3(bits: Expr) -> Expr:
    word = bits.astype("uint32")
    magnitude = word & tirx.const(_MAGNITUDE, "uint32")
    value = tirx.reinterpret("float32", magnitude << tirx.const(_MANTISSA_SHIFT, "uint32"))
    value = value * tirx.const(_E4M3_REBIAS, "float32")
    nan = tirx.const(math.nan, "float32")
    value = tirx.Select(magnitude == tirx.const(_E4M3_NAN, "uint32"), nan, value)
    sign = (word & tirx.const(_SIGN, "uint32")) << tirx.const(24, "uint32")
    return tirx.reinterpret("float32", tirx.reinterpret("uint32", value) | sign)


def _from_e5m2(bits: Expr) -> Expr:
    half = bits.astype("uint16") << tirx.const(8, "uint16")
    return tirx.reinterpret("float16", half).astype("float32")


_DECODERS: dict[str, Callable[[Expr], Expr]] = {
    "float8_e4m3fn": _from_e4m3,
    "float8_e5m2": _from_e5m2,
}
RULES = [(tirx.Cast, _decoded)]
"""For `functions.rewritten`."""
