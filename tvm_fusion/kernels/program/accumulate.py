"""Sums over rows beside reductions over columns: layer-norm backward, dx with dgamma and dbeta.

r[i]    = sum over j of dy[i, j]             rows [S * R] x columns N
a[s, j] = sum over k of dy[s * R + k, j]     an accumulation: rows (S, R), S results a column
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tvm_ffi
from tvm.ir import TensorLoad, Var

from ...errors import Unsupported
from .definitions import Definition
from .expr import constant, dtype_of, number, unflatten, variables
from .program import Accumulation
from .resolver import Resolver
from .space import Space, make_space


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
