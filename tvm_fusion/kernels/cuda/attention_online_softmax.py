"""The online softmax of 16 queries of each warp, in registers.

A thread holds scores of rows `lane // 4` and 8 below: element ``4 * i + 2 * half + v`` is column
``8 * i + 2 * (lane % 4) + v`` of row `half`. The weights of a row are 2^(factor * (s - m)), where m
is its largest score so far or, if `lazy`, one that the largest has not passed by more than 2^lazy:
then neither the sums nor the results need to be scaled (FlashAttention-4, 2025, as published; exact
in exact arithmetic).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from .attention_tiles import TileConfig, TiledAttention
from .functions import horner
from .intrinsics import device_call, ex2, pack_halves, rcp

LOG2_E, LN_2 = math.log2(math.e), math.log(2.0)

LOWEST = -1.0e30
"""Stands for the largest score of a row that has no visible key yet: finite, so that the difference
to a hidden score (-inf) is -inf and its weight 0."""

SOME_WEIGHT = 0.5
"""The sum of a row's weights is at least 1 if the row has a visible key: one weight is."""

# 2^f on -1/2 <= f <= 1/2, relative error 1.0e-4, and exact at 0.
EX2_POLYNOMIAL = (1.0, 0.693282898, 0.242210975, 0.0550090578)

# 12582912 is 1.5 * 2^23: adding it rounds to a whole number, which then lies in the lowest bits.
# Below -126 there are no normal numbers; what remains is nothing beside a weight of 1.
_EX2 = (
    "x = fmaxf(x, -126.0f); float k = x + 12582912.0f; float f = x - (k - 12582912.0f); "
    "float e = {polynomial}; return __int_as_float(__float_as_int(e) + (__float_as_int(k) << 23));"
)

ALL_LANES = 0xFFFFFFFF


def ex2_on_multipliers(x: Expr) -> Expr:
    """2 to the power of `x` without the special-function unit, for x <= 0 or little more."""
    body = _EX2.format(polynomial=horner(EX2_POLYNOMIAL, "f"))
    return device_call("float32", "ex2_polynomial", "float x", body, x)


class Softmax:
    """Emits the softmax; `scores` and `results` are the accumulators of the two products."""

    def __init__(self, problem: TiledAttention, config: TileConfig, scores: Expr, results: Expr):
        self.problem, self.config = problem, config
        self.scores, self.results = scores, results
        self.count, self.result_count = config.block_n // 2, problem.features // 2
        self.factor = (1.0 if problem.scale is None else problem.scale) * LOG2_E
        self.weights = T.alloc_local((config.block_n // 4,), "uint32")
        self.largest = T.alloc_local((2,), "float32")
        self.sums = T.alloc_local((2,), "float32")
        self.shrink = T.alloc_local((2,), "float32")
        self.reference = T.alloc_local((2,), "float32")
        self.chains = T.alloc_local((4,), "float32")

    # ---- one tile of keys

    def weigh(self, first: bool) -> None:
        """Emits the weights of a tile in place of its scores, and their sums."""
        self._reduce(tirx.Max)
        for half in range(2):
            self._across_row(self.chains, half, tirx.Max)
        for half in range(2):
            self._raise(half, first)
        for i in range(self.count):
            half = i // 2 % 2
            power = self.scores[i] * T.float32(self.factor) - self.reference[half]
            every = self.config.polynomial
            # Neighbours are computed alike: both rows have the same share.
            on_multipliers = every and i // 4 % every == every - 1
            T.buffer_store(
                self.scores, ex2_on_multipliers(power) if on_multipliers else ex2(power), [i]
            )
        self._reduce(lambda a, b: a + b)
        for half in range(2):
            total = self.chains[half]
            if not first:
                total = self.sums[half] * self.shrink[half] + total
            T.buffer_store(self.sums, total, [half])

    def _raise(self, half: int, first: bool) -> None:
        """The score that the weights of a row refer to, and what older weights shrink by."""
        found, old = self.chains[half], self.largest[half]
        if self.problem.hides:
            found = tirx.Max(found, T.float32(LOWEST))
        if first:
            T.buffer_store(self.largest, found, [half])
        else:
            found = T.Bind(tirx.Max(found, old))
            if self.config.lazy:
                grown = (found - old) * T.float32(self.factor) > T.float32(self.config.lazy)
                found = T.Bind(tirx.Select(grown, found, old))
            T.buffer_store(self.shrink, ex2((old - found) * T.float32(self.factor)), [half])
            T.buffer_store(self.largest, found, [half])
        T.buffer_store(self.reference, self.largest[half] * T.float32(self.factor), [half])

    def _reduce(self, combine: Callable[[Expr, Expr], Expr]) -> None:
        """Each thread's scores of a row as one, in `chains`; two chains a row until the end."""
        for chain in range(2):
            for half in range(2):
                at = chain * 4 + half * 2
                value = combine(self.scores[at], self.scores[at + 1])
                T.buffer_store(self.chains, value, [chain * 2 + half])
        for i in range(2, self.count // 4):
            for half in range(2):
                at, place = i * 4 + half * 2, i % 2 * 2 + half
                value = combine(self.scores[at], self.scores[at + 1])
                if combine is not tirx.Max:
                    value = combine(
                        combine(self.chains[place], self.scores[at]), self.scores[at + 1]
                    )
                else:
                    value = combine(self.chains[place], value)
                T.buffer_store(self.chains, value, [place])
        for half in range(2):
            T.buffer_store(self.chains, combine(self.chains[half], self.chains[2 + half]), [half])

    def _across_row(self, buffer: Expr, half: int, combine: Callable[[Expr, Expr], Expr]) -> None:
        """What the four threads of a row hold, combined."""
        for lanes in (1, 2):
            other = T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), buffer[half], lanes, 32, 32)
            T.buffer_store(buffer, combine(buffer[half], other), [half])

    def pack(self) -> None:
        """Emits the rounding of the weights: the accumulators of one product are the left operand
        of the next, pair by pair.
        """
        for i in range(self.count // 2):
            word = pack_halves(self.problem.dtype, self.scores[2 * i], self.scores[2 * i + 1])
            T.buffer_store(self.weights, word, [i])

    def shrink_results(self) -> None:
        """Emits the scaling of the results so far, where a row of the warp needs it."""
        if not self.config.lazy:
            self._scale(self.shrink)
            return
        shrinks = tirx.Min(self.shrink[0], self.shrink[1]) < T.float32(1)
        some = T.cuda.any_sync(T.uint32(ALL_LANES), T.cast(shrinks, "int32"))
        with T.If(some != 0), T.Then():
            self._scale(self.shrink)

    def _scale(self, by: Expr) -> None:
        for i in range(self.result_count):
            T.buffer_store(self.results, self.results[i] * by[i // 2 % 2], [i])

    # ---- a tile of queries

    def start(self, empty: bool = False) -> None:
        """Emits what the first tile of keys finds; if `empty`, it is weighed as any other."""
        for i in range(self.result_count):
            T.buffer_store(self.results, T.float32(0), [i])
        for half in range(2):
            if not empty:
                T.buffer_store(self.shrink, T.float32(1), [half])
                continue
            T.buffer_store(self.largest, T.float32(LOWEST), [half])
            T.buffer_store(self.sums, T.float32(0), [half])

    def total(self) -> None:
        """Emits the sums of whole rows, and their reciprocals."""
        for half in range(2):
            self._across_row(self.sums, half, lambda a, b: a + b)
        for half in range(2):
            inverse = rcp(self.sums[half])
            if self.problem.hides:
                seen = self.sums[half] > T.float32(SOME_WEIGHT)
                inverse = tirx.Select(seen, inverse, T.float32(0))
            T.buffer_store(self.shrink, inverse, [half])

    def divide(self) -> None:
        """Emits the division of the results by the sums."""
        self._scale(self.shrink)

    def lse(self, half: int) -> Expr:
        """The logarithm of the sum of a row's weights."""
        total = T.log2(self.sums[half]) + self.reference[half]
        found = total * T.float32(LN_2)
        if self.problem.hides:
            seen = self.sums[half] > T.float32(SOME_WEIGHT)
            found = tirx.Select(seen, found, T.float32(-math.inf))
        return found
