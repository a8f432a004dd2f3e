"""Direct convolution by vectors of filters: register tiles of positions by vectors.

    acc[p, v] += box[c, y + r, x_p + s] * panels[v, (r, s, c), 0:16]       14 by 2, say

One element of the data meets a vector of weights, so that any stride, dilation and width are read
where they lie in the box. Depthwise convolutions of channels that lie side by side are computed in
the same way: each filter has a channel of its own, and a vector of filters reads one of channels.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr, Var

from ...cpu.loops import seq
from ...program.expr import number
from .outputs import transpose_sums
from .writer import Element, Tile, Writer

# Sums of positions that are transposed at a time: 16 kB, half of a first-level cache.
MOST_TURNED = 256


class FilterLanes(Writer):
    """See the module docstring."""

    @property
    def vectors(self) -> int:
        """Vectors of a register tile."""
        return self.tiles.filters // self.lanes

    def _panel_lanes(self) -> int:
        return self.lanes

    @property
    def _box_channels(self) -> int:
        return self.tiles.filters if self.convolution.is_depthwise else super()._box_channels

    def _fill(self, start: Expr, count: Expr) -> tirx.Stmt | None:
        return None if self.convolution.is_depthwise else super()._fill(start, count)

    def _allocate_sums(self, kept: int) -> None:
        most = min(self.height, max(1, MOST_TURNED // self.pitch))
        blocks = -(-self.height // most)
        rows = self.turned_rows = -(-self.height // blocks)
        positions = blocks * rows * self.pitch + self.lanes  # squares read beyond the last one
        self.sums = self.scope.allocate("sums", [kept, positions, self.tiles.filters], self.dtype)
        if not self.along_filters:
            count = -(-rows * self.pitch // self.lanes) * self.lanes
            self.turned = self.scope.allocate("turned", [self.lanes, count], self.dtype)

    # ---- sums

    def _positions(
        self, first: Expr, count: Expr, slot: Expr, group: Expr, filters: int
    ) -> tirx.Stmt:
        sums = super()._positions(first, count, slot, group, filters)
        if not self.convolution.is_depthwise:
            return sums
        channel = self.loops.simplify(group * self.imm(self.tiles.filters))
        return seq(self.box.fill(self.starts, channel, self.imm(filters)), sums)

    def _cells(self, tile: Tile) -> list[tuple[int, ...]]:
        vectors = -(-tile.filters // self.lanes)
        return [
            (r, c, v) for r in range(tile.rows) for c in range(tile.columns) for v in range(vectors)
        ]

    def _place(self, tile: Tile, cell: tuple[int, ...], lane: Expr) -> list[Expr]:
        r, c, v = cell
        position = self._position(tile, tile.row + self.imm(r), tile.column + self.imm(c))
        return [tile.slot, position, self.loops.simplify(self.imm(v * self.lanes) + lane)]

    def _product(
        self, tile: Tile, cell: tuple[int, ...], lane: Expr, env: dict[Var, Expr], element: Element
    ) -> Expr:
        r, c, v = cell
        vector = self.loops.simplify(tile.group * self.imm(self.vectors) + self.imm(v))
        weight = self.weights.load(vector, env, lane, self.loops, self.dtype)
        own = None
        if self.convolution.is_depthwise:
            own = self.loops.simplify(self.imm(v * self.lanes) + lane)
        return element(tile.row + self.imm(r), tile.column + self.imm(c), own) * weight

    # ---- outputs

    def _store(self, slot: Expr, group: Expr, filters: int) -> tirx.Stmt:
        first = self.loops.simplify(group * self.imm(self.tiles.filters))
        if self.along_filters:

            def total(position: Expr, at: Expr) -> Expr:
                return tirx.BufferLoad(self.sums, [slot, position, at])

            return self._stores_along_filters(first, filters, total)
        vectors = -(-filters // self.lanes)
        return seq(*(self._store_vector(slot, first, v, filters) for v in range(vectors)))

    def _store_vector(self, slot: Expr, first: Expr, v: int, filters: int) -> tirx.Stmt:
        """The outputs of one vector of filters, transposed some rows at a time."""
        loops, step = self.loops, self.turned_rows
        start = v * self.lanes
        count = loops.simplify(tirx.FloorDiv(self.rows + self.imm(step - 1), self.imm(step)))
        block = loops.new("rows", count)
        base = loops.simplify(block.value * self.imm(step))

        def load(at: Expr, lane: Expr) -> Expr:
            position = loops.simplify(base * self.imm(self.pitch) + at)
            column = loops.simplify(self.imm(start) + lane)
            return tirx.BufferLoad(self.sums, [slot, position, column])

        def turn(value: Expr, lane: Expr, at: Expr) -> tirx.Stmt:
            return tirx.BufferStore(self.turned, value, [lane, at])

        turned = transpose_sums(loops, self.lanes, step * self.pitch, self.dtype, load, turn)
        lane = loops.new("f", min(self.lanes, filters - start))
        here = self.imm(step)
        if number(self.rows) is None or int(number(self.rows)) % step:
            here = loops.simplify(tirx.Min(here, self.rows - base))

        def total(position: Expr) -> Expr:
            return tirx.BufferLoad(self.turned, [lane.value, position])

        number_of = first + self.imm(start) + lane.value
        stores = self._stores_along_positions(base, here, number_of, total)
        return block.around(seq(turned, lane.around(stores)))
