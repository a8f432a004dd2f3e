"""Direct convolution on a CPU: vectors of filters, register tiles of positions by vectors.

    for each task, in parallel: an image, a block of rows, some vectors of filters
        for each block of channels:
            box[c, u, v] <- data, with zeros around it
            for each group of vectors, for each register tile of positions (14 by 2 vectors, say):
                for r, s, c:
                    acc[p, v] += box[c, y + r, x_p + s] * panels[v, (r, s, c), 0:16]
                sums[p, v] <- acc
            outputs of the group of vectors, see `outputs`

One element of the data meets a vector of weights, so that any stride, dilation and width are read
where they lie in the box. A transposed convolution is one with fewer taps for each phase of its
positions.
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
from ..geometry import Convolution
from .box import Box, Run, Span, by_vectors
from .outputs import Outputs, steps, transpose_sums
from .panels import Weights
from .tiles import Tiles

# Sums of positions that are transposed at a time: 16 kB, half of a first-level cache.
MOST_TURNED = 256


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """`count` register tiles in a row, each of `size` positions, from `start` on."""

    start: int
    count: Expr
    size: int


def write_direct(
    func: tirx.PrimFunc, convolution: Convolution, tiles: Tiles, machine: Machine
) -> tuple[tirx.Stmt, Weights]:
    """The loops of a convolution, and the panels that they read.

    Raises
    ------
    Unsupported
        The weights have no panels.
    """
    writer = _Writer(func, convolution, tiles, machine)
    return writer.run(), writer.weights


class _Writer:
    def __init__(self, func, convolution: Convolution, tiles: Tiles, machine: Machine) -> None:
        self.convolution, self.tiles = convolution, tiles
        self.loops = Loops("int64")
        self.scope = Scope(self.loops, {}, machine.scales)
        self.dtype = convolution.product.dtype
        self.lanes = tiles.lanes
        self.spans = [
            Span.of(w, block) for w, block in zip(convolution.windows, tiles.blocks, strict=True)
        ]
        self.weights = Weights.of(convolution, self.lanes, self._term_order(), func)
        self.outputs = Outputs(convolution, self.scope)

    def imm(self, value: int) -> Expr:
        """An index constant."""
        return self.loops.imm(value)

    def _term_order(self) -> list:
        """The axes of the sum in the order of the loops."""
        axes = (*(w.tap for w in self.convolution.windows), self.convolution.channels)
        return [a for a in axes if a is not None]

    # ---- tasks

    def run(self) -> tirx.Stmt:
        """All tasks."""
        convolution, tiles = self.convolution, self.tiles
        blocks = [-(-w.size // b) for w, b in zip(convolution.windows, tiles.blocks, strict=True)]
        *outer, rows, columns = [1, 1, *blocks]
        extents = [*outer, convolution.groups, tiles.filter_tasks, rows, columns]
        total = 1
        for extent in extents:
            total *= extent
        kind = ForKind.PARALLEL if tiles.is_parallel and total > 1 else ForKind.SERIAL
        task = self.loops.new("task", total, kind)
        at = unflatten(task.value, extents, self.loops.analyzer)
        binds: list[tirx.Stmt] = []
        *outer_at, group, self.filter_task, row, column = (
            self._bound(n, extent, binds) for n, extent in zip(at, extents, strict=True)
        )
        order = [*outer_at, row, column][-len(blocks) :] if len(blocks) > 1 else [column]
        self.starts = []
        self.valid = []
        for window, block, number_of in zip(convolution.windows, tiles.blocks, order, strict=True):
            start = self.loops.simplify(number_of * self.imm(block))
            self.starts.append(start)
            left = tirx.Min(self.imm(block), self.imm(window.size) - start)
            self.valid.append(
                self.imm(block) if window.size % block == 0 else self._bound(left, block + 1, binds)
            )
        self.group = group
        self.env: dict[Var, Expr] = {}
        if convolution.group is not None:
            self.env[convolution.group.var] = group
        self._allocate()
        body = self._channel_blocks()
        tasks = task.around(seq(*binds, *self.scope.allocated, body))
        if self.weights.is_constant:
            return tasks
        return seq(allocate(self.weights.buffer), self.weights.pack(self.scope), tasks)

    def _bound(self, value: Expr, extent: int, binds: list[tirx.Stmt]) -> Expr:
        value = self.loops.simplify(value)
        if number(value) is not None:
            return self.imm(int(number(value)))
        var = self.loops.new("at", extent).var
        binds.append(tirx.Bind(var, value))
        return var

    def _allocate(self) -> None:
        tiles = self.tiles
        self.box = Box(
            self.convolution, self.spans, tiles.channels, self.dtype, self.lanes, self.scope
        )
        self.pitch = self._padded(-1)
        self.height = self._padded(-2) if len(self.spans) > 1 else 1
        positions = self.pitch * self.height + self.lanes  # squares read beyond the last one
        kept = tiles.groups_of_task if self.several else 1
        self.width = tiles.vectors * self.lanes
        self.sums = self.scope.allocate("sums", [kept, positions, self.width], self.dtype)
        self.along_filters = _along_filters(self.convolution)
        if not self.along_filters:
            self.turned_rows = self._turned_rows()
            count = -(-self.turned_rows * self.pitch // self.lanes) * self.lanes
            self.turned = self.scope.allocate("turned", [self.lanes, count], self.dtype)

    @property
    def several(self) -> bool:
        """Whether channels come in several blocks."""
        return self.tiles.channels < self.convolution.channels_of_group

    def _padded(self, which: int) -> int:
        """Positions of a block in whole register tiles."""
        span = self.spans[which]
        window, block = span.window, span.block
        if block == window.size:
            return block
        size = self.tiles.columns if which == -1 else self.tiles.rows
        step = size * window.expansion
        return -(-block // step) * step

    def _turned_rows(self) -> int:
        """Rows whose sums are transposed at a time."""
        if self.pitch >= self.lanes or len(self.spans) == 1:
            return 1
        most = max(1, MOST_TURNED // self.pitch)
        return min(self.height, most)

    # ---- blocks of channels, groups of vectors

    def _channel_blocks(self) -> tirx.Stmt:
        convolution, size = self.convolution, self.tiles.channels
        channels = convolution.channels_of_group
        blocks = -(-channels // size)
        block = self.loops.new("channels", blocks)
        first = block.value * self.imm(size)
        count = self.imm(size)
        if channels % size:
            count = tirx.Min(count, self.imm(channels) - first)
        count = self.loops.simplify(count)
        start = self.loops.simplify(self.group * self.imm(channels) + first)
        fill = self.box.fill(self.starts, start, count)
        last = tirx.EQ(block.value, self.imm(blocks - 1))
        body = seq(fill, self._filter_groups(first, count, last))
        if not self.several:
            return body
        zero = constant(0, self.dtype)
        kept, positions, width = (int(e) for e in self.sums.ty.shape)
        k, p = self.loops.new("k", kept), self.loops.new("p", positions)

        def clear(at: Expr, lane: Loop | None) -> list:
            return [tirx.BufferStore(self.sums, zero, [k.value, p.value, at])]

        cleared = by_vectors(self.loops, self.lanes, self.imm(0), self.imm(width), clear)
        return seq(k.around(p.around(cleared)), block.around(body))

    def _filter_groups(self, first: Expr, count: Expr, last: Expr) -> tirx.Stmt:
        """The groups of vectors of a task; the last one of all may be narrower."""
        tiles = self.tiles
        filters = self.convolution.filters_of_group
        vectors = -(-filters // self.lanes)
        groups = -(-vectors // tiles.vectors)
        index = self.loops.new("filters", tiles.groups_of_task)
        group = self.loops.simplify(self.filter_task * self.imm(tiles.groups_of_task) + index.value)
        whole = filters // (tiles.vectors * self.lanes)

        def body(width: int) -> tirx.Stmt:
            slot = index.value if self.several else self.imm(0)
            vector = self.loops.simplify(group * self.imm(tiles.vectors))
            n = -(-width // self.lanes)
            sums = self._positions(first, count, slot, vector, n)
            stored = self._store(slot, vector, width)
            if self.several:
                stored = tirx.IfThenElse(last, stored, None)
            return seq(sums, stored)

        rest = filters - whole * tiles.vectors * self.lanes
        parts = None
        if rest:
            parts = tirx.IfThenElse(tirx.EQ(group, self.imm(groups - 1)), body(rest), None)
        if whole:
            wide = body(tiles.vectors * self.lanes)
            exists = tirx.LT(group, self.imm(whole))
            if parts is None and groups % tiles.groups_of_task == 0:
                parts = wide
            else:
                parts = tirx.IfThenElse(exists, wide, parts)
        return index.around(parts)

    # ---- register tiles

    def _positions(
        self, first: Expr, count: Expr, slot: Expr, vector: Expr, vectors: int
    ) -> tirx.Stmt:
        """The sums of all positions of a block."""
        stmts = []
        for phases in itertools.product(*(s.runs for s in self.spans)):
            rows = self._parts(-2, phases)
            columns = self._parts(-1, phases)
            tiles = []
            for down in rows:
                i = self.loops.new("i", down.count)
                inner = []
                for across in columns:
                    j = self.loops.new("j", across.count)
                    at = (
                        self.imm(down.start) + i.value * self.imm(down.size),
                        self.imm(across.start) + j.value * self.imm(across.size),
                    )
                    tile = self._tile(
                        phases, at, down.size, across.size, first, count, slot, vector, vectors
                    )
                    inner.append(j.around(tile))
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
        span, run, valid = self.spans[which], phases[which], self.valid[which]
        most = self.tiles.columns if which == -1 else self.tiles.rows
        step = span.window.expansion
        size = number(valid)
        if size is not None:
            length = -(-(int(size) - run.phase) // step)
            parts, start = [], 0
            if length <= 0:
                return []
            for n, each in even_parts(length, most):
                parts.append(Part(start, self.imm(n), each))
                start += n * each
            return parts
        tile = self.imm(step * most)
        count = tirx.FloorDiv(valid - self.imm(run.phase) + tile - self.imm(1), tile)
        return [Part(0, self.loops.simplify(count), most)]

    def _tile(
        self,
        phases: Sequence[Run],
        at: tuple[Expr, Expr],
        rows: int,
        columns: int,
        first: Expr,
        count: Expr,
        slot: Expr,
        vector: Expr,
        vectors: int,
    ) -> tirx.Stmt:
        """One register tile: `rows` by `columns` positions of a phase from `at` on."""
        loops, lanes = self.loops, self.lanes
        cells = [(r, c, v) for r in range(rows) for c in range(columns) for v in range(vectors)]
        acc = new_buffer("acc", [self.imm(len(cells)), self.imm(lanes)], self.dtype)
        channel = loops.new("c", count)
        taps = [loops.new("t", max(1, run.count)) for run in phases]
        is_empty = any(run.count == 0 for run in phases)

        def each(value: Callable[[int, int, int, Expr, list[Expr]], Expr]) -> list[tirx.Stmt]:
            stmts = []
            for n, (r, c, v) in enumerate(cells):
                lane = loops.new("v", lanes, ForKind.VECTORIZED)
                where = [self.imm(n), lane.value]
                stmts.append(
                    lane.around(tirx.BufferStore(acc, value(r, c, v, lane.value, where), where))
                )
            return stmts

        def place(r: int, c: int, v: int, lane: Expr) -> list[Expr]:
            row = (
                (at[0] + self.imm(r)) * self.imm(self.spans[-2].window.expansion)
                + self.imm(phases[-2].phase)
                if len(self.spans) > 1
                else self.imm(0)
            )
            column = (at[1] + self.imm(c)) * self.imm(self.spans[-1].window.expansion) + self.imm(
                phases[-1].phase
            )
            position = loops.simplify(row * self.imm(self.pitch) + column)
            return [slot, position, loops.simplify(self.imm(v * lanes) + lane)]

        def begin(r: int, c: int, v: int, lane: Expr, where: list[Expr]) -> Expr:
            if self.several:
                return tirx.BufferLoad(self.sums, place(r, c, v, lane))
            return constant(0, self.dtype)

        env = dict(self.env)
        if self.convolution.channels is not None:
            env[self.convolution.channels.var] = loops.simplify(first + channel.value)
        for run, tap, span in zip(phases, taps, self.spans, strict=True):
            if span.window.tap is not None:
                number_of = self.imm(run.first) + tap.value * self.imm(run.step)
                env[span.window.tap.var] = loops.simplify(number_of)

        def element(r: int, c: int) -> Expr:
            where = []
            for i, (run, tap, span) in enumerate(zip(phases, taps, self.spans, strict=True)):
                here = self.imm(run.at) + tap.value * self.imm(run.pitch)
                from_end = len(self.spans) - i
                if from_end <= 2:
                    moved, own = (at[1], c) if from_end == 1 else (at[0], r)
                    here = here + (moved + self.imm(own)) * self.imm(span.stride)
                where.append(loops.simplify(here))
            return self.box.load(channel.value, where)

        def add(r: int, c: int, v: int, lane: Expr, where: list[Expr]) -> Expr:
            weight = self.weights.load(
                loops.simplify(vector + self.imm(v)), env, lane, loops, self.dtype
            )
            return tirx.BufferLoad(acc, where) + element(r, c) * weight

        terms = seq(*each(add))
        for loop in (channel, *reversed(taps)):
            terms = loop.around(terms)
        stores = []
        for n, (r, c, v) in enumerate(cells):
            lane = loops.new("v", lanes, ForKind.VECTORIZED)
            value = tirx.BufferLoad(acc, [self.imm(n), lane.value])
            stores.append(
                lane.around(tirx.BufferStore(self.sums, value, place(r, c, v, lane.value)))
            )
        return seq(allocate(acc), *each(begin), None if is_empty else terms, *stores)

    # ---- outputs

    def _store(self, slot: Expr, vector: Expr, width: int) -> tirx.Stmt:
        """The outputs of some filters of a block of positions."""
        first = self.loops.simplify(vector * self.imm(self.lanes))
        if self.along_filters:
            return self._store_filters(slot, first, width)
        vectors = [
            self._store_positions(slot, first, v, min(self.lanes, width - v * self.lanes))
            for v in range(-(-width // self.lanes))
        ]
        return seq(*vectors)

    def _at(self, row: Expr, column: Expr, filters: Expr) -> dict[Var, Expr]:
        """What all axes are at a position of the block."""
        env = dict(self.env)
        inside = [row, column]
        for i, (window, start) in enumerate(
            zip(self.convolution.windows, self.starts, strict=True)
        ):
            if window.axis is None:
                continue
            from_end = len(self.starts) - i
            here = start if from_end > 2 else start + inside[-from_end]
            env[window.axis.var] = self.loops.simplify(here)
        if self.convolution.filters is not None:
            env[self.convolution.filters.var] = filters
        return env

    @property
    def _rows_and_columns(self) -> tuple[Expr, Expr]:
        rows = self.valid[-2] if len(self.spans) > 1 else self.imm(1)
        return rows, self.valid[-1]

    def _store_filters(self, slot: Expr, first: Expr, width: int) -> tirx.Stmt:
        rows, columns = self._rows_and_columns
        i, j = self.loops.new("i", rows), self.loops.new("j", columns)
        position = self.loops.simplify(i.value * self.imm(self.pitch) + j.value)

        def ops(at: Expr, lane: Loop | None) -> list:
            total = tirx.BufferLoad(self.sums, [slot, position, at])
            env = self._at(i.value, j.value, self.loops.simplify(first + at))
            return self.outputs.point(env, total, lane)

        stores = by_vectors(self.loops, self.lanes, self.imm(0), self.imm(width), ops)
        return i.around(j.around(stores))

    def _store_positions(self, slot: Expr, first: Expr, v: int, width: int) -> tirx.Stmt:
        """One vector of filters, some rows at a time."""
        loops, step = self.loops, self.turned_rows
        rows, columns = self._rows_and_columns
        count = loops.simplify(tirx.FloorDiv(rows + self.imm(step - 1), self.imm(step)))
        block = loops.new("rows", count)
        base = loops.simplify(block.value * self.imm(step))

        def load(at: Expr, lane: Expr) -> Expr:
            position = loops.simplify(base * self.imm(self.pitch) + at)
            return tirx.BufferLoad(
                self.sums, [slot, position, loops.simplify(self.imm(v * self.lanes) + lane)]
            )

        def turn(value: Expr, lane: Expr, at: Expr) -> tirx.Stmt:
            return tirx.BufferStore(self.turned, value, [lane, at])

        turned = transpose_sums(loops, self.lanes, step * self.pitch, self.dtype, load, turn)
        lane = loops.new("f", width)
        here = self.imm(step)
        if number(rows) is None or int(number(rows)) % step:
            here = loops.simplify(tirx.Min(here, rows - base))
        i = loops.new("i", here)
        filters = loops.simplify(first + self.imm(v * self.lanes) + lane.value)

        def ops(at: Expr, vector: Loop | None) -> list:
            where = loops.simplify(i.value * self.imm(self.pitch) + at)
            total = tirx.BufferLoad(self.turned, [lane.value, where])
            env = self._at(loops.simplify(base + i.value), at, filters)
            return self.outputs.point(env, total, vector)

        stores = by_vectors(loops, self.lanes, self.imm(0), columns, ops)
        return block.around(seq(turned, lane.around(i.around(stores))))


def _along_filters(convolution: Convolution) -> bool:
    """Whether the first output is contiguous along filters rather than along positions."""
    if convolution.filters is None:
        return False
    return steps(convolution, convolution.filters) == 1
