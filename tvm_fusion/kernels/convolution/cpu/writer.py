"""Loops of a direct convolution on a CPU: tasks, blocks of channels, register tiles.

    for each task, in parallel: an image, a block of rows, some groups of filters
        for each block of channels:
            box[c, u, v] <- data, with zeros around it
            for each group of filters, for each register tile of positions:
                for r, s, c:
                    sums of the tile += box * weights
            outputs of the group of filters, see `outputs`

What lies along the vectors is up to the form: filters (`filter_lanes`) or positions
(`position_lanes`). A transposed convolution is one with fewer taps for each phase of its positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.tirx import ForKind

from ...cpu.contraction.task_tiles import even_parts
from ...cpu.loops import Loop, Loops, seq
from ...cpu.machine import Machine
from ...cpu.nests.scope import Scope, allocate, new_buffer
from ...program.expr import constant, number, unflatten
from ...program.program import Extent
from ..geometry import Convolution
from .box import Box, Run, Span
from .outputs import Outputs, along_filters
from .panels import Weights
from .tiles import Tiles
from .vectors import by_vectors


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """`count` register tiles in a row, each of `size` positions, from `start` on."""

    start: int
    count: Expr
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """A register tile, and what it sums up.

    Attributes
    ----------
    phases : sequence of Run
        The taps of each window.
    row, column : Expr
        The first position, counted within the phase.
    rows, columns : int
    channel, count : Expr
        The first channel of the block, and how many there are.
    slot, group : Expr
        Where its sums are kept, and the number of the group of filters.
    filters : int
    """

    phases: Sequence[Run]
    row: Expr
    column: Expr
    rows: int
    columns: int
    channel: Expr
    count: Expr
    slot: Expr
    group: Expr
    filters: int


Element = Callable[..., Expr]
"""An element of the data at a row and a column; of another channel than the sum's, if given."""


class Writer:
    """Writes the loops of a convolution; a form says what a register tile is.

    Attributes
    ----------
    weights : Weights
        The panels that the loops read.

    Raises
    ------
    Unsupported
        The weights have no panels.
    """

    transformed = False  # whether panels hold points of a transform
    along_last = False  # whether vectors of data run along the last window

    def __init__(
        self, func: tirx.PrimFunc, convolution: Convolution, tiles: Tiles, machine: Machine
    ) -> None:
        self.convolution, self.tiles = convolution, tiles
        self.loops = Loops("int64")
        self.scope = Scope(self.loops, {}, machine.scales)
        self.dtype, self.lanes = convolution.product.dtype, tiles.lanes
        self.spans = self._spans()
        axes = (*(w.tap for w in convolution.windows), convolution.channels)
        order = [axis for axis in axes if axis is not None]
        self.weights = Weights.of(convolution, self._panel_lanes(), order, func, self.transformed)
        self.outputs = Outputs(convolution, self.scope)
        self.along_filters = along_filters(convolution)

    # ---- what a form has of its own

    def _held(self) -> Sequence[int]:
        """Positions along each window that a box is for."""
        return self.tiles.blocks

    def _spans(self) -> list[Span]:
        """What a block of positions reads, for each window."""
        span = self.tiles.span
        return [span(self.convolution, number, block) for number, block in enumerate(self._held())]

    def _panel_lanes(self) -> int:
        """Filters of a panel of weights."""
        raise NotImplementedError

    def _allocate_sums(self, kept: int) -> None:
        """Allocate `sums` for some groups of filters."""
        raise NotImplementedError

    def _cells(self, tile: Tile) -> list[tuple[int, ...]]:
        """The vectors of a register tile: number of the row, and two more."""
        raise NotImplementedError

    def _place(self, tile: Tile, cell: tuple[int, ...], lane: Expr) -> list[Expr]:
        """Where the sum of a lane of a cell is kept."""
        raise NotImplementedError

    def _product(
        self, tile: Tile, cell: tuple[int, ...], lane: Expr, env: dict[Var, Expr], element: Element
    ) -> Expr:
        """A term of a lane of a cell."""
        raise NotImplementedError

    def _store(self, slot: Expr, group: Expr, filters: int) -> tirx.Stmt:
        """The outputs of a group of filters."""
        raise NotImplementedError

    # ---- tasks

    def imm(self, value: Extent) -> Expr:
        """A size as an index."""
        return self.loops.imm(value)

    def run(self) -> tirx.Stmt:
        """All tasks; packing of the weights first, where they are no constant."""
        convolution, tiles = self.convolution, self.tiles
        blocks = [w.blocks(n) for w, n in zip(convolution.windows, tiles.blocks, strict=True)]
        *outer, rows, columns = [1, 1, *blocks]
        extents = [*outer, convolution.groups, tiles.filter_tasks, rows, columns]
        total = 1
        for extent in extents:
            total *= extent
        several = not isinstance(total, int) or total > 1
        kind = ForKind.PARALLEL if tiles.is_parallel and several else ForKind.SERIAL
        task = self.loops.new("task", total, kind)
        binds: list[tirx.Stmt] = []
        # Without a division by the first size, which may be symbolic.
        ones = next((n for n, size in enumerate(extents) if not _is_one(size)), 0)
        at = [self.imm(0)] * ones
        at += unflatten(task.value, extents[ones:], self.loops.analyzer)
        *outer_at, self.group, self.filter_task, row, column = (
            self._bound(n, extent, binds) for n, extent in zip(at, extents, strict=True)
        )
        self._place_block([*outer_at, row, column][-len(blocks) :], binds)
        self.env: dict[Var, Expr] = {}
        if convolution.group is not None:
            self.env[convolution.group.var] = self.group
        self._allocate()
        body = self._channel_blocks()
        tasks = task.around(seq(*binds, *self.scope.allocated, body))
        if self.weights.is_constant:
            return tasks
        return seq(allocate(self.weights.buffer), self.weights.pack(self.scope), tasks)

    def _place_block(self, numbers: Sequence[Expr], binds: list[tirx.Stmt]) -> None:
        """Where the task's block starts along each window, and how many of it exist."""
        self.starts: list[Expr] = []
        self.valid: list[Expr] = []
        blocks = zip(self.convolution.windows, self.tiles.blocks, numbers, strict=True)
        for window, block, number_of in blocks:
            start = self.loops.simplify(number_of * self.imm(block))
            here = self.imm(block)
            if not window.is_multiple_of(block):
                left = tirx.Min(here, self.imm(window.size) - start)
                here = self._bound(left, block + 1, binds)
            self.starts.append(start)
            self.valid.append(here)

    def _bound(self, value: Expr, extent: Extent, binds: list[tirx.Stmt]) -> Expr:
        value = self.loops.simplify(value)
        if number(value) is not None:
            return self.imm(int(number(value)))
        var = self.loops.new("at", extent).var
        binds.append(tirx.Bind(var, value))
        return var

    def _allocate(self) -> None:
        self.box = Box(
            self.convolution,
            self.spans,
            self._box_channels,
            self.dtype,
            self.lanes,
            self.scope,
            along_last=self.along_last,
        )
        self.pitch = self._padded(-1)
        self.height = self._padded(-2) if len(self.spans) > 1 else 1
        self._allocate_sums(self.tiles.groups_of_task if self.several else 1)

    @property
    def _box_channels(self) -> int:
        """Channels of the data that a block keeps."""
        return self.tiles.channels

    @property
    def several(self) -> bool:
        """Whether channels come in several blocks."""
        return self.tiles.channels < self.convolution.channels_of_group

    def _padded(self, which: int) -> int:
        """Positions of a block in whole register tiles."""
        window, block = self.convolution.windows[which], self.tiles.blocks[which]
        if not window.is_symbolic and block == window.size:
            return block
        size = self.tiles.columns if which == -1 else self.tiles.rows
        step = size * window.expansion
        return -(-block // step) * step

    # ---- blocks of channels, groups of filters

    def _channel_blocks(self) -> tirx.Stmt:
        size, channels = self.tiles.channels, self.convolution.channels_of_group
        blocks = -(-channels // size)
        block = self.loops.new("channels", blocks)
        first = block.value * self.imm(size)
        count = self.imm(size)
        if channels % size:
            count = self.loops.simplify(tirx.Min(count, self.imm(channels) - first))
        start = self.loops.simplify(self.group * self.imm(channels) + first)
        last = tirx.EQ(block.value, self.imm(blocks - 1))
        groups = self._filter_groups(first, count, last)
        body = seq(self._fill(start, count), groups)
        return seq(self._clear(), block.around(body)) if self.several else body

    def _fill(self, start: Expr, count: Expr) -> tirx.Stmt | None:
        """The box of some channels."""
        return self.box.fill(self.starts, start, count)

    def _clear(self) -> tirx.Stmt:
        *outer, inner = self.sums.ty.shape
        made = [self.loops.new("p", int(extent)) for extent in outer]
        where = [loop.value for loop in made]

        def clear(at: Expr, lane: Loop | None) -> list:
            return [tirx.BufferStore(self.sums, constant(0, self.dtype), [*where, at])]

        body = by_vectors(self.loops, self.lanes, self.imm(0), inner, clear)
        for loop in reversed(made):
            body = loop.around(body)
        return body

    def _filter_groups(self, first: Expr, count: Expr, last: Expr) -> tirx.Stmt:
        """The groups of a task; the last one of all may be smaller."""
        tiles, filters = self.tiles, self.convolution.filters_of_group
        groups = -(-filters // tiles.filters)
        whole, rest = divmod(filters, tiles.filters)
        index = self.loops.new("filters", tiles.groups_of_task)
        before = self.filter_task * self.imm(tiles.groups_of_task)
        group = self.loops.simplify(before + index.value)

        def body(size: int) -> tirx.Stmt:
            slot = index.value if self.several else self.imm(0)
            stored = self._store(slot, group, size)
            if self.several:
                stored = tirx.IfThenElse(last, stored, None)
            return seq(self._positions(first, count, slot, group, size), stored)

        parts = None
        if rest:
            parts = tirx.IfThenElse(tirx.EQ(group, self.imm(groups - 1)), body(rest), None)
        if whole and parts is None and groups % tiles.groups_of_task == 0:
            parts = body(tiles.filters)
        elif whole:
            exists = tirx.LT(group, self.imm(whole))
            parts = tirx.IfThenElse(exists, body(tiles.filters), parts)
        return index.around(parts)

    # ---- register tiles

    def _positions(
        self, first: Expr, count: Expr, slot: Expr, group: Expr, filters: int
    ) -> tirx.Stmt:
        """The sums of all positions of a block."""
        stmts = []
        for phases in itertools.product(*(s.runs for s in self.spans)):
            tiles = []
            for down in self._parts(-2, phases):
                i = self.loops.new("i", down.count)
                row = self.imm(down.start) + i.value * self.imm(down.size)
                inner = []
                for across in self._parts(-1, phases):
                    j = self.loops.new("j", across.count)
                    column = self.imm(across.start) + j.value * self.imm(across.size)
                    sizes = (down.size, across.size)
                    tile = Tile(phases, row, column, *sizes, first, count, slot, group, filters)
                    inner.append(j.around(self._tile(tile)))
                tiles.append(i.around(seq(*inner)))
            stmts.append(self._in_phase(phases, seq(*tiles)))
        return seq(*stmts)

    def _in_phase(self, phases: Sequence[Run], body: tirx.Stmt) -> tirx.Stmt:
        """What is for one phase of the outer windows, of which a task has one position."""
        tests = [
            tirx.EQ(tirx.FloorMod(start, self.imm(span.window.expansion)), self.imm(run.phase))
            for start, span, run in list(zip(self.starts, self.spans, phases, strict=True))[:-2]
            if span.window.expansion > 1
        ]
        return tirx.IfThenElse(tirx.all(*tests), body, None) if tests else body

    def _parts(self, which: int, phases: Sequence[Run]) -> list[Part]:
        """Register tiles along the rows or columns of a phase."""
        if len(self.spans) < -which:
            return [Part(0, self.imm(1), 1)]
        window, run, valid = self.spans[which].window, phases[which], self.valid[which]
        most = self.tiles.columns if which == -1 else self.tiles.rows
        size = number(valid)
        if size is None:
            tile = self.imm(window.expansion * most)
            count = tirx.FloorDiv(valid - self.imm(run.phase) + tile - self.imm(1), tile)
            return [Part(0, self.loops.simplify(count), most)]
        length = -(-(int(size) - run.phase) // window.expansion)
        parts, start = [], 0
        for n, each in self._even(length, most, which) if length > 0 else ():
            parts.append(Part(start, self.imm(n), each))
            start += n * each
        return parts

    def _even(self, length: int, most: int, which: int) -> list[tuple[int, int]]:
        """Cuts positions into register tiles: how many of which size."""
        return even_parts(length, most)

    def _tile(self, tile: Tile) -> tirx.Stmt:
        """One register tile."""
        loops = self.loops
        cells = self._cells(tile)
        acc = new_buffer("acc", [self.imm(len(cells)), self.imm(self.lanes)], self.dtype)
        channel = loops.new("c", tile.count)
        taps = [loops.new("t", max(1, run.count)) for run in tile.phases]
        env = dict(self.env)
        if self.convolution.channels is not None:
            env[self.convolution.channels.var] = loops.simplify(tile.channel + channel.value)
        for run, tap, span in zip(tile.phases, taps, self.spans, strict=True):
            if span.window.tap is not None:
                at = self.imm(run.first) + tap.value * self.imm(run.step)
                env[span.window.tap.var] = loops.simplify(at)

        def each(value: Callable[[tuple[int, ...], Expr, list[Expr]], Expr]) -> list[tirx.Stmt]:
            stmts = []
            for n, cell in enumerate(cells):
                lane = loops.new("v", self.lanes, ForKind.VECTORIZED)
                where = [self.imm(n), lane.value]
                store = tirx.BufferStore(acc, value(cell, lane.value, where), where)
                stmts.append(lane.around(store))
            return stmts

        def begin(cell: tuple[int, ...], lane: Expr, where: list[Expr]) -> Expr:
            if self.several:
                return tirx.BufferLoad(self.sums, self._place(tile, cell, lane))
            return constant(0, self.dtype)

        def element(row: Expr, column: Expr, own: Expr | None = None) -> Expr:
            where = []
            inside = [row, column]
            for i, (run, tap) in enumerate(zip(tile.phases, taps, strict=True)):
                from_end = len(self.spans) - i
                moved = inside[-from_end] if from_end <= 2 else self.imm(0)
                at = self.imm(run.at) + tap.value * self.imm(run.pitch)
                where.append((moved, loops.simplify(at)))
            return self.box.load(channel.value if own is None else own, where)

        def add(cell: tuple[int, ...], lane: Expr, where: list[Expr]) -> Expr:
            return tirx.BufferLoad(acc, where) + self._product(tile, cell, lane, env, element)

        terms = seq(*each(add))
        for loop in (channel, *reversed(taps)):
            terms = loop.around(terms)
        meets = all(run.count for run in tile.phases)
        ends = self._ends(tile, cells, acc)
        return seq(allocate(acc), *each(begin), terms if meets else None, *ends)

    def _ends(self, tile: Tile, cells: Sequence[tuple[int, ...]], acc: Var) -> list[tirx.Stmt]:
        """What becomes of the sums of a register tile: they are kept."""
        stores = []
        for n, cell in enumerate(cells):
            lane = self.loops.new("v", self.lanes, ForKind.VECTORIZED)
            value = tirx.BufferLoad(acc, [self.imm(n), lane.value])
            where = self._place(tile, cell, lane.value)
            stores.append(lane.around(tirx.BufferStore(self.sums, value, where)))
        return stores

    def _position(self, tile: Tile, row: Expr, column: Expr) -> Expr:
        """The number of a position in the block: `row` and `column` are within the phase."""
        found = []
        for which, at in ((-2, row), (-1, column)):
            if len(self.spans) >= -which:
                step = self.imm(self.spans[which].window.expansion)
                found.append(at * step + self.imm(tile.phases[which].phase))
        *above, across = found
        down = above[0] if above else self.imm(0)
        return self.loops.simplify(down * self.imm(self.pitch) + across)

    # ---- outputs

    def _at(self, row: Expr, column: Expr, filters: Expr) -> dict[Var, Expr]:
        """What all axes are at a position of the block."""
        env = dict(self.env)
        inside = [row, column]
        windows = zip(self.convolution.windows, self.starts, strict=True)
        for i, (window, start) in enumerate(windows):
            if window.axis is not None:
                from_end = len(self.starts) - i
                here = start if from_end > 2 else start + inside[-from_end]
                env[window.axis.var] = self.loops.simplify(here)
        if self.convolution.filters is not None:
            env[self.convolution.filters.var] = self.loops.simplify(filters)
        return env

    @property
    def rows(self) -> Expr:
        """Rows of the block that exist."""
        return self.valid[-2] if len(self.spans) > 1 else self.imm(1)

    def _stores_along_filters(
        self, first: Expr, filters: int, total: Callable[[Expr, Expr], Expr]
    ) -> tirx.Stmt:
        """Outputs by vectors of filters; `total` is the sum of a position and a filter."""
        i, j = self.loops.new("i", self.rows), self.loops.new("j", self.valid[-1])
        position = self.loops.simplify(i.value * self.imm(self.pitch) + j.value)

        def ops(at: Expr, lane: Loop | None) -> list:
            env = self._at(i.value, j.value, first + at)
            return self.outputs.point(env, total(position, at), lane)

        stores = by_vectors(self.loops, self.lanes, self.imm(0), self.imm(filters), ops)
        return i.around(j.around(stores))

    def _stores_along_positions(
        self, base: Expr, rows: Expr, filters: Expr, total: Callable[[Expr], Expr]
    ) -> tirx.Stmt:
        """Outputs of one filter by vectors of positions, of some rows from `base` on; `total` is
        the sum of a position, counted from there.
        """
        columns, window = self.valid[-1], self.convolution.windows[-1]
        if self.pitch == window.size > 1 and len(self.spans) > 1:  # rows lie end to end
            rows, columns = self.imm(1), self.loops.simplify(rows * columns)
        i = self.loops.new("i", rows)

        def ops(at: Expr, lane: Loop | None) -> list:
            position = self.loops.simplify(i.value * self.imm(self.pitch) + at)
            down, across = i.value, at
            if number(rows) == 1 and len(self.spans) > 1:
                down, across = (f(at, self.imm(self.pitch)) for f in (tirx.FloorDiv, tirx.FloorMod))
            env = self._at(self.loops.simplify(base + down), across, filters)
            return self.outputs.point(env, total(position), lane)

        stores = by_vectors(self.loops, self.lanes, self.imm(0), columns, ops)
        return i.around(stores)


def _is_one(size: Extent) -> bool:
    return isinstance(size, int) and size == 1
