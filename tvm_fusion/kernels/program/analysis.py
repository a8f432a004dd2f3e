"""From a fused PrimFunc to the row program it computes.

The analysis walks backwards from the outputs (see `resolver`). Nothing is recognised by the name
of an operator: the label pick of a cross-entropy, a slice or a transposed read are loads at other
indices and no more.

Does not handle: reductions of several values other than argmax and argmin, reductions over axes
that differ in extent or rows, buffers written in parts or by several blocks, data-dependent writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var

from ...errors import TooDeep, Unsupported
from .collapse import collapse_axes, reachable
from .definitions import Definition, read_definitions, read_params, shape_of
from .expr import (
    constant,
    convert,
    dtype_of,
    flatten,
    linear_form,
    number,
    substitute,
    unflatten,
    variables,
)
from .program import Accumulation, Element, Extent, Output, Program, Scalar, Tile
from .resolver import Placeholders, Resolver
from .space import Space, index_dtype_of, make_space, pointwise_space, row_space
from .window import is_window

# Sums over rows beside reductions over columns: layer-norm backward, dx with dgamma and dbeta.
#
# r[i]    = sum over j of dy[i, j]             rows [S * R] x columns N
# a[s, j] = sum over k of dy[s * R + k, j]     an accumulation: rows (S, R), S results a column


def sums_over_rows(reductions: Sequence[Definition]) -> list[Definition]:
    """The reductions over outer axes, where there are others over the contiguous ones as well."""
    outer = [definition for definition in reductions if _keeps_last_axis(definition)]
    return outer if len(outer) < len(reductions) else []


def _keeps_last_axis(definition: Definition) -> bool:
    """Whether neighbours in memory belong to different results."""
    loads: list[TensorLoad] = []
    tvm_ffi.structural_walk(definition.value, [(TensorLoad, loads.append)])
    if not loads:
        return False
    kept = {axis for axis in definition.axes if axis is not None}
    reduced = {axis for axis, extent in definition.reduced if extent != 1}
    widest = max(loads, key=lambda load: len(_axes(load) & (kept | reduced)))
    for index in reversed(widest.indices):
        used = set(variables(index))
        if used & reduced:
            return False
        if used & kept:
            return True
    return False


def _axes(load: TensorLoad) -> set[Var]:
    return set(variables(*load.indices))


def accumulation_space(
    rows: Sequence[Definition], sums: Sequence[Definition], index_dtype: str
) -> Space:
    """Rows (S, R) and columns: S results a column, each over R rows.

    Raises
    ------
    Unsupported
        Where the sums and the rows are not over the same points.
    """
    columns = math.prod(extent for _, extent in rows[0].reduced)
    pieces = {(math.prod(d.shape), math.prod(extent for _, extent in d.reduced)) for d in sums}
    if len(pieces) != 1 or not isinstance(columns, int):
        raise Unsupported(f"sums over rows of {len(pieces)} kinds")
    ((results, length),) = pieces
    known = isinstance(results, int) and isinstance(length, int)
    if not known or columns == 0 or results % columns:
        raise Unsupported(f"{results} sums over {length} rows of {columns} columns")
    space = make_space((results // columns, length), columns, index_dtype)
    for definition in rows:
        reduced = math.prod(extent for _, extent in definition.reduced)
        if not space.equal(reduced, columns) or not space.is_row(definition.shape):
            raise Unsupported(f"{definition.buffer.name} does not hold one element a row")
    return space


def accumulation(
    param: int, definition: Definition, space: Space, resolver: Resolver
) -> Accumulation:
    """What is summed over rows into a parameter."""
    if definition.is_part:
        raise Unsupported(f"{definition.buffer.name} is written in part by sums over rows")
    group, row = space.row_vars
    offset = space.analyzer.simplify(group * constant(space.columns, space.index_dtype))
    indices = unflatten(offset + space.column_var, definition.shape, space.analyzer)
    env = {axis: i.astype(dtype_of(axis)) for axis, i in definition.at(indices).items()}
    extents = [extent for _, extent in definition.reduced]
    places = unflatten(row, extents, space.analyzer)
    for (axis, _), place in zip(definition.reduced, places, strict=True):
        env[axis] = place.astype(dtype_of(axis))
    body, _, initial = resolver.terms(definition, env)
    if initial is not None and number(initial) is None:
        raise Unsupported(f"{definition.buffer.name} starts from {initial}")
    phase = resolver.placeholders.phase(body)
    return Accumulation(param, definition.kind, body, offset, definition.dtype, initial, phase)


# Walks: in which order the elements of a rows x columns space lie in memory, where the columns are
# not the last axes.
#
#     S[i] = sum over k of x[k, i]      rows (i), columns k     walk k, i:    element k * N + i
#     S[c] = sum over n, h, w of x[n, c, h, w]                  walk n, c, hw


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """Axes of the space in the order of memory: the coordinate along each, and its extent."""

    coordinates: tuple[Expr, ...]
    extents: tuple[Extent, ...]
    place: Expr

    def has_shape(self, space: Space, shape: Sequence[Extent]) -> bool:
        """Whether `shape` is these axes, but for axes of extent 1."""
        theirs = [extent for extent in shape if extent != 1]
        return len(theirs) == len(self.extents) and all(map(space.equal, self.extents, theirs))

    def indices(self, space: Space, shape: Sequence[Extent]) -> tuple[Expr, ...]:
        """Where a buffer of `shape`, or of as many elements, holds the element of this point."""
        if not self.has_shape(space, shape):
            return unflatten(self.place, shape, space.analyzer)
        names = iter(self.coordinates)
        zero = constant(0, space.index_dtype)
        return tuple(zero if extent == 1 else next(names) for extent in shape)


def walks(space: Space, reductions: Sequence[Definition]) -> list[Walk]:
    """The orders in which the reductions read what they reduce, other than rows then columns."""
    found: dict[tuple, Walk] = {}
    for definition in reductions:
        rows = _rows(space, definition)
        loads: list[TensorLoad] = []
        tvm_ffi.structural_walk(definition.value, [(TensorLoad, loads.append)])
        for load in loads if rows is not None else ():
            order = _order(load, rows, [var for var, extent in definition.reduced if extent != 1])
            if order is not None and list(order) != sorted(order) and order not in found:
                found[order] = _walk(space, definition, order)
    return list(found.values())


def _rows(space: Space, definition: Definition) -> list[Var] | None:
    """The block axes that are the row axes of the space, in its order."""
    axes = [
        (axis, extent)
        for axis, extent in zip(definition.axes, definition.shape, strict=True)
        if extent != 1
    ]
    if len(axes) != len(space.rows):
        return None
    same = all(space.equal(extent, own) for (_, extent), own in zip(axes, space.rows, strict=True))
    return [axis for axis, _ in axes] if same else None


def _order(load: TensorLoad, rows: list[Var], columns: list[Var]) -> tuple[int, ...] | None:
    """The number of the axis (rows first) that each index of `load` is, if each is just one."""
    axes = [*rows, *columns]
    order = []
    for index, extent in zip(load.indices, shape_of(load.source), strict=True):
        if extent == 1 or number(index) == 0:
            continue
        place = next((p for p, axis in enumerate(axes) if axis.same_as(index)), None)
        if place is None:
            return None
        order.append(place)
    return tuple(order) if sorted(order) == list(range(len(axes))) else None


def _walk(space: Space, definition: Definition, order: tuple[int, ...]) -> Walk:
    first, reduced = len(space.rows), [e for _, e in definition.reduced if e != 1]

    def along(extents: Sequence[Extent]) -> tuple[Expr, ...]:
        return unflatten(space.column_var, extents, space.analyzer)

    coordinates = (*space.row_vars, *along(reduced))
    extents = (*space.rows, *reduced)
    # for the place, neighbours among the columns are one axis: fewer divisions
    runs: list[list[int]] = []
    for axis in range(len(reduced)):
        at = order.index(first + axis)
        joined = axis > 0 and at > 0 and order[at - 1] == first + axis - 1
        runs[-1].append(axis) if joined else runs.append([axis])
    sizes = []
    for run in runs:
        size = reduced[run[0]]
        for axis in run[1:]:
            size = size * reduced[axis]
        sizes.append(size)
    merged = {
        run[0]: (index, size) for run, index, size in zip(runs, along(sizes), sizes, strict=True)
    }
    steps = [
        (coordinates[axis], extents[axis]) if axis < first else merged[axis - first]
        for axis in order
        if axis < first or axis - first in merged
    ]
    place = flatten([s[0] for s in steps], [s[1] for s in steps], space.index_dtype)
    return Walk(
        tuple(coordinates[axis] for axis in order),
        tuple(extents[axis] for axis in order),
        space.analyzer.simplify(place),
    )


SUPPORTED_DTYPES = re.compile(
    r"bool|bfloat16|float8_e4m3fn|float8_e5m2|float(16|32|64)|u?int(8|16|32|64)"
)


def analyze(func: tirx.PrimFunc, exact: bool = False, parts: bool = False) -> Program:
    """The row program that a fused PrimFunc computes.

    Parameters
    ----------
    func : s_tir PrimFunc of complete blocks, unscheduled; static or symbolic shapes.
    exact : keep every rounding of the unfused graph, instead of rounding only what is stored.
    parts : whether outputs behind reductions may have a part of the columns (`Output.share`).

    Returns
    -------
    Program
        Its axes are merged where all accesses walk through them together. Pointwise outputs that
        run over other axes than the first are its siblings.

    Raises
    ------
    Unsupported
        Where the function is not one space of rows x columns; the message says why.
    """
    analysis = _Analysis(func, exact, parts)
    try:
        reductions = [d for d in analysis.blocks if d.kind is not None and not is_window(d)]
        sums = sums_over_rows(reductions)
        if sums:
            rows = [d for d in reductions if d not in sums]
            space = accumulation_space(rows, sums, index_dtype_of(analysis.blocks))
            return collapse_axes(analysis.program(space, analysis.written, sums))
        if reductions:
            space = row_space(analysis.blocks, reductions)
            return collapse_axes(analysis.program(space, analysis.written))
        return _pointwise(analysis)
    except RecursionError:
        raise TooDeep("the chain of temporaries is too long") from None


class _Analysis:
    """A function, and its programs over given spaces."""

    def __init__(self, func: tirx.PrimFunc, exact: bool, parts: bool) -> None:
        self.exact, self.parts = exact, parts
        self.params = read_params(func)
        self.blocks = read_definitions(func)
        self.definitions = {definition.buffer: definition for definition in self.blocks}
        self.written = [i for i, p in enumerate(self.params) if p.var in self.definitions]
        name = func.attrs.get("global_symbol") if func.attrs else None
        self.name = None if name is None else str(name)
        if not self.written:
            raise Unsupported("no parameter is written")
        for var in (*(param.var for param in self.params), *self.definitions):
            if not SUPPORTED_DTYPES.fullmatch(str(var.ty.dtype)):
                raise Unsupported(f"{var.name} holds {var.ty.dtype}")

    def definition(self, param: int) -> Definition:
        """The definition of an output."""
        return self.definitions[self.params[param].var]

    def program(
        self, space: Space, outputs: Sequence[int], sums: Sequence[Definition] = ()
    ) -> Program:
        """The program that computes some of the outputs over `space`; `sums` run over its rows."""
        placeholders = Placeholders(space, self.params)
        resolver = Resolver(space, self.definitions, placeholders, self.exact)
        reductions = [d for d in self.blocks if d.kind is not None and not is_window(d)]
        orders = walks(space, [d for d in reductions if d not in sums])
        summed = [i for i in outputs if self.definition(i) in sums]
        plain = [i for i in outputs if i not in summed]
        found = tuple(
            _part_of_rows(i, self.definition(i), space, resolver, share)
            if (share := self._share(self.definition(i), space)) > 1
            else _output(i, self.definition(i), space, resolver, orders)
            for i in plain
        )
        over_rows = tuple(accumulation(i, self.definition(i), space, resolver) for i in summed)
        return placeholders.program(self.name, found, self.exact, over_rows)

    def _share(self, definition: Definition, space: Space) -> int:
        """How many times a row's columns are what the definition has of each row, if it is a part
        of them that is taken.
        """
        if not self.parts or not isinstance(space.columns, int):
            return 1
        elements, rows = math.prod(definition.shape), math.prod(space.rows)
        if isinstance(elements, int) and isinstance(rows, int):
            own = elements // rows if rows and elements % rows == 0 else 0
        else:
            *outer, own = definition.shape or (1,)
            own = own if isinstance(own, int) and space.is_row(outer) else 0
        return space.columns // own if own > 1 and space.columns % own == 0 else 1


def _pointwise(analysis: _Analysis) -> Program:
    """One program for the outputs that share axes with the first, siblings for the others."""
    parts: list[Program] = []
    waiting = analysis.written
    while waiting:
        space = pointwise_space(analysis.blocks, analysis.definition(waiting[0]))
        fitting = [i for i in waiting if space.is_element(analysis.definition(i).shape)]
        program = analysis.program(space, fitting)
        scattered = _scattered(analysis, program, space)
        if scattered:
            fitting = [i for i in fitting if i not in scattered]
            program = analysis.program(space, fitting)
        parts.append(collapse_axes(program))
        waiting = [i for i in waiting if i not in fitting]
    return dataclasses.replace(parts[0], siblings=tuple(parts[1:]))


def _scattered(analysis: _Analysis, program: Program, space: Space) -> set[int]:
    """Outputs that share nothing with the space but their size.

    Computed in the linear order of the space, they read their inputs all over the place. What stays
    linear (a reshape) is fine.
    """
    coordinates = (*program.row_vars, program.column_var)
    definitions = program.placeholders()
    found = set()
    for output in program.outputs:
        if space.has_axes(analysis.definition(output.param).shape):
            continue
        used = reachable(output.value, definitions)
        loads = (item for item in used if isinstance(item, Tile | Scalar | Element))
        if any(linear_form(load.offset, coordinates) is None for load in loads):
            found.add(output.param)
    return found


def _output(
    param: int, definition: Definition, space: Space, resolver: Resolver, orders: Sequence[Walk]
) -> Output:
    """What is written to a parameter: one element a point, or one a row."""
    shape = definition.shape
    full = space.is_element(shape)
    if not full and not space.is_row(shape):
        text = f"{list(space.rows)} x {space.columns}"
        raise Unsupported(f"{definition.buffer.name} {list(shape)} is no part of {text}")
    if not full or not orders:
        return _plain_output(param, definition, space, resolver, full)
    fitting = [walk for walk in orders if walk.has_shape(space, shape)]
    others = [walk for walk in orders if walk not in fitting]
    plain = [None] if space.has_axes(shape) else []
    candidates = [*fitting, *plain, *others, *([] if plain else [None])]
    for walk in candidates[:-1]:
        with contextlib.suppress(Unsupported):
            return _placed_output(param, definition, space, resolver, walk)
    return _placed_output(param, definition, space, resolver, candidates[-1])


def _plain_output(
    param: int, definition: Definition, space: Space, resolver: Resolver, full: bool
) -> Output:
    """An output in the order of rows, then columns."""
    indices = space.indices(definition.shape, full)
    value = resolver.read(definition.buffer, indices, None)
    if definition.is_part:
        return _part_output(param, definition, space, resolver, value, indices, full)
    offset = space.row_index
    if full:
        columns = space.columns
        size = constant(columns, "int32") if isinstance(columns, int) else columns
        offset = offset * convert(size, space.index_dtype)
    offset = space.analyzer.simplify(offset)
    phase = resolver.placeholders.phase(value)
    return Output(param, value, offset, definition.dtype, full, phase)


def _part_of_rows(
    param: int, definition: Definition, space: Space, resolver: Resolver, share: int
) -> Output:
    """An output of the first columns of each row: those are as many as one of `share` parts."""
    if definition.is_part:
        raise Unsupported(f"{definition.buffer.name} is written in part by a part of the columns")
    own = space.narrowed(space.columns // share)
    value = resolver.read(definition.buffer, own.indices(definition.shape, True), None)
    offset = space.row_index * constant(own.columns, space.index_dtype)
    offset, phase = space.analyzer.simplify(offset), resolver.placeholders.phase(value)
    return Output(param, value, offset, definition.dtype, True, phase, share=share)


def _placed_output(
    param: int, definition: Definition, space: Space, resolver: Resolver, walk: Walk | None
) -> Output:
    """A full output whose elements lie in the order of `walk`."""
    if walk is None:
        return _plain_output(param, definition, space, resolver, full=True)
    indices = walk.indices(space, definition.shape)
    value = resolver.read(definition.buffer, indices, None)
    if definition.is_part:
        return _part_output(param, definition, space, resolver, value, indices, True)
    first = {space.column_var: constant(0, space.index_dtype)}
    offset = space.analyzer.simplify(substitute(walk.place, first))
    phase = resolver.placeholders.phase(value)
    return Output(param, value, offset, definition.dtype, True, phase, walk.place)


def _part_output(
    param: int,
    definition: Definition,
    space: Space,
    resolver: Resolver,
    value: Expr,
    indices: tuple[Expr, ...],
    full: bool,
) -> Output:
    """An output that is a part of its buffer, at the pitches of that."""
    place = flatten(indices, shape_of(definition.buffer), space.index_dtype)
    place = space.analyzer.simplify(place)
    first = {space.column_var: constant(0, space.index_dtype)}
    offset = space.analyzer.simplify(substitute(place, first))
    form = linear_form(place, (space.column_var,))
    follows = not full or (form is not None and number(form[0][0]) == 1)
    phase = resolver.placeholders.phase(value)
    dtype = definition.dtype
    return Output(param, value, offset, dtype, full, phase, None if follows else place)
