"""Products of pairs of bfloat16, summed up in float32 by one instruction (AVX-512 BF16).

    s[j] += a[k] * b[k, j] + a[k + 1] * b[k + 1, j]         for 16 columns j

A pair is one uint32, the earlier term in its lower half; behind an odd number of terms comes a
zero. The instruction takes numbers below the normal ones for zeros, in operands and sums, and
rounds the sum of a pair before it adds it.

Its LLVM intrinsic takes vectors of bfloat16, which TVM has none of in LLVM: a function that takes
integers is imported, and inlined by LLVM.

Does not handle: right operands that are computed; these are multiplied in float32.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr, StringImm

from ...program.expr import constant, dtype_of
from ..machine import Machine
from ..stages.stages import Stage, analyzer_of, load_stride, points
from .operands import Product
from .panels import plain_load

LANES = 16
PAIR = "uint32"
ELEMENT = "uint16"

_NAME = "tvm_fusion_dot_pairs"
_SUMS, _INTEGERS, _PAIRS = "<16 x float>", "<16 x i32>", "<32 x bfloat>"
_INTRINSIC = "@llvm.x86.avx512bf16.dpbf16ps.512"

# On one line: TVM prints no other string into a script that reads back.
_LLVM_IR = (
    f"define {_SUMS} @{_NAME}({_SUMS} %s, {_INTEGERS} %a, {_INTEGERS} %b) {{ "
    f"%x = bitcast {_INTEGERS} %a to {_PAIRS} "
    f"%y = bitcast {_INTEGERS} %b to {_PAIRS} "
    f"%r = call {_SUMS} {_INTRINSIC}({_SUMS} %s, {_PAIRS} %x, {_PAIRS} %y) "
    f"ret {_SUMS} %r }}"
)


def takes_pairs(stage: Stage, product: Product, machine: Machine) -> bool:
    """Whether a contraction multiplies pairs, to be summed up in float32: of bfloat16 that are
    loaded on the right, and maybe computed, and then rounded as the graph does, on the left.
    """
    right = plain_load(stage, product.right)
    plain = right is not None and dtype_of(right) == "bfloat16"
    sums = all(dtype_of(value) == "float32" for value in stage.values)
    return machine.dots_pairs and stage.factors == "bfloat16" and plain and sums


def lies_in_pairs(stage: Stage, operand: Expr) -> bool:
    """Whether the pairs of an operand lie in memory: terms are even in number, and contiguous."""
    load = plain_load(stage, operand)
    if load is None or dtype_of(load) != "bfloat16":
        return False
    last = stage.reduced[-1]
    even = last.size is not None and points([last]) % 2 == 0
    return even and load_stride(load, last.var, analyzer_of(stage.domain)) == 1


def importing(stmt: tirx.Stmt) -> tirx.Stmt:
    """A statement in which `dot` can be called."""
    return tirx.AttrStmt(0, "pragma_import_llvm", StringImm(_LLVM_IR), stmt)


def dot(sums: Expr, left: Expr, right: Expr) -> Expr:
    """The vector of sums with the products of one pair on the left, for all lanes, added."""
    pairs = tirx.Broadcast(left, LANES)
    return tirx.call_pure_extern(f"float32x{LANES}", _NAME, sums, pairs, right)


def bits(x: Expr) -> Expr:
    """A bfloat16 number as an integer."""
    return tirx.reinterpret(ELEMENT, x)


def rounded_bits(x: Expr) -> Expr:
    """The float32 number `x`, a bfloat16 one widened, as the integer of that."""
    return tirx.Cast(ELEMENT, tirx.RShift(tirx.reinterpret(PAIR, x), constant(16, PAIR)))


def pair_at(pair: Expr, terms: Expr, is_even: bool, element: Callable[[Expr], Expr]) -> Expr:
    """A pair of an operand; `element` is the bfloat16 number at a term, else as `pair_of`."""
    return pair_of(pair, terms, is_even, lambda term: bits(element(term)))


def pair_of(pair: Expr, terms: Expr, is_even: bool, element: Callable[[Expr], Expr]) -> Expr:
    """A pair of an operand.

    Parameters
    ----------
    terms : Expr
        The number of all terms, which `is_even` says to be even.
    element : callable
        The bfloat16 number at a term, as an integer.
    """
    index = dtype_of(pair)
    first = pair * constant(2, index)
    second = first + constant(1, index)
    low = tirx.Cast(PAIR, element(first))
    if is_even:
        high = tirx.Cast(PAIR, element(second))
    else:
        there = tirx.Cast(PAIR, element(tirx.Min(second, terms - constant(1, index))))
        high = tirx.Select(tirx.LT(second, terms), there, constant(0, PAIR))
    return tirx.BitwiseOr(low, tirx.LShift(high, constant(16, PAIR)))


def neighbours(load: Expr, count: int) -> Expr:
    """`count` pairs that lie one after the other, of which `load` loads the first number."""
    *outer, last = load.indices
    ramp = tirx.Ramp(last, constant(1, dtype_of(last)), 2 * count)
    vector = tirx.BufferLoad(load.source, [*outer, ramp])
    return tirx.reinterpret(PAIR if count == 1 else f"{PAIR}x{count}", vector)
