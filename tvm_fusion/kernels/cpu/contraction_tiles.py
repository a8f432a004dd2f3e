"""Tiles of a contraction, by predicted time.

A task computes a tile of rows and columns. Packing an element of the right operand costs as much as
several multiply-adds, and every tile of rows needs it again, unless it is packed ahead for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product as combinations
from math import ceil, prod

from tvm.ir import Expr, TensorLoad

from ..expr import bytes_of, dtype_of
from .access import load_stride
from .groups import TASKS_PER_CORE, Group
from .machine import Machine
from .operands import Product, operand_loads
from .rewrite import loads
from .stages import Axis, Stage, analyzer_of
from .work import bytes_of_buffer, points, size_of, stage_work

ROW_TILES = (8, 16, 32, 48, 64, 96, 128, 192, 256)
COLUMN_TILES = (16, 32, 64, 96, 128, 256)

# Cost of packing an element, in multiply-adds, measured on convolutions and transposed weights:
# contiguous, for each run of contiguous ones, strided, and of writing it to main memory and back.
PACK_CONTIGUOUS, PACK_RUN, PACK_STRIDED, PACK_AHEAD = 12.0, 200.0, 60.0, 6.0

# Starting a parallel loop of its own, in multiply-adds.
AHEAD_OVERHEAD = 200_000.0

# Columns of a register tile, in vectors; the rows take the registers that are left.
REGISTER_TILE_VECTORS = 2

Tile = list[int | None]


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """A contraction of a group, and which of the shared axes are its rows and its columns."""

    group: Group
    member: int
    product: Product
    machine: Machine

    @property
    def stage(self) -> Stage:
        """The stage that contracts."""
        return self.group.stages[self.member]

    def dims(self, side: tuple[Axis, ...]) -> list[int]:
        """Shared axes that belong to a side."""
        found = range(len(self.group.shared))
        return [d for d in found if any(self.group.axis(d, self.member) is a for a in side)]

    def tiles(self, tile: Tile, dims: list[int]) -> int:
        """Number of tiles along some shared axes."""
        sizes = ((size_of(self.group.axis(d)), tile[d]) for d in dims)
        return prod(1 if t is None else ceil(n / t) for n, t in sizes)


def register_tile(machine: Machine, dtype: str) -> tuple[int, int]:
    """Rows and columns of the tile that a contraction accumulates in registers."""
    lanes = machine.lanes(bytes_of(dtype))
    rows = 8 if machine.vector_registers >= 32 else 4
    return rows, REGISTER_TILE_VECTORS * lanes


def contraction_tile(group: Group, member: int, product: Product, machine: Machine) -> Tile:
    """The tile with the least predicted time."""
    problem = Problem(group, member, product, machine)
    row_dims, column_dims = problem.dims(product.rows), problem.dims(product.columns)
    best: tuple[float, Tile] | None = None
    for rows, columns in combinations(ROW_TILES, COLUMN_TILES):
        tile: Tile = [1] * len(group.shared)
        height = _fill(problem, tile, row_dims, product.rows, rows)
        width = _fill(problem, tile, column_dims, product.columns, columns)
        cost = _cost(problem, tile, height, width)
        if best is None or cost < best[0]:
            best = (cost, tile)
    assert best is not None
    return best[1]


def packs_ahead(problem: Problem, tile: Tile) -> bool:
    """Whether the right operand should be packed once for all tiles, by a loop of its own."""
    if not _may_pack_ahead(problem, tile):
        return False
    product = problem.product
    cost = pack_cost(problem.stage, product.right, product.columns)
    times = problem.tiles(tile, problem.dims(product.rows))
    packed = points((*product.batch, *product.columns, *product.reduced))
    return packed * cost * times > packed * (cost + PACK_AHEAD) + AHEAD_OVERHEAD


def _may_pack_ahead(problem: Problem, tile: Tile) -> bool:
    """It must not depend on the tile, nor outgrow its source; tiles must be whole panels."""
    product, group = problem.product, problem.group
    written = {b for s in group.stages for b in s.buffers}
    sources = {r.source: r for r in operand_loads(problem.stage, product.right)}
    if any(source in written for source in sources):
        return False
    held = sum(bytes_of_buffer(s.ty.shape, "float32") for s in sources)
    dims = problem.dims(product.columns)
    if bytes_of_buffer([a.extent for a in _read_axes(product)], "float32") > 2 * held:
        return False
    _, width = register_tile(problem.machine, dtype_of(problem.stage.values[0]))
    long = [a for a in product.columns if a.size != 1]
    whole = all(tile[d] is None for d in dims)
    return whole or (len(long) == 1 and all(tile[d] % width == 0 for d in dims))


def _read_axes(product: Product) -> tuple[Axis, ...]:
    return (*product.batch, *product.columns, *product.reduced)


def _fill(problem: Problem, tile: Tile, dims: list[int], side: tuple[Axis, ...], goal: int) -> int:
    """Lengthen the tile from the innermost axis on, up to `goal` elements; returns its length."""
    axes = {d: problem.group.axis(d, problem.member) for d in dims}
    length = points(a for a in side if not any(a is x for x in axes.values()))
    for d in reversed(dims):
        room = max(1, goal // length)
        size = size_of(axes[d])
        if axes[d].size is not None and size <= room:
            tile[d] = None
            length *= size
            continue
        tile[d] = room
        length *= room
        break
    return length


def _cost(problem: Problem, tile: Tile, height: int, width: int) -> float:
    """Predicted time of a term: arithmetic on padded tiles, packing, and cores that wait."""
    stage, product, cores = problem.stage, problem.product, problem.machine.cores
    micro_rows, micro_columns = register_tile(problem.machine, dtype_of(stage.values[0]))
    tasks = problem.tiles(tile, list(range(len(tile))))
    padded_rows = ceil(height / micro_rows) * micro_rows
    padded_columns = ceil(width / micro_columns) * micro_columns
    element = pack_cost(stage, product.right, product.columns)
    right = tasks * padded_columns * element
    if packs_ahead(problem, tile):
        once = tasks / problem.tiles(tile, problem.dims(product.rows))
        right = once * padded_columns * (element + PACK_AHEAD)
        right += AHEAD_OVERHEAD / points(product.reduced)
    left = tasks * padded_rows * _left_cost(stage, product)
    rounds = ceil(tasks / cores) * cores
    waiting = rounds / tasks * (1 + 0.2 * cores * TASKS_PER_CORE / tasks)
    return (tasks * padded_rows * padded_columns + left + right) * waiting


def _left_cost(stage: Stage, product: Product) -> float:
    if reads_directly(product.left):
        return 0.0
    return pack_cost(stage, product.left, product.rows)


def pack_cost(stage: Stage, operand: Expr, side: tuple[Axis, ...]) -> float:
    """Cost of packing one element of an operand."""
    analyzer = analyzer_of(stage.domain)
    steps = [load_stride(r, side[-1].var, analyzer) for r in operand_loads(stage, operand)]
    contiguous = all(s in (0, 1) for s in steps)
    base = PACK_CONTIGUOUS + PACK_RUN / size_of(side[-1]) if contiguous else PACK_STRIDED
    return base + 4.0 * max(0, stage_work(stage) - 3)


def reads_directly(operand: Expr) -> bool:
    """Whether an operand is one plain load, so that it needs no packing."""
    return isinstance(operand, TensorLoad) and not loads(*operand.indices)
