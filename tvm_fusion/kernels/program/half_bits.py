"""The bits of 16-bit floats by integer arithmetic on those of float32.

    reinterpret("int16", x)    ->  half_bits(dtype, reinterpret("uint32", Cast("float32", x)))
    reinterpret("float16", n)  ->  half_of_bits("float16", n)

Neither what computes halves in float32 (a CPU) nor TVM's legalization of bfloat16 has the halves
themselves to look at. A float32 number that is no half is rounded to the nearest, ties to even.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr

_EXPONENT, _MANTISSA, _INFINITY = 0x7F800000, 0x007FFFFF, 0x7C00
_REBIAS = 112 << 23  # the bias of float32's exponents less that of float16's


def half_bits(dtype: str, bits: Expr) -> Expr:
    """The bits of a half, as uint16, from those of the float32 of its value, as uint32."""
    magnitude = bits & _u32(0x7FFFFFFF)
    rounded = {"bfloat16": _bfloat16, "float16": _float16}[dtype](magnitude)
    return tirx.Cast("uint16", ((bits >> _u32(16)) & _u32(0x8000)) | rounded)


def half_of_bits(dtype: str, bits: Expr) -> Expr:
    """The number that 16 bits, of an integer type, are as a half; of type float32."""
    word = tirx.Cast("uint32", tirx.Cast("uint16", bits))
    if dtype == "bfloat16":
        return _float(word << _u32(16))
    exponent, mantissa = word & _u32(_INFINITY), word & _u32(0x3FF)
    moved = (word & _u32(0x7FFF)) << _u32(13)
    # A number below the normal ones, as the mantissa behind the least normal exponent.
    least = _u32(_REBIAS + (1 << 23))
    small = _float(mantissa << _u32(13) | least) - _float(least)
    special = _float(moved | _u32(_EXPONENT))
    value = tirx.Select(exponent == _u32(_INFINITY), special, _float(moved + _u32(_REBIAS)))
    magnitude = tirx.Select(exponent == _u32(0), small, value)
    return tirx.Select((word & _u32(0x8000)) != _u32(0), -magnitude, magnitude)


def _bfloat16(magnitude: Expr) -> Expr:
    is_nan = magnitude > _u32(_EXPONENT)
    return tirx.Select(is_nan, magnitude >> _u32(16), _shifted(magnitude, _u32(16)))


def _float16(magnitude: Expr) -> Expr:
    normal = tirx.min(_shifted(magnitude - _u32(_REBIAS), _u32(13)), _u32(_INFINITY))
    # Below 2^-14 the implicit bit shows, and the exponent is how far it is moved.
    exponent = magnitude >> _u32(23)
    by = _u32(126) - tirx.max(exponent, _u32(101))
    small = _shifted(magnitude & _u32(_MANTISSA) | _u32(1 << 23), by)
    nan = _u32(_INFINITY) | ((magnitude & _u32(_MANTISSA)) >> _u32(13))
    number = tirx.Select(exponent < _u32(113), small, normal)
    return tirx.Select(magnitude > _u32(_EXPONENT), nan, number)


def _shifted(word: Expr, by: Expr) -> Expr:
    """word / 2**by, rounded to the nearest, ties to even."""
    one = _u32(1)
    half = (one << (by - one)) - one
    return (word + half + ((word >> by) & one)) >> by


def _float(bits: Expr) -> Expr:
    return tirx.reinterpret("float32", bits)


def _u32(value: int) -> Expr:
    return tirx.const(value, "uint32")
