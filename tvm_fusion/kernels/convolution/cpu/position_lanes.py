"""Direct convolution by vectors of positions: register tiles of filters by rows by vectors.

    acc[f, y, v] += weights[f, c, r, s] * box[c, y + r, 16 v + s : 16 v + s + 16]

For few filters a group, depthwise convolutions among them, and where results lie along positions
and sums are short, so that transposing vectors of filters takes longer than they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from tvm import tirx
from tvm.ir import Expr, Var

from ...cpu.contraction.task_tiles import even_parts
from ...cpu.loops import Loop
from ...cpu.nests.scope import allocate, new_buffer
from .box import Span
from .tiles import stores_at_once
from .vectors import by_vectors
from .writer import Element, Tile, Writer


class PositionLanes(Writer):
    """See the module docstring."""

    along_last = True

    def _held(self) -> Sequence[int]:
        *others, last = self.tiles.blocks
        return (*others, -(-last // self.lanes) * self.lanes)

    def _spans(self) -> list[Span]:
        *others, last = super()._spans()
        block = self.tiles.blocks[-1]
        fills = block >= self.lanes or last.streams > 1
        if self.convolution.channels is None and fills:  # a copy of few taps is most of the work
            last = last.aligned(self.lanes, block)
        return [*others, last]

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

    @cached_property
    def stores_at_once(self) -> bool:
        """Whether results are written from registers (see `tiles.stores_at_once`)."""
        return stores_at_once(self.convolution, self.tiles)

    def _allocate_sums(self, kept: int) -> None:
        if self.stores_at_once:
            return
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

    def _ends(self, tile: Tile, cells: Sequence[tuple[int, ...]], acc: Var) -> list[tirx.Stmt]:
        if not self.stores_at_once:
            return super()._ends(tile, cells, acc)
        stmts, firsts = [], []
        for v in range(tile.columns // self.lanes):
            first = new_buffer("first", [self.imm(1)], self.loops.dtype)
            start = self.loops.simplify(self.starts[-1] + self._column(tile, v, self.imm(0)))
            stmts += [allocate(first), tirx.BufferStore(first, start, [self.imm(0)])]
            firsts.append(tirx.BufferLoad(first, [self.imm(0)]))
        results = [self._result(tile, cell, acc, n, firsts) for n, cell in enumerate(cells)]
        return [*stmts, *results]

    def _result(
        self, tile: Tile, cell: tuple[int, ...], acc: Var, number_of: int, firsts: Sequence[Expr]
    ) -> tirx.Stmt:
        """The outputs of a vector of sums; `firsts` are loads: where the first position is some sum
        of loops, TVM does not see that rows lie end to end.
        """
        r, v, f = cell
        filters = tile.group * self.imm(self.tiles.filters) + self.imm(f)
        here = self._at(tile.row + self.imm(r), self._column(tile, v, self.imm(0)), filters)

        def ops(at: Expr, lane: Loop | None) -> list:
            env = {**here, self.convolution.windows[-1].axis.var: firsts[v] + at}
            total = tirx.BufferLoad(acc, [self.imm(number_of), at])
            return self.outputs.point(env, total, lane)

        return by_vectors(self.loops, self.lanes, self.imm(0), self.imm(self.lanes), ops)

    def _store(self, slot: Expr, group: Expr, filters: int) -> tirx.Stmt | None:
        if self.stores_at_once:
            return None
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
