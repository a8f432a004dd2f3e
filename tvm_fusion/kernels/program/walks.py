"""Walks: in which order the elements of a rows x columns space lie in memory, where the columns are
not the last axes.

    S[i] = sum over k of x[k, i]      rows (i), columns k     walk k, i:    element k * N + i
    S[c] = sum over n, h, w of x[n, c, h, w]                  walk n, c, hw
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm.ir import Expr, TensorLoad, Var

from .definitions import Definition, shape_of
from .expr import constant, flatten, number, unflatten
from .program import Extent
from .space import Space


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
