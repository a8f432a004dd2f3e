"""Pairs of halves in 32-bit words: taking apart, loading, storing."""

from __future__ import annotations

from tvm.ir import Expr
from tvm.script import tirx as T

from ..program.expr import FLOAT8_DTYPES
from .float8 import pack_float8
from .intrinsics import device_call, pack_halves

_TAKE_APART = {
    ("float16", 0): "return __low2float(*reinterpret_cast<__half2*>(&u));",
    ("float16", 1): "return __high2float(*reinterpret_cast<__half2*>(&u));",
    ("bfloat16", 0): "return __uint_as_float(u << 16);",
    ("bfloat16", 1): "return __uint_as_float(u & 0xffff0000u);",
}


def half_of(dtype: str, word: Expr, v: int) -> Expr:
    """Half number `v` of a pair, as a float32."""
    name = f"{'high' if v else 'low'}_{dtype}"
    return device_call("float32", name, "unsigned u", _TAKE_APART[dtype, v], word)


def load_word(place: Expr) -> Expr:
    """The aligned 32-bit word at `place`, which nothing writes during the kernel.

    It is read where it stands: what is known to be constant ptxas reads for a whole tile at once,
    and keeps it, and all that follows from it, in registers that there are not.
    """
    body = 'unsigned u; asm volatile("ld.global.b32 %0, [%1];" : "=r"(u) : "l"(p)); return u;'
    return device_call("uint32", "load_word", "const void* p", body, place)


def store_pair(dtype: str, place: Expr, low: Expr, high: Expr) -> Expr:
    """Stores two neighbours at the aligned `place`: halves, float32, or 8-bit floats."""
    if dtype == "float32":
        body = "*(float2*)p = make_float2(low, high);"
        return device_call(
            "void", "store_floats", "void* p, float low, float high", body, place, low, high
        )
    if dtype in FLOAT8_DTYPES:
        zero = T.float32(0)
        word = pack_float8(dtype, (low, high, zero, zero))
        body = "*(unsigned short*)p = (unsigned short)v;"
        return device_call("void", "store_bytes", "void* p, unsigned v", body, place, word)
    word = pack_halves(dtype, low, high)
    return device_call(
        "void", "store_word", "void* p, unsigned v", "*(unsigned*)p = v;", place, word
    )
