"""Copies of a contraction's operands in the order in which the register tiles read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tvm import tirx
from tvm.ir import Expr, PrimType, TensorLoad, Var
from tvm.tirx import ForKind

from ...program.expr import constant, convert, dtype_of, number
from ..loops import Loops, nest, seq
from ..math import bfloat16_to_float32, round_to_bfloat16
from ..nests.emit_transpose import transposed
from ..nests.scope import Scope, allocate, new_buffer
from ..stages.resolve import Point, Resolve
from ..stages.rewrite import Substitute, loads
from ..stages.stages import Axis, Stage, analyzer_of, has_division, load_stride, offset, simplified
from .bfloat16_pairs import ELEMENT, PAIR, bits, neighbours, pair_at, rounded_bits
from .operands import (
    Product,
    Side,
    blocks,
    depends,
    flattened,
    operand_loads,
    positions,
    product_of,
)
from .panels import plain_load

# Packing the right operand of a contraction once, before its tiles are computed.
#
#     right[j // 32, k, j % 32] = B[k, j]
#
# Each panel of columns is contiguous: the register tile reads it from end to end.


def packed_operand(stage: Stage, product: Product, width: int, paired: bool = False) -> Stage:
    """A stage that writes the right operand of `product` in panels of `width` columns.

    Its buffer has the axes of the batch, then panel, term (or pair of terms, where they are
    `paired`) and column in the panel.
    """
    index = _index_dtype(stage)

    def axis(name: str, extent: Expr | int) -> Axis:
        size = constant(extent, index) if isinstance(extent, int) else convert(extent, index)
        return Axis(Var(name, PrimType(index)), size)

    columns = _length(product.columns, index)
    panels = analyzer_of(()).simplify(
        tirx.FloorDiv(columns + constant(width - 1, index), constant(width, index))
    )
    batch = [axis(a.var.name, a.extent) for a in product.batch]
    terms = _length(product.reduced, index)
    two = constant(2, index)
    steps = tirx.FloorDiv(terms + constant(1, index), two) if paired else terms
    panel, term = axis("panel", panels), axis("term", analyzer_of(()).simplify(steps))
    lane = axis("lane", width)
    column = panel.index * constant(width, index) + lane.index
    env = {
        a.var: convert(b.index, dtype_of(a.var)) for a, b in zip(product.batch, batch, strict=True)
    }
    env.update(_positions(product.columns, column))
    inside = depends(product.right, stage)
    binds = []

    def at(term: Expr, operand: Expr) -> Expr:
        renamed = env | _positions(product.reduced, term)
        for var, value in stage.binds:
            if var in inside:
                fresh = Var(var.name, var.ty)
                binds.append((fresh, Substitute(renamed)(value)))
                renamed[var] = fresh
        return Substitute(renamed)(operand)

    if paired:
        load = plain_load(stage, product.right)
        is_even = number(analyzer_of(()).simplify(tirx.FloorMod(terms, two))) == 0
        value = pair_at(term.index, terms, is_even, lambda k: at(k, load))
    else:
        value = convert(at(term.index, product.right), dtype_of(stage.values[0]))
    dtype = dtype_of(value)
    axes = (*batch, panel, term, lane)
    buffer = new_buffer(f"{stage.name}_right", [a.extent for a in axes], dtype)
    packed = Stage(f"{stage.name}_right", (buffer,), axes, (), (value,), binds=tuple(binds))
    return simplified(_guarded(packed, panel, column, columns, width))


def _guarded(stage: Stage, panel: Axis, column: Expr, columns: Expr, width: int) -> Stage:
    """The stage with zeros behind the last column; whole panels have a branch of their own."""
    size = number(columns)
    if size is not None and int(size) % width == 0:
        return stage
    (value,) = stage.values
    for var, bound in reversed(stage.binds):
        value = tirx.Let(var, bound, value)
    zero = constant(0, dtype_of(value))
    inner = tirx.if_then_else(tirx.LT(column, columns), value, zero)
    whole = tirx.LT(panel.index, tirx.FloorDiv(columns, constant(width, dtype_of(panel.var))))
    return replace(stage, binds=(), values=(tirx.if_then_else(whole, value, inner),))


def _length(axes: tuple[Axis, ...], dtype: str) -> Expr:
    total: Expr = constant(1, dtype)
    for a in axes:
        total = total * convert(a.extent, dtype)
    return analyzer_of(()).simplify(total)


def _positions(axes: tuple[Axis, ...], flat: Expr) -> dict[Var, Expr]:
    """Position on each axis of element number `flat`."""
    env: dict[Var, Expr] = {}
    for i in range(len(axes) - 1, -1, -1):
        extent = convert(axes[i].extent, dtype_of(flat))
        here = flat if i == 0 else tirx.FloorMod(flat, extent)
        env[axes[i].var] = convert(here, dtype_of(axes[i].var))
        flat = tirx.FloorDiv(flat, extent)
    return env


def _index_dtype(stage: Stage) -> str:
    axes = (*stage.axes, *stage.reduced)
    return "int64" if any(dtype_of(a.var) == "int64" for a in axes) else "int32"


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
    """Evaluates and copies the operands of one contraction; `batch` is where its batch axes are.

    Where terms are `paired`, those of the right operand are counted by pairs, and a copy of the
    left one holds bfloat16 as integers, a zero behind an odd number (see `pairs`).
    """

    stage: Stage
    product: Product
    scope: Scope
    batch: dict[Var, Expr]
    paired: bool = False

    @property
    def left_dtype(self) -> str:
        """The type of a copy of the left operand."""
        return ELEMENT if self.paired else dtype_of(self.stage.values[0])

    @property
    def right_dtype(self) -> str:
        """The type of a copy of the right operand."""
        return PAIR if self.paired else dtype_of(self.stage.values[0])

    def pack_right(self, side: Side, block: Block, buffer: Var, lanes: int) -> tirx.Stmt:
        """Copy columns: a row of `buffer`, of whole vectors, for each term."""

        def store(value: Expr, term: Expr, column: Expr) -> tirx.Stmt:
            return tirx.BufferStore(buffer, value, [term, column])

        def pair(at: list[Expr], term: Expr) -> tuple[list, Expr]:
            return [], self._pair(side, at, term)

        def single(at: list[Expr], term: Expr) -> tuple[list, Expr]:
            return self._value(self.product.right, self._env(side, at, term))

        if self.can_turn(side, block.first, block.count, lanes):
            return self._transposed(side, block, lanes, store)
        across = self._runs_along_terms(side, self.product.right)
        value, dtype = pair if self.paired else single, self.right_dtype
        return self._pack(side, value, dtype, block, store, terms_inside=across)

    def pack_left(self, side: Side, block: Block, buffer: Var) -> tirx.Stmt:
        """Copy rows: a row of `buffer` for each row."""

        def store(value: Expr, term: Expr, row: Expr) -> tirx.Stmt:
            return tirx.BufferStore(buffer, value, [row, term])

        def value(at: list[Expr], term: Expr) -> tuple[list, Expr]:
            return self._left_value(self._env(side, at, term))

        copied = self._pack(side, value, self.left_dtype, block, store, terms_inside=True)
        if not self.paired or self.is_even:
            return copied
        row = self.scope.loops.new("c", block.width)
        return seq(copied, nest([row], [store(constant(0, ELEMENT), block.count, row.value)]))

    def _left_value(self, env: dict[Var, Expr]) -> tuple[list, Expr]:
        """Bindings that compute an element of the left operand, and what its copy holds."""
        if not self.paired:
            return self._value(self.product.left, env)
        load = plain_load(self.stage, self.product.left)
        if load is not None and dtype_of(load) == "bfloat16":
            return [], bits(Resolve(self.scope, env, Point())(load))
        ops, value = self._value(self.product.left, env)
        wide = Var("wide", PrimType("float32"))
        return [*ops, tirx.Bind(wide, value)], rounded_bits(round_to_bfloat16(wide))

    def left(self, side: Side, row: Expr, term: Expr) -> Expr:
        """The left operand at one row and term, without a copy."""
        env = self._env(side, positions(side, row, self.scope.loops), term)
        return Resolve(self.scope, env, Point())(self.product.left)

    def left_pair(self, side: Side, row: Expr, pair: Expr) -> Expr:
        """The left operand, a plain load whose pairs lie in memory, at one row and pair."""
        loops = self.scope.loops
        term = loops.simplify(pair * loops.imm(2))
        return neighbours(self._load(self.product.left, side, row, term), 1)

    def left_pair_lies(self, side: Side, row: Expr, pair: Expr) -> bool:
        """Whether `left_pair` can be read, and where without dividing."""
        loops = self.scope.loops
        load = plain_load(self.stage, self.product.left)
        if not self.is_even or load is None or dtype_of(load) != "bfloat16":
            return False
        terms = (loops.simplify(pair * loops.imm(2) + loops.imm(n)) for n in range(3))
        found = [self._load(self.product.left, side, row, term) for term in terms]
        first, second, third = (offset(x.source, list(x.indices)) for x in found)
        step = loops.simplify(third - first)
        return number(loops.simplify(second - first)) == 1 and not has_division(step)

    def right(self, side: Side, column: Expr, term: Expr) -> Expr:
        """The right operand, a plain load, at one column and term, as what is summed up."""
        if self.paired:
            return self._pair(side, positions(side, column, self.scope.loops), term)
        load = self._load(self.product.right, side, column, term)
        if dtype_of(load) == "bfloat16":
            load = bfloat16_to_float32(load)
        return convert(load, dtype_of(self.stage.values[0]))

    def turn(
        self,
        side: Side,
        column: Callable[[Expr], Expr],
        first: Expr,
        count: Expr,
        lanes: int,
        store: Store,
    ) -> tirx.Stmt:
        """Copy a right operand that is contiguous along the terms, square by square: a lane has a
        `column`, from the term `first` on; at least `lanes` terms. `store` is given a lane.
        """
        loops = self.scope.loops

        def load(r: int, start: Expr, row: Var) -> tirx.Stmt:
            start = loops.simplify(first + start)
            return self._load_row(side, column(loops.imm(r)), start, row)

        def write(r: int, lane: Expr, value: Expr, start: Expr) -> tirx.Stmt:
            return store(value, loops.simplify(start + loops.imm(r)), lane)

        whole = self._whole(first, count)
        transposed = squares(loops, lanes, whole, self.right_dtype, load, write)
        half, lane = loops.new("k", count - whole), loops.new("v", lanes)
        term = loops.simplify(whole + half.value)
        value = self.right(side, column(lane.value), loops.simplify(first + term))
        return seq(transposed, nest([half, lane], [store(value, term, lane.value)]))

    def can_turn(self, side: Side, first: Expr, count: Expr, lanes: int) -> bool:
        """Whether squares of the right operand can be transposed: it runs along the terms."""
        steps = self.right_steps(side)
        whole = self._whole(first, count)
        enough = self.scope.loops.analyzer.can_prove(whole >= self.scope.loops.imm(lanes))
        return steps is not None and steps[0] == 1 and steps[1] not in (0, 1) and enough

    def _whole(self, first: Expr, count: Expr) -> Expr:
        """How many of `count` terms there are without half a pair at the end."""
        loops = self.scope.loops
        if not self.paired or self.is_even:
            return count
        pairs = tirx.FloorDiv(self.terms, loops.imm(2))
        return loops.simplify(tirx.Min(count, pairs - first))

    def _load_row(self, side: Side, column: Expr, start: Expr, row: Var) -> tirx.Stmt:
        """Load a vector of a right operand that is contiguous along the terms, into a buffer."""
        loops, lanes = self.scope.loops, int(number(row.ty.shape[0]))
        if self.paired:
            first = self._load(self.product.right, side, column, start * loops.imm(2))
            whole = [tirx.Ramp(loops.imm(0), loops.imm(1), lanes)]
            return tirx.BufferStore(row, neighbours(first, lanes), whole)

        def store(v: Expr) -> tirx.Stmt:
            return tirx.BufferStore(row, self.right(side, column, start + v), [v])

        return loops.loop("v", lanes, store, ForKind.VECTORIZED)

    @property
    def terms(self) -> Expr:
        """How many terms there are, each counted by itself."""
        loops = self.scope.loops
        return product_of((convert(a.extent, loops.dtype) for a in self.product.reduced), loops)

    @property
    def is_even(self) -> bool:
        """Whether the terms are known to be even in number."""
        loops = self.scope.loops
        return number(loops.simplify(tirx.FloorMod(self.terms, loops.imm(2)))) == 0

    def _load(self, operand: Expr, side: Side, at: Expr, term: Expr) -> TensorLoad:
        """What a plain operand loads at one element of its side and one term."""
        env = self._env(side, positions(side, at, self.scope.loops), term)
        return Resolve(self.scope, env, Point())(plain_load(self.stage, operand))

    def _pair(self, side: Side, at: list[Expr], pair: Expr) -> Expr:
        """A pair of the right operand, a plain load."""
        load = plain_load(self.stage, self.product.right)

        def element(term: Expr) -> Expr:
            env = self._env(side, at, self.scope.loops.simplify(term))
            return Resolve(self.scope, env, Point())(load)

        return pair_at(pair, self.terms, self.is_even, element)

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
        self,
        side: Side,
        value: Callable[[list[Expr], Expr], tuple[list, Expr]],
        dtype: str,
        block: Block,
        store: Store,
        terms_inside: bool,
    ) -> tirx.Stmt:
        """Store what `value` computes at a position on each axis of the side and a term."""
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
        ops, element = value(at, loops.simplify(block.first + term.value))
        ops = [*ops, store(element, term.value, flat)]
        copy = nest([*made, term] if terms_inside else [term, *made], ops)
        return seq(copy, self._zeros(block, dtype, store))

    def _value(self, operand: Expr, env: dict[Var, Expr]) -> tuple[list, Expr]:
        """Bindings that compute one element of an operand, and the element."""
        point = Point()
        resolve = Resolve(self.scope, env, point)
        needed = depends(operand, self.stage)
        for var, value in self.stage.binds:
            if var in needed:
                env[var] = resolve.bind(var.name, resolve(value))
        value = convert(resolve(operand), dtype_of(self.stage.values[0]))
        return point.ops, value

    def _transposed(self, side: Side, block: Block, lanes: int, store: Store) -> tirx.Stmt:
        """Copy columns, some at a time, square by square; those behind the end repeat the last."""
        loops = self.scope.loops
        group = loops.new("c", blocks(block.valid, lanes, loops))
        first = group.value * loops.imm(lanes)
        last = side.valid - loops.imm(1)

        def column(lane: Expr) -> Expr:
            return loops.simplify(tirx.Min(block.start + first + lane, last))

        def place(value: Expr, term: Expr, lane: Expr) -> tirx.Stmt:
            return store(value, term, first + lane)

        return group.around(self.turn(side, column, block.first, block.count, lanes, place))

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
    load: Callable[[int, Expr, Var], tirx.Stmt],
    store: Callable[[int, Expr, Expr, Expr], tirx.Stmt],
) -> tirx.Stmt:
    """Turns `lanes` rows of `length` elements, at least one square; the last may overlap.

    Parameters
    ----------
    load : callable
        Loads a piece of a row: the row, where the piece starts, and the buffer for it.
    store : callable
        Stores an element of a transposed row: row and lane in the square, the value, and where the
        square starts.
    """
    square = loops.new("square", blocks(length, lanes, loops))
    last = loops.simplify(length - loops.imm(lanes))
    start = loops.simplify(tirx.Min(square.value * loops.imm(lanes), last))
    rows = [new_buffer("row", [loops.imm(lanes)], dtype) for _ in range(lanes)]

    def vector(body: Callable[[Expr], tirx.Stmt]) -> tirx.Stmt:
        return loops.loop("v", lanes, body, ForKind.VECTORIZED)

    def write(r: int) -> tirx.Stmt:
        return vector(lambda v: store(r, v, tirx.BufferLoad(rows[r], [v]), start))

    body = seq(
        *map(allocate, rows),
        *(load(r, start, row) for r, row in enumerate(rows)),
        transposed(rows),
        *map(write, range(lanes)),
    )
    return square.around(body)
