"""argmax and argmin in row kernels: pairs in a thread, one 64-bit key among threads.

    thread:   (value, column) of the best element so far, strictly better ones replace it
    others:   key = ordered bits of the value << 32 | ~column; the largest key wins

so that what exchanges sums and maxima exchanges keys as well. The smallest column of equal values
wins. NaN counts as the worst value.
"""

from __future__ import annotations

import dataclasses
import math

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...errors import Unsupported
from ..program.expr import bits_of, constant, convert, dtype_of, is_integer
from ..program.program import ReduceKind, Reduction

ARG_KINDS = (ReduceKind.ARGMAX, ReduceKind.ARGMIN)
NO_COLUMN = 2**31 - 1
KEY = "uint64"


def is_arg(reduction: Reduction) -> bool:
    """Whether a reduction gives an index."""
    return reduction.kind in ARG_KINDS


def carried(reduction: Reduction) -> Reduction:
    """The reduction that combines the partial results of threads: of keys, for an index."""
    if not is_arg(reduction):
        return reduction
    return dataclasses.replace(reduction, kind=ReduceKind.MAX, dtype=KEY, index=None)


def check_arg(reduction: Reduction) -> None:
    """Refuses values that do not fit into a key."""
    dtype = dtype_of(reduction.body)
    if is_arg(reduction) and dtype != "bool" and bits_of(dtype) > 32:
        raise Unsupported(f"{reduction.kind} of {dtype}")


class Best:
    """The best element of each accumulator of a thread.

    Parameters
    ----------
    reduction : an argmax or argmin.
    ways : independent accumulators.
    """

    def __init__(self, reduction: Reduction, ways: int) -> None:
        self.reduction, self.ways = reduction, ways
        dtype = dtype_of(reduction.body)
        self.dtype = "int32" if dtype == "bool" else dtype
        self.values = T.alloc_local((ways,), self.dtype)
        self.columns = T.alloc_local((ways,), "int32")
        for way in range(ways):
            T.buffer_store(self.values, self._worst(), [way])
            T.buffer_store(self.columns, constant(NO_COLUMN, "int32"), [way])

    def update(
        self, way: int, value: Expr, column: Expr, valid: Expr | None, in_order: bool
    ) -> None:
        """Takes an element into account; `in_order`: its column is larger than all before."""
        value = T.Bind(convert(value, self.dtype))
        column = convert(column, "int32")
        taken = self._better(value, self.values[way])
        if not in_order:
            first = tirx.And(tirx.EQ(value, self.values[way]), column < self.columns[way])
            taken = tirx.Or(taken, first)
        taken = T.Bind(taken if valid is None else tirx.And(valid, taken))
        T.buffer_store(self.values, tirx.Select(taken, value, self.values[way]), [way])
        T.buffer_store(self.columns, tirx.Select(taken, column, self.columns[way]), [way])

    def key(self) -> Var:
        """One key for all accumulators, in an array of one element."""
        found = T.alloc_local((1,), KEY)
        for way in range(self.ways):
            key = T.Bind(self._key(self.values[way], self.columns[way]))
            T.buffer_store(found, key if way == 0 else tirx.Max(found[0], key), [0])
        return found

    def _worst(self) -> Expr:
        largest = self.reduction.kind == ReduceKind.ARGMAX
        if self.dtype.startswith("float"):
            return constant(-math.inf if largest else math.inf, self.dtype)
        return tirx.min_value(self.dtype) if largest else tirx.max_value(self.dtype)

    def _better(self, a: Expr, b: Expr) -> Expr:
        return a > b if self.reduction.kind == ReduceKind.ARGMAX else a < b

    def _key(self, value: Expr, column: Expr) -> Expr:
        bits = _ordered_bits(value)
        if self.reduction.kind == ReduceKind.ARGMIN:
            bits = tirx.bitwise_not(bits)
        low = tirx.bitwise_not(tirx.Cast("uint32", column))
        high = tirx.shift_left(tirx.Cast(KEY, bits), constant(32, KEY))
        return tirx.bitwise_or(high, tirx.Cast(KEY, low))


def index_of(reduction: Reduction, key: Expr) -> Expr:
    """The index behind the largest key; the first column where no element is better than none."""
    column = tirx.Cast("int32", tirx.bitwise_not(tirx.Cast("uint32", key)))
    column = T.Bind(column)
    none = tirx.EQ(column, constant(NO_COLUMN, "int32"))
    column = tirx.Select(none, constant(0, "int32"), column)
    return T.Bind(convert(column, reduction.dtype))


def _ordered_bits(value: Expr) -> Expr:
    """32 bits that compare as the values do."""
    dtype = dtype_of(value)
    sign = constant(2**31, "uint32")
    if is_integer(dtype):
        bits = tirx.Cast("uint32", value)
        return bits if dtype.startswith("uint") else tirx.bitwise_xor(bits, sign)
    bits = tirx.reinterpret("uint32", value)
    # a negative zero is equal to a positive one
    bits = T.Bind(tirx.Select(tirx.EQ(bits, sign), constant(0, "uint32"), bits))
    return tirx.Select(bits >= sign, tirx.bitwise_not(bits), tirx.bitwise_or(bits, sign))
