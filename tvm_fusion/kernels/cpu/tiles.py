"""Sizes of the tiles that a group is computed in."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product as combinations
from math import ceil

from tvm.ir import Expr

from ..expr import bytes_of, dtype_of
from .access import load_stride
from .groups import TASKS_PER_CORE, Group
from .lanes import best_lane
from .machine import Machine
from .operands import Product, split_product
from .rewrite import loads
from .stages import Axis, Stage, analyzer_of
from .work import points, size_of, stage_work

# Elements of a tile of a pointwise group: enough to hide the loop around it.
POINTWISE_ELEMENTS = 4096

# Tile edges where one access runs along another axis than the rest (lines of a cache, vectors).
TRANSPOSE_TILE = 32

# Width of a tile whose vectors run along a shared axis while other axes are reduced.
COLUMN_TILE = 128

# Candidate tile edges of contractions, and cost of packing an element in multiply-adds.
ROW_TILES = (8, 16, 32, 48, 64, 96, 128, 192, 256)
COLUMN_TILES = (16, 32, 64, 96, 128, 256)
PACK_CONTIGUOUS, PACK_RUN, PACK_STRIDED, PACK_NOTHING = 12.0, 200.0, 60.0, 0.0

# Columns of a register tile, in vectors; rows come from the registers that are left.
REGISTER_TILE_VECTORS = 2


def register_tile(machine: Machine, dtype: str) -> tuple[int, int]:
    """Rows and columns of the tile that a contraction accumulates in registers."""
    lanes = machine.lanes(bytes_of(dtype))
    rows = 8 if machine.vector_registers >= 32 else 4
    return rows, REGISTER_TILE_VECTORS * lanes


def choose_tile(group: Group, machine: Machine) -> tuple[int | None, ...]:
    """Tile length along each shared axis; None stands for the whole axis."""
    contractions = [(i, p) for i, s in enumerate(group.stages) if (p := split_product(s))]
    if contractions:
        main = max(contractions, key=lambda c: points(group.stages[c[0]].domain))
        tile = _contraction_tile(group, *main, machine)
    elif all(len(s.domain) == len(group.shared) for s in group.stages):
        tile = _pointwise_tile(group)
    else:
        tile = _reduction_tile(group)
    return tuple(
        None if t is not None and (size := group.axis(d).size) is not None and size <= t else t
        for d, t in enumerate(tile)
    )


def _pointwise_tile(group: Group) -> list[int | None]:
    """Whole inner axes up to a few thousand elements; squares where accesses disagree."""
    order = sorted(range(len(group.shared)), key=lambda d: group.shared[d][-1])
    if len(order) > 1:
        conflict = _transposed(group, order)
        if conflict is not None:
            return [TRANSPOSE_TILE if d in conflict else 1 for d in range(len(group.shared))]
    tile: list[int | None] = [1] * len(order)
    left = POINTWISE_ELEMENTS
    for d in reversed(order):
        size = size_of(group.axis(d))
        tile[d] = None if size <= left else max(1, left)
        left //= size
        if left <= 1:
            break
    return tile


def _transposed(group: Group, order: list[int]) -> set[int] | None:
    """Two axes, one contiguous for the stores and the other for a load; None without such a load."""
    for member, stage in enumerate(group.stages):
        analyzer = analyzer_of(stage.domain)
        for load in stage.reads():
            steps = {
                d: load_stride(load, group.axis(d, member).var, analyzer)
                for d in order
                if size_of(group.axis(d, member)) >= 8
            }
            along = [d for d, step in steps.items() if step == 1]
            if along and order[-1] in steps and along[-1] != order[-1] and steps[order[-1]] != 0:
                return {along[-1], order[-1]}
    return None


def _reduction_tile(group: Group) -> list[int | None]:
    """Single rows, except along the axes that vectors run along."""
    tile: list[int | None] = [1] * len(group.shared)
    for member, stage in enumerate(group.stages):
        lane = best_lane(stage)
        for d, positions in enumerate(group.shared):
            if stage.axes[positions[member]] is lane:
                tile[d] = COLUMN_TILE
    return tile


def _contraction_tile(
    group: Group, member: int, product: Product, machine: Machine
) -> list[int | None]:
    """The pair of row and column tiles with the least predicted time of the main contraction."""
    stage = group.stages[member]
    axes = [stage.axes[p[member]] for p in group.shared]
    sides = (product.rows, product.columns)
    row_dims, column_dims = ([d for d, a in enumerate(axes) if _among(a, s)] for s in sides)
    best: tuple[float, list[int | None]] | None = None
    for rows, columns in combinations(ROW_TILES, COLUMN_TILES):
        tile: list[int | None] = [1] * len(axes)
        height = _fill(tile, row_dims, axes, _fixed(product.rows, axes, row_dims), rows)
        width = _fill(tile, column_dims, axes, _fixed(product.columns, axes, column_dims), columns)
        cost = _cost(stage, product, axes, tile, height, width, machine)
        if best is None or cost < best[0]:
            best = (cost, tile)
    assert best is not None
    return best[1]


def _among(axis: Axis, axes: tuple[Axis, ...]) -> bool:
    return any(a is axis for a in axes)


def _fixed(side: tuple[Axis, ...], axes: list[Axis], dims: list[int]) -> int:
    """Length of a side along its axes that are not shared."""
    return points(a for a in side if not any(axes[d] is a for d in dims))


def _fill(tile: list[int | None], dims: list[int], axes: list[Axis], fixed: int, goal: int) -> int:
    """Lengthen the tile from the innermost axis on, up to `goal` elements; returns its length."""
    length = fixed
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


def _cost(
    stage: Stage,
    product: Product,
    axes: list[Axis],
    tile: list[int | None],
    height: int,
    width: int,
    machine: Machine,
) -> float:
    """Predicted time: arithmetic on padded tiles, packing, and cores that wait."""
    micro_rows, micro_columns = register_tile(machine, dtype_of(stage.values[0]))
    tasks = 1
    for a, t in zip(axes, tile, strict=True):
        tasks *= 1 if t is None else ceil(size_of(a) / t)
    padded_rows = ceil(height / micro_rows) * micro_rows
    padded_columns = ceil(width / micro_columns) * micro_columns
    packing = padded_columns * pack_cost(stage, product.right, product.columns)
    packing += padded_rows * pack_cost(stage, product.left, product.rows, direct=True)
    rounds = ceil(tasks / machine.cores) * machine.cores
    waiting = rounds / tasks * (1 + 0.2 * machine.cores * TASKS_PER_CORE / tasks)
    return tasks * (padded_rows * padded_columns + packing) * waiting


def pack_cost(stage: Stage, operand: Expr, side: tuple[Axis, ...], direct: bool = False) -> float:
    """Cost of packing one element of an operand."""
    if direct and reads_directly(stage, operand):
        return PACK_NOTHING
    analyzer = analyzer_of(stage.domain)
    found = list(_operand_loads(stage, operand))
    steps = [load_stride(load, side[-1].var, analyzer) for load in found]
    contiguous = all(s in (0, 1) for s in steps)
    base = PACK_CONTIGUOUS + PACK_RUN / size_of(side[-1]) if contiguous else PACK_STRIDED
    return base + 4.0 * max(0, stage_work(stage) - 3)


def reads_directly(stage: Stage, operand: Expr) -> bool:
    """Whether an operand is one load of the type that is summed, so that it needs no packing."""
    from tvm.ir import TensorLoad

    return isinstance(operand, TensorLoad) and not any(loads(*operand.indices))


def _operand_loads(stage: Stage, operand: Expr) -> Iterator:
    from .operands import depends

    yield from loads(operand)
    inside = depends(operand, stage)
    for var, value in stage.binds:
        if var in inside:
            yield from loads(value)
