"""Reductions of what a product computes over runs of its rows, for each column.

    T[i, j] = sum_k x[i, k] * w[k, j]        h[i, j] = relu(T[i, j])
    p[t, j] = sum over r < 16 of h[16 t + r, j]    where 16 t + r < 100, else of 0

A run may be a block of several axes, such as 2 x 8 positions of an image, or of fewer rows, such as
2 x 2 positions that are pooled. The last runs along an axis reach beyond it, where terms are
neutral; or there is none behind the last whole one. The reduction is told over the elements of what
it reads: each goes to p[i // 16, j], which of the last ones may be no element of p.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var

from ...errors import Unsupported
from ..program.definitions import Definition
from ..program.expr import (
    conjunction,
    constant,
    convert,
    dtype_of,
    is_if_then_else,
    number,
    same,
    substitute,
    variables,
)
from ..program.program import Extent, ReduceKind
from .model import (
    INDEX,
    RUN_ROWS,
    Axis,
    ColumnPartial,
    Output,
    Simplifier,
    fresh_var,
    size_of,
)

_KINDS = (ReduceKind.SUM, ReduceKind.MAX)

WINDOW_ROWS = tuple(1 << bits for bits in range(1, RUN_ROWS.bit_length()))
"""Rows of runs that lie within `RUN_ROWS`."""


@dataclass(frozen=True, slots=True, eq=False)
class RowRun:
    """A reduction over runs of rows, over the elements of the tensor that it reads.

    Attributes
    ----------
    axes : of the elements.
    indices : of the result that an element goes to.
    terms : which term of it an element is: the reduced axes.
    inner : the axes without elements behind the last whole run.
    heights : of a run, along each axis.
    whole : no run reaches beyond the elements.
    """

    axes: tuple[Axis, ...]
    indices: tuple[Expr, ...]
    terms: Mapping[Var, Expr]
    inner: tuple[Axis, ...]
    heights: tuple[int, ...]
    whole: bool

    @property
    def rows(self) -> int:
        """Elements of a run."""
        return math.prod(self.heights)

    @property
    def inside(self) -> Expr | None:
        """The condition under which an element is a term; None where all are."""
        pairs = zip(self.axes, self.inner, strict=True)
        cut = [own for axis, own in pairs if own.extent < axis.extent]
        return conjunction(*(axis.var < constant(axis.extent, INDEX) for axis in cut))


def find_row_run(definition: Definition, after: Mapping[Var, tuple[Extent, ...]]) -> RowRun | None:
    """A reduction as one of runs of rows, or None: of another form, of other runs, or of columns.

    `after` are the products, and what is pointwise in them, with the extents that are written:
    those of a part of a concatenation are not those of the whole.
    """
    extents = [extent for _, extent in definition.reduced]
    if definition.kind not in _KINDS or not all(isinstance(n, int) for n in extents):
        return None
    loads = [load for load in loads_of(definition.value) if load.source in after]
    if math.prod(extents) not in WINDOW_ROWS or not loads:
        return None
    first = loads[0].indices
    if not all(same(a, b) for load in loads for a, b in zip(first, load.indices, strict=True)):
        return None
    found = _Reader(definition, loads[0], after[loads[0].source]).read()
    return found if found is not None and _reduces_all(definition, found) else None


def loads_of(expr: Expr) -> list[TensorLoad]:
    """The loads of an expression, in order."""
    found: list[TensorLoad] = []
    tvm_ffi.structural_walk(expr, [(TensorLoad, found.append)])
    return found


class _Reader:
    """Reads each index of a load as a whole axis of the result, or as a run along one."""

    def __init__(self, definition: Definition, load: TensorLoad, shape: tuple[Extent, ...]) -> None:
        self.definition, self.load, self.shape = definition, load, shape
        axes = zip(definition.axes, definition.shape, strict=True)
        self.spatial = {axis: n for axis, n in axes if axis is not None}
        self.reduced = dict(definition.reduced)
        self.at: dict[Var, Expr] = {}
        self.inner: list[Axis] = []
        self.heights: list[int] = []
        self.whole = True
        for var, extent in (*self.spatial.items(), *self.reduced.items()):
            if extent == 1:
                self.at[var] = constant(0, INDEX)

    def read(self) -> RowRun | None:
        """The run, or None."""
        axes, plain = [], False
        for index, extent in zip(self.load.indices, self.shape, strict=True):
            if not isinstance(extent, int):
                return None
            if extent == 1 and number(self._simple(index)) == 0:
                continue
            axes.append(Axis(fresh_var(f"e{len(axes)}", INDEX), extent))
            steps = self._steps(index)
            if steps is None or not self._put(axes[-1], steps):
                return None
            plain = not set(steps) & set(self.reduced)
        if not plain or set(self.at) != {*self.spatial, *self.reduced}:
            return None  # the innermost axis, whose elements are neighbours, is one of columns
        indices = [
            constant(0, INDEX) if axis is None else self.at[axis] for axis in self.definition.axes
        ]
        terms = {v: self.at[v] for v in self.reduced}
        inner, heights = tuple(self.inner), tuple(self.heights)
        return RowRun(tuple(axes), tuple(indices), terms, inner, heights, self.whole)

    def _simple(self, index: Expr) -> Expr:
        return tvm.sym.Analyzer().simplify(substitute(index, self.at))

    def _steps(self, index: Expr) -> dict[Var, int] | None:
        """The coefficients of a linear form without a constant, or None."""
        index = self._simple(index)
        found = variables(index)
        zero = {var: constant(0, INDEX) for var in found}
        analyzer, rest, steps = tvm.sym.Analyzer(), index, {}
        for var in found:
            one = {**zero, var: constant(1, INDEX)}
            step = number(analyzer.simplify(substitute(index, one)))
            if step is None:
                return None
            steps[var] = int(step)
            rest = rest - var * constant(int(step), INDEX)
        return steps if number(analyzer.simplify(rest)) == 0 else None

    def _put(self, axis: Axis, steps: Mapping[Var, int]) -> bool:
        """Takes in what an axis of the elements says of those of the reduction."""
        outer = [var for var in steps if var in self.spatial]
        inner = [var for var in steps if var in self.reduced]
        if len(outer) > 1 or len(inner) > 1 or len(steps) != len(outer) + len(inner):
            return False
        height = self.reduced[inner[0]] if inner else 1
        count = self.spatial[outer[0]] if outer else 1
        counts = axis.extent // height, -(-axis.extent // height)
        if count not in counts or any(var in self.at for var in steps):
            return False
        self.inner.append(replace(axis, extent=min(axis.extent, count * height)))
        self.heights.append(int(height))
        self.whole &= count * height <= axis.extent
        expected = {**dict.fromkeys(outer, height), **dict.fromkeys(inner, 1)}
        if expected != dict(steps):
            return False
        size = constant(height, INDEX)
        for var in outer:
            self.at[var] = tirx.FloorDiv(axis.var, size) if height > 1 else axis.var
        for var in inner:
            self.at[var] = tirx.FloorMod(axis.var, size) if outer else axis.var
        return True


def _reduces_all(definition: Definition, run: RowRun) -> bool:
    """Whether all elements are terms, and nothing else is one."""
    value = definition.value
    while isinstance(value, tirx.Cast):
        value = value.value
    if not is_neutral(definition.kind, definition.initial, definition.dtype):
        return False
    if not is_if_then_else(value):
        size = math.prod(n for axis, n in zip(definition.axes, definition.shape, strict=True))
        return size * run.rows == size_of(run.inner)
    condition, _, other = value.args
    env = definition.at(run.indices) | run.terms
    inside = Simplifier(run.inner)(substitute(condition, env))
    return number(inside) == 1 and is_neutral(definition.kind, other, definition.dtype)


def is_neutral(kind: ReduceKind, value: Expr, dtype: str) -> bool:
    """Whether a term changes no result."""
    while isinstance(value, tirx.Cast):
        value = value.value
    found = number(value)
    if kind is ReduceKind.SUM:
        return found == 0
    return found is not None and found <= number(tirx.min_value(dtype))


def with_row_bits(
    outputs: Sequence[Output],
    m: Sequence[Axis],
    others: Sequence[Axis],
    bits: Sequence[int] | None = None,
) -> tuple[Output, ...]:
    """Outputs whose reductions of rows know by which bits of their numbers rows of a run differ:
    those given, or the lowest ones. `others` are the axes of the batch and of columns.

    Raises
    ------
    Unsupported
        Reductions of other rows than these, from the first one of `m` on.
    """
    found = []
    for output in outputs:
        partial = output.partial
        if isinstance(partial, ColumnPartial):
            if dtype_of(output.value) != "float32":
                raise Unsupported(f"a run of {dtype_of(output.value)}")
            own = tuple(range(partial.rows.bit_length() - 1) if bits is None else bits)
            places = [*output.indices, *([] if partial.inside is None else [partial.inside])]
            if 1 << len(own) != partial.rows or not _differ_in(own, places, m, others):
                raise Unsupported(f"a reduction of rows that are no {partial.rows} side by side")
            output = replace(output, partial=replace(partial, bits=own))
        found.append(output)
    return tuple(found)


def _differ_in(
    bits: Sequence[int], places: Sequence[Expr], m: Sequence[Axis], others: Sequence[Axis]
) -> bool:
    """Whether rows whose numbers differ in these bits, of a block of `RUN_ROWS`, are one run:
    `places` tell which one a row is of.
    """
    count = size_of(m)
    if not isinstance(count, int) or max(bits, default=0) >= RUN_ROWS.bit_length() - 1:
        return False
    first, place = fresh_var("first", INDEX), fresh_var("place", INDEX)
    axes = [Axis(first, -(-count // RUN_ROWS)), Axis(place, RUN_ROWS)]
    simplify = Simplifier([*others, *axes])
    start = first * constant(RUN_ROWS, INDEX)

    def at(env: Mapping[Var, Expr], exprs: Sequence[Expr]) -> list[Expr]:
        return [simplify(substitute(expr, env)) for expr in exprs]

    # What becomes simple of any row of 16, such as (7 (row // 7) + row % 7) // 16, and what of each
    # one by itself, such as (row // 4) // 3 where that is (4 first + row of 16 // 4) // 3.
    found = at(_coordinates(m, start + place, simplify), places)
    numbers = [constant(row, INDEX) for row in range(RUN_ROWS)]
    ways = (
        [at({place: row}, found) for row in numbers],
        [at(_coordinates(m, start + row, simplify), places) for row in numbers],
    )

    def is_one(bit: int) -> bool:
        """Whether rows that differ in this bit go to one result."""
        pairs = [(row, row | 1 << bit) for row in range(RUN_ROWS) if not row >> bit & 1]
        return any(all(_equal(way[a], way[b]) for a, b in pairs) for way in ways)

    return all(map(is_one, bits))


def _equal(some: Sequence[Expr], others: Sequence[Expr]) -> bool:
    return all(same(a, b) for a, b in zip(some, others, strict=True))


def _coordinates(m: Sequence[Axis], row: Expr, simplify: Simplifier) -> dict[Var, Expr]:
    """The axes of rows at a row; beyond the last one the first of them goes on."""
    found, at = {}, row
    for position in range(len(m) - 1, -1, -1):
        size = constant(m[position].extent, INDEX)
        found[m[position].var] = tirx.FloorMod(at, size) if position else at
        at = convert(simplify(tirx.FloorDiv(at, size)), INDEX)
    return found
