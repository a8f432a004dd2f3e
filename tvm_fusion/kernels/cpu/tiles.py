"""Sizes of the tiles that a group is computed in."""

from __future__ import annotations

from math import prod

from .contraction.operands import split_product
from .contraction.task_tiles import NEAR_BYTES, contraction_tile
from .groups import SMALL_PART, TASKS_PER_CORE, Group
from .machine import Machine
from .stages.lanes import best_lane
from .stages.stages import analyzer_of, load_stride, points, size_of, stage_work

# Elements of a tile of a pointwise group: enough to hide the loop around it.
POINTWISE_ELEMENTS = 4096

# Tile edges where one access runs along another axis than the rest: float32 on two Zen 4 cores,
# x.T + y of 1024 x 1024, x.T of 1000 x 1001 and a turn of 56 x 56 images of 64 channels take 180,
# 65 and 112 us with 64 x 64; 325, 69 and 110 with 64 x 32; 168, 68 and 135 with 32 x 64.
TRANSPOSE_TILE = 64

# Width of a tile whose vectors run along a shared axis while other axes are reduced: what is read
# again stays in a cache. What is read once is read in whole rows, or long pieces of them, if there
# are many rows: a few side by side are fetched ahead in any case. Whole rows are better read again,
# too, if they stay near: on 2 cores of a Zen 4 softmaxes over the middle axes of 16 x 100 x 700 and
# 8 x 64 x 333 take 415 and 64 us, 680 and 77 by tiles of 128 columns; of 8 x 512 x 1000, whose rows
# are too many, 2.4 ms either way, 3.3 by tiles of 512.
COLUMN_TILE, LONG_PIECE, MANY_TERMS = 128, 4096, 32
FLOAT_BYTES = 4

# Elements of a tile of several short rows: their scalars fill vectors, and a row's chain of
# dependent steps overlaps with the next one's.
SHORT_ROWS = 1024


def choose_tile(group: Group, machine: Machine) -> tuple[int | None, ...]:
    """Tile length along each shared axis; None stands for the whole axis."""
    contractions = [(i, p) for i, s in enumerate(group.stages) if (p := split_product(s))]
    if contractions:
        main = max(contractions, key=lambda c: points(group.stages[c[0]].domain))
        tile = contraction_tile(group, *main, machine)
    elif all(len(s.domain) == len(group.shared) for s in group.stages):
        tile = _pointwise_tile(group)
    else:
        tile = _reduction_tile(group, machine)
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
        left //= max(size, 1)
        if left <= 1:
            break
    return tile


def _transposed(group: Group, order: list[int]) -> set[int] | None:
    """Two axes, one contiguous for the stores, the other for a load; None without such a load."""
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


def _reduction_tile(group: Group, machine: Machine) -> list[int | None]:
    """Single rows; several where vectors run across them, or where rows are short.

    What is computed once a row is a small part of the work, unless rows are short: it decides
    nothing by itself.
    """
    tile: list[int | None] = [1] * len(group.shared)
    total, across = 0, [0] * len(group.shared)
    for member, stage in enumerate(group.stages):
        work = points(stage.domain) * stage_work(stage)
        total += work
        lane = best_lane(stage)
        for d, positions in enumerate(group.shared):
            if stage.axes[positions[member]] is lane:
                across[d] += work
    for d, work in enumerate(across):
        if work * SMALL_PART >= total:
            tile[d] = _column_tile(group, d, machine)
    if tile and all(t == 1 for t in tile):
        row = max(points(s.domain) for s in group.stages) // prod(
            size_of(group.axis(d)) for d in range(len(tile))
        )
        tile[-1] = 1 << (max(1, min(COLUMN_TILE, SHORT_ROWS // max(1, row))).bit_length() - 1)
    return tile


def _column_tile(group: Group, dim: int, machine: Machine) -> int:
    """Columns of a tile: whole rows or long pieces of them, as far as all cores have work."""
    most = max(points(s.domain) for s in group.stages)
    others = prod(size_of(group.axis(d)) for d in range(len(group.shared)) if d != dim)
    size = size_of(group.axis(dim))
    rows = most // (others * size)
    wanted = 1 if machine.cores == 1 else TASKS_PER_CORE * machine.cores
    pieces = max(-(-wanted // others), -(-size // LONG_PIECE))
    is_read_once = sum(points(s.domain) == most for s in group.stages) == 1
    stays_near = pieces == 1 and rows * size * FLOAT_BYTES <= NEAR_BYTES
    if rows < MANY_TERMS or not (is_read_once or stays_near):
        return COLUMN_TILE
    return max(COLUMN_TILE, -(-size // pieces // COLUMN_TILE) * COLUMN_TILE)
