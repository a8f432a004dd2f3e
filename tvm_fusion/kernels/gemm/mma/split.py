"""Products of float32 on tensor cores that keep its precision: six of bfloat16 for each.

    a = a1 + a2 + a3,  b = b1 + b2 + b3                 (8 bits of mantissa each: 24 in all)
    a b = a1 b1 + a1 b2 + a2 b1 + a2 b2 + a1 b3 + a3 b1 (less than 2^-21.9 of it is lost)

The parts of a number are exact, and those of 0, 1 and other powers of two are the number and zeros:
a product with such (one-hot rows, permutations, scales) moves numbers as they are. Two parts of
tfloat32 take as long on tensor cores (three products at half the rate) and fewer instructions in
front of them, but hold 22 bits, 23 if rounded to the nearest: a number would change in its last
one. (Henry, Tang and Heinecke, Leveraging the bfloat16 artificial intelligence datatype for
higher-precision computations, 2019.)

Tensor cores cut sums off where they add, which of a long sum leaves less than float32 would: they
add the products of 16 terms, and the sums of these are rounded to the nearest outside. (Ootomo and
Yokota, Recovering single precision accuracy from Tensor Cores, 2022.)
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm.ir import Expr
from tvm.script import tirx as T

from ...program.expr import constant
from .plan import TERM_BYTES, WarpTiles
from .units import at_least, multiply, split_float32

SUMS, A_REGISTERS, B_REGISTERS = 4, 4, 2
"""Registers of a thread: of the sums of one mma.sync, of its operands."""

PARTS = 3
SMALL_PRODUCTS = ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1))
"""Parts of a and b that are multiplied before the first ones are, the smallest products first."""
FIRST_PRODUCT = ((0, 0),)

PRODUCTS = len(SMALL_PRODUCTS) + len(FIRST_PRODUCT)
PART_DTYPE = "bfloat16"

LEAST_REST = -(2.0**126)
"""Below any sum of 16 terms' smaller products, each less than 2^-6 of a term that is finite. What
takes the place of NaN is no less, so that finite terms that are added to it stay finite, too, up
to three quarters of the largest float32."""


class SplitProducts:
    """The registers in which the fragments of two rounds are split, and what is multiplied.

    A register of mma.sync holds a term of float32, or two of a half precision: terms t and t + 4
    of 8 are taken for neighbours, on both sides, and two rounds of 8 for one of 16.
    """

    def __init__(self, tiles: WarpTiles):
        self.tiles = tiles
        rows = tiles.tiles_m * A_REGISTERS
        self.a = [T.alloc_local((rows,), "uint32") for _ in range(PARTS)]
        self.b = [T.alloc_local((B_REGISTERS,), "uint32") for _ in range(PARTS)]
        self.part = T.alloc_local((tiles.tiles_m * SUMS,), "float32")

    def take(self, a: Expr) -> None:
        """Splits the left operand's fragments."""
        rows = self.tiles.tiles_m * A_REGISTERS
        with T.serial(self.tiles.tiles_m, unroll=True) as tile:
            for half in range(2):
                for row in range(2):
                    first = half * rows + tile * A_REGISTERS + row
                    at = tile * A_REGISTERS + half * 2 + row
                    _split(self.a, at, a[first], a[first + 2])

    def multiply(self, b: Expr, sums: Expr, column: int) -> None:
        """Adds the products of all rows by 8 columns, the smaller ones first."""
        for half in range(2):
            first = (half * self.tiles.tiles_n + column) * B_REGISTERS
            _split(self.b, half, b[first], b[first + 1])
        count = self.tiles.tiles_m * SUMS
        with T.serial(count, unroll=True) as i:
            T.buffer_store(self.part, constant(0.0, "float32"), [i])
        self._add(SMALL_PRODUCTS)
        with T.serial(count, unroll=True) as i:
            # NaN where a term is infinite: the product of the first parts is that or NaN by itself.
            finite = at_least(self.part[i], constant(LEAST_REST, "float32"))
            T.buffer_store(self.part, finite, [i])
        self._add(FIRST_PRODUCT)
        with T.serial(self.tiles.tiles_m, unroll=True) as i, T.serial(SUMS, unroll=True) as v:
            at = (i * self.tiles.tiles_n + column) * SUMS + v
            T.buffer_store(sums, sums[at] + self.part[i * SUMS + v], [at])

    def _add(self, products: Sequence[tuple[int, int]]) -> None:
        right = [part.ptr_to([0]) for part in self.b]
        for product in products:
            with T.serial(self.tiles.tiles_m, unroll=True) as i:
                left = [part.ptr_to([i * A_REGISTERS]) for part in self.a]
                multiply_parts(self.part.ptr_to([i * SUMS]), left, right, [product])


def multiply_parts(
    sums: Expr, a: Sequence[Expr], b: Sequence[Expr], products: Sequence[tuple[int, int]]
) -> None:
    """Adds some products of parts of fragments of 16 terms, by pointers to their registers."""
    for left, right in products:
        T.evaluate(multiply(PART_DTYPE, PART_DTYPE, TERM_BYTES // 2, sums, a[left], b[right]))


def _split(parts: list[Expr], at: Expr | int, first: Expr, second: Expr) -> None:
    places = [part.ptr_to([at]) for part in parts]
    T.evaluate(split_float32(places, first, second))
