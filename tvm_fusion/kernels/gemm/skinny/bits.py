"""Small integers inside loaded words, and their conversion to floats without I2F.

    (w >> 12) & 15      bits 12 ... 15 of a loaded word: a `Field`
    f32(field)          as_float((w >> 12) & 15 | 0x4B000000) - 2^23
    two f16(field)      (w >> 8) & 0x000F000F | 0x64006400 = halves 1024 + field, then one HFMA2

The exponent of 2^23 (of 1024 in half precision) makes the mantissa count ones: conversion is one
logical and one floating-point instruction; I2F runs at a quarter of their rate. What a field is
follows from shifts, masks, divisions and casts alone: int8, int4 in bytes or in 32-bit words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from tvm import tirx
from tvm.ir import Expr, Var
from tvm.ir.prim.expr import BitwiseAnd, LShift, RShift
from tvm.script import tirx as T

from ...gpu.intrinsics import device_call
from ...program.expr import bits_of, constant, dtype_of, is_integer, number

# Registers that hold small integers or two halves: what the device does with their bits.

FLOAT_ONE = 0x4B000000  # 2^23, the float32 whose last bit of mantissa is 1
HALF_ONE = 0x64006400  # two times 1024, the float16 whose last bit of mantissa is 1
HALF_BITS = 10  # bits of mantissa of a float16


def word_of(array: Expr, slot: Expr | int) -> Expr:
    """The aligned 32-bit word of a register array that begins at an element."""
    body = "return *(const unsigned*)p;"
    return device_call("uint32", "word", "const void* p", body, array.ptr_to([slot]))


def field_float(word: Expr, shift: int, field: Field) -> Expr:
    """A field of a word as 2^23 + number + bias, in float32."""
    mask, sign = (1 << field.bits) - 1, field.bias
    moved = word >> T.uint32(shift) if shift else word
    return tirx.reinterpret("float32", masked(moved, mask, FLOAT_ONE | sign))


def field_pair(word: Expr, shift: int, field: Field) -> tuple[Expr, float]:
    """Two halves 1024 + 2^s (number + bias) of the fields at `shift` and `shift` + 16, and 2^s."""
    rest = shift
    if shift + field.bits > HALF_BITS:
        rest = shift - 8 if shift >= 8 and shift - 8 + field.bits <= HALF_BITS else 0
        word = T.Bind(word >> T.uint32(shift - rest))
    mask = (((1 << field.bits) - 1) << rest) * 0x10001
    magic = HALF_ONE ^ (field.bias << rest) * 0x10001
    return masked(word, mask, magic), float(1 << rest)


def masked(word: Expr, mask: int, flipped: int) -> Expr:
    """``(word & mask) ^ flipped`` in one instruction, which nvcc makes two of."""
    body = (
        'unsigned r; asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(r) : "r"(w), "r"(m), "r"(f)); '
        "return r;"
    )
    arguments = "unsigned w, unsigned m, unsigned f"
    return device_call("uint32", "masked", arguments, body, word, T.uint32(mask), T.uint32(flipped))


def half_fma(a: Expr, scale: float, shift: float) -> Expr:
    """``a * scale + shift`` of two halves; both constants have to be halves."""
    body = (
        'unsigned r; asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); '
        "return r;"
    )
    arguments = "unsigned a, unsigned b, unsigned c"
    return device_call("uint32", "half_fma", arguments, body, a, _twice(scale), _twice(shift))


def half_add(a: Expr, b: Expr) -> Expr:
    """Sums of two halves each."""
    body = 'unsigned r; asm("add.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r;'
    return device_call("uint32", "half_add", "unsigned a, unsigned b", body, a, b)


def byte_perm(a: Expr, b: Expr, selectors: int) -> Expr:
    """Four bytes of the eight of two words, by number, the lowest first."""
    body = "return __byte_perm(a, b, s);"
    arguments = "unsigned a, unsigned b, unsigned s"
    return device_call("uint32", "byte_perm", arguments, body, a, b, T.uint32(selectors))


def half_multiply(a: Expr, b: Expr) -> Expr:
    """Products of two halves each."""
    body = 'unsigned r; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r;'
    return device_call("uint32", "half_mul", "unsigned a, unsigned b", body, a, b)


def is_half(value: float) -> bool:
    """Whether a number is a float16."""
    return abs(value) < 65504 and float(np.float16(value)) == value


def _twice(value: float) -> Expr:
    return T.uint32(int(np.float16(value).view(np.uint16)) * 0x10001)


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """`bits` bits of an element from `shift` on; `holder` is the element's placeholder.

    With `by` the element is shifted down first, by that many bits more. Where `most` is not 0, up
    to so many of the upper bits are those of a neighbour, and still to be masked.
    """

    holder: Var
    shift: int
    bits: int
    signed: bool
    by: Expr | None = None
    most: int = 0

    @property
    def bias(self) -> int:
        """What flipping the sign bit adds to the number."""
        return 1 << (self.bits - 1) if self.signed else 0


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """``field * scale + shift``, and `rest` on top, which has no field."""

    field: Field
    scale: float = 1.0
    shift: float = 0.0
    rest: Expr | None = None


def field_of(expr: Expr) -> Field | None:
    """An integer expression as a field of one loaded element, or None."""
    dtype = dtype_of(expr)
    if not is_integer(dtype):
        return None
    if isinstance(expr, Var):
        return Field(expr, 0, bits_of(dtype), dtype.startswith("int"))
    if isinstance(expr, tirx.Cast):
        inner = field_of(expr.value) if is_integer(dtype_of(expr.value)) else None
        return None if inner is None else _cast(inner, dtype)
    if not isinstance(expr, RShift | BitwiseAnd | tirx.FloorDiv | tirx.FloorMod):
        return None
    a, b = expr.a, expr.b
    if isinstance(expr, BitwiseAnd) and number(b) is None:
        a, b = b, a
    if isinstance(expr, RShift) and isinstance(b, tirx.Min):
        return _moved(field_of(a), b)
    value = number(b)
    if value is None:
        return None
    if isinstance(expr, RShift) and isinstance(a, LShift):
        return _extended(a, value)
    inner = field_of(a)
    if inner is None:
        return None
    if isinstance(expr, BitwiseAnd):
        return _masked(inner, (value + 1).bit_length() - 1) if value & (value + 1) == 0 else None
    if isinstance(expr, RShift):
        return _shifted(inner, value)
    if value <= 0 or value & (value - 1):
        return None
    power = value.bit_length() - 1
    return _shifted(inner, power) if isinstance(expr, tirx.FloorDiv) else _masked(inner, power)


def _cast(inner: Field, dtype: str) -> Field | None:
    bits = bits_of(dtype)
    if inner.most:
        return None
    if inner.bits < bits:
        return inner if dtype.startswith("int") or not inner.signed else None
    return replace(inner, bits=bits, signed=dtype.startswith("int"))


def _moved(inner: Field | None, by: tirx.Min) -> Field | None:
    """A shift that is the same for all points of a block, and known to be at most ``by.b``."""
    most = number(by.b)
    if inner is None or inner.signed or inner.by is not None or not most:
        return None
    return replace(inner, by=by.a, most=most) if 0 < most < inner.bits else None


def _shifted(inner: Field, by: int) -> Field | None:
    if inner.most or by >= inner.bits:
        return None
    return replace(inner, shift=inner.shift + by, bits=inner.bits - by)


def _masked(inner: Field, bits: int) -> Field | None:
    if bits <= 0 or (bits > inner.bits and inner.signed):
        return None
    if inner.most and bits + inner.most > inner.bits:
        return None
    return replace(inner, bits=min(bits, inner.bits), signed=False, most=0)


def _extended(left: LShift, right: int) -> Field | None:
    """``(x << a) >> b`` of a whole word: the shift back carries the sign along."""
    up, inner = number(left.b), field_of(left.a)
    if up is None or inner is None or inner.bits != bits_of(dtype_of(left)) or not 0 <= up <= right:
        return None
    bits = inner.bits - right
    return replace(inner, shift=inner.shift + right - up, bits=bits) if bits > 0 else None


def linear_of(expr: Expr, invariant: Callable[[Expr], bool]) -> Linear | None:
    """A float32 expression as a linear function of one field, or None."""
    if isinstance(expr, tirx.Cast):
        inner = expr.value
        if is_integer(dtype_of(inner)):
            return _of_integer(inner)
        if dtype_of(inner) == "float16" and isinstance(inner, tirx.Cast):
            whole = is_integer(dtype_of(inner.value))
            found = _of_integer(inner.value) if whole else linear_of(inner.value, invariant)
            return found if found is not None and _whole(found) else None
        return None
    if not isinstance(expr, tirx.Add | tirx.Sub | tirx.Mul):
        return None
    for kept, other, sign in ((expr.a, expr.b, 1.0), (expr.b, expr.a, -1.0)):
        found = linear_of(kept, invariant)
        if found is None or found.rest is not None:
            continue
        value = number(_plain(other))
        if isinstance(expr, tirx.Mul):
            if value is None:
                return None
            return replace(found, scale=found.scale * value, shift=found.shift * value)
        if isinstance(expr, tirx.Sub) and sign < 0:
            found = replace(found, scale=-found.scale, shift=-found.shift)
        down = isinstance(expr, tirx.Sub) and sign > 0
        if value is not None:
            return replace(found, shift=found.shift + (-value if down else value))
        if not invariant(other):
            return None
        return replace(found, rest=other * constant(-1.0, "float32") if down else other)
    return None


def _plain(expr: Expr) -> Expr:
    """An immediate without the casts that keep its value."""
    while isinstance(expr, tirx.Cast) and number(expr.value) is not None:
        if float(np.float16(number(expr.value))) != number(expr.value):
            return expr
        expr = expr.value
    if isinstance(expr, tirx.Cast) and isinstance(expr.value, tirx.Cast):
        inner = _plain(expr.value)
        return inner if number(inner) is not None else expr
    return expr


def _of_integer(expr: Expr) -> Linear | None:
    """A cast pushed into an integer sum whose numbers are small enough to be exact."""
    if isinstance(expr, tirx.Cast) and is_integer(dtype_of(expr.value)) and field_of(expr) is None:
        wide = bits_of(dtype_of(expr)) >= 16 and dtype_of(expr).startswith("int")
        return _of_integer(expr.value) if wide else None
    if isinstance(expr, tirx.Add | tirx.Sub):
        sign = 1 if isinstance(expr, tirx.Add) else -1
        found, value = _of_integer(expr.a), number(expr.b)
        small = bits_of(dtype_of(expr)) >= 16 and dtype_of(expr).startswith("int")
        if found is None or value is None or not small:
            return None
        shift = found.shift + sign * value
        return replace(found, shift=shift) if abs(shift) <= 1 << 14 else None
    found = field_of(expr)
    exact = found is not None and found.bits <= 14 and not found.most
    return Linear(found) if exact else None


def _whole(linear: Linear) -> bool:
    """Whether rounding the number to half precision changes nothing."""
    largest = abs(linear.shift) + abs(linear.scale) * (1 << linear.field.bits)
    return (
        linear.rest is None
        and largest <= 2048
        and linear.scale == int(linear.scale)
        and linear.shift == int(linear.shift)
    )
