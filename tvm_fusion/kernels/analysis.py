"""From a fused PrimFunc to the row program it computes.

The analysis walks backwards from the outputs (see `resolver`). Nothing is recognised by the name
of an operator: the label pick of a cross-entropy, a slice or a transposed read are loads at other
indices and no more.

Does not handle: reductions of more than one value (argmax), reductions over axes that differ in
extent or rows, buffers written in parts or by several blocks, data-dependent writes.
"""

from __future__ import annotations

from tvm import tirx

from ..errors import Unsupported
from .collapse import collapse_axes, drop_unused
from .definitions import Definition, read_definitions, read_params
from .expr import constant, convert
from .placeholders import Placeholders
from .program import Output, Program
from .resolver import Resolver
from .space import Space, choose_space


def analyze(func: tirx.PrimFunc, exact: bool = False) -> Program:
    """The row program that a fused PrimFunc computes.

    Parameters
    ----------
    func : s_tir PrimFunc of complete blocks, unscheduled; static or symbolic shapes.
    exact : keep every rounding of the unfused graph, instead of rounding only what is stored.

    Returns
    -------
    Program
        Its axes are merged where all accesses walk through them together.

    Raises
    ------
    Unsupported
        Where the function is not one space of rows x columns; the message says why.
    """
    params = read_params(func)
    blocks = read_definitions(func)
    space = choose_space(blocks, params)
    placeholders = Placeholders(space, params)
    definitions = {definition.buffer: definition for definition in blocks}
    resolver = Resolver(space, definitions, placeholders, exact)
    try:
        outputs = tuple(
            _output(index, definitions[param.var], space, resolver)
            for index, param in enumerate(params)
            if param.var in definitions
        )
    except RecursionError:
        raise Unsupported("the chain of temporaries is too long") from None
    name = func.attrs.get("global_symbol") if func.attrs else None
    program = Program(
        name=None if name is None else str(name),
        params=params,
        rows=space.rows,
        columns=space.columns,
        row_vars=space.row_vars,
        column_var=space.column_var,
        tiles=tuple(placeholders.tiles),
        scalars=tuple(placeholders.scalars),
        elements=tuple(placeholders.elements),
        reductions=tuple(placeholders.reductions),
        values=tuple(placeholders.values),
        outputs=outputs,
        exact=exact,
    )
    return collapse_axes(drop_unused(program))


def _output(param: int, definition: Definition, space: Space, resolver: Resolver) -> Output:
    """What is written to a parameter: one element a point, or one a row."""
    shape = definition.shape
    full = space.is_element(shape)
    if not full and not space.is_row(shape):
        text = f"{list(space.rows)} x {space.columns}"
        raise Unsupported(f"{definition.buffer.name} {list(shape)} is no part of {text}")
    value = resolver.read(definition.buffer, space.indices(shape, full), None)
    offset = space.row_index
    if full:
        columns = space.columns
        size = constant(columns, "int32") if isinstance(columns, int) else columns
        offset = offset * convert(size, space.index_dtype)
    offset = space.analyzer.simplify(offset)
    phase = resolver.placeholders.phase(value)
    return Output(param, value, offset, definition.dtype, full, phase)
