"""Reductions of runs of columns in the epilogue of the Hopper GEMM.

A thread combines its own columns of a run, piece by piece, for each of its two rows; behind the
last piece the four threads of a quad, which hold the columns of one row, meet in two shuffles, and
the first of them stores.

    p[m, n // width] = sum over the run of value[m, n]
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from ...contraction.reader import Output
from ...gpu.product_frame import Frame
from ...gpu.product_grid import Tile
from ...program.expr import conjunction, convert
from ...program.program import COMBINE, ReduceKind
from .layout import Layout
from .model import HopperSegment
from .plan import CHUNK

QUAD = 4
WARP = 32


class Partials:
    """What a thread has of the present run of each partial output: a value for each of two rows."""

    def __init__(self, frame: Frame, layout: Layout):
        self.frame, self.layout = frame, layout
        self.kept = {
            (number, position): T.alloc_local((2,), "float32")
            for number, segment in enumerate(layout.problem.segments)
            for position, output in enumerate(segment.outputs)
            if output.partial is not None
        }

    def add(
        self, number: int, position: int, chunk: int, group: int, half: int, pair: tuple[Expr, Expr]
    ) -> None:
        """Takes in two neighbouring columns of a row; the first of a run start it afresh."""
        partial = self.layout.problem.segments[number].outputs[position].partial
        combine = COMBINE[ReduceKind(partial.kind)]
        sums = self.kept[number, position]
        value = combine(*pair)
        if chunk * CHUNK % partial.width or group:
            value = combine(sums[half], value)
        T.buffer_store(sums, value, [half])

    def close(self, number: int, segment: HopperSegment, tile: Tile, chunk: int) -> None:
        """Stores the runs that end with a piece."""
        for position, output in enumerate(segment.outputs):
            if output.partial is not None and (chunk + 1) * CHUNK % output.partial.width == 0:
                self._store(self.kept[number, position], segment, output, tile, chunk)

    def _store(
        self, sums: Expr, segment: HopperSegment, output: Output, tile: Tile, chunk: int
    ) -> None:
        layout, partial = self.layout, output.partial
        combine = COMBINE[ReduceKind(partial.kind)]
        first = chunk + 1 - partial.width // CHUNK
        column = T.Bind(layout.column(tile, first, 0))  # any of the run has the same place
        for half in range(2):
            for step in range(1, QUAD.bit_length()):
                mask = T.uint32(0xFFFFFFFF)
                other = T.tvm_warp_shuffle_xor(mask, sums[half], step, WARP, WARP)
                T.buffer_store(sums, combine(sums[half], other), [half])
            row = layout.row(tile, half)
            inside = conjunction(
                tirx.EQ(layout.lane % QUAD, 0),
                row < layout.rows(segment) if layout.ragged_rows(segment) else None,
                column < segment.N if layout.ragged_columns(segment) else None,
            )
            with T.If(inside), T.Then():
                point = layout.point(segment, tile, row, column)
                target = self.frame.output(output.param)
                indices = self.frame.place(output.indices, point)
                T.buffer_store(target, convert(sums[half], output.dtype), indices)
