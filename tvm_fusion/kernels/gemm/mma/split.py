"""Products of float32 on tensor cores that keep its precision: three of tfloat32 for each.

    a = a_high + a_low,  b = b_high + b_low           (10 bits of mantissa each)
    a b = a_high b_high + a_high b_low + a_low b_high (less than 2^-19 of it is lost)

Tensor cores cut sums off where they add, which of a long sum leaves less than float32 would: they
add the products of 16 terms, and the sums of these are rounded to the nearest outside. (Ootomo and
Yokota, Recovering single precision accuracy from Tensor Cores, 2022.)
"""

from __future__ import annotations

from tvm.ir import Expr
from tvm.script import tirx as T

from ...program.expr import constant
from .plan import TERM_BYTES, WarpTiles
from .units import at_least, multiply, split_float32

SUMS, A_REGISTERS, B_REGISTERS = 4, 4, 2
"""Registers of a thread: of the sums of one mma.sync, of its operands."""

PRODUCTS = 3

LEAST_REST = -(2.0**123)
"""Below any sum of 16 terms' smaller products, each less than 2^-9 of a term that is finite. What
takes the place of NaN is no less, so that finite terms that are added to it stay finite, too."""


class SplitProducts:
    """The registers in which the fragments of two rounds are split, and what is multiplied."""

    def __init__(self, tiles: WarpTiles):
        self.tiles = tiles
        self.rows = tiles.tiles_m * A_REGISTERS
        self.a_high, self.a_low = (T.alloc_local((2 * self.rows,), "uint32") for _ in range(2))
        self.b_high, self.b_low = (T.alloc_local((2 * B_REGISTERS,), "uint32") for _ in range(2))
        self.part = T.alloc_local((tiles.tiles_m * SUMS,), "float32")

    def take(self, a: Expr) -> None:
        """Splits the left operand's fragments."""
        with T.serial(2 * self.rows, unroll=True) as i:
            T.evaluate(split_float32(self.a_high.ptr_to([i]), self.a_low.ptr_to([i]), a[i]))

    def multiply(self, b: Expr, sums: Expr, column: int) -> None:
        """Adds the products of all rows by 8 columns, the smaller ones first."""
        half = self.tiles.tiles_n * B_REGISTERS
        for i in range(2 * B_REGISTERS):
            word = b[i // B_REGISTERS * half + column * B_REGISTERS + i % B_REGISTERS]
            T.evaluate(split_float32(self.b_high.ptr_to([i]), self.b_low.ptr_to([i]), word))
        count = self.tiles.tiles_m * SUMS
        with T.serial(count, unroll=True) as i:
            T.buffer_store(self.part, constant(0.0, "float32"), [i])
        self._add(self.a_low, self.b_high)
        self._add(self.a_high, self.b_low)
        with T.serial(count, unroll=True) as i:
            # NaN where a term is infinite: the product of the high parts is that or NaN by itself.
            finite = at_least(self.part[i], constant(LEAST_REST, "float32"))
            T.buffer_store(self.part, finite, [i])
        self._add(self.a_high, self.b_high)
        with T.serial(self.tiles.tiles_m, unroll=True) as i, T.serial(SUMS, unroll=True) as v:
            at = (i * self.tiles.tiles_n + column) * SUMS + v
            T.buffer_store(sums, sums[at] + self.part[i * SUMS + v], [at])

    def _add(self, a: Expr, b: Expr) -> None:
        for half in range(2):
            right = b.ptr_to([half * B_REGISTERS])
            with T.serial(self.tiles.tiles_m, unroll=True) as i:
                left = a.ptr_to([half * self.rows + i * A_REGISTERS])
                into = self.part.ptr_to([i * SUMS])
                T.evaluate(multiply("float32", "float32", TERM_BYTES // 4, into, left, right))
