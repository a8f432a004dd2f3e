"""Loops of a contraction over one tile: packed operands, and a register tile of results.

    for each block of terms k:
        for each block of columns:
            right[k, j] <- B                       packed: contiguous along the columns, float32
            left[i, k]  <- A                       packed only if A is no plain array
            for each register tile (i, j):         8 rows x 2 vectors
                acc[i, j] += left[i, k] * right[k, j] over the block of terms
                result[i, j] += acc[i, j]

Rows and columns are the flattened axes of each side; both are padded to whole register tiles. The
result is a buffer of the tile, read by the stages that follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, prod

from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var
from tvm.tirx import ForKind

from ..expr import constant, convert, dtype_of, number
from .access import has_division, load_stride, offset
from .contraction_tiles import reads_directly, register_tile
from .loops import Loop, nest, seq
from .machine import Machine
from .operands import Product, depends, operand_loads
from .resolve import Point, Resolve
from .scope import Place, Region, Scope, allocate, new_buffer
from .stages import Axis, Stage, analyzer_of

# Terms and columns packed at a time: 256 x 256 float32 fill a quarter of a 1 MB second-level cache.
TERMS_BLOCK = 256
COLUMNS_BLOCK = 256

# Added to the row length of packed operands: lengths of a power of two collide in the first-level cache.
ROW_PADDING = 16

# Columns transposed at a time where an operand is contiguous along the terms.
TRANSPOSED_COLUMNS = 16


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """The flattened rows or columns of a tile.

    Attributes
    ----------
    axes : tuple of Axis
        Outermost first; an axis whose last tile is shorter comes first, so that what is valid is a prefix.
    regions : tuple of Region
    length : Expr
        Number of elements with whole tiles.
    valid : Expr
        Number of elements in this tile.
    padded : Expr
        `length` rounded up to register tiles.
    """

    axes: tuple[Axis, ...]
    regions: tuple[Region, ...]
    length: Expr
    valid: Expr
    padded: Expr


def emit_contraction(
    stage: Stage, product: Product, scope: Scope, machine: Machine, packed: Var | None = None
) -> tirx.Stmt:
    """Compute the tile of a contraction into a new buffer of the tile.

    `packed` holds the right operand, if it was packed ahead.
    """
    return _Emitter(stage, product, scope, machine, packed).run()


class _Emitter:
    def __init__(
        self,
        stage: Stage,
        product: Product,
        scope: Scope,
        machine: Machine,
        packed: Var | None,
    ) -> None:
        self.packed = packed
        self.stage = stage
        self.product = product
        self.scope = scope
        self.loops = scope.loops
        self.dtype = dtype_of(stage.values[0])
        height, self.micro_columns = register_tile(machine, self.dtype)
        rows = prod(int(number(scope.region(a).full) or height) for a in product.rows)
        self.micro_rows = min(height, rows)
        self.rows = self._side(product.rows, self.micro_rows)
        self.columns = self._side(product.columns, self.micro_columns)
        self.batch = [scope.region(a) for a in product.batch]
        self.terms = self._product(convert(a.extent, self.loops.dtype) for a in product.reduced)
        self.terms_block = self._block(self.terms, TERMS_BLOCK, 1)
        self.columns_block = self._block(self.columns.padded, COLUMNS_BLOCK, self.micro_columns)
        self.left_is_direct = self._left_is_direct()

    def imm(self, value: int) -> Expr:
        """An index constant."""
        return self.loops.imm(value)

    def run(self) -> tirx.Stmt:
        self.result = self._result()
        batch = [self.loops.new("b", r.extent) for r in self.batch]
        self.at = [b.value for b in batch]
        if self.packed is None:
            pitch = self.columns_block + ROW_PADDING
            self.right = self.scope.allocate("right", [self.terms_block, pitch], self.dtype)
        if not self.left_is_direct:
            shape = [self.rows.padded, self.terms_block + ROW_PADDING]
            self.left = self.scope.allocate("left", shape, self.dtype)
        body = self.loops.loop(
            "term_block", self._blocks(self.terms, self.terms_block), self._terms
        )
        if self._accumulates():
            body = seq(self._clear(), body)
        for b in reversed(batch):
            body = b.around(body)
        return body

    # Geometry

    def _side(self, axes: tuple[Axis, ...], micro: int) -> Side:
        ordered = sorted(axes, key=lambda a: not self.scope.region(a).is_dynamic)
        regions = tuple(self.scope.region(a) for a in ordered)
        length = self._product(r.full for r in regions)
        valid = self._product(r.extent for r in regions)
        padded = self.loops.simplify(
            tirx.FloorDiv(length + self.imm(micro - 1), self.imm(micro)) * self.imm(micro)
        )
        return Side(tuple(ordered), regions, length, valid, padded)

    def _product(self, extents: object) -> Expr:
        total = self.imm(1)
        for e in extents:
            total = self.loops.simplify(total * e)
        return total

    def _block(self, length: Expr, most: int, multiple: int) -> int:
        """Block length: the whole, or equal parts of at most about `most`."""
        size = number(length)
        if size is None:
            return most
        parts = max(1, round(size / most))
        return ceil(ceil(size / parts) / multiple) * multiple

    def _blocks(self, length: Expr, block: int) -> Expr:
        return self.loops.simplify(tirx.FloorDiv(length + self.imm(block - 1), self.imm(block)))

    def _in_block(self, length: Expr, block: int, number_of: Expr) -> Expr:
        """Elements of one block."""
        return self.loops.simplify(tirx.Min(self.imm(block), length - number_of * self.imm(block)))

    def _indices(self, side: Side, flat: Expr) -> list[Expr]:
        """Position on each axis of element `flat` of a side."""
        out: list[Expr] = []
        for i in range(len(side.axes) - 1, -1, -1):
            full = side.regions[i].full
            local = flat if i == 0 else tirx.FloorMod(flat, full)
            out.append(self.loops.simplify(side.regions[i].base + local))
            flat = self.loops.simplify(tirx.FloorDiv(flat, full))
        return out[::-1]

    def _term_indices(self, flat: Expr) -> dict[Var, Expr]:
        env = {}
        for i in range(len(self.product.reduced) - 1, -1, -1):
            axis = self.product.reduced[i]
            extent = convert(axis.extent, self.loops.dtype)
            env[axis.var] = self.loops.simplify(flat if i == 0 else tirx.FloorMod(flat, extent))
            flat = self.loops.simplify(tirx.FloorDiv(flat, extent))
        return env

    def _env(self, side: Side, indices: list[Expr], term: Expr) -> dict[Var, Expr]:
        env = self._term_indices(term)
        env.update((a.var, i) for a, i in zip(side.axes, indices, strict=True))
        for axis, region, at in zip(self.product.batch, self.batch, self.at, strict=True):
            env[axis.var] = self.loops.simplify(region.base + at)
        axes = (*self.stage.axes, *self.stage.reduced)
        dtypes = {a.var: dtype_of(a.var) for a in axes}
        return {k: convert(v, dtypes[k]) for k, v in env.items()}

    # The result

    def _result(self) -> Var:
        """Allocate the result, and tell the readers where to find its elements."""
        shape = [*(r.full for r in self.batch), self.rows.padded, self.columns.padded]
        result = self.scope.allocate(self.stage.buffer.name, shape, self.dtype)
        position = {a.var: i for i, a in enumerate(self.stage.axes)}

        def flat(side: Side, indices: list[Expr]) -> Expr:
            total = self.imm(0)
            for axis, region in zip(side.axes, side.regions, strict=True):
                index = convert(indices[position[axis.var]], self.loops.dtype)
                total = total * region.full + (index - region.base)
            return self.loops.simplify(total)

        def place(indices: list[Expr]) -> list[Expr]:
            batch = [
                self.loops.simplify(convert(indices[position[a.var]], self.loops.dtype) - r.base)
                for a, r in zip(self.product.batch, self.batch, strict=True)
            ]
            return [*batch, flat(self.rows, indices), flat(self.columns, indices)]

        buffer = self.stage.buffer
        self.scope.places[buffer] = Place(result, place, self.stage.rounding)
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

    def _terms(self, block: Expr) -> tirx.Stmt:
        count = self._in_block(self.terms, self.terms_block, block)
        first = self.loops.simplify(block * self.imm(self.terms_block))

        def columns(j: Expr) -> tirx.Stmt:
            width = self._in_block(self.columns.padded, self.columns_block, j)
            start = self.loops.simplify(j * self.imm(self.columns_block))
            pack = None if self.packed is not None else self._pack_right(first, count, start, width)
            return seq(pack, self._register_tiles(first, count, start, width))

        blocks = self._blocks(self.columns.padded, self.columns_block)
        work = self.loops.loop("column_block", blocks, columns)
        left = None if self.left_is_direct else self._pack_left(first, count)
        return seq(left, work)

    def _pack_right(self, first: Expr, count: Expr, start: Expr, width: Expr) -> tirx.Stmt:
        def store(value: Expr, term: Expr, column: Expr) -> tirx.Stmt:
            return tirx.BufferStore(self.right, value, [term, column])

        valid = tirx.Max(self.imm(0), tirx.Min(width, self.columns.valid - start))
        return self._pack(
            self.columns,
            self.product.right,
            first,
            count,
            start,
            self.loops.simplify(valid),
            width,
            store,
        )

    def _pack_left(self, first: Expr, count: Expr) -> tirx.Stmt:
        def store(value: Expr, term: Expr, row: Expr) -> tirx.Stmt:
            return tirx.BufferStore(self.left, value, [row, term])

        return self._pack(
            self.rows,
            self.product.left,
            first,
            count,
            self.imm(0),
            self.rows.valid,
            self.rows.padded,
            store,
            by_rows=True,
        )

    def _pack(
        self,
        side: Side,
        operand: Expr,
        first: Expr,
        count: Expr,
        start: Expr,
        valid: Expr,
        width: Expr,
        store: Callable[[Expr, Expr, Expr], tirx.Stmt],
        by_rows: bool = False,
    ) -> tirx.Stmt:
        """Copy elements `start` to `start + width` of a side, for `count` terms; zeros behind `valid`."""
        term = self.loops.new("k", count)
        if len(side.axes) > 1 and number(start) == 0 and number(width) is not None:
            made = [self.loops.new("c", r.extent) for r in side.regions]
            flat = self.imm(0)
            for loop, region in zip(made, side.regions, strict=True):
                flat = flat * region.full + loop.value
            flat = self.loops.simplify(flat)
            indices = [
                self.loops.simplify(r.base + loop.value)
                for r, loop in zip(side.regions, made, strict=True)
            ]
        else:
            made = [self.loops.new("c", valid)]
            flat = made[0].value
            indices = self._indices(side, start + flat)
        ops = self._operand(side, operand, indices, first + term.value, flat, term.value, store)
        if by_rows or self._runs_along_terms(side, operand):
            copy = self._transposed_loops(made, term, ops, by_rows)
        else:
            copy = nest([term, *made], ops)
        return seq(copy, self._padding(valid, width, count, store))

    def _transposed_loops(
        self, made: list[Loop], term: Loop, ops: list[tirx.Stmt], by_rows: bool
    ) -> tirx.Stmt:
        return nest([*made, term], ops)

    def _padding(
        self, valid: Expr, width: Expr, count: Expr, store: Callable[[Expr, Expr, Expr], tirx.Stmt]
    ) -> tirx.Stmt | None:
        rest = self.loops.simplify(width - valid)
        if number(rest) == 0:
            return None
        term, pad = self.loops.new("k", count), self.loops.new("c", rest)
        zero = constant(0, self.dtype)
        return nest([term, pad], [store(zero, term.value, valid + pad.value)])

    def _operand(
        self,
        side: Side,
        operand: Expr,
        indices: list[Expr],
        term: Expr,
        flat: Expr,
        local_term: Expr,
        store: Callable[[Expr, Expr, Expr], tirx.Stmt],
    ) -> list[tirx.Stmt]:
        """Bindings that compute one element of an operand, and the store of it."""
        env = self._env(side, indices, self.loops.simplify(term))
        point = Point()
        resolve = Resolve(self.scope, env, point)
        needed = depends(operand, self.stage)
        for var, value in self.stage.binds:
            if var in needed:
                env[var] = resolve.bind(var.name, resolve(value))
        value = convert(resolve(operand), self.dtype)
        return [*point.ops, store(value, local_term, flat)]

    def _runs_along_terms(self, side: Side, operand: Expr) -> bool:
        """Whether an operand is contiguous along the last reduced axis and not along the side."""
        analyzer = analyzer_of(self.stage.domain)
        found = operand_loads(self.stage, operand)
        along = [load_stride(x, self.product.reduced[-1].var, analyzer) for x in found]
        across = [load_stride(x, side.axes[-1].var, analyzer) for x in found]
        return all(s == 1 for s in along) and any(s not in (0, 1) for s in across)

    # Register tiles

    def _left_is_direct(self) -> bool:
        """Whether the register tile can read the left operand where it is."""
        if not reads_directly(self.product.left):
            return False
        self.at = [self.loops.new("b", r.extent).value for r in self.batch]
        row, term = self.loops.new("i", self.rows.valid), self.loops.new("k", self.terms)
        load = self._direct(row.value, term.value)
        if not isinstance(load, TensorLoad) or dtype_of(load) != self.dtype:
            return False
        ahead = self._direct(row.value, term.value + self.imm(1))
        step = offset(ahead.source, list(ahead.indices)) - offset(load.source, list(load.indices))
        return not has_division(self.loops.simplify(step))

    def _direct(self, row: Expr, term: Expr) -> Expr:
        env = self._env(self.rows, self._indices(self.rows, row), term)
        return Resolve(self.scope, env, Point())(self.product.left)

    def _left(self, row: Expr, first: Expr, term: Expr) -> Expr:
        if self.left_is_direct:
            return self._direct(row, self.loops.simplify(first + term))
        return tirx.BufferLoad(self.left, [row, term])

    def _right(self, first: Expr, term: Expr, start: Expr, column: Expr, lane: Expr) -> Expr:
        """Element of the right operand: term `first` + `term`, column `start` + `column` + `lane`."""
        if self.packed is None:
            return tirx.BufferLoad(self.right, [term, column + lane])
        width = self.imm(self.micro_columns)
        position = start + column
        if len(self.columns.axes) == 1:
            position = self.columns.regions[0].base + position
        panel = self.loops.simplify(tirx.FloorDiv(position, width))
        batch = [self.loops.simplify(r.base + b) for r, b in zip(self.batch, self.at, strict=True)]
        return tirx.BufferLoad(
            self.packed, [*batch, panel, self.loops.simplify(first + term), lane]
        )

    def _register_tiles(self, first: Expr, count: Expr, start: Expr, width: Expr) -> tirx.Stmt:
        across = self.loops.simplify(tirx.FloorDiv(width, self.imm(self.micro_columns)))
        down = self.loops.simplify(tirx.FloorDiv(self.rows.padded, self.imm(self.micro_rows)))
        return self.loops.loop(
            "j",
            across,
            lambda j: self.loops.loop("i", down, lambda i: self._micro(i, j, first, count, start)),
        )

    def _micro(self, i: Expr, j: Expr, first: Expr, count: Expr, start: Expr) -> tirx.Stmt:
        """One register tile over a block of terms."""
        rows, width = range(self.micro_rows), self.micro_columns
        shape = [self.imm(self.micro_rows), self.imm(width)]
        acc = new_buffer("acc", shape, self.dtype)
        column = self.loops.simplify(j * self.imm(width))
        row = self.loops.simplify(i * self.imm(self.micro_rows))
        setup: list[tirx.Stmt] = [allocate(acc)]
        at: list[Expr] = []
        for r in rows:
            index = self.loops.simplify(row + self.imm(r))
            if self.left_is_direct and not self._rows_are_whole():
                index = self.loops.simplify(tirx.Min(index, self.rows.valid - self.imm(1)))
            at.append(index)

        def vector(body: Callable[[Expr], tirx.Stmt]) -> tirx.Stmt:
            return self.loops.loop("v", width, body, ForKind.VECTORIZED)

        def clear(r: int) -> tirx.Stmt:
            zero = constant(0, self.dtype)
            return vector(lambda v: tirx.BufferStore(acc, zero, [self.imm(r), v]))

        def step(term: Expr) -> tirx.Stmt:
            return seq(*(multiply(r, term) for r in rows))

        def multiply(r: int, term: Expr) -> tirx.Stmt:
            left = self._left(at[r], first, term)

            def body(v: Expr) -> tirx.Stmt:
                right = self._right(first, term, start, column, v)
                old = tirx.BufferLoad(acc, [self.imm(r), v])
                return tirx.BufferStore(acc, old + left * right, [self.imm(r), v])

            return vector(body)

        def write(r: int) -> tirx.Stmt:
            def body(v: Expr) -> tirx.Stmt:
                where = [*self.at, row + self.imm(r), start + column + v]
                value = tirx.BufferLoad(acc, [self.imm(r), v])
                if self._accumulates():
                    value = tirx.BufferLoad(self.result, where) + value
                return tirx.BufferStore(self.result, value, where)

            return vector(body)

        return seq(
            *setup,
            *(clear(r) for r in rows),
            self.loops.loop("k", count, step),
            *(write(r) for r in rows),
        )

    def _rows_are_whole(self) -> bool:
        """Whether every row of every register tile exists."""
        size = number(self.rows.valid)
        return size is not None and size == number(self.rows.padded)
