"""From a fused PrimFunc with scans to the program over rows x columns that it computes."""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr

from ...errors import TooDeep, Unsupported
from ..program.collapse import collapse_axes
from ..program.definitions import Definition, read_definitions, read_params, shape_of
from ..program.expr import constant, flatten, linear_form, number, substitute, unflatten
from ..program.program import Output, Program
from ..program.resolver import Placeholders, Resolver
from ..program.space import Space, index_dtype_of, make_space


def read_scans(func: tirx.PrimFunc, exact: bool = False) -> Program:
    """The program of a function with scans: columns lie along the scanned axis.

    Raises
    ------
    Unsupported
        There is no scan, or something is computed over other points.
    """
    try:
        return collapse_axes(_read(func, exact))
    except RecursionError:
        raise TooDeep("the chain of temporaries is too long") from None


def _read(func: tirx.PrimFunc, exact: bool) -> Program:
    params, blocks = read_params(func), read_definitions(func, scans=True)
    anchor = next((d for d in blocks if d.scan is not None), None)
    if anchor is None:
        raise Unsupported("the function holds no scan")
    place = next(n for n, axis in enumerate(anchor.axes) if anchor.scan.axis.same_as(axis))
    rows = [e for n, e in enumerate(anchor.shape) if n != place and e != 1]
    space = make_space(rows, anchor.shape[place], index_dtype_of(blocks))
    definitions = {definition.buffer: definition for definition in blocks}
    placeholders = Placeholders(space, params)
    resolver = Resolver(space, definitions, placeholders, exact)
    axes = _axes(space, anchor, place)
    written = [n for n, param in enumerate(params) if param.var in definitions]
    columns = anchor.shape[place]
    if isinstance(columns, int):
        columns = constant(columns, space.index_dtype)
    last = columns - 1
    turned = tuple(last - axis if n == place else axis for n, axis in enumerate(axes))
    outputs = [
        _output(n, definitions[params[n].var], anchor, (axes, turned), resolver) for n in written
    ]
    name = func.attrs.get("global_symbol") if func.attrs else None
    if placeholders.reductions:
        raise Unsupported("a reduction beside a scan")
    return placeholders.program(None if name is None else str(name), outputs, exact)


def _axes(space: Space, anchor: Definition, place: int) -> tuple[Expr, ...]:
    """The coordinate along each axis of what is scanned."""
    rows, zero = iter(space.row_vars), constant(0, space.index_dtype)
    return tuple(
        space.column_var if n == place else zero if extent == 1 else next(rows)
        for n, extent in enumerate(anchor.shape)
    )


def _output(
    param: int,
    definition: Definition,
    anchor: Definition,
    ways: tuple[tuple[Expr, ...], tuple[Expr, ...]],
    resolver: Resolver,
) -> Output:
    """What is written to a parameter: from one end of the rows, or from the other."""
    name, space = definition.buffer.name, resolver.space
    shape = definition.shape
    if len(shape) != len(anchor.shape) or not all(map(space.equal, shape, anchor.shape)):
        if definition.is_part or not space.is_element(shape):
            raise Unsupported(f"{name} {list(shape)} beside scans of {list(anchor.shape)}")
        flat = [flatten(axes, anchor.shape, space.index_dtype) for axes in ways]
        ways = tuple(unflatten(at, shape, space.analyzer) for at in flat)
    axes, turned = ways
    try:
        value = resolver.read(definition.buffer, axes, None)
    except Unsupported:
        value, axes = resolver.read(definition.buffer, turned, None), turned
    at = flatten(axes, shape_of(definition.buffer), space.index_dtype)
    at = space.analyzer.simplify(at)
    offset = substitute(at, {space.column_var: constant(0, space.index_dtype)})
    form = linear_form(at, (space.column_var,))
    follows = form is not None and number(form[0][0]) == 1
    return Output(
        param,
        value,
        space.analyzer.simplify(offset),
        definition.dtype,
        True,
        0,
        None if follows else at,
    )
