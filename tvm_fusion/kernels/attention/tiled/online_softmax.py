"""The online softmax of 16 queries of each warp, in registers.

A thread holds scores of rows `lane // 4` and 8 below: element ``4 * i + 2 * half + v`` is column
``8 * i + 2 * (lane % 4) + v`` of row `half`. The weights of a row are 2^(factor * (s - m)), where m
is its largest score so far or, if `lazy`, one that the largest has not passed by more than 2^lazy:
then neither the sums nor the results need to be scaled (FlashAttention-4, 2025, as published; exact
in exact arithmetic). With `rarely`, the threads of a row do not even exchange their largest scores
before one of them has passed this limit. They compare bits, three at a time: of positive numbers
these have the order of the numbers, and where the limit is not positive, it counts as passed.

Masks that are read may hold numbers so low (-1e9) that the factor times the largest score is off by
more than weights can bear: the scores of such a tile are taken relative to the largest at first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from ...gpu.intrinsics import device_call, ex2, pack_halves, rcp
from .tiles import TileConfig, TiledAttention

LOG2_E, LN_2 = math.log2(math.e), math.log(2.0)

HIDDEN_ROW = -1.0e30
"""Stands for the largest score of a row that has no visible key yet: finite, so that the difference
to a hidden score (-inf) is -inf and its weight 0, also times the factor."""

LOWEST = -3.4028234663852886e38
"""The same where scores may be any finite numbers."""

LOW = -1.0e5
"""Below, a row's scores are taken relative to the largest before they are multiplied."""

SOME_WEIGHT = 0.5
"""The sum of a row's weights is at least 1 if the row has a visible key: one weight is."""

ALL_LANES = 0xFFFFFFFF
ALWAYS = -(2**31)


def as_int(x: Expr) -> Expr:
    """The bits of a float."""
    return device_call("int32", "float_bits", "float x", "return __float_as_int(x);", x)


def largest_bits(bits: Expr, a: Expr, b: Expr) -> Expr:
    """The largest of three by their bits: one instruction."""
    body = "return max(bits, max(__float_as_int(a), __float_as_int(b)));"
    return device_call("int32", "largest_bits", "int bits, float a, float b", body, bits, a, b)


def some_lane(condition: Expr) -> Expr:
    """An int32: whether a condition holds in some lane of the warp."""
    return T.cuda.any_sync(T.uint32(ALL_LANES), T.cast(condition, "int32"))


class Softmax:
    """Emits the softmax; `scores` and `results` are the accumulators of the two products."""

    def __init__(
        self,
        problem: TiledAttention,
        config: TileConfig,
        scores: Expr,
        results: Expr,
        rarely: bool = False,
    ):
        self.problem, self.config = problem, config
        self.rarely, self.wide_masks = rarely and bool(config.lazy), problem.wide_masks
        self.scores, self.results = scores, results
        self.count, self.result_count = config.block_n // 2, problem.features // 2
        self.scale = 1.0 if problem.scale is None else problem.scale
        self.factor = self.scale * LOG2_E
        self.lowest = LOWEST if self.wide_masks else HIDDEN_ROW
        self.weights = T.alloc_local((config.block_n // 4,), "uint32")
        self.largest = T.alloc_local((2,), "float32")
        self.sums = T.alloc_local((2,), "float32")
        self.shrink = T.alloc_local((2,), "float32")
        self.reference = T.alloc_local((2,), "float32")
        self.chains = T.alloc_local((4,), "float32")
        if self.rarely:
            # Whether weights of the warp shrink since the last tile.
            self.raised = T.alloc_local((1,), "int32")
            self.bits = T.alloc_local((4,), "int32")
            self.limits = T.alloc_local((2,), "int32")
        if self.wide_masks:
            # What is taken off the scores of a row at first, and whether the warp has such a row.
            self.base = T.alloc_local((2,), "float32")
            self.low = T.alloc_local((1,), "int32")

    # ---- one tile of keys

    def weigh(self, first: bool) -> None:
        """Emits the weights of a tile in place of its scores, and their sums."""
        rarely = self.rarely and not first
        if rarely:
            self._raise_rarely()
        else:
            self._raise_rows(first)
        if self.wide_masks:
            with T.If(self.low[0] != 0), T.Then():
                for i in range(self.count):
                    T.buffer_store(self.scores, self.scores[i] - self.base[i // 2 % 2], [i])
        for i in range(self.count):
            half = i // 2 % 2
            power = self.scores[i] * T.float32(self.factor) - self.reference[half]
            T.buffer_store(self.scores, ex2(power), [i])
        self._reduce(lambda a, b: a + b)
        for half in range(2):
            total = self.chains[half]
            if not first:
                before = self.sums[half] if rarely else self.sums[half] * self.shrink[half]
                total = before + total
            T.buffer_store(self.sums, total, [half])

    def _raise_rows(self, first: bool) -> None:
        """The scores that the weights of both rows refer to."""
        self._reduce(tirx.Max)
        for half in range(2):
            self._across_row(self.chains, half, tirx.Max)
        for half in range(2):
            self._raise(half, first)
        if self.wide_masks:
            low = tirx.Min(self.base[0], self.base[1]) < T.float32(0)
            T.buffer_store(self.low, some_lane(low), [0])
        if self.rarely:
            T.buffer_store(self.raised, T.int32(0) if first else self._some_shrink(), [0])

    def _raise_rarely(self) -> None:
        """The same, where a row of the warp has passed its limit."""
        self._reduce_bits()
        passed = [self.bits[half] > self.limits[half] for half in range(2)]
        T.buffer_store(self.raised, some_lane(tirx.Or(*passed)), [0])
        with T.If(self.raised[0] != 0), T.Then():
            self._raise_rows(False)
            for half in range(2):
                T.buffer_store(self.sums, self.sums[half] * self.shrink[half], [half])

    def _reduce_bits(self) -> None:
        """Each thread's largest score of a row by its bits, in `bits`."""
        for i in range(self.count // 4):
            for half in range(2):
                at, place = i * 4 + half * 2, i % 2 * 2 + half
                last = self.bits[place] if i > 1 else as_int(self.scores[at])
                value = largest_bits(last, self.scores[at], self.scores[at + 1])
                T.buffer_store(self.bits, value, [place])
        for half in range(2):
            T.buffer_store(self.bits, tirx.Max(self.bits[half], self.bits[2 + half]), [half])

    def _raise(self, half: int, first: bool) -> None:
        """The score that the weights of a row refer to, and what older weights shrink by."""
        found, old = self.chains[half], self.largest[half]
        if self.problem.hides:
            found = tirx.Max(found, T.float32(self.lowest))
        if first:
            T.buffer_store(self.largest, found, [half])
        else:
            found = T.Bind(tirx.Max(found, old))
            if self.config.lazy:
                grown = (found - old) * T.float32(self.factor) > T.float32(self.config.lazy)
                found = T.Bind(tirx.Select(grown, found, old))
            T.buffer_store(self.shrink, ex2((old - found) * T.float32(self.factor)), [half])
            T.buffer_store(self.largest, found, [half])
        reference, zero = self.largest[half] * T.float32(self.factor), T.float32(0)
        if self.wide_masks:
            low = T.Bind(self.largest[half] < T.float32(LOW))
            reference = tirx.Select(low, zero, reference)
            T.buffer_store(self.base, tirx.Select(low, self.largest[half], zero), [half])
        T.buffer_store(self.reference, reference, [half])
        if self.rarely:
            limit = T.Bind(self.largest[half] + T.float32(self.config.lazy / self.factor))
            T.buffer_store(
                self.limits, tirx.Select(limit > zero, as_int(limit), T.int32(ALWAYS)), [half]
            )

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
        some = self.raised[0] if self.rarely else self._some_shrink()
        with T.If(some != 0), T.Then():
            self._scale(self.shrink)

    def _some_shrink(self) -> Expr:
        """An int32: whether weights of the warp shrink."""
        return some_lane(tirx.Min(self.shrink[0], self.shrink[1]) < T.float32(1))

    def _scale(self, by: Expr) -> None:
        for i in range(self.result_count):
            T.buffer_store(self.results, self.results[i] * by[i // 2 % 2], [i])

    # ---- warps that have other keys of the same queries

    def found(self) -> list[Expr]:
        """What a thread has found: the largest scores of its rows, sums of weights, results."""
        rows = [*(self.largest[half] for half in range(2)), *(self.sums[half] for half in range(2))]
        return [*rows, *(self.results[i] for i in range(self.result_count))]

    def join(self, other: Sequence[Expr]) -> None:
        """Emits what `found` of the same thread of another warp adds."""
        grow = T.alloc_local((2,), "float32")
        for half in range(2):
            T.buffer_store(grow, other[half], [half])
            largest, factor = self.largest[half], T.float32(self.factor)
            T.buffer_store(
                self.shrink, ex2((largest - tirx.Max(largest, grow[half])) * factor), [half]
            )
            T.buffer_store(self.largest, tirx.Max(largest, grow[half]), [half])
            T.buffer_store(grow, ex2((grow[half] - self.largest[half]) * factor), [half])
            total = self.sums[half] * self.shrink[half] + other[2 + half] * grow[half]
            T.buffer_store(self.sums, total, [half])
        for i in range(self.result_count):
            half = i // 2 % 2
            value = self.results[i] * self.shrink[half] + other[4 + i] * grow[half]
            T.buffer_store(self.results, value, [i])

    # ---- a tile of queries

    def start(self, empty: bool = False) -> None:
        """Emits what the first tile of keys finds; if `empty`, it is weighed as any other."""
        for i in range(self.result_count):
            T.buffer_store(self.results, T.float32(0), [i])
        for half in range(2):
            if not empty:
                T.buffer_store(self.shrink, T.float32(1), [half])
                continue
            T.buffer_store(self.largest, T.float32(self.lowest), [half])
            T.buffer_store(self.sums, T.float32(0), [half])
            if self.rarely:
                T.buffer_store(self.limits, T.int32(ALWAYS), [half])

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
        found = T.log2(self.sums[half]) * T.float32(LN_2)
        found = found + self.largest[half] * T.float32(self.scale)
        if self.problem.hides:
            seen = self.sums[half] > T.float32(SOME_WEIGHT)
            found = tirx.Select(seen, found, T.float32(-math.inf))
        return found
