"""Which axes of a product are rows, columns and batch, and which factor is A.

acc[i, j] = sum_k x[i, k] * w[k, j]     axes only A reads are rows, axes only B reads columns,
                                        axes of both (or of neither) are batch
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm.ir import Expr, Var

from ..program.expr import constant, number, substitute, variables
from .index import Simplifier
from .model import INDEX, Axis, Operand, Output, Segment, equal_sizes, size_of

Factors = tuple[tuple[Operand, Operand], tuple[Axis, ...]]
"""Both factors of a product, and the axes of its sum."""

Orientation = tuple[tuple[Axis, ...], tuple[Axis, ...], tuple[Axis, ...], tuple[bool, ...]]
"""Batch, row and column axes, and for each product whether its second factor is A."""


def _used(operand: Operand, axes: Sequence[Axis]) -> set[Var]:
    """The axes, but those of the sum, that an operand depends on."""
    return {axis.var for axis in axes} & set(
        variables(operand.value, *(b.value for b in operand.bindings))
    )


def orientations(
    factors: Sequence[Factors], axes: Sequence[Axis], output: Output
) -> list[Orientation]:
    """Both ways to call one factor A and the other B, the one with contiguous columns first."""
    found = [_orientation(factors, axes, flip) for flip in (False, True)]
    inner = next((i for i in reversed(output.indices) if number(i) is None), None)
    if inner is None:
        return found
    columns = [_moves(inner, {axis.var for axis in n}, axes) for _, _, n, _ in found]
    return found if columns[0] or not columns[1] else found[::-1]


def _moves(index: Expr, wanted: set[Var], axes: Sequence[Axis]) -> bool:
    """Whether a step along one of the axes `wanted` moves `index` by one."""
    zero = {axis.var: constant(0, INDEX) for axis in axes}
    simplify = Simplifier(axes)
    start = simplify(substitute(index, zero))
    for var in variables(index):
        if var in wanted:
            step = simplify(substitute(index, {**zero, var: constant(1, INDEX)}) - start)
            if number(step) == 1:
                return True
    return False


def _orientation(factors: Sequence[Factors], axes: Sequence[Axis], flip: bool) -> Orientation:
    """Axes only A's read are rows, axes only B's read are columns, the others are batch."""
    pairs = [(_used(x, axes), _used(y, axes)) for (x, y), _ in factors]
    first = pairs[0][::-1] if flip else pairs[0]
    rows, columns = first[0] - first[1], first[1] - first[0]
    flipped = []
    for x, y in pairs:
        flipped.append(bool(x & columns or y & rows) and not (y & columns or x & rows))
    flipped[0] = flip
    a = set().union(*(y if f else x for (x, y), f in zip(pairs, flipped, strict=True)))
    b = set().union(*(x if f else y for (x, y), f in zip(pairs, flipped, strict=True)))
    m = tuple(axis for axis in axes if axis.var in a - b)
    n = tuple(axis for axis in axes if axis.var in b - a)
    batch = tuple(axis for axis in axes if (axis.var in a) == (axis.var in b))
    return batch, m, n, tuple(flipped)


def fitting(
    candidates: Sequence[Orientation], before: Sequence[Segment], factors: Sequence[Factors]
) -> Orientation:
    """The orientation of a segment beside those before it.

    Siblings call the same tensor A, so that batch and rows are those of the first segment. A
    segment of its own sizes or operands takes the orientation with contiguous columns.
    """
    if not before:
        return candidates[0]
    first = before[0]
    fitting = [
        c
        for c in candidates
        if equal_sizes(size_of(c[0]), size_of(first.batch))
        and equal_sizes(size_of(c[1]), size_of(first.m))
    ]
    if not fitting:
        return candidates[0]
    shared = first.products[0].a.load
    for candidate in fitting:
        pair = factors[0][0]
        load = pair[1 if candidate[3][0] else 0].load
        if shared is not None and load is not None and load.source.same_as(shared.source):
            return candidate
    return fitting[0] if shared is None else candidates[0]
