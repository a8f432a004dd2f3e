"""Sums and outputs of a contraction while it is read, each in coordinates of its own.

y[b, s, c] = T[b, c // 64, s, c % 64]      the output y reads the sum T at functions of (b, s, c)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var

from ...errors import Unsupported
from ..program.definitions import Definition
from ..program.expr import (
    HALF_DTYPES,
    constant,
    dtype_of,
    is_integer,
    number,
    rebuild,
    same,
    substitute,
    variables,
    widened,
)
from ..program.program import Extent, ReduceKind
from .inline import Inliner, collapse
from .model import (
    INDEX,
    Axis,
    ColumnPartial,
    Finish,
    RowPartial,
    Simplifier,
    equal_sizes,
    fresh_var,
    size_of,
)
from .pairs import Pair, Position, Read, find_pairs
from .row_runs import RowRun, find_row_run, is_neutral, loads_of

# What a reduction block sums up: its two factors, and the dtypes of the sum.


def is_sum_of_products(definition: Definition) -> bool:
    """Whether a definition is one; any other reduction is refused."""
    if definition.kind is None:
        return False
    is_sum = definition.kind is ReduceKind.SUM and number(definition.initial) == 0
    if not is_sum or not isinstance(_without_casts(definition.value), tirx.Mul):
        raise Unsupported(f"{definition.buffer.name} is no sum of products")
    return True


def two_factors(definition: Definition) -> tuple[Expr, Expr]:
    """Both sides of a product; of three factors and more, each goes where its axes are."""
    factors = _all_factors(_without_casts(definition.value))
    axes = {axis for axis in definition.axes if axis is not None}
    used = [axes & set(variables(factor)) for factor in factors]
    start = next((i for i in range(1, len(used)) if not used[i] <= used[0]), 1)
    left, right = [0], [start]
    for i in range(1, len(factors)):
        if i != start:
            (left if used[i] <= used[0] else right).append(i)
    sides = []
    for side in (left, right):
        value = factors[side[0]]
        for i in side[1:]:
            value = tirx.Mul(value, factors[i])
        sides.append(value)
    return sides[0], sides[1]


def _all_factors(expr: Expr) -> list[Expr]:
    if isinstance(expr, tirx.Mul):
        return [*_all_factors(expr.a), *_all_factors(expr.b)]
    return [expr]


def _without_casts(expr: Expr) -> Expr:
    """A product before it is rounded; integers are left alone, since they would wrap."""
    while isinstance(expr, tirx.Cast) and not is_integer(dtype_of(expr.value)):
        expr = expr.value
    return expr


def sum_dtype(dtype: str) -> str:
    """The dtype a sum runs in: float32 for halves, 32 bits for small integers (cut when read)."""
    if is_integer(dtype) and dtype.lstrip("uint") in ("8", "16"):
        return "int32" if dtype.startswith("int") else "uint32"
    return widened(dtype)


def rounded_dtype(found: Definition, definitions: Iterable[Definition]) -> str:
    """The half precision that every reader rounds a float32 sum to, else the dtype it has."""
    readers = _Readers(found.buffer)
    for definition in definitions:
        readers.visit(definition.value)
    return readers.dtypes.pop() if len(readers.dtypes) == 1 else found.dtype


def scaled_dtype(
    found: Definition, definitions: Iterable[Definition], outputs: Sequence[Definition]
) -> str | None:
    """The half precision that a sum is rounded to behind one factor, its only reader; else None.

    `outputs` are definitions that are stored as they are.
    """
    definitions = list(definitions)
    readers = [d for d in definitions if _reads(d.value, found.buffer)]
    if len(readers) != 1:
        return None
    value, dtype = readers[0].value, dtype_of(readers[0].value)
    if isinstance(value, tirx.Cast) and dtype in HALF_DTYPES:
        value = value.value
    elif not any(readers[0] is output for output in outputs):
        dtype = rounded_dtype(readers[0], definitions)
    if dtype not in HALF_DTYPES or not isinstance(value, tirx.Mul):
        return None
    sides = (value.a, value.b), (value.b, value.a)
    scaled = any(_is_load(a, found.buffer) and not _reads(b, found.buffer) for a, b in sides)
    return dtype if scaled else None


def _is_load(expr: Expr, buffer: Var) -> bool:
    return isinstance(expr, TensorLoad) and expr.source.same_as(buffer)


def _reads(expr: Expr, buffer: Var) -> bool:
    readers = _Readers(buffer)
    readers.visit(expr)
    return bool(readers.dtypes)


class _Readers:
    """Dtypes in which a buffer is read: a half where it is rounded at once, else its own."""

    def __init__(self, buffer: Var):
        self.buffer = buffer
        self.dtypes: set[str] = set()

    def visit(self, expr: Expr) -> Expr:
        """Notes the reads within `expr`."""
        rounded = isinstance(expr, tirx.Cast) and dtype_of(expr) in HALF_DTYPES
        load = expr.value if rounded else expr
        if not isinstance(load, TensorLoad):
            if not isinstance(expr, Var):
                rebuild(expr, self.visit)  # of other types, where a function of halves is within
            return expr
        if load.source.same_as(self.buffer):
            self.dtypes.add(dtype_of(expr))
        for index in load.indices:
            self.visit(index)
        return expr


# Reductions of what a product computes, over runs of columns: they stand in its epilogue.
#
# T[i, j] = sum_k x[i, k] * w[k, j]     h[i, j] = T[i, j] + r[i, j]
# p[i, t] = sum over c < 128 of h[i, 128 t + c]^2     ->  an output with RowPartial("sum", 128)

_KINDS = (ReduceKind.SUM, ReduceKind.MAX)


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """What is pointwise in a reduction over runs of rows or of columns, `definition`."""

    definition: Definition
    run: RowRun | Axis


def sums_and_partials(
    definitions: Sequence[Definition],
) -> tuple[list[Definition], dict[Var, Axis | RowRun | Finished]]:
    """The products, and the reductions of what comes of a product by what they write: the axis of
    columns that one reduces, or its runs of rows; also what is pointwise in one over rows. Any
    other reduction is refused.
    """
    sums: list[Definition] = []
    partials: dict[Var, Axis | RowRun | Finished] = {}
    after: dict[Var, tuple[Extent, ...]] = {}  # products, what is pointwise in them, by extents
    for definition in definitions:
        loads = loads_of(definition.value)
        read = list(dict.fromkeys(load.source for load in loads if load.source in partials))
        if read:
            partials[definition.buffer] = _finished(definition, read, partials, definitions)
        elif definition.kind is None:
            if any(load.source in after for load in loads):
                after[definition.buffer] = definition.shape
        elif _reduces_product(definition, loads, after):
            run = find_row_run(definition, after)
            partials[definition.buffer] = run_axis(definition) if run is None else run
        elif is_sum_of_products(definition):
            sums.append(definition)
            after[definition.buffer] = definition.shape
    return sums, partials


def _finished(
    definition: Definition,
    read: Sequence[Var],
    partials: Mapping[Var, Axis | RowRun | Finished],
    definitions: Sequence[Definition],
) -> Finished:
    """A definition that reads a reduction, as pointwise in it.

    Raises
    ------
    Unsupported
        It reduces once more, or reads another kind of reductions, or several.
    """
    first = read[0]
    known = partials[first]
    if len(read) > 1 or definition.kind is not None:
        raise Unsupported(
            f"{first.name} is no sum of products, and {definition.buffer.name} reads it"
        )
    if isinstance(known, Finished):
        return known
    return Finished(next(d for d in definitions if d.buffer.same_as(first)), known)


def _reduces_product(
    definition: Definition, loads: list[TensorLoad], after: Collection[Var]
) -> bool:
    """Whether each term is another element of a product, or of what is pointwise in it."""
    axes = {axis for axis, n in zip(definition.axes, definition.shape, strict=True) if n != 1}
    axes |= {var for var, extent in definition.reduced if extent != 1}
    return any(load.source in after and axes <= set(variables(*load.indices)) for load in loads)


def run_axis(definition: Definition) -> Axis:
    """The one axis that a partial reduces, as a new coordinate.

    Raises
    ------
    Unsupported
        For several axes or a symbolic one, other reductions than sum and max, and initial values
        that change the result.
    """
    name = definition.buffer.name
    real = [(var, extent) for var, extent in definition.reduced if extent != 1]
    if len(real) != 1 or not isinstance(real[0][1], int):
        raise Unsupported(f"{name} is no sum of products, nor one of a run of columns")
    if definition.kind not in _KINDS or not is_neutral(
        definition.kind, definition.initial, definition.dtype
    ):
        raise Unsupported(f"{name} is no sum of products, and reduces columns in another way")
    return Axis(fresh_var("run", INDEX), real[0][1])


def run_point(definition: Definition, indices: tuple[Expr, ...], run: Expr) -> dict[Var, Expr]:
    """The block's axes for the element at `indices` and one term of its reduction."""
    env = definition.at(indices)
    for var, extent in definition.reduced:
        env[var] = constant(0, INDEX) if extent == 1 else run
    return env


def partial_of(result: Result) -> RowPartial | ColumnPartial | None:
    """The model's word for a result that is a reduction."""
    if result.run is None:
        return result.over_rows
    return RowPartial(result.definition.kind.value, result.run.extent, result.finish)


def follows_columns(
    indices: Iterable[Expr], run: Expr, width: int, n: Sequence[Axis], axes: Sequence[Axis]
) -> bool:
    """Whether `run` counts the columns of aligned runs of `width`, all with the same `indices`.

    `indices` and `run` are functions of `axes`; `n` are those of the columns.
    """
    if not n or not isinstance(n[-1].extent, int) or n[-1].extent % width:
        return False
    last = n[-1]
    first, place = fresh_var("first", INDEX), fresh_var("place", INDEX)
    count = Axis(first, last.extent // width)
    others = [axis for axis in axes if not axis.var.same_as(last.var)]
    simplify = Simplifier([*others, count, Axis(place, width)])
    start = first * constant(width, INDEX)
    inside, before = {last.var: start + place}, {last.var: start}
    return same(simplify(substitute(run, inside)), place) and all(
        same(simplify(substitute(i, inside)), simplify(substitute(i, before))) for i in indices
    )


@dataclass(slots=True, eq=False)
class Sum:
    """A product under way: its definition, and where in the space of its segment it lives."""

    definition: Definition
    number: int
    position: Position | None = None

    @property
    def name(self) -> str:
        return self.definition.buffer.name


@dataclass(slots=True, eq=False)
class Result:
    """An output under way: `axes` are its own coordinates, `reads` says where it reads each sum.

    A partial has one coordinate more, `run` (the term of its reduction), which is at `place` of the
    segment; one of runs of rows has the coordinates of the elements it reads, the last of which is
    at `place`, and the axes of its terms, and is what `over_rows` says. Of a sum that it reads at
    `pairs` of points, `reads` has one of each. `dtype` is that of what is stored: what `finish`
    says, of a partial that has one.
    """

    definition: Definition
    param: int
    axes: list[Axis]
    indices: Position
    run: Axis | None = None
    reads: dict[Var, Position] = field(default_factory=dict)
    position: Position | None = None
    place: Expr | None = None
    pairs: dict[Var, Pair] = field(default_factory=dict)
    terms: dict[Var, Expr] = field(default_factory=dict)
    over_rows: ColumnPartial | None = None
    finish: Finish | None = None
    dtype: str = ""

    @property
    def is_partial(self) -> bool:
        """Whether it is a reduction of elements."""
        return self.run is not None or bool(self.terms)

    def value(self, inliner: Inliner, indices: Position, run: Expr | None) -> Expr:
        """The element at `indices`; of a partial, the term of its reduction at `run`."""
        if self.terms:
            return inliner.resolve(self.definition.value, self.terms)
        if self.run is None:
            return inliner.load(self.definition.buffer, indices)
        return inliner.resolve(self.definition.value, run_point(self.definition, indices, run))


def read_result(
    definition: Definition,
    param: int,
    definitions: dict[Var, Definition],
    exact: bool,
    run: Axis | RowRun | Finished | None,
) -> Result:
    """Which sums an output reads, at which functions of its own indices."""
    if isinstance(run, Axis | None):
        axes, indices = coordinates(definition.shape, "o")
        axes += [] if run is None else [run]
        result = Result(definition, param, axes, indices, run, dtype=definition.dtype)
    elif isinstance(run, RowRun):
        result = _over_rows(definition, param, run)
    else:
        result = _finished_result(definition, param, run, definitions, exact)
    definition, axes, indices, run = result.definition, result.axes, result.indices, result.run

    reads: dict[Var, list[Read]] = {}

    def note(read: Definition, at: Position) -> Expr:
        result.reads.setdefault(read.buffer, at)
        reads.setdefault(read.buffer, []).append((at, tuple(inliner.conditions)))
        return fresh_var(read.buffer.name, widened(read.dtype))

    inliner = Inliner(definitions, exact, Simplifier(axes), note)
    result.value(inliner, indices, run and run.var)
    several = {buffer: found for buffer, found in reads.items() if not _at_one_point(found)}
    if several:
        name = next(iter(several)).name
        result.pairs = (not result.is_partial and find_pairs(axes, several)) or {}
        if not result.pairs:
            raise Unsupported(f"{name} is read at several points of an output")
        result.reads.update({buffer: pair.base for buffer, pair in result.pairs.items()})
    if not result.reads:
        raise Unsupported(f"{definition.buffer.name} does not depend on a product")
    return result


def _over_rows(definition: Definition, param: int, run: RowRun) -> Result:
    heights = {axis.var: n for axis, n in zip(run.axes, run.heights, strict=True)}
    partial = ColumnPartial(definition.kind.value, run.rows, run.whole, run.inside, heights=heights)
    return Result(
        definition,
        param,
        list(run.axes),
        run.indices,
        terms=definition.at(run.indices) | run.terms,
        over_rows=partial,
        dtype=definition.dtype,
    )


def _finished_result(
    definition: Definition,
    param: int,
    found: Finished,
    definitions: Mapping[Var, Definition],
    exact: bool,
) -> Result:
    """An output that is pointwise in a reduction over runs of rows or of columns, told over the
    elements of that; nothing else is read.
    """
    reduction, run = found.definition, found.run
    if isinstance(run, RowRun):
        result = _over_rows(reduction, param, run)
        own, reduced_at = run.inner, run.indices
    else:
        own, reduced_at = coordinates(reduction.shape, "r")
        terms = run_point(reduction, reduced_at, run.var)
        result = Result(reduction, param, [*own, run], reduced_at, run, terms=terms)
    reads: list[Position] = []
    axes, indices = coordinates(definition.shape, "o")

    def note(read: Definition, at: Position) -> Expr:
        if not read.buffer.same_as(reduction.buffer):
            raise Unsupported(f"{definition.buffer.name} reads a product and a reduction of it")
        reads.append(at)
        return fresh_var(read.buffer.name, widened(read.dtype))

    Inliner(definitions, exact, Simplifier(axes), note).load(definition.buffer, indices)
    if not all(same(a, b) for at in reads for a, b in zip(reads[0], at, strict=True)):
        raise Unsupported(f"{reduction.buffer.name} is read at several points of an output")
    why = f"{definition.buffer.name} is no rearrangement of {reduction.buffer.name}"
    env = _inverse(axes, zip(reads[0], reduced_at, strict=True), why)
    simplify = Simplifier(own)
    place = tuple(simplify(substitute(index, env)) for index in indices)
    if isinstance(run, Axis) and not _are_all(own, place, definition.shape, simplify):
        raise Unsupported(why)
    reduced = fresh_var("reduced", widened(reduction.dtype))

    inliner = Inliner(definitions, exact, simplify, lambda read, at: reduced)
    (value,), bindings = collapse([inliner.load(definition.buffer, place)], inliner.bindings)
    if any(loads_of(e) for e in (value, *(b.value for b in bindings))):
        raise Unsupported(f"{definition.buffer.name} reads other tensors behind a reduction")
    result.indices, result.dtype = place, definition.dtype
    finish = Finish(reduced, bindings, value).map(lambda e: _simple(e, simplify))
    if result.over_rows is None:
        result.finish = finish
    else:
        result.over_rows = replace(result.over_rows, finish=finish)
    return result


def _are_all(
    axes: Sequence[Axis], place: Position, shape: Sequence[Extent], simplify: Simplifier
) -> bool:
    """Whether places, another one at each point of the axes, are all those of a shape."""
    extents = {axis.var: axis.extent for axis in axes}
    if not equal_sizes(size_of(axes), math.prod(shape)):
        return False
    for at, extent in zip(place, shape, strict=True):
        if isinstance(at, Var):
            if not equal_sizes(extents[at], extent):
                return False
        else:
            most = simplify.most(at)
            if most is None or not isinstance(extent, int) or most >= extent:
                return False
    return True


def _simple(expr: Expr, simplify: Simplifier) -> Expr:
    """An expression whose integers are simplified, such as the number of elements of a window."""
    if dtype_of(expr) == INDEX:
        return simplify(expr)
    return expr if isinstance(expr, Var) else rebuild(expr, lambda e: _simple(e, simplify))


def _at_one_point(reads: Sequence[Read]) -> bool:
    first = reads[0][0]
    return all(same(a, b) for at, _ in reads for a, b in zip(first, at, strict=True))


def coordinates(shape: Iterable[Extent], prefix: str) -> tuple[list[Axis], Position]:
    """One axis for each extent but 1, and the indices they make."""
    axes: list[Axis] = []
    indices: list[Expr] = []
    for extent in shape:
        if extent == 1:
            indices.append(constant(0, INDEX))
            continue
        axes.append(Axis(fresh_var(f"{prefix}{len(axes)}", INDEX), extent))
        indices.append(axes[-1].var)
    return axes, tuple(indices)


def inverted(result: Result, base: Sum, axes: Sequence[Axis]) -> dict[Var, Expr]:
    """The result's own coordinates as functions of the segment's axes."""
    why = f"{result.definition.buffer.name} is no rearrangement of {base.name}"
    reads = result.reads[base.definition.buffer]
    if not equal_sizes(size_of(result.axes), size_of(axes)):
        raise Unsupported(why)
    return _inverse(result.axes, zip(reads, base.position, strict=True), why)


def _inverse(axes: Sequence[Axis], pairs: Iterable[tuple[Expr, Expr]], why: str) -> dict[Var, Expr]:
    """The axes as functions of what their functions are at: of the second of each pair."""
    moved = [(read, at) for read, at in pairs if number(at) is None]
    own = [axis.var for axis in axes]
    plain = {read: at for read, at in moved if isinstance(read, Var)}
    if len(plain) == len(moved) == len(own):
        return plain
    extents = [constant(a.extent, INDEX) if isinstance(a.extent, int) else a.extent for a in axes]
    try:
        inverse = tirx.IndexMap(own, [read for read, _ in moved], None).inverse(extents)
    except RuntimeError as error:
        raise Unsupported(why) from error
    names = {var: at for var, (_, at) in zip(inverse.initial_indices, moved, strict=True)}
    return {
        var: substitute(index, names) for var, index in zip(own, inverse.final_indices, strict=True)
    }
