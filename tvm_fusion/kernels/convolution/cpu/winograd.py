"""Convolutions of 3 x 3 taps by the minimal filtering algorithm F(2 x 2, 3 x 3).

    V = B^T d B     the data of 4 x 4 elements that 2 x 2 positions meet, for each channel
    U = G w G^T     the weights, when the module is compiled
    M = sum_c U V   sixteen products, one for each point of the transform
    Y = A^T M A     2 x 2 positions

takes 16 multiplications for what takes 36. Sums have as many terms as channels, so that rounding
errors are no larger than those of the direct sums. An element that is no finite number spreads to
the other positions of its tile.

Source: A. Lavin and S. Gray, Fast Algorithms for Convolutional Neural Networks (2016); the
matrices are S. Winograd's (Arithmetic Complexity of Computations, 1980).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product as combinations
from math import ceil, prod

from tvm import tirx
from tvm.ir import Expr, PrimType, Var
from tvm.tirx import ForKind

from ....errors import Unsupported
from ...cpu.contraction.task_tiles import (
    FAR_CYCLES,
    NEAR_BYTES,
    PARTS,
    TASK_CYCLES,
    TILE_CYCLES,
    even_parts,
)
from ...cpu.loops import seq
from ...cpu.machine import PRODUCT_WORK, Machine
from ...cpu.nests.scope import allocate, new_buffer
from ...program.expr import constant
from ..geometry import Convolution
from ..transform import EDGE, LEAST_CHANNELS, LEAST_FILTERS, POINTS, TAPS
from .filter_lanes import FilterLanes
from .outputs import along_filters
from .tiles import RESULT_CYCLES, TURN_CYCLES, Tiles, filter_cycles, register_tiles

# Transformed weights beyond this are not tried: they would come from the memory in each call. Of
# 512 channels, 17 MB, they take a ResNet-18 on a core of a Zen 4 (32 MB last-level cache) from 24.9
# to 21.8 ms.
MOST_WEIGHTS = 32 << 20

# Cycles of transforming a vector of tiles of one channel, and a tile of one vector of filters.
INPUT_CYCLES, OUTPUT_CYCLES = 90.0, 60.0


def suits(convolution: Convolution) -> bool:
    """Whether a convolution has 3 x 3 taps of neighbours in rows that lie end to end, enough
    channels and filters, and leave to round otherwise.
    """
    if len(convolution.windows) < 2 or convolution.contraction.exact:
        return False
    *outer, above, last = convolution.windows
    square = all(
        (w.taps, w.stride, w.dilation, w.expansion) == (TAPS, 1, 1, 1) for w in (above, last)
    )
    channels, filters = convolution.channels_of_group, convolution.filters_of_group
    points = POINTS * POINTS * channels * filters * convolution.groups
    return (
        square
        and (convolution.channel_dim is None or convolution.channel_dim < last.dim)
        and all(w.taps == 1 for w in outer)
        and convolution.product.dtype == "float32"
        and channels >= LEAST_CHANNELS
        and filters >= LEAST_FILTERS
        and points * 4 <= MOST_WEIGHTS
    )


def winograd_tiles(convolution: Convolution, machine: Machine) -> tuple[float, Tiles]:
    """Predicted cycles of the fastest tiles, and these: rows and columns of a register tile count
    tiles of 2 x 2 positions.

    Raises
    ------
    Unsupported
        The convolution is of another kind, or what a task keeps would not stay near.
    """
    lanes = machine.lanes(4)
    filters = convolution.filters_of_group
    if not suits(convolution) or (convolution.groups > 1 and filters % lanes):
        raise Unsupported("no convolution of 3 x 3 taps of many channels")
    is_parallel = convolution.multiply_adds * PRODUCT_WORK >= machine.small_work
    *outer, above, last = convolution.windows
    height, width = ceil(above.size / EDGE), ceil(last.size / EDGE)
    best: tuple[float, int, Tiles] | None = None
    tiles = register_tiles(machine.vector_registers, height, width, ceil(filters / lanes))
    for rows, columns, vectors in tiles:
        groups = ceil(filters / (vectors * lanes))
        heights = sorted({ceil(height / p) for p in PARTS}, reverse=True)
        shares = sorted({ceil(groups / p) for p in PARTS})
        for block, share in combinations(heights, shares):
            blocks = (*(1 for _ in outer), min(above.size, block * EDGE), last.size)
            tile = Tiles(
                lanes,
                True,
                rows,
                columns,
                vectors * lanes,
                blocks,
                share,
                ceil(groups / share),
                convolution.channels_of_group,
                is_parallel,
            )
            cycles = _cycles(convolution, tile, machine.cores if is_parallel else 1)
            if best is None or cycles < best[0]:
                best = (cycles, 0, tile)
    return best[0], best[2]


def _cycles(convolution: Convolution, tiles: Tiles, cores: int) -> float:
    channels, filters = convolution.channels_of_group, convolution.filters_of_group
    vectors = ceil(min(tiles.groups_of_task * tiles.filters, filters) / tiles.lanes)
    height, width = (ceil(n / EDGE) for n in tiles.blocks[-2:])
    sums = number = 0.0
    of_tile = tiles.filters // tiles.lanes
    for (n, r), (m, c) in combinations(
        even_parts(height, tiles.rows), even_parts(width, tiles.columns)
    ):
        sums += n * m * filter_cycles(r * c, of_tile)
        number += n * m
    points = POINTS * POINTS
    compute = points * vectors / of_tile * (sums * channels + number * TILE_CYCLES)
    inputs = INPUT_CYCLES * channels * height * ceil(width / tile_lanes(width, tiles.lanes))
    outputs = OUTPUT_CYCLES * height * width * vectors
    weights = FAR_CYCLES * points * channels * vectors
    turn = 0.0 if along_filters(convolution) else TURN_CYCLES
    results = (RESULT_CYCLES + turn) * prod(tiles.blocks) * vectors
    kept = points * channels * height * width * 4
    far = FAR_CYCLES * vectors / of_tile * max(0, kept - NEAR_BYTES) / (4 * tiles.lanes)
    task = TASK_CYCLES + compute + inputs + outputs + weights + results + far
    blocks = zip(convolution.windows, tiles.blocks, strict=True)
    tasks = prod(ceil(w.size / b) for w, b in blocks) * convolution.groups * tiles.filter_tasks
    return task * ceil(tasks / cores)


def tile_lanes(width: int, lanes: int) -> int:
    """Tiles of a row that are transformed at a time."""
    while lanes > 4 and lanes // 2 >= width:
        lanes //= 2
    return lanes


class Winograd(FilterLanes):
    """See the module docstring."""

    transformed = True
    along_last = True

    def _allocate(self) -> None:
        if not self.weights.is_constant:
            raise Unsupported("weights that are no constants, whose transform is not known")
        self.tile_rows, self.tile_columns = (ceil(n / EDGE) for n in self.tiles.blocks[-2:])
        self.at_once = tile_lanes(self.tile_columns, self.lanes)
        self.tile_pitch = ceil(self.tile_columns / self.at_once) * self.at_once
        super()._allocate()
        points, tiles = POINTS * POINTS, self.tile_rows * self.tile_columns
        shape = [points, self.tiles.channels, self.tile_rows * self.tile_pitch]
        self.data = self.scope.allocate("data", shape, self.dtype)
        self.products = self.scope.allocate(
            "products", [points, tiles, self.tiles.filters], self.dtype
        )

    def _held(self) -> Sequence[int]:
        *outer, rows, columns = self.tiles.blocks
        width = ceil(columns / EDGE)
        at_once = tile_lanes(width, self.tiles.lanes)
        return (*outer, ceil(rows / EDGE) * EDGE, ceil(width / at_once) * at_once * EDGE)

    def _padded(self, which: int) -> int:
        return ceil(self.tiles.blocks[which] / EDGE) * EDGE

    # ---- data

    def _fill(self, start: Expr, count: Expr) -> tirx.Stmt | None:
        return seq(super()._fill(start, count), self._transform_data())

    def _transform_data(self) -> tirx.Stmt:
        """B^T d B, of a vector of tiles beside each other at a time."""
        loops, lanes = self.loops, self.at_once
        channel = loops.new("c", self.tiles.channels)
        row = loops.new("i", self.tile_rows)
        block = loops.new("j", self.tile_pitch // lanes)
        first = block.value * self.imm(lanes)
        values = _Values(f"{self.dtype}x{lanes}")

        def load(y: int, x: int) -> Expr:
            """Every second element of a row of the box, from its element `x` on."""
            at = loops.simplify(first * self.imm(EDGE) + self.imm(x))
            where = [(self.imm(0), self.imm(0)) for _ in self.spans[:-2]]
            where.append((self.imm(0), loops.simplify(row.value * self.imm(EDGE) + self.imm(y))))
            parts = [
                self.box.load(channel.value, [*where, (self.imm(0), loops.simplify(at + half))])
                for half in (self.imm(0), self.imm(lanes))
            ]
            ramps = [
                tirx.BufferLoad(
                    p.source, [*p.indices[:-1], tirx.Ramp(p.indices[-1], self.imm(1), lanes)]
                )
                for p in parts
            ]
            order = [constant(2 * n, "int32") for n in range(lanes)]
            return values.bind(tirx.Shuffle([values.bind(r) for r in ramps], order))

        rows = [_transformed([load(y, x) for x in range(POINTS)], values) for y in range(POINTS)]
        columns = [_transformed([r[x] for r in rows], values) for x in range(POINTS)]
        position = loops.simplify(row.value * self.imm(self.tile_pitch) + first)
        ramp = tirx.Ramp(position, self.imm(1), lanes)
        stores = [
            tirx.BufferStore(
                self.data, columns[x][y], [self.imm(y * POINTS + x), channel.value, ramp]
            )
            for y, x in combinations(range(POINTS), range(POINTS))
        ]
        return channel.around(row.around(block.around(seq(*values.stmts, *stores))))

    # ---- products, and results of them

    def _positions(
        self, first: Expr, count: Expr, slot: Expr, group: Expr, filters: int
    ) -> tirx.Stmt:
        point = self.loops.new("point", POINTS * POINTS)
        tiles = []
        for start, n, rows in _runs(self.tile_rows, self.tiles.rows):
            i = self.loops.new("i", n)
            row = self.imm(start) + i.value * self.imm(rows)
            for begin, m, columns in _runs(self.tile_columns, self.tiles.columns):
                j = self.loops.new("j", m)
                column = self.imm(begin) + j.value * self.imm(columns)
                tile = self._product_tile(point.value, row, column, rows, columns, group, filters)
                tiles.append(i.around(j.around(tile)))
        vectors = -(-filters // self.lanes)
        results = [self._transform_results(slot, v) for v in range(vectors)]
        return seq(point.around(seq(*tiles)), *results)

    def _product_tile(
        self,
        point: Expr,
        row: Expr,
        column: Expr,
        rows: int,
        columns: int,
        group: Expr,
        filters: int,
    ) -> tirx.Stmt:
        """The sums of some tiles by some vectors of filters at one point."""
        loops = self.loops
        vectors = range(-(-filters // self.lanes))
        cells = [*combinations(range(rows), range(columns), vectors)]
        acc = new_buffer("acc", [self.imm(len(cells)), self.imm(self.lanes)], self.dtype)
        channel = loops.new("c", self.tiles.channels)
        *_, above, last = self.convolution.windows
        four = self.imm(POINTS)
        env = dict(self.env)
        env[self.convolution.channels.var] = channel.value
        env[above.tap.var] = loops.simplify(tirx.FloorDiv(point, four))
        env[last.tap.var] = loops.simplify(tirx.FloorMod(point, four))

        def each(store: Callable[[int, tuple[int, int, int], Expr], tirx.Stmt]) -> list[tirx.Stmt]:
            stmts = []
            for n, cell in enumerate(cells):
                lane = loops.new("v", self.lanes, ForKind.VECTORIZED)
                stmts.append(lane.around(store(n, cell, lane.value)))
            return stmts

        def begin(n: int, cell: tuple[int, int, int], lane: Expr) -> tirx.Stmt:
            return tirx.BufferStore(acc, constant(0, self.dtype), [self.imm(n), lane])

        def add(n: int, cell: tuple[int, int, int], lane: Expr) -> tirx.Stmt:
            r, c, v = cell
            at = (row + self.imm(r)) * self.imm(self.tile_pitch) + column + self.imm(c)
            element = tirx.BufferLoad(self.data, [point, channel.value, loops.simplify(at)])
            vector = loops.simplify(group * self.imm(self.vectors) + self.imm(v))
            weight = self.weights.load(vector, env, lane, loops, self.dtype)
            total = tirx.BufferLoad(acc, [self.imm(n), lane]) + element * weight
            return tirx.BufferStore(acc, total, [self.imm(n), lane])

        def keep(n: int, cell: tuple[int, int, int], lane: Expr) -> tirx.Stmt:
            r, c, v = cell
            at = (row + self.imm(r)) * self.imm(self.tile_columns) + column + self.imm(c)
            where = [point, loops.simplify(at), loops.simplify(self.imm(v * self.lanes) + lane)]
            return tirx.BufferStore(self.products, tirx.BufferLoad(acc, [self.imm(n), lane]), where)

        return seq(allocate(acc), *each(begin), channel.around(seq(*each(add))), *each(keep))

    def _transform_results(self, slot: Expr, v: int) -> tirx.Stmt:
        """A^T M A of one vector of filters, tile by tile."""
        loops = self.loops
        i, j = loops.new("i", self.tile_rows), loops.new("j", self.tile_columns)
        tile = loops.simplify(i.value * self.imm(self.tile_columns) + j.value)
        lanes = tirx.Ramp(self.imm(v * self.lanes), self.imm(1), self.lanes)
        values = _Values(f"{self.dtype}x{self.lanes}")
        points = [
            [
                values.bind(tirx.BufferLoad(self.products, [self.imm(y * POINTS + x), tile, lanes]))
                for x in range(POINTS)
            ]
            for y in range(POINTS)
        ]
        rows = [_result(row, values) for row in points]
        stores = []
        for x in range(EDGE):
            for y, value in enumerate(_result([row[x] for row in rows], values)):
                down = i.value * self.imm(EDGE) + self.imm(y)
                across = j.value * self.imm(EDGE) + self.imm(x)
                position = loops.simplify(down * self.imm(self.pitch) + across)
                stores.append(tirx.BufferStore(self.sums, value, [slot, position, lanes]))
        return i.around(j.around(seq(*values.stmts, *stores)))


class _Values:
    """Bindings of vectors."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.stmts: list[tirx.Stmt] = []

    def bind(self, value: Expr) -> Var:
        """A name for a value."""
        var = Var("m", PrimType(self.dtype))
        self.stmts.append(tirx.Bind(var, value))
        return var


def _transformed(d: Sequence[Expr], values: _Values) -> list[Var]:
    """B^T d."""
    return [values.bind(v) for v in (d[0] - d[2], d[1] + d[2], d[2] - d[1], d[1] - d[3])]


def _result(m: Sequence[Expr], values: _Values) -> list[Var]:
    """A^T m."""
    return [values.bind(v) for v in (m[0] + m[1] + m[2], m[1] - m[2] - m[3])]


def _runs(length: int, most: int) -> list[tuple[int, int, int]]:
    """First tile, number and size of register tiles."""
    found, start = [], 0
    for n, size in even_parts(length, most):
        found.append((start, n, size))
        start += n * size
    return found
