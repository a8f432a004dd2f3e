"""Recognises contractions: sums over products of two operands with different output axes.

    C[b, i, j] = sum_k A[b, i, k] * B[b, k, j]      batch b, rows i, columns j

Convolutions are of this form: the rows are output channels, the columns output positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var

from ...program.expr import convert, number
from ..loops import Loops
from ..nests.scope import Region, Scope
from ..stages.rewrite import free_variables, loads
from ..stages.stages import Axis, Kind, Stage, analyzer_of, load_stride, points
from .panels import Panels, panels_of

# The rows and the columns of a contraction's tile, each flattened into one axis; and blocks.


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


# With fewer rows, columns or terms than this, packing costs more than it saves.
LEAST_ROWS = 3
LEAST_COLUMNS = 4
LEAST_TERMS = 4

# Up to so many rows and results, sums along vectors of terms beat packing an operand that lies
# along the terms: on 2 cores of a Zen 4, 4 x 8192 x 10 takes 17 us (97 packed), 3 x 65537 x 5 59
# (579), 6 x 2048 x 40 17 (29), 8 x 512 x 16 4.7 (6.2); but 12 x 777 x 12 takes 11 (8.2), and
# 8 x 8192 x 64 205 (77).
MOST_DOT_ROWS, MOST_DOTS = 8, 240

# With fewer columns or terms, panels are mostly padding, or over before they are begun.
LEAST_PANEL = 16


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """A contraction; `left` varies by rows, `right` by columns; columns run along the vectors."""

    left: Expr
    right: Expr
    batch: tuple[Axis, ...]
    rows: tuple[Axis, ...]
    columns: tuple[Axis, ...]
    reduced: tuple[Axis, ...]


def split_product(stage: Stage) -> Product | None:
    """The contraction that `stage` computes, or None if it is none, or too small to be worth it."""
    if stage.kind is not Kind.SUM or not stage.reduced:
        return None
    binds = {v: e for v, e in stage.binds}
    value = stage.values[0]
    while isinstance(value, Var) and value in binds:
        value = binds[value]
    if not isinstance(value, tirx.Mul):
        return None
    left, right = value.a, value.b
    by_left, by_right = depends(left, stage), depends(right, stage)
    space = [a for a in stage.axes if a.size != 1]
    batch, rows, columns = [], [], []
    for axis in space:
        in_left, in_right = axis.var in by_left, axis.var in by_right
        if not in_left and not in_right:
            return None
        (batch if in_left and in_right else rows if in_left else columns).append(axis)
    if not rows and not columns:
        return None
    if not columns or (rows and _rows_along_vectors(rows, columns, space[-1])):
        left, right, rows, columns = right, left, columns, rows
    product = Product(left, right, *map(tuple, (batch, rows, columns)), stage.reduced)
    return product if _is_worth(stage, product) or _is_worth_panels(stage, product) else None


def depends(expr: Expr, stage: Stage) -> set[Var]:
    """Hashes of all variables that `expr` depends on, through the bindings of `stage`."""
    binds = {v: e for v, e in stage.binds}
    found: set[Var] = set()
    stack = [expr]
    while stack:
        for key in free_variables(stack.pop()):
            if key not in found:
                found.add(key)
                if key in binds:
                    stack.append(binds[key])
    return found


def operand_loads(stage: Stage, operand: Expr) -> list[TensorLoad]:
    """All loads that an operand depends on."""
    inside = depends(operand, stage)
    return loads(operand, *(value for var, value in stage.binds if var in inside))


def _rows_along_vectors(rows: list[Axis], columns: list[Axis], last: Axis) -> bool:
    """Whether the two sides should change places: the last axis is stored contiguously."""
    last_in_rows = any(a is last for a in rows)
    along = rows if last_in_rows else columns
    other = columns if last_in_rows else rows
    if points(along) < 16 and points(other) > points(along):
        return not last_in_rows
    return last_in_rows


def constant_panels(
    stage: Stage, product: Product, lanes: int, paired: bool = False
) -> tuple[Var, Panels] | None:
    """The constant that the right operand of a contraction is, and its panels."""
    sides = (product.batch, product.reduced, product.columns)
    return panels_of(stage, product.right, sides, lanes, paired)


def _is_worth_panels(stage: Stage, product: Product) -> bool:
    """Whether a product of few rows is worth it since its right operand costs no packing."""
    if points(product.columns) < LEAST_PANEL or points(product.reduced) < LEAST_PANEL:
        return False
    return constant_panels(stage, product, 1) is not None


def _is_worth(stage: Stage, product: Product) -> bool:
    return (
        points(product.rows) >= LEAST_ROWS
        and points(product.columns) >= LEAST_COLUMNS
        and points(product.reduced) >= LEAST_TERMS
        and not _are_few_dots(stage, product)
    )


def _are_few_dots(stage: Stage, product: Product) -> bool:
    """Whether few results are sums along memory on both sides."""
    rows, columns = points(product.rows), points(product.columns)
    if rows > MOST_DOT_ROWS or rows * columns > MOST_DOTS:
        return False
    last = stage.reduced[-1]
    if points([last]) < LEAST_PANEL or constant_panels(stage, product, 1) is not None:
        return False
    analyzer = analyzer_of(stage.domain)
    reads = (*operand_loads(stage, product.left), *operand_loads(stage, product.right))
    return all(load_stride(read, last.var, analyzer) == 1 for read in reads)
