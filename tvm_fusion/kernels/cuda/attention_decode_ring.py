"""Keys and values on their way through shared memory, and as fragments of mma.m16n8k16.

Each warp has a ring of its own: it waits for its own copies, and no barrier of the block is needed.
A stage holds the keys of a step, then their values; a row of each is a key, one chunk longer than
the head so that eight rows lie in different banks.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ..expr import conjunction, constant, convert
from .attention_decode_config import WARP, Layout
from .attention_decode_problem import Source
from .gemm_access import Digit
from .gemm_frame import Frame, coordinates
from .gemm_mma_operand import digit_sum
from .gemm_mma_units import CHUNK, copy_async, load_matrices

BYTES = 2


class Rows:
    """Copies of the rows of keys (or of values) of one unit into a warp's ring."""

    def __init__(
        self,
        frame: Frame,
        source: Source,
        axes: tuple,
        env: Mapping[Var, Expr],
        ring: Expr,
        place: tuple[int, int, int],
    ):
        """`place`: padded extent of the head, bytes between rows, start within a stage."""
        self.frame, self.source, self.axes, self.env, self.ring = frame, source, axes, env, ring
        self.padded, self.pitch, self.start = place
        self.per_row = self.padded * BYTES // source.piece
        buffer = frame.buffers[source.load.source]
        self.pointer = buffer.ptr_to([0] * len(source.load.indices))

    def prepare(self, lane: Expr) -> None:
        """Emits what does not change from step to step."""
        self.lane = lane
        zero = {axis.var: constant(0, self.frame.index) for axis in self.source.head}
        self.env = {**self.env, **zero}
        self.base = None
        if self.source.keys is not None:
            first = {axis.var: constant(0, self.frame.index) for axis in self.axes}
            base = self.frame.rewrite(self.source.offset, {**self.env, **first})
            self.base = T.Bind(convert(base, "int64"))

    def copy(self, stage: Expr, first: Expr, step: int, limits: tuple[Expr, Expr] | None) -> None:
        """Starts the copies of keys ``first ... first + step - 1``.

        `limits`: no key at or above the first is copied, but zeros in its place; none at or above
        the second exists.
        """
        simple = self.source.keys is not None and len(self.source.keys) <= 1
        start, last = self._split(0)
        line = None
        if simple and WARP % self.per_row == 0:
            line = T.Bind(self._at(first + start, last))
        for i in range(step * self.per_row // WARP):
            row, column = self._split(i)
            if line is not None:
                stride = self.source.keys[0].stride if self.source.keys else 0
                skip = i * (WARP // self.per_row)
                at = line + _int64(stride, self.frame) * constant(skip * BYTES, "int64")
            else:
                at = self._at(first + row, column, limits)
            target = row * self.pitch + column * self.source.piece + self.start
            inside = None if limits is None else first + row < limits[0]
            if self.padded != self.source.extent:
                end = self.source.extent * BYTES // self.source.piece
                inside = conjunction(inside, column < end)
            place = self.ring.ptr_to([stage + target])
            T.evaluate(copy_async(self.source.piece, place, self.pointer, at, inside))

    def _split(self, i: int) -> tuple[Expr, Expr]:
        """Row and piece within the row of a lane's copy number `i`."""
        if WARP % self.per_row == 0:
            return self.lane // self.per_row + i * (WARP // self.per_row), self.lane % self.per_row
        if self.per_row % WARP == 0:
            across = self.per_row // WARP
            return constant(i // across, "int32"), self.lane + i % across * WARP
        unit = self.lane + i * WARP
        return unit // self.per_row, unit % self.per_row

    def _at(self, key: Expr, column: Expr, limits: tuple[Expr, Expr] | None = None) -> Expr:
        """Distance of a piece from the start of the parameter, in bytes."""
        index = self.frame.index
        if self.base is not None:
            digits = self.source.keys or (Digit(1, 0),)
            index = "int64" if len(digits) == 1 else index
            row = self.base + convert(
                _digit_sum(digits, convert(key, index), self.frame, index), "int64"
            )
        else:
            if limits is not None:
                key = T.min(key, limits[1] - 1)
            env = {**self.env, **coordinates(self.axes, convert(key, index), self.frame)}
            row = convert(self.frame.rewrite(self.source.offset, env), "int64")
        column = convert(column * self.source.piece, "int64")
        return row * constant(BYTES, "int64") + column


def _digit_sum(digits: tuple[Digit, ...], flat: Expr, frame: Frame, index: str) -> Expr:
    if len(digits) > 1:
        return digit_sum(digits, flat, frame)
    return flat * _int64(digits[0].stride, frame)


def _int64(size, frame: Frame) -> Expr:
    return constant(size, "int64") if isinstance(size, int) else convert(size, "int64")


class Fragments:
    """Where the lanes of a warp read the fragments of queries, keys and values."""

    def __init__(self, layout: Layout, lane: Expr):
        row, matrix = lane % 8, lane // 8
        self.layout = layout
        near, far = matrix % 2, matrix // 2
        # ldmatrix hands out four 8 x 8 matrices, the rows of each by the addresses of eight lanes.
        self.query = T.Bind((near * 8 + row) * layout.k_pitch + far * CHUNK)
        self.key = T.Bind((far * 8 + row) * layout.k_pitch + near * CHUNK)
        first = layout.config.step * layout.k_pitch
        self.value = T.Bind((near * 8 + row) * layout.v_pitch + far * CHUNK + first)

    def queries(self, memory: Expr, start: int, tile: int, term: int) -> Expr:
        """16 rows by 16 terms: a fragment of A."""
        words = T.alloc_local((4,), "uint32")
        at = start + tile * 16 * self.layout.k_pitch + term * 2 * CHUNK
        place = memory.ptr_to([self.query + at])
        T.evaluate(load_matrices(words.ptr_to([0]), place, False))
        return words

    def keys(self, ring: Expr, stage: Expr, group: int, term: int) -> Expr:
        """16 keys by 16 terms: fragments of B for 8 keys, then for the 8 behind them."""
        words = T.alloc_local((4,), "uint32")
        at = group * 16 * self.layout.k_pitch + term * 2 * CHUNK
        place = ring.ptr_to([stage + (self.key + at)])
        T.evaluate(load_matrices(words.ptr_to([0]), place, False))
        return words

    def values(self, ring: Expr, stage: Expr, group: int, feature: int) -> Expr:
        """16 keys by 16 features: fragments of B for 8 features, then for the 8 behind them."""
        words = T.alloc_local((4,), "uint32")
        at = group * 16 * self.layout.v_pitch + feature * 2 * CHUNK
        place = ring.ptr_to([stage + (self.value + at)])
        T.evaluate(load_matrices(words.ptr_to([0]), place, True))
        return words
