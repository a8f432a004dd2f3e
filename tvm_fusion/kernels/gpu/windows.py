"""Aligned vectors over rows that start anywhere in memory.

A row of N columns starts at element `base` of a parameter, `shift` elements behind a multiple of
the vector width W. Vector v covers the columns ``v * W - shift + lane``, so that it lies at a
multiple of W in memory; the first and the last vector stick out of the row.

    W = 8, shift = 3       | . . . 0 1 2 3 4 | 5 6 7 8 9 10 11 12 | 13 14 . . . . . . |
                                 v = 0               v = 1                v = 2

Threads walk in the order v = 1, 2, ..., count - 1, 0: what comes before the last `stride` vectors
is whole in every row. An input whose rows lie at another place modulo W (`skew`; a vector that all
rows share, such as gamma) is read as the two aligned vectors around, and moved together.
"""

from __future__ import annotations

import math

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ..program.expr import bytes_of, constant, convert, dtype_of, known_factor, uses_any
from ..program.program import Extent, Output, Program, Tile
from .frame import held, then
from .intrinsics import device_call
from .memory import WIDEST, copy_in
from .scope import RowScope
from .transfer import places
from .vectors import divides, vector_elements, vector_width

WORD = 4
"""Bytes of a register."""


def needs_windows(program: Program, width: int) -> bool:
    """Whether rows need not start or end with whole vectors of `width`."""
    return width > 1 and not divides(width, program.columns, program.analyzer())


def row_width(program: Program) -> int:
    """Columns of one vector: of whole accesses, in windows where the rows do not divide into them.

    Rows of less than two vectors gain nothing from windows. Where a row is read in pieces, vectors
    lie within the pieces.
    """
    plain, widest = vector_width(program), vector_width(program, tail=True)
    big = any(tile.per_row for tile in program.tiles) or any(o.full for o in program.outputs)
    columns = program.columns
    short = isinstance(columns, int) and columns < 2 * widest
    if big:
        return plain if short else widest
    while plain > 1 and program.elements and not vector_elements(program, plain):
        plain //= 2
    return plain


class Windows:
    """The vectors of one row, and how they are loaded.

    Attributes
    ----------
    interior : vectors that every row has whole, apart from the first.
    most : vectors of the row that has most of them.
    shift, count : of the current row, once `enter` has been called.
    """

    def __init__(self, program: Program, width: int) -> None:
        self.program, self.width = program, width
        self.analyzer = program.analyzer()
        self.base = _base(program, width, self.analyzer)
        unit = math.gcd(known_factor(self.base, self.analyzer), width)
        self.slack = width - unit
        columns = program.columns
        if isinstance(columns, int):
            self.interior: Extent = max(columns // width - 1, 0)
            self.most: Extent = self.most_of(columns)
        self.skewed = {tile.var: self.gap(tile.offset) % width != 0 for tile in program.tiles}

    def most_of(self, columns: int) -> int:
        """Vectors of the row of so many columns that has most of them."""
        return -(-(columns + self.slack) // self.width)

    def gap(self, offset: Expr) -> int:
        """Largest number known to divide the distance of `offset` from the rows' start (or 0)."""
        return _gap(offset, self.base, self.analyzer)

    def piece(self, output: Output) -> int:
        """Bytes of one access of an output's vector."""
        aligned = math.gcd(self.gap(output.offset), self.width) * bytes_of(output.dtype)
        return min(WIDEST, aligned & -aligned)

    # ---- the current row

    def enter(self, scope: RowScope, columns: Expr | int) -> None:
        """Binds what is known of the current row; its scalars must be loaded."""
        width, index = self.width, self.program.index_dtype
        base = scope.row(self.base)
        self.columns = constant(columns, index) if isinstance(columns, int) else columns
        self.shift = held(convert(T.truncmod(base, width), index))
        self.count = held(T.truncdiv(self.columns + self.shift + (width - 1), width))
        if not isinstance(columns, int):
            self.interior = held(tirx.Max(T.truncdiv(columns, width) - 1, constant(0, index)))
            self.most = self.count
        self.origins: dict[Var, Expr] = {}
        self.skews: dict[Var, tuple[Expr, Expr]] = {}
        for tile in self.program.tiles:
            offset = scope.row(tile.offset)
            origin = held(offset - convert(self.shift, dtype_of(offset)))
            self.origins[tile.var] = origin
            if self.skewed[tile.var]:
                # what follows counts from a multiple of W that is not negative
                skew = held(T.truncmod(origin + width, width))
                zero = constant(0, dtype_of(offset))
                step = tirx.Select(skew > zero, constant(width, dtype_of(offset)), zero)
                self.skews[tile.var] = skew, held(step)

    def vector(self, number: Expr, edge: bool) -> Expr:
        """Which vector a thread's `number` in the order of the walk is."""
        if not edge:
            return number + 1
        follows = number + 1 < self.count
        return T.Bind(tirx.Select(follows, number + 1, constant(0, dtype_of(number))))

    def column(self, vector: Expr) -> Expr:
        """Column of the first lane; negative where the vector starts before the row."""
        return convert(vector, self.program.index_dtype) * self.width - self.shift

    def holds(self, column: Expr) -> Expr:
        """Whether a column belongs to the row."""
        return tirx.And(constant(0, dtype_of(column)) <= column, column < self.columns)

    def is_whole(self, column: Expr) -> Expr:
        """Whether a vector that starts at `column` lies within the row."""
        zero = constant(0, dtype_of(column))
        return tirx.And(zero <= column, column + self.width <= self.columns)

    # ---- loads

    def load(
        self,
        scope: RowScope,
        tile: Tile,
        vector: Expr,
        target: tuple[Var, Expr | int],
        hint: str,
        edge: bool,
    ) -> None:
        """The lanes of a vector that lie within the row, into a register array at a slot.

        Other lanes hold anything. Nothing is read beyond the parameter.
        """
        width, (buffer, slot) = self.width, target
        origin = self.origins[tile.var]
        start = origin + convert(vector, dtype_of(origin)) * width
        reader = _Reader(scope, tile, width, hint, self.analyzer)
        if not self.skewed[tile.var]:
            reader.read(start, target, low=False, high=edge and not reader.whole_vectors)
            return
        size = bytes_of(tile.dtype)
        if width * size < WORD:
            reader.lanes(T.Bind(start), target)
            return
        skew, step = self.skews[tile.var]
        pair = T.alloc_local((2 * width,), tile.dtype)
        first = T.Bind(start - skew)
        reader.read(first, (pair, 0), low=edge, high=edge and not reader.whole_vectors)
        reader.read(
            T.Bind(first + step), (pair, width), low=False, high=edge or not reader.whole_vectors
        )
        move_together(places(buffer, slot, size)(0), pair.ptr_to([0]), skew, width * size, size)


class _Reader:
    """Reads aligned vectors of a tile's parameter, whole or the part within its memory."""

    def __init__(self, scope: RowScope, tile: Tile, width: int, hint: str, analyzer) -> None:
        self.scope, self.tile, self.width, self.hint = scope, tile, width, hint
        elements = scope.program.params[tile.param].elements
        self.elements = elements if isinstance(elements, int) else scope.row(elements)
        self.whole_vectors = divides(width, elements, analyzer)
        self.buffer = scope.frame.buffers[tile.param]

    def read(self, start: Expr, target: tuple[Var, Expr | int], low: bool, high: bool) -> None:
        """The vector at `start`; `low`, `high`: it may lie before or behind the memory."""
        dtype = dtype_of(start)
        zero, end = constant(0, dtype), self._end(dtype)
        inside = [zero <= start] if low else []
        if high:
            inside.append(start < end if self.whole_vectors else start + self.width <= end)
        if not inside:
            self._vector(start, target)
            return
        with T.If(inside[0] if len(inside) == 1 else tirx.And(*inside)):
            with T.Then():
                self._vector(start, target)
            if not self.whole_vectors:
                with T.Else():
                    self.lanes(start, target)

    def lanes(self, start: Expr, target: tuple[Var, Expr | int]) -> None:
        """Element by element, those within the memory."""
        buffer, slot = target
        zero, end = constant(0, dtype_of(start)), self._end(dtype_of(start))
        for lane in range(self.width):
            at = start + lane
            with then(tirx.And(zero <= at, at < end)):
                T.buffer_store(buffer, self.buffer[at], [slot + lane])

    def _vector(self, start: Expr, target: tuple[Var, Expr | int]) -> None:
        size, (buffer, slot) = bytes_of(self.tile.dtype), target
        nbytes = self.width * size
        source = places(self.buffer, start, size)
        copy_in(places(buffer, slot, size), source, nbytes, min(WIDEST, nbytes), self.hint)

    def _end(self, dtype: str) -> Expr:
        if isinstance(self.elements, int):
            return constant(self.elements, dtype)
        return convert(self.elements, dtype)


def move_together(target: Expr, source: Expr, skew: Expr, nbytes: int, size: int) -> None:
    """`nbytes` from element `skew` of a register array on, of which there are twice as many.

    The words move in steps of powers of two, so that every index is known.
    """
    words = nbytes // WORD
    lines = [f"unsigned w[{2 * words}];", "const unsigned* p = (const unsigned*)s;"]
    lines += [f"w[{i}] = p[{i}];" for i in range(2 * words)]
    step, left = words // 2, 2 * words
    while step:
        left -= step
        moves = " ".join(f"w[{i}] = w[{i + step}];" for i in range(left))
        lines.append(f"if (bytes & {step * WORD}) {{ {moves} }}")
        step //= 2
    lines.append("unsigned* o = (unsigned*)d;")
    if size < WORD:
        lines.append(f"unsigned bits = 8u * ((unsigned)bytes & {WORD - 1}u);")
    for i in range(words):
        both = f"(((unsigned long long)w[{i + 1}] << 32) | w[{i}]) >> bits"
        lines.append(f"o[{i}] = {f'(unsigned)({both})' if size < WORD else f'w[{i}]'};")
    arguments = "void* d, const void* s, int bytes"
    count = convert(skew, "int32") * size
    name, body = f"together{nbytes}_{size}", " ".join(lines)
    T.evaluate(device_call("void", name, arguments, body, target, source, count))


def _base(program: Program, width: int, analyzer) -> Expr:
    """The offset that most of what is moved agrees with modulo `width`; outputs before inputs."""
    full = [output for output in program.outputs if output.full]
    big: list[Tile | Output] = [*full, *(tile for tile in program.tiles if tile.per_row)]
    scalars = {scalar.var for scalar in program.scalars}

    def cost(offset: Expr) -> tuple[int, int, bool]:
        apart = [item for item in big if _gap(item.offset, offset, analyzer) % width]
        stores = sum(isinstance(item, Output) for item in apart)
        return stores, sum(bytes_of(item.dtype) for item in apart), uses_any(offset, scalars)

    candidates = [item.offset for item in big]
    return min(candidates, key=cost) if candidates else constant(0, program.index_dtype)


def _gap(offset: Expr, base: Expr, analyzer) -> int:
    if dtype_of(offset) != dtype_of(base):
        offset, base = convert(offset, "int64"), convert(base, "int64")
    return known_factor(analyzer.simplify(offset - base), analyzer)
