"""Sixteen queries of a warp in the mma.sync attention: scores, weights and results in registers.

A lane holds rows lane // 4 and 8 below, and columns 2 * (lane % 4) and the next of every 8, of the
scores as of the results: what mma.m16n8k16 leaves of its sums, as wgmma does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from ...gpu.access import is_multiple
from ..tiled.online_softmax import Softmax
from ..tiled.points import Points
from ..tiled.stores import RowStores
from ..tiled.tiles import Tile

if TYPE_CHECKING:
    from .kernel import MmaKernel


class WarpRows:
    """Emits what happens to them; `row` is the first row of the block that the lane holds."""

    def __init__(self, kernel: MmaKernel, row: Expr, lane: Expr):
        self.kernel, self.row = kernel, row
        plan, problem = kernel.plan, kernel.problem
        column = T.Bind(lane % 4 * 2)
        self.scores = T.alloc_local((plan.config.block_n // 2,), "float32")
        self.results = T.alloc_local((problem.features // 2,), "float32")
        self.softmax = Softmax(problem, plan.config, self.scores, self.results)
        self.points = Points(kernel, problem.formulas, self.scores, row, column)
        self.stores = RowStores(kernel, self.results, lane, column)

    def start(self, tile: Tile) -> None:
        """Emits what stands before the first tile of keys."""
        self.softmax.start(empty=True)
        self.points.start(tile)

    def clear_scores(self) -> None:
        """Emits zeros in place of the scores."""
        for i in range(self.kernel.plan.config.block_n // 2):
            T.buffer_store(self.scores, T.float32(0), [i])

    def weigh(self, number: Expr, by_point: bool) -> None:
        """Emits the weights of tile `number` of keys, as operands of the second product."""
        self.points.apply(number, by_point)
        self.softmax.weigh(first=False)
        self.softmax.shrink_results()
        self.softmax.pack()

    def finish(self, tile: Tile) -> None:
        """Emits the outputs of the rows that exist."""
        self.softmax.total()
        self.softmax.divide()
        whole = is_multiple(self.kernel.problem.attention.M, self.kernel.plan.config.block_m)
        for half in range(2):
            row = T.Bind(tile.query + self.row + half * 8)
            exists = tirx.IntImm("bool", 1) if whole else row < self.kernel.M
            with T.If(exists), T.Then():
                self.stores.emit(tile, half, row, self.softmax.lse(half), True)
