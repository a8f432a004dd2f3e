"""Which accesses of a row program are vectors when neighbouring lanes are neighbours in memory.

Two ways to lay the lanes of a program whose columns are not consecutive in memory:

    along rows      lane v is row v // inner, column q * inner + v % inner; threads walk over q
                    S[i] = sum_j x[j * N + i]                    inner 1:  x[q * N + v]
                    S[g] = sum_j x[j // 10 * C + g * 10 + j % 10]  inner 10: x[q * C + v]
    along columns   a vector is consecutive columns of one row; threads walk over its vectors
                    S[i] = sum_j x[j // HW * C * HW + i * HW + j % HW]
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Expr, Var

from ...errors import Unsupported
from ..gpu.memory import WIDEST
from ..gpu.vectors import WIDEST_VECTOR, piece_bytes, vector_elements
from ..program.expr import (
    Binary,
    bytes_of,
    constant,
    convert,
    dtype_of,
    linear_form,
    number,
    substitute,
    uses_any,
    variables,
)
from ..program.program import Element, Extent, Level, Output, Program, Scalar, Tile, Value


@dataclass(frozen=True, slots=True, eq=False)
class Vector:
    """An access that is one vector for the lanes of a thread.

    Attributes
    ----------
    param, dtype : what is accessed.
    start : element of the first lane, over row variables, `Lanes.lane` and `Lanes.step`.
    piece : bytes of one access.
    moves : whether it changes with the step.
    """

    param: int
    dtype: str
    start: Expr
    piece: int
    moves: bool


@dataclass(frozen=True, slots=True, eq=False)
class Lanes:
    """The vectors of a program at one width.

    Attributes
    ----------
    along_rows, inner, width : see the module docstring.
    count : lanes side by side in memory (along rows); vectors of a row (along columns).
    steps : how many vectors there are to walk over.
    lane, step : variables of `Vector.start`: the thread's first lane, and the vector it is at. A
        gather's start also holds placeholders, equal for all lanes.
    loads, scalars : by placeholder.
    outputs : by position in the program.
    """

    along_rows: bool
    inner: int
    width: int
    count: Extent
    steps: Extent
    lane: Var
    step: Var
    loads: dict[Var, Vector]
    scalars: dict[Var, Vector]
    outputs: dict[int, Vector]


def find_inner(program: Program) -> int:
    """Columns that are neighbours in memory between two rows; 1 where rows themselves are, or where
    no access is known to run along the rows (a guarded read, a transposed one): lanes then access
    elements of their own.

    Raises
    ------
    Unsupported
        There is a single row.
    """
    if not program.rows:
        raise Unsupported("there is a single row")
    return _along_rows(program)[1]


def is_transposed(program: Program) -> bool:
    """Whether the rows of all accesses lie apart in memory: neighbours are columns, if any."""
    return bool(_main_accesses(program)) and not _along_rows(program)[0]


def _along_rows(program: Program) -> tuple[int, int]:
    """Bytes a point that run along the rows, and the neighbouring columns with which they do."""
    best, found = 0, 1
    for inner in _candidates(program):
        size = sum(
            bytes_of(item.dtype)
            for item, offset in _main_accesses(program)
            if _LaneView(program, inner).unit_stride(offset) is not None
        )
        if size > best:
            best, found = size, inner
    return best, found


def lanes_along_rows(program: Program, inner: int, width: int) -> Lanes:
    """The vectors of `width` neighbouring lanes that are rows, or parts of them."""
    view = _LaneView(program, inner)
    scalars = {
        s.var: view.vector(s.param, s.dtype, s.offset, width) for s in program.scalars if inner == 1
    }
    return Lanes(
        True,
        inner,
        width,
        program.rows[-1] * inner,
        view.steps,
        view.lane,
        view.step,
        _known(
            {
                item.var: view.vector(item.param, item.dtype, _offset(program, item), width)
                for item in _coordinate_loads(program)
            }
        ),
        _known(scalars),
        _known(
            {
                position: view.vector(o.param, o.dtype, _offset(program, o), width)
                for position, o in enumerate(program.outputs)
                if o.full or inner == 1
            }
        ),
    )


def lanes_along_columns(program: Program, inner: int, width: int) -> Lanes:
    """The vectors of `width` neighbouring columns of one row."""
    if inner % width or not isinstance(program.columns, int):
        raise Unsupported(f"vectors of {width} in runs of {inner} columns")
    dtype = program.index_dtype
    lane, step = (Var(name, tvm.ir.PrimType(dtype)) for name in ("v", "q"))
    column = {program.column_var: step * constant(width, dtype)}
    analyzer = program.analyzer()
    analyzer.bind(step, tvm.ir.Range(0, program.columns // width))

    def vector(item: Tile | Element | Output) -> Vector | None:
        offset = _offset(program, item)
        probe = Element(lane, item.param, offset, item.dtype)
        if width != 1 and not _is_vector(program, probe, width):
            return None
        start = analyzer.simplify(substitute(offset, column))
        piece = piece_bytes(start, item.dtype, width, analyzer)
        return Vector(item.param, item.dtype, start, piece, True)

    return Lanes(
        False,
        inner,
        width,
        program.columns // width,
        program.columns // width,
        lane,
        step,
        _known({item.var: vector(item) for item in _coordinate_loads(program)}),
        {},
        _known({place: vector(o) for place, o in enumerate(program.outputs) if o.full}),
    )


def widths(program: Program) -> list[int]:
    """Vector widths worth a try, the widest first: 16 bytes of the narrowest dtype and below; no
    vectors where nothing runs along the rows.
    """
    if not _along_rows(program)[0]:
        return [1]
    sizes = [bytes_of(item.dtype) for item, _ in _main_accesses(program)]
    width = WIDEST // min(sizes, default=2)
    while width > 1 and width * max(sizes) > WIDEST_VECTOR:
        width //= 2
    return [width >> shift for shift in range(width.bit_length())]


def main_bytes(program: Program) -> tuple[int, int]:
    """Bytes a point that are read, and that are written."""
    known = _main_accesses(program)
    read = sum(bytes_of(i.dtype) for i, _ in known if not isinstance(i, Output))
    if not known:
        own = (e for e in program.elements if program.level(e.offset) == Level.ELEMENT)
        read = sum(bytes_of(e.dtype) for e in own)
    stored = sum(bytes_of(o.dtype) for o in program.outputs if o.full)
    return read, stored


# ---- accesses


def _known(found: dict) -> dict:
    return {key: vector for key, vector in found.items() if vector is not None}


def _offset(program: Program, item: Tile | Element | Output) -> Expr:
    """The element that is accessed at a point."""
    if isinstance(item, Output) and item.place is not None:
        return item.place
    if isinstance(item, Tile) or (isinstance(item, Output) and item.full):
        return item.offset + program.column_var
    return item.offset


def _coordinate_loads(program: Program) -> list[Tile | Element]:
    """Loads of every point whose place follows from coordinates, and from what lanes share."""
    blocked = _differing(program)
    free = [
        item
        for item in (*program.tiles, *program.elements)
        if not isinstance(item, Element)
        or (item.guard is None and program.level(item.offset) == Level.ELEMENT)
    ]
    return [item for item in free if not any(v in blocked for v in variables(item.offset))]


def _differing(program: Program) -> set[Var]:
    """Placeholders that differ between rows along the lanes, or wait for reductions."""
    lane = program.row_vars[-1]
    found: set[Var] = {reduction.var for reduction in program.reductions}
    pending = [*program.tiles, *program.scalars, *program.elements, *program.values]
    while True:
        more = [
            item
            for item in pending
            if item.var not in found and uses_any(_depends_on(item), [lane, *found])
        ]
        if not more:
            return found
        found.update(item.var for item in more)


def _depends_on(item: Tile | Scalar | Element | Value) -> Expr:
    if isinstance(item, Value):
        return item.body
    guard = item.guard if isinstance(item, Element) else None
    return item.offset if guard is None else tirx.Select(guard, item.offset, item.offset)


def _main_accesses(program: Program) -> list[tuple[Tile | Element | Output, Expr]]:
    """Loads and stores that differ at every point of the space."""
    lane = program.row_vars[-1:]
    items = [*_coordinate_loads(program), *(o for o in program.outputs if o.full)]
    pairs = [(item, _offset(program, item)) for item in items]
    return [
        (item, offset)
        for item, offset in pairs
        if uses_any(offset, lane) and program.level(offset) == Level.ELEMENT
    ]


def _candidates(program: Program) -> list[int]:
    """1, and the divisors of the column variable in offsets."""
    found = {1}

    def see(division: tirx.FloorDiv | tirx.FloorMod) -> None:
        divisor = number(division.b)
        if division.a.same_as(program.column_var) and divisor:
            found.add(int(divisor))

    for _, offset in _main_accesses(program):
        tvm_ffi.structural_walk(offset, [(tirx.FloorDiv, see), (tirx.FloorMod, see)])
    if not isinstance(program.columns, int):
        return [1]
    return sorted(inner for inner in found if program.columns % inner == 0)


def _is_vector(program: Program, probe: Element, width: int) -> bool:
    return bool(vector_elements(replace(program, elements=(probe,)), width))


class _LaneView:
    """Offsets over lane and step instead of the last row axis and the column."""

    def __init__(self, program: Program, inner: int) -> None:
        dtype = program.index_dtype
        self.program, self.inner = program, inner
        self.steps = program.columns if inner == 1 else program.columns // inner
        self.lane, self.step, self.vector_number = (
            Var(name, tvm.ir.PrimType(dtype)) for name in ("v", "q", "t")
        )
        size = constant(inner, dtype)
        row = self.lane if inner == 1 else tirx.FloorDiv(self.lane, size)
        column = self.step if inner == 1 else self.step * size + tirx.FloorMod(self.lane, size)
        self.env = {program.row_vars[-1]: row, program.column_var: column}
        self.analyzer = tvm.sym.Analyzer()
        for var, extent in zip(program.row_vars[:-1], program.rows[:-1], strict=True):
            self.analyzer.bind(var, tvm.ir.Range(0, extent))
        self.analyzer.bind(self.lane, tvm.ir.Range(0, program.rows[-1] * inner))
        self.analyzer.bind(self.step, tvm.ir.Range(0, self.steps))

    def unit_stride(self, offset: Expr) -> Expr | None:
        """`offset` over lane and step, where neighbouring lanes are neighbours in memory."""
        offset = _in_dtype(offset, self.program.index_dtype)
        moved = self.analyzer.simplify(substitute(offset, self.env))
        form = linear_form(moved, [self.lane])
        if form is None or number(form[0][0]) != 1 or uses_any(form[1], [self.lane]):
            return None
        return moved

    def vector(self, param: int, dtype: str, offset: Expr, width: int) -> Vector | None:
        """The access as a vector, if it is one."""
        if uses_any(offset, _differing(self.program)):
            return None
        start = self.unit_stride(offset)
        if start is None:
            return None
        zero = constant(0, self.program.index_dtype)
        base = self.analyzer.simplify(substitute(start, {self.lane: zero}))
        piece = piece_bytes(base, dtype, width, self.analyzer)
        moves = uses_any(start, [self.step, *self.program.placeholders()])
        return Vector(param, dtype, start, piece, moves)


def _in_dtype(offset: Expr, dtype: str) -> Expr:
    """`offset` computed in the dtype of the coordinates, which any place in a parameter fits."""
    if dtype_of(offset) == dtype:
        return offset
    if isinstance(offset, tirx.Cast):
        return _in_dtype(offset.value, dtype)
    if isinstance(offset, Binary):
        return type(offset)(_in_dtype(offset.a, dtype), _in_dtype(offset.b, dtype))
    return convert(offset, dtype)
