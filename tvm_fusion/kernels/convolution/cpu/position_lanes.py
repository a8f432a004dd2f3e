"""Direct convolution by vectors of positions: register tiles of filters by rows by vectors.

    acc[f, y, v] += weights[f, c, r, s] * box[c, y + r, 16 v + s : 16 v + s + 16]

For few filters a group, depthwise convolutions among them, and where results lie along positions
and sums are short, so that transposing vectors of filters takes longer than they do.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.ir import Expr, Var

from ...cpu.contraction.task_tiles import even_parts
from .writer import Element, Tile, Writer


class PositionLanes(Writer):
    """See the module docstring."""

    along_last = True

    def _held(self) -> Sequence[int]:
        *others, last = self.tiles.blocks
        return (*others, -(-last // self.lanes) * self.lanes)

    def _panel_lanes(self) -> int:
        return self.tiles.filters

    def _padded(self, which: int) -> int:
        found = super()._padded(which)
        return -(-found // self.lanes) * self.lanes if which == -1 else found

    def _even(self, length: int, most: int, which: int) -> list[tuple[int, int]]:
        if which != -1:
            return super()._even(length, most, which)
        parts = even_parts(-(-length // self.lanes), most // self.lanes)
        return [(n, size * self.lanes) for n, size in parts]

    def _allocate_sums(self, kept: int) -> None:
        shape = [kept, self.tiles.filters, self.pitch * self.height]
        self.sums = self.scope.allocate("sums", shape, self.dtype)

    # ---- sums

    def _cells(self, tile: Tile) -> list[tuple[int, ...]]:
        return [
            (r, v, f)
            for f in range(tile.filters)
            for r in range(tile.rows)
            for v in range(tile.columns // self.lanes)
        ]

    def _column(self, tile: Tile, v: int, lane: Expr) -> Expr:
        return self.loops.simplify(tile.column + self.imm(v * self.lanes) + lane)

    def _place(self, tile: Tile, cell: tuple[int, ...], lane: Expr) -> list[Expr]:
        r, v, f = cell
        column = self._column(tile, v, lane)
        return [tile.slot, self.imm(f), self._position(tile, tile.row + self.imm(r), column)]

    def _product(
        self, tile: Tile, cell: tuple[int, ...], lane: Expr, env: dict[Var, Expr], element: Element
    ) -> Expr:
        r, v, f = cell
        weight = self.weights.load(tile.group, env, self.imm(f), self.loops, self.dtype)
        return element(tile.row + self.imm(r), self._column(tile, v, lane)) * weight

    # ---- outputs

    def _store(self, slot: Expr, group: Expr, filters: int) -> tirx.Stmt:
        first = self.loops.simplify(group * self.imm(self.tiles.filters))
        if self.along_filters and filters > 1:

            def of_filter(position: Expr, at: Expr) -> Expr:
                return tirx.BufferLoad(self.sums, [slot, at, position])

            return self._stores_along_filters(first, filters, of_filter)
        lane = self.loops.new("f", filters)

        def total(position: Expr) -> Expr:
            return tirx.BufferLoad(self.sums, [slot, lane.value, position])

        stores = self._stores_along_positions(self.imm(0), self.rows, first + lane.value, total)
        return lane.around(stores)
