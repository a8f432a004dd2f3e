"""Loops of a contraction over one tile.

    for each block of terms k:
        for each block of columns:
            right[k, j] <- B                       packed, unless that was done ahead
            left[i, k]  <- A                       packed only if A is no plain array
            for each register tile (i, j):         6 rows x 4 vectors, say
                acc[i, j] += left[i, k] * right[k, j] over the block of terms
                result[i, j] (+)= acc[i, j]

Rows and columns are the flattened axes of each side, dealt out evenly to register tiles; columns
are padded to whole vectors. Every accumulator is a buffer of one vector: LLVM keeps those in
registers, and takes wider ones apart. The result is a buffer of the tile, read by the stages that
follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var
from tvm.tirx import ForKind

from ...program.expr import constant, convert, dtype_of, number
from ..loops import nest, seq
from ..machine import Machine
from ..math import bfloat16_to_float32
from ..nests.scope import Place, Scope, allocate, new_buffer
from ..stages.stages import Axis, Stage, has_division, offset
from .bfloat16_pairs import LANES, dot, neighbours, takes_pairs
from .operands import (
    Product,
    block_length,
    blocks,
    flattened,
    in_block,
    make_side,
    positions,
    product_of,
)
from .packing import Block, Operands
from .task_tiles import PACKED_ELEMENTS, TERMS_BLOCK, even_parts, reads_directly, register_tile

# Terms at a time where the right operand lies in panels: 1024 terms of four vectors of 64 bytes.
PANEL_TERMS_BLOCK = 1024

# Added to the rows of packed operands: rows of 2**n elements collide in the first-level cache.
ROW_PADDING = 16


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """`count` register tiles in a row, each `size` rows or vectors long, from `start` on."""

    start: int
    count: Expr
    size: int


class Contraction:
    """Computes the tile of a contraction into a new buffer of the tile.

    Attributes
    ----------
    packed : Var or None
        The panels of the right operand, if it was packed ahead.
    output : Var or None
        What the result is copied to in the end: register tiles are stored there at once. To be set
        where `can_store_to` allows it.
    """

    def __init__(
        self, stage: Stage, product: Product, scope: Scope, machine: Machine, packed: Var | None
    ) -> None:
        self.stage, self.product, self.packed = stage, product, packed
        self.output: Var | None = None
        self.scope, self.loops = scope, scope.loops
        self.dtype = dtype_of(stage.values[0])
        self.paired = takes_pairs(stage, product, machine)
        height, width = (_length(side, scope) for side in (product.rows, product.columns))
        self.tile = tile = register_tile(machine, self.dtype, height, width)
        self.rows = make_side(product.rows, 1 if height else tile.rows, scope)
        self.columns = make_side(product.columns, tile.lanes if width else tile.columns, scope)
        extents = (convert(a.extent, self.loops.dtype) for a in product.reduced)
        self.all_terms = product_of(extents, self.loops)
        self.terms = blocks(self.all_terms, 2, self.loops) if self.paired else self.all_terms
        self.terms_block = block_length(self.terms, self._most_terms(height), 1)
        most = max(tile.columns, PACKED_ELEMENTS // self.terms_block)
        self.columns_block = block_length(self.columns.padded, most, tile.columns)

    def _most_terms(self, height: int | None) -> int:
        """Terms of a block; all at once where no second register tile reads a panel again."""
        if self.packed is None:
            return TERMS_BLOCK
        once = height is not None and height <= self.tile.rows
        return int(number(self.terms) or PANEL_TERMS_BLOCK) if once else PANEL_TERMS_BLOCK

    def imm(self, value: int) -> Expr:
        """An index constant."""
        return self.loops.imm(value)

    def can_store_to(self, output: Var) -> bool:
        """Whether register tiles are final, and whole vectors of contiguous elements there."""
        last = [a for a in self.stage.axes if a.size != 1][-1]
        columns = self.product.columns
        return (
            not self._accumulates()
            and self.stage.rounding is None
            and dtype_of(output) == self.dtype
            and len(columns) == 1
            and columns[0] is last
            and self.columns.is_whole
            and not any(r.is_dynamic for r in self.rows.regions)
            and number(self.rows.length) is not None
        )

    def run(self) -> tirx.Stmt:
        """All loops over the batch of the tile."""
        regions = [self.scope.region(a) for a in self.product.batch]
        batch = [self.loops.new("b", r.extent) for r in regions]
        self.at = [b.value for b in batch]
        bases = [self.loops.simplify(r.base + b.value) for r, b in zip(regions, batch, strict=True)]
        where = {a.var: i for a, i in zip(self.product.batch, bases, strict=True)}
        self.operands = Operands(self.stage, self.product, self.scope, where, self.paired)
        self.direct = self._left_is_direct()
        self.result = self._result() if self.output is None else self._output()
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
            self.right = self.scope.allocate("right", shape, self.operands.right_dtype)
        if not self.direct:
            terms = 2 * self.terms_block if self.paired else self.terms_block
            shape = [self.rows.padded, terms + ROW_PADDING]
            self.left = self.scope.allocate("left", shape, self.operands.left_dtype)

    def _left_is_direct(self) -> bool:
        """Whether the register tile can read the left operand where it is, without dividing."""
        row, term = self.loops.new("i", self.rows.valid), self.loops.new("k", self.terms)
        if self.paired:
            return self.operands.left_pair_lies(self.rows, row.value, term.value)
        if not reads_directly(self.product.left):
            return False
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

    def _output(self) -> Var:
        """Let readers read the result where it is stored in the end."""
        self.scope.places[self.stage.buffer] = Place(self.output, lambda indices: indices)
        return self.output

    def place_of(self, row: Expr, column: Expr) -> list[Expr]:
        """Where an element of the result is stored."""
        if self.output is None:
            return [*self.at, row, column]
        env = dict(self.operands.batch)
        for side, at in ((self.rows, row), (self.columns, column)):
            found = positions(side, at, self.loops)
            env.update((a.var, i) for a, i in zip(side.axes, found, strict=True))
        return [convert(env.get(a.var, self.imm(0)), dtype_of(a.var)) for a in self.stage.axes]

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
            rows = Block(
                *self._terms_of(first, count), self.imm(0), self.rows.padded, self.rows.valid
            )
            left = self.operands.pack_left(self.rows, rows, self.left)
        if self.packed is not None:
            whole = Block(first, count, self.imm(0), self.columns.padded, self.columns.valid)
            return seq(left, self._register_tiles(whole))
        return seq(left, *self._column_blocks(first, count))

    def _terms_of(self, first: Expr, count: Expr) -> tuple[Expr, Expr]:
        """The first of the terms of a block, and how many there are, each counted by itself."""
        if not self.paired:
            return first, count
        first = self.loops.simplify(first * self.imm(2))
        count = tirx.Min(count * self.imm(2), self.all_terms - first)
        return first, self.loops.simplify(count)

    def _column_blocks(self, first: Expr, count: Expr) -> list[tirx.Stmt]:
        """The columns block by block: whole blocks, then what is left."""
        size = number(self.columns.padded)
        width = self.imm(self.columns_block)
        if size is None:
            number_of = blocks(self.columns.padded, self.columns_block, self.loops)
            length = lambda j: in_block(self.columns.padded, self.columns_block, j, self.loops)  # noqa: E731
            body = lambda j: self._column_block(first, count, j * width, length(j))  # noqa: E731
            return [self.loops.loop("column_block", number_of, body)]
        whole, rest = divmod(int(size), self.columns_block)
        body = lambda j: self._column_block(first, count, j * width, width)  # noqa: E731
        done = [self.loops.loop("column_block", whole, body)]
        if rest:
            start = self.imm(whole * self.columns_block)
            done.append(self._column_block(first, count, start, self.imm(rest)))
        return done

    def _column_block(self, first: Expr, count: Expr, start: Expr, width: Expr) -> tirx.Stmt:
        """Pack a block of columns and compute with it."""
        start = self.loops.simplify(start)
        exists = tirx.Max(self.imm(0), tirx.Min(width, self.columns.valid - start))
        block = Block(first, count, start, width, self.loops.simplify(exists))
        pack = self.operands.pack_right(self.columns, block, self.right, self.tile.lanes)
        return seq(pack, self._register_tiles(block))

    def _register_tiles(self, block: Block) -> tirx.Stmt:
        """The register tiles of a block; those without a row or column that exists are left out."""
        lanes = self.tile.lanes
        vectors = self.loops.simplify(tirx.FloorDiv(block.width, self.imm(lanes)))
        exist = blocks(block.valid, lanes, self.loops)
        down = self._parts(self.rows.padded, self.rows.valid, self.tile.rows)
        stmts = []
        for across in self._parts(vectors, exist, self.tile.vectors):

            def column(j: Expr, across: Part = across) -> tirx.Stmt:
                at = self.imm(across.start) + j * self.imm(across.size)
                return seq(*(self._row_tiles(part, at, across.size, block) for part in down))

            stmts.append(self.loops.loop("j", across.count, column))
        return seq(*stmts)

    def _row_tiles(self, part: Part, vector: Expr, vectors: int, block: Block) -> tirx.Stmt:
        def tile(i: Expr) -> tirx.Stmt:
            row = self.loops.simplify(self.imm(part.start) + i * self.imm(part.size))
            return _RegisterTile(self, row, part.size, vector, vectors, block).emit()

        return self.loops.loop("i", part.count, tile)

    def _parts(self, length: Expr, valid: Expr, most: int) -> list[Part]:
        """Register tiles along a side of which the first `valid` elements (or vectors) exist."""
        size = number(length)
        if size is None:
            return [Part(0, blocks(valid, most, self.loops), most)]
        parts, start = [], 0
        for count, each in even_parts(int(size), most):
            needed = blocks(tirx.Max(self.imm(0), valid - self.imm(start)), each, self.loops)
            exist = self.loops.simplify(tirx.Min(self.imm(count), needed))
            parts.append(Part(start, exist, each))
            start += count * each
        return parts

    # Operands

    def existing_row(self, row: Expr) -> Expr:
        """The row itself, or the last one where it lies behind the end and is read in place."""
        if self.direct and not self.rows.is_whole:
            row = tirx.Min(row, self.rows.valid - self.imm(1))
        return self.loops.simplify(row)

    def left_at(self, row: Expr, block: Block, term: Expr) -> Expr:
        """An element or a pair of the left operand; `term` is relative to the block."""
        if self.paired:
            if self.direct:
                pair = self.loops.simplify(block.first + term)
                return self.operands.left_pair(self.rows, row, pair)
            first = self.loops.simplify(term * self.imm(2))
            return neighbours(tirx.BufferLoad(self.left, [row, first]), 1)
        if self.direct:
            return self.operands.left(self.rows, row, self.loops.simplify(block.first + term))
        return tirx.BufferLoad(self.left, [row, term])

    def right_at(self, block: Block, term: Expr, vector: Expr, lane: Expr) -> Expr:
        """An element or pair of the right operand; `term`, `vector` are relative to the block."""
        if self.packed is None:
            column = self.loops.simplify(vector * self.imm(self.tile.lanes))
            if isinstance(lane, tirx.Ramp):  # a ramp may be an index, a sum with one may not
                lane = tirx.Ramp(column + lane.base, lane.stride, lane.lanes)
                return tirx.BufferLoad(self.right, [term, lane])
            return tirx.BufferLoad(self.right, [term, column + lane])
        if len(self.columns.axes) == 1:
            base = self.columns.regions[0].base
            vector = vector + tirx.FloorDiv(base, self.imm(self.tile.lanes))
        panel = self.loops.simplify(vector)
        if not self.columns.is_whole:
            last = self.packed.ty.shape[-3] - constant(1, dtype_of(self.packed.ty.shape[-3]))
            panel = self.loops.simplify(tirx.Min(panel, convert(last, self.loops.dtype)))
        term = self.loops.simplify(block.first + term)
        load = tirx.BufferLoad(self.packed, [*self.operands.batch.values(), panel, term, lane])
        if self.paired:
            return load
        if dtype_of(load) == "bfloat16":
            return convert(bfloat16_to_float32(load), self.dtype)
        return convert(load, self.dtype)


def _length(axes: tuple[Axis, ...], scope: Scope) -> int | None:
    """Elements of a whole tile of some axes, if that is known."""
    sizes = [number(scope.region(a).full) for a in axes]
    return None if None in sizes else int(prod(sizes))


@dataclass(frozen=True, slots=True, eq=False)
class _RegisterTile:
    """One register tile: `rows` from `row` on, `vectors` from `vector` on in a block of columns."""

    outer: Contraction
    row: Expr
    rows: int
    vector: Expr
    vectors: int
    block: Block

    def emit(self) -> tirx.Stmt:
        """Sum up a block of terms, and store it or add it to the result."""
        outer = self.outer
        shape = [outer.imm(self.rows * self.vectors), outer.imm(outer.tile.lanes)]
        acc = new_buffer("acc", shape, outer.dtype)
        cells = [(r, c) for r in range(self.rows) for c in range(self.vectors)]
        at = [outer.existing_row(self.row + outer.imm(r)) for r in range(self.rows)]

        def load(r: int, c: int, v: Expr) -> Expr:
            return tirx.BufferLoad(acc, [outer.imm(r * self.vectors + c), v])

        def store(r: int, c: int, v: Expr, value: Expr) -> tirx.Stmt:
            return tirx.BufferStore(acc, value, [outer.imm(r * self.vectors + c), v])

        def step(term: Expr) -> tirx.Stmt:
            left = [outer.left_at(row, self.block, term) for row in at]
            columns = [
                outer.loops.simplify(self.vector + outer.imm(c)) for c in range(self.vectors)
            ]

            def multiply(r: int, c: int, v: Expr) -> tirx.Stmt:
                right = outer.right_at(self.block, term, columns[c], v)
                return store(r, c, v, load(r, c, v) + left[r] * right)

            def add_pairs(r: int, c: int) -> tirx.Stmt:
                v = tirx.Ramp(outer.imm(0), outer.imm(1), LANES)
                right = outer.right_at(self.block, term, columns[c], v)
                return store(r, c, v, dot(load(r, c, v), left[r], right))

            if outer.paired:
                return seq(*(add_pairs(r, c) for r, c in cells))
            return self._vectors(cells, multiply)

        zero = constant(0, outer.dtype)
        return seq(
            allocate(acc),
            self._vectors(cells, lambda r, c, v: store(r, c, v, zero)),
            outer.loops.loop("k", self.block.count, step),
            self._vectors(cells, lambda r, c, v: self._write(r, c, v, load(r, c, v))),
        )

    def _write(self, r: int, c: int, v: Expr, value: Expr) -> tirx.Stmt:
        outer = self.outer
        vector = outer.loops.simplify(self.vector + outer.imm(c))
        column = self.block.start + vector * outer.imm(outer.tile.lanes) + v
        where = outer.place_of(outer.loops.simplify(self.row + outer.imm(r)), column)
        if outer._accumulates():
            value = tirx.BufferLoad(outer.result, where) + value
        return tirx.BufferStore(outer.result, value, where)

    def _vectors(
        self, cells: list[tuple[int, int]], body: Callable[[int, int, Expr], tirx.Stmt]
    ) -> tirx.Stmt:
        """A statement of one vector for each accumulator."""
        lanes, loop = self.outer.tile.lanes, self.outer.loops.loop
        return seq(
            *(
                loop("v", lanes, lambda v, r=r, c=c: body(r, c, v), ForKind.VECTORIZED)
                for r, c in cells
            )
        )
