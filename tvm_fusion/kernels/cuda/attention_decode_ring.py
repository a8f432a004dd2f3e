"""Keys and values on their way through shared memory, and as fragments of mma.m16n8k16.

Each warp has a ring of its own: it waits for its own copies, and no barrier of the block is needed.
A stage holds the keys of a step, then their values; a row of each is a key, one chunk longer than
the head so that eight rows lie in different banks.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ..expr import conjunction, constant
from .attention_decode_config import WARP, Layout
from .attention_source import BYTES, Lines, Source
from .gemm_frame import Frame
from .gemm_mma_units import CHUNK, copy_async, load_matrices


class Rows(Lines):
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
        super().__init__(frame, source, axes, env)
        self.ring = ring
        self.padded, self.pitch, self.start = place
        self.per_row = self.padded * BYTES // source.piece

    def prepare(self, lane: Expr) -> None:
        """Emits what does not change from step to step."""
        super().prepare()
        self.lane = lane

    def copy(self, stage: Expr, first: Expr, step: int, limits: tuple[Expr, Expr] | None) -> None:
        """Starts the copies of keys ``first ... first + step - 1``.

        `limits`: no key at or above the first is copied, but zeros in its place; none at or above
        the second exists.
        """
        count = None if limits is None else limits[1]
        start, last = self._split(0)
        line = None
        if self.evenly and WARP % self.per_row == 0:
            line = T.Bind(self.at(first + start, last))
        for i in range(step * self.per_row // WARP):
            row, column = self._split(i)
            if line is not None:
                at = line + self.further(i * (WARP // self.per_row))
            else:
                at = self.at(first + row, column, count)
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
