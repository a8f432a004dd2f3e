"""Loops of a contraction over one tile.

    for each block of terms k:
        for each block of columns:
            right[k, j] <- B                       packed: contiguous along the columns
            left[i, k]  <- A                       packed only if A is no plain array
            for each register tile (i, j):         8 rows x 2 vectors
                acc[i, j] += left[i, k] * right[k, j] over the block of terms
                result[i, j] += acc[i, j]

Rows and columns are the flattened axes of each side; both are padded to whole register tiles. The
result is a buffer of the tile, read by the stages that follow.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var
from tvm.tirx import ForKind

from ..expr import constant, convert, dtype_of, number
from .access import has_division, offset
from .contraction_tiles import reads_directly, register_tile
from .loops import nest, seq
from .machine import Machine
from .operands import Product
from .packing import Block, Operands
from .scope import Place, Scope, allocate, new_buffer
from .sides import block_length, blocks, flattened, in_block, make_side, product_of
from .stages import Stage

# Terms and columns packed at a time: 256 x 256 float32 are a quarter of a 1 MB second-level cache.
TERMS_BLOCK = 256
COLUMNS_BLOCK = 256

# Added to the rows of packed operands: rows of 2**n elements collide in the first-level cache.
ROW_PADDING = 16


def emit_contraction(
    stage: Stage, product: Product, scope: Scope, machine: Machine, packed: Var | None = None
) -> tirx.Stmt:
    """Compute the tile of a contraction into a new buffer of the tile.

    `packed` holds the right operand, if it was packed ahead.
    """
    return _Emitter(stage, product, scope, machine, packed).run()


class _Emitter:
    def __init__(
        self, stage: Stage, product: Product, scope: Scope, machine: Machine, packed: Var | None
    ) -> None:
        self.stage, self.product, self.packed = stage, product, packed
        self.scope, self.loops = scope, scope.loops
        self.dtype = dtype_of(stage.values[0])
        height, self.width = register_tile(machine, self.dtype)
        length = prod(int(number(scope.region(a).full) or height) for a in product.rows)
        self.height = min(height, length)
        self.rows = make_side(product.rows, self.height, scope)
        self.columns = make_side(product.columns, self.width, scope)
        extents = (convert(a.extent, self.loops.dtype) for a in product.reduced)
        self.terms = product_of(extents, self.loops)
        self.terms_block = block_length(self.terms, TERMS_BLOCK, 1)
        self.columns_block = block_length(self.columns.padded, COLUMNS_BLOCK, self.width)

    def imm(self, value: int) -> Expr:
        """An index constant."""
        return self.loops.imm(value)

    def run(self) -> tirx.Stmt:
        """All loops over the batch of the tile."""
        regions = [self.scope.region(a) for a in self.product.batch]
        batch = [self.loops.new("b", r.extent) for r in regions]
        self.at = [b.value for b in batch]
        bases = [self.loops.simplify(r.base + b.value) for r, b in zip(regions, batch, strict=True)]
        where = {a.var: i for a, i in zip(self.product.batch, bases, strict=True)}
        self.operands = Operands(self.stage, self.product, self.scope, where)
        self.direct = self._left_is_direct()
        self.result = self._result()
        self._allocate_packs()
        count = blocks(self.terms, self.terms_block, self.loops)
        body = self.loops.loop("term_block", count, self._terms)
        if self._accumulates():
            body = seq(self._clear(), body)
        for b in reversed(batch):
            body = b.around(body)
        return body

    def _allocate_packs(self) -> None:
        if self.packed is None:
            shape = [self.terms_block, self.columns_block + ROW_PADDING]
            self.right = self.scope.allocate("right", shape, self.dtype)
        if not self.direct:
            shape = [self.rows.padded, self.terms_block + ROW_PADDING]
            self.left = self.scope.allocate("left", shape, self.dtype)

    def _left_is_direct(self) -> bool:
        """Whether the register tile can read the left operand where it is, without dividing."""
        if not reads_directly(self.product.left):
            return False
        row, term = self.loops.new("i", self.rows.valid), self.loops.new("k", self.terms)
        here = self.operands.left(self.rows, row.value, term.value)
        if not isinstance(here, TensorLoad) or dtype_of(here) != self.dtype:
            return False
        ahead = self.operands.left(self.rows, row.value, term.value + self.imm(1))
        step = offset(ahead.source, list(ahead.indices)) - offset(here.source, list(here.indices))
        return not has_division(self.loops.simplify(step))

    # The result

    def _result(self) -> Var:
        """Allocate the result, and tell the readers where to find its elements."""
        regions = [self.scope.region(a) for a in self.product.batch]
        shape = [*(r.full for r in regions), self.rows.padded, self.columns.padded]
        result = self.scope.allocate(self.stage.buffer.name, shape, self.dtype)

        def place(indices: list[Expr]) -> list[Expr]:
            at = {a.var: i for a, i in zip(self.stage.axes, indices, strict=True)}
            batch = [
                self.loops.simplify(convert(at[a.var], self.loops.dtype) - r.base)
                for a, r in zip(self.product.batch, regions, strict=True)
            ]
            sides = (flattened(side, at, self.loops) for side in (self.rows, self.columns))
            return [*batch, *sides]

        self.scope.places[self.stage.buffer] = Place(result, place, self.stage.rounding)
        return result

    def _accumulates(self) -> bool:
        """Whether the terms come in several blocks, or the sum starts from something."""
        several = number(self.terms) is None or number(self.terms) > self.terms_block
        return several or number(self.stage.initial[0]) != 0

    def _clear(self) -> tirx.Stmt:
        initial = convert(self.stage.initial[0], self.dtype)
        row = self.loops.new("i", self.rows.padded)
        column = self.loops.new("j", self.columns.padded)
        store = tirx.BufferStore(self.result, initial, [*self.at, row.value, column.value])
        return nest([row, column], [store])

    # Blocks

    def _terms(self, index: Expr) -> tirx.Stmt:
        """One block of terms."""
        count = in_block(self.terms, self.terms_block, index, self.loops)
        first = self.loops.simplify(index * self.imm(self.terms_block))
        left = None
        if not self.direct:
            rows = Block(first, count, self.imm(0), self.rows.padded, self.rows.valid)
            left = self.operands.pack_left(self.rows, rows, self.left)

        def columns(j: Expr) -> tirx.Stmt:
            width = in_block(self.columns.padded, self.columns_block, j, self.loops)
            start = self.loops.simplify(j * self.imm(self.columns_block))
            exists = tirx.Max(self.imm(0), tirx.Min(width, self.columns.valid - start))
            block = Block(first, count, start, width, self.loops.simplify(exists))
            pack = None
            if self.packed is None:
                pack = self.operands.pack_right(self.columns, block, self.right)
            return seq(pack, self._register_tiles(block))

        number_of = blocks(self.columns.padded, self.columns_block, self.loops)
        return seq(left, self.loops.loop("column_block", number_of, columns))

    def _register_tiles(self, block: Block) -> tirx.Stmt:
        across = self.loops.simplify(tirx.FloorDiv(block.width, self.imm(self.width)))
        down = self.loops.simplify(tirx.FloorDiv(self.rows.padded, self.imm(self.height)))

        def column(j: Expr) -> tirx.Stmt:
            return self.loops.loop("i", down, lambda i: self._register_tile(i, j, block))

        return self.loops.loop("j", across, column)

    # Register tiles

    def _register_tile(self, i: Expr, j: Expr, block: Block) -> tirx.Stmt:
        """One register tile over a block of terms."""
        rows = range(self.height)
        acc = new_buffer("acc", [self.imm(self.height), self.imm(self.width)], self.dtype)
        column = self.loops.simplify(j * self.imm(self.width))
        row = self.loops.simplify(i * self.imm(self.height))
        at = [self._existing_row(row + self.imm(r)) for r in rows]

        def clear(r: int, v: Expr) -> tirx.Stmt:
            return tirx.BufferStore(acc, constant(0, self.dtype), [self.imm(r), v])

        def multiply(r: int, v: Expr, term: Expr) -> tirx.Stmt:
            old = tirx.BufferLoad(acc, [self.imm(r), v])
            product = self._left(at[r], block, term) * self._right(block, term, column, v)
            return tirx.BufferStore(acc, old + product, [self.imm(r), v])

        def write(r: int, v: Expr) -> tirx.Stmt:
            where = [*self.at, row + self.imm(r), block.start + column + v]
            value = tirx.BufferLoad(acc, [self.imm(r), v])
            if self._accumulates():
                value = tirx.BufferLoad(self.result, where) + value
            return tirx.BufferStore(self.result, value, where)

        def step(term: Expr) -> tirx.Stmt:
            return seq(*(self._vector(lambda v, r=r: multiply(r, v, term)) for r in rows))

        return seq(
            allocate(acc),
            *(self._vector(lambda v, r=r: clear(r, v)) for r in rows),
            self.loops.loop("k", block.count, step),
            *(self._vector(lambda v, r=r: write(r, v)) for r in rows),
        )

    def _vector(self, body: Callable[[Expr], tirx.Stmt]) -> tirx.Stmt:
        return self.loops.loop("v", self.width, body, ForKind.VECTORIZED)

    def _existing_row(self, row: Expr) -> Expr:
        """The row itself, or the last one where it lies behind the end and is read in place."""
        if self.direct and not self.rows.is_whole:
            row = tirx.Min(row, self.rows.valid - self.imm(1))
        return self.loops.simplify(row)

    def _left(self, row: Expr, block: Block, term: Expr) -> Expr:
        """An element of the left operand; `term` is relative to the block."""
        if self.direct:
            return self.operands.left(self.rows, row, self.loops.simplify(block.first + term))
        return tirx.BufferLoad(self.left, [row, term])

    def _right(self, block: Block, term: Expr, column: Expr, lane: Expr) -> Expr:
        """An element of the right operand; `term` and `column` are relative to the block."""
        if self.packed is None:
            return tirx.BufferLoad(self.right, [term, column + lane])
        position = block.start + column
        if len(self.columns.axes) == 1:
            position = self.columns.regions[0].base + position
        panel = self.loops.simplify(tirx.FloorDiv(position, self.imm(self.width)))
        term = self.loops.simplify(block.first + term)
        return tirx.BufferLoad(self.packed, [*self.operands.batch.values(), panel, term, lane])
