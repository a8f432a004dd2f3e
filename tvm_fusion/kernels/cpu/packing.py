"""Copies of a contraction's operands in the order in which the register tiles read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.tirx import ForKind

from ..expr import constant, convert, dtype_of, number
from .access import load_stride
from .emit_transpose import turned
from .loops import Loops, nest, seq
from .math import bfloat16_to_float32
from .operands import Product, depends, operand_loads
from .panels import plain_load
from .resolve import Point, Resolve
from .rewrite import loads
from .scope import Scope, allocate, new_buffer
from .sides import Side, blocks, flattened, positions
from .stages import Stage, analyzer_of

# Stores a value: its term and its element of the side, both relative to the block.
Store = Callable[[Expr, Expr, Expr], tirx.Stmt]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Terms `first` to `first + count`, and elements `start` to `start + width` of a side.

    Only the first `valid` elements exist; the others are zero.
    """

    first: Expr
    count: Expr
    start: Expr
    width: Expr
    valid: Expr


@dataclass(frozen=True, slots=True, eq=False)
class Operands:
    """Evaluates and copies the operands of one contraction; `batch` is where its batch axes are."""

    stage: Stage
    product: Product
    scope: Scope
    batch: dict[Var, Expr]

    def pack_right(self, side: Side, block: Block, buffer: Var, lanes: int) -> tirx.Stmt:
        """Copy columns: a row of `buffer`, of whole vectors, for each term."""
        operand = self.product.right

        def store(value: Expr, term: Expr, column: Expr) -> tirx.Stmt:
            return tirx.BufferStore(buffer, value, [term, column])

        if self._turns(side, block, lanes):
            return self._turned(side, block, lanes, store)
        across = self._runs_along_terms(side, operand)
        return self._pack(side, operand, block, store, terms_inside=across)

    def pack_left(self, side: Side, block: Block, buffer: Var) -> tirx.Stmt:
        """Copy rows: a row of `buffer` for each row."""

        def store(value: Expr, term: Expr, row: Expr) -> tirx.Stmt:
            return tirx.BufferStore(buffer, value, [row, term])

        return self._pack(side, self.product.left, block, store, terms_inside=True)

    def left(self, side: Side, row: Expr, term: Expr) -> Expr:
        """The left operand at one row and term, without a copy."""
        env = self._env(side, positions(side, row, self.scope.loops), term)
        return Resolve(self.scope, env, Point())(self.product.left)

    def right(self, side: Side, column: Expr, term: Expr) -> Expr:
        """The right operand, a plain load, at one column and term, as what is summed up."""
        env = self._env(side, positions(side, column, self.scope.loops), term)
        load = Resolve(self.scope, env, Point())(plain_load(self.stage, self.product.right))
        if dtype_of(load) == "bfloat16":
            load = bfloat16_to_float32(load)
        return convert(load, dtype_of(self.stage.values[0]))

    def right_steps(self, side: Side) -> tuple[int | None, int | None] | None:
        """By how much a plain right operand moves with the term, if there is one axis of terms, and
        with the last axis of the columns. None where it is computed.
        """
        load = plain_load(self.stage, self.product.right)
        if load is None or loads(*load.indices):
            return None
        analyzer, (*outer, term) = analyzer_of(self.stage.domain), self.product.reduced
        along = None if outer else load_stride(load, term.var, analyzer)
        return along, load_stride(load, side.axes[-1].var, analyzer)

    def _pack(
        self, side: Side, operand: Expr, block: Block, store: Store, terms_inside: bool
    ) -> tirx.Stmt:
        loops = self.scope.loops
        term = loops.new("k", block.count)
        width = number(block.width)
        if len(side.axes) > 1 and width is not None and width == number(side.padded):
            made = [loops.new("c", r.extent) for r in side.regions]
            at = [
                loops.simplify(r.base + loop.value)
                for r, loop in zip(side.regions, made, strict=True)
            ]
            env = {a.var: i for a, i in zip(side.axes, at, strict=True)}
            flat = flattened(side, env, loops)
        else:
            made = [loops.new("c", block.valid)]
            flat = made[0].value
            at = positions(side, block.start + flat, loops)
        env = self._env(side, at, loops.simplify(block.first + term.value))
        ops = self._copy(operand, env, lambda value: store(value, term.value, flat))
        copy = nest([*made, term] if terms_inside else [term, *made], ops)
        return seq(copy, self._zeros(block, dtype_of(self.stage.values[0]), store))

    def _copy(
        self, operand: Expr, env: dict[Var, Expr], store: Callable[[Expr], tirx.Stmt]
    ) -> list[tirx.Stmt]:
        """Bindings that compute one element of an operand, and the store of it."""
        point = Point()
        resolve = Resolve(self.scope, env, point)
        needed = depends(operand, self.stage)
        for var, value in self.stage.binds:
            if var in needed:
                env[var] = resolve.bind(var.name, resolve(value))
        value = convert(resolve(operand), dtype_of(self.stage.values[0]))
        return [*point.ops, store(value)]

    def _turns(self, side: Side, block: Block, lanes: int) -> bool:
        """Whether the right operand can be turned in squares: it is contiguous along the terms."""
        steps = self.right_steps(side)
        enough = self.scope.loops.analyzer.can_prove(block.count >= self.scope.loops.imm(lanes))
        return steps is not None and steps[0] == 1 and steps[1] not in (0, 1) and enough

    def _turned(self, side: Side, block: Block, lanes: int, store: Store) -> tirx.Stmt:
        """Copy columns, some at a time, square by square; those behind the end repeat the last."""
        loops = self.scope.loops
        group = loops.new("c", blocks(block.valid, lanes, loops))
        first = group.value * loops.imm(lanes)
        last = side.valid - loops.imm(1)

        def read(r: int, term: Expr) -> Expr:
            column = tirx.Min(block.start + first + loops.imm(r), last)
            return self.right(side, loops.simplify(column), loops.simplify(block.first + term))

        def write(r: int, lane: Expr, value: Expr, start: Expr) -> tirx.Stmt:
            return store(value, loops.simplify(start + loops.imm(r)), first + lane)

        dtype = dtype_of(self.stage.values[0])
        return group.around(squares(loops, lanes, block.count, dtype, read, write))

    def _zeros(self, block: Block, dtype: str, store: Store) -> tirx.Stmt | None:
        loops = self.scope.loops
        rest = loops.simplify(block.width - block.valid)
        if number(rest) == 0:
            return None
        term, pad = loops.new("k", block.count), loops.new("c", rest)
        return nest([term, pad], [store(constant(0, dtype), term.value, block.valid + pad.value)])

    def _env(self, side: Side, at: list[Expr], term: Expr) -> dict[Var, Expr]:
        """What all axes are for an element of a side and a term."""
        env = {a.var: i for a, i in zip(side.axes, at, strict=True)}
        env.update(self.batch)
        loops = self.scope.loops
        for i in range(len(self.product.reduced) - 1, -1, -1):
            axis = self.product.reduced[i]
            extent = convert(axis.extent, loops.dtype)
            env[axis.var] = loops.simplify(term if i == 0 else tirx.FloorMod(term, extent))
            term = loops.simplify(tirx.FloorDiv(term, extent))
        return {var: convert(value, dtype_of(var)) for var, value in env.items()}

    def _runs_along_terms(self, side: Side, operand: Expr) -> bool:
        """Whether an operand is contiguous along the last reduced axis and not along the side."""
        analyzer = analyzer_of(self.stage.domain)
        found = operand_loads(self.stage, operand)
        along = [load_stride(x, self.product.reduced[-1].var, analyzer) for x in found]
        across = [load_stride(x, side.axes[-1].var, analyzer) for x in found]
        return all(s == 1 for s in along) and any(s not in (0, 1) for s in across)


def squares(
    loops: Loops,
    lanes: int,
    length: Expr,
    dtype: str,
    read: Callable[[int, Expr], Expr],
    store: Callable[[int, Expr, Expr, Expr], tirx.Stmt],
) -> tirx.Stmt:
    """Turns `lanes` rows of `length` elements, at least one square; the last may overlap.

    Parameters
    ----------
    read : callable
        An element of a row: the row, and the position in it.
    store : callable
        Stores an element of a turned row: row and lane in the square, the value, and where the
        square starts.
    """
    square = loops.new("square", blocks(length, lanes, loops))
    last = loops.simplify(length - loops.imm(lanes))
    start = loops.simplify(tirx.Min(square.value * loops.imm(lanes), last))
    rows = [new_buffer("row", [loops.imm(lanes)], dtype) for _ in range(lanes)]

    def vector(body: Callable[[Expr], tirx.Stmt]) -> tirx.Stmt:
        return loops.loop("v", lanes, body, ForKind.VECTORIZED)

    def load(r: int) -> tirx.Stmt:
        return vector(lambda v: tirx.BufferStore(rows[r], convert(read(r, start + v), dtype), [v]))

    def write(r: int) -> tirx.Stmt:
        return vector(lambda v: store(r, v, tirx.BufferLoad(rows[r], [v]), start))

    body = seq(
        *map(allocate, rows), *map(load, range(lanes)), turned(rows), *map(write, range(lanes))
    )
    return square.around(body)
