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
import re
from collections.abc import Sequence

from tvm import tirx

from ...errors import TooDeep, Unsupported
from .accumulate import accumulation, accumulation_space, sums_over_rows
from .collapse import collapse_axes, drop_unused, reachable
from .definitions import Definition, read_definitions, read_params
from .expr import constant, convert, linear_form, substitute
from .placeholders import Placeholders
from .program import Element, Output, Program, Scalar, Tile
from .resolver import Resolver
from .space import Space, index_dtype_of, pointwise_space, row_space
from .walks import Walk, walks
from .window import is_window

SUPPORTED_DTYPES = re.compile(
    r"bool|bfloat16|float8_e4m3fn|float8_e5m2|float(16|32|64)|u?int(8|16|32|64)"
)


def analyze(func: tirx.PrimFunc, exact: bool = False) -> Program:
    """The row program that a fused PrimFunc computes.

    Parameters
    ----------
    func : s_tir PrimFunc of complete blocks, unscheduled; static or symbolic shapes.
    exact : keep every rounding of the unfused graph, instead of rounding only what is stored.

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
    analysis = _Analysis(func, exact)
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

    def __init__(self, func: tirx.PrimFunc, exact: bool) -> None:
        self.exact = exact
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
        found = tuple(_output(i, self.definition(i), space, resolver, orders) for i in plain)
        over_rows = tuple(accumulation(i, self.definition(i), space, resolver) for i in summed)
        program = Program(
            name=self.name,
            params=self.params,
            rows=space.rows,
            columns=space.columns,
            row_vars=space.row_vars,
            column_var=space.column_var,
            tiles=tuple(placeholders.tiles),
            scalars=tuple(placeholders.scalars),
            elements=tuple(placeholders.elements),
            reductions=tuple(placeholders.reductions),
            values=tuple(placeholders.values),
            outputs=found,
            exact=self.exact,
            accumulations=over_rows,
        )
        return drop_unused(program)


def _pointwise(analysis: _Analysis) -> Program:
    """One program for the outputs that share axes with the first, siblings for the others."""
    parts: list[Program] = []
    waiting = analysis.written
    while waiting:
        space = pointwise_space(analysis.blocks, analysis.definition(waiting[0]))
        fitting = [i for i in waiting if space.is_element(analysis.definition(i).shape)]
        program = analysis.program(space, fitting)
        scattered = _scattered(program, space)
        if scattered:
            fitting = [i for i in fitting if i not in scattered]
            program = analysis.program(space, fitting)
        parts.append(collapse_axes(program))
        waiting = [i for i in waiting if i not in fitting]
    return dataclasses.replace(parts[0], siblings=tuple(parts[1:]))


def _scattered(program: Program, space: Space) -> set[int]:
    """Outputs that share nothing with the space but their size.

    Computed in the linear order of the space, they read their inputs all over the place. What stays
    linear (a reshape) is fine.
    """
    coordinates = (*program.row_vars, program.column_var)
    definitions = program.placeholders()
    found = set()
    for output in program.outputs:
        if space.has_axes(program.params[output.param].shape):
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
    value = resolver.read(definition.buffer, space.indices(definition.shape, full), None)
    offset = space.row_index
    if full:
        columns = space.columns
        size = constant(columns, "int32") if isinstance(columns, int) else columns
        offset = offset * convert(size, space.index_dtype)
    offset = space.analyzer.simplify(offset)
    phase = resolver.placeholders.phase(value)
    return Output(param, value, offset, definition.dtype, full, phase)


def _placed_output(
    param: int, definition: Definition, space: Space, resolver: Resolver, walk: Walk | None
) -> Output:
    """A full output whose elements lie in the order of `walk`."""
    if walk is None:
        return _plain_output(param, definition, space, resolver, full=True)
    value = resolver.read(definition.buffer, walk.indices(space, definition.shape), None)
    first = {space.column_var: constant(0, space.index_dtype)}
    offset = space.analyzer.simplify(substitute(walk.place, first))
    phase = resolver.placeholders.phase(value)
    return Output(param, value, offset, definition.dtype, True, phase, walk.place)
