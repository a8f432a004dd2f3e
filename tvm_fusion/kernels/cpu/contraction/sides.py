"""The rows and the columns of a contraction's tile, each flattened into one axis; and blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from tvm import tirx
from tvm.ir import Expr, Var

from ...program.expr import convert, number
from ..loops import Loops
from ..nests.scope import Region, Scope
from ..stages.stages import Axis


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """Flattened rows or columns.

    Attributes
    ----------
    axes : tuple of Axis
        Outermost first. One whose last tile is shorter comes first: what is valid is a prefix.
    regions : tuple of Region
    length : Expr
        Number of elements of a whole tile.
    valid : Expr
        Number of elements of this tile.
    padded : Expr
        `length` rounded up to register tiles.
    """

    axes: tuple[Axis, ...]
    regions: tuple[Region, ...]
    length: Expr
    valid: Expr
    padded: Expr

    @property
    def is_whole(self) -> bool:
        """Whether every element of every register tile exists."""
        size = number(self.valid)
        return size is not None and size == number(self.padded)


def make_side(axes: tuple[Axis, ...], micro: int, scope: Scope) -> Side:
    """Flatten some axes of the tile; `micro` is the edge of a register tile."""
    loops = scope.loops
    ordered = tuple(sorted(axes, key=lambda a: not scope.region(a).is_dynamic))
    regions = tuple(scope.region(a) for a in ordered)
    length = product_of((r.full for r in regions), loops)
    padded = loops.simplify(blocks(length, micro, loops) * loops.imm(micro))
    return Side(ordered, regions, length, product_of((r.extent for r in regions), loops), padded)


def positions(side: Side, flat: Expr, loops: Loops) -> list[Expr]:
    """What each axis is at element `flat` of a side."""
    out: list[Expr] = []
    for i in range(len(side.axes) - 1, -1, -1):
        full = side.regions[i].full
        local = flat if i == 0 else tirx.FloorMod(flat, full)
        out.append(loops.simplify(side.regions[i].base + local))
        flat = loops.simplify(tirx.FloorDiv(flat, full))
    return out[::-1]


def flattened(side: Side, at: dict[Var, Expr], loops: Loops) -> Expr:
    """The element of a side at which each axis is `at` its variable."""
    total: Expr = loops.imm(0)
    for axis, region in zip(side.axes, side.regions, strict=True):
        total = total * region.full + (convert(at[axis.var], loops.dtype) - region.base)
    return loops.simplify(total)


def product_of(extents: Iterable[Expr], loops: Loops) -> Expr:
    """Product of some extents."""
    total: Expr = loops.imm(1)
    for e in extents:
        total = loops.simplify(total * e)
    return total


def block_length(length: Expr, most: int, multiple: int) -> int:
    """Length of a block: the whole, or equal parts of about `most`, a multiple of `multiple`."""
    size = number(length)
    if size is None:
        return most
    parts = max(1, round(size / most))
    return ceil(ceil(size / parts) / multiple) * multiple


def blocks(length: Expr, block: int, loops: Loops) -> Expr:
    """Number of blocks, the last one maybe shorter."""
    return loops.simplify(tirx.FloorDiv(length + loops.imm(block - 1), loops.imm(block)))


def in_block(length: Expr, block: int, index: Expr, loops: Loops) -> Expr:
    """Elements of block number `index`."""
    return loops.simplify(tirx.Min(loops.imm(block), length - index * loops.imm(block)))
