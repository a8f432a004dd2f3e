"""Registers that hold small integers or two halves: what the device does with their bits."""

from __future__ import annotations

import numpy as np
from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from ...gpu.intrinsics import device_call
from .bits import Field

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
