"""Multiplies accumulators of the Hopper GEMM by the factors of their rows, before the epilogue.

What the factors are made of is loaded while the last steps of a tile run.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from ...gpu.product_grid import Tile
from ...gpu.product_math import evaluate
from .fetch import Fetch
from .layout import Layout

# Steps before the end of a tile in which the loads are issued.
STEPS_AHEAD = 2


class Scale:
    """Factors of all segments for the accumulators `sums` of a warpgroup."""

    def __init__(self, layout: Layout, fetch: Fetch, sums: Expr):
        self.layout, self.plan, self.problem = layout, layout.plan, layout.problem
        self.fetch, self.sums = fetch, sums

    def during(self, step: Expr | int, tile: Tile) -> None:
        """Emits what belongs into a step: the loads, once."""
        when = max(self.plan.least_steps - STEPS_AHEAD, 0)
        if isinstance(step, int):
            if step == when:
                self.fetch.once(tile)
            return
        with T.If(step == when), T.Then():
            self.fetch.once(tile)

    def apply(self, tile: Tile) -> None:
        """Emits the multiplication, of what this block stores."""
        for number, own in self.layout.kernel.grid.each_segment(tile):
            for half in range(2):
                for position, value in enumerate(self._values(number, own, half)):
                    start = position * (self.plan.out_n // 2)
                    for i in range(start, start + self.plan.share_n // 2):
                        if i % 4 // 2 == half:
                            T.buffer_store(self.sums, self.sums[i] * value, [i])

    def _values(self, number: int, tile: Tile, half: int) -> list[Expr]:
        """The factor of each product for one of a thread's two rows."""
        segment, layout = self.problem.segments[number], self.layout
        env = layout.point(segment, tile, layout.row(tile, half), tirx.IntImm("int32", 0))
        for load, registers in self.fetch.kept[number]:
            if not load.per_column:
                env[load.var] = T.Bind(self.fetch.value(load, registers, 0, 0, half, 0))
        factors = evaluate(layout.kernel.frame, (), segment.factors, env, False)
        return [T.Bind(value) for value in factors]
