"""Whether every query sees some key, whatever the inputs are: a key that meets all conditions.

n <= m                                  key 0
n <= m and m - n < 100                  key m, where there are not fewer keys than queries
n <= m and ids[b, m] == ids[b, n]       key m
n < lengths[b]                          none: a length may be 0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import tvm
from tvm import tirx
from tvm.ir import Expr, TensorLoad

from ...contraction.model import INDEX, MAX_EXTENT, Axis
from ...program.expr import (
    constant,
    convert,
    dtype_of,
    is_integer,
    linear_form,
    number,
    same,
    substitute,
    variables,
)

_COMPARISONS = (tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ)


def every_row_sees_a_key(
    conditions: Sequence[Expr], axes: Sequence[Axis], keys: Sequence[Axis]
) -> bool:
    """Whether some key provably meets all conditions of a visible key, for all rows.

    Parameters
    ----------
    conditions : boolean, over `axes` and `keys`, without temporaries.
    axes, keys : of the rows, and of the keys. Symbolic extents are 1 or more.
    """
    if len(keys) != 1:
        return not conditions
    return _Proof(axes, keys[0]).holds(conditions)


class _Proof:
    """Tries keys one by one."""

    def __init__(self, axes: Sequence[Axis], key: Axis) -> None:
        self.key = key
        self.analyzer = tvm.sym.Analyzer()
        extents = [a.extent for a in (*axes, key) if not isinstance(a.extent, int)]
        for size in variables(*extents):
            one, most = constant(1, dtype_of(size)), constant(MAX_EXTENT, dtype_of(size))
            self.analyzer.bind(size, tvm.ir.Range(one, most))
        for axis in axes:
            self.analyzer.bind(axis.var, tvm.ir.Range(0, axis.extent))

    def holds(self, conditions: Sequence[Expr]) -> bool:
        """Whether one of the candidates meets all conditions."""
        return any(
            self._is_a_key(candidate)
            and all(self._true(substitute(c, {self.key.var: candidate})) for c in conditions)
            for candidate in self._candidates(conditions)
        )

    def _candidates(self, conditions: Sequence[Expr]) -> Iterator[Expr]:
        """The first and the last key, and those on the edge of a condition."""
        yield constant(0, INDEX)
        yield _size(self.key) - constant(1, INDEX)
        for condition in conditions:
            for comparison in _comparisons(condition):
                yield from self._edges(comparison)

    def _edges(self, comparison: Expr) -> Iterator[Expr]:
        """Keys where both sides of a comparison are equal, or 1 apart; for equal elements of
        tensors, keys that read the same element.
        """
        a, b = comparison.a, comparison.b
        if isinstance(a, TensorLoad) and isinstance(b, TensorLoad) and a.source.same_as(b.source):
            sides = list(zip(a.indices, b.indices, strict=True))
        else:
            sides = [(a, b)]
        for left, right in sides:
            if not (is_integer(dtype_of(left)) and is_integer(dtype_of(right))):
                continue
            form = linear_form(convert(left, INDEX) - convert(right, INDEX), [self.key.var])
            factor = None if form is None else number(form[0][0])
            if factor in (1, -1):
                edge = convert(form[1], INDEX) * constant(-int(factor), INDEX)
                for step in (0, -1, 1):
                    yield edge + constant(step, INDEX)

    def _is_a_key(self, candidate: Expr) -> bool:
        inside = tirx.And(candidate >= 0, candidate < _size(self.key))
        return self._true(inside)

    def _true(self, condition: Expr) -> bool:
        """Whether a condition holds at all points."""
        if isinstance(condition, tirx.And):
            return self._true(condition.a) and self._true(condition.b)
        if isinstance(condition, tirx.Or):
            return self._true(condition.a) or self._true(condition.b)
        if isinstance(condition, tirx.EQ) and self._same(condition.a, condition.b):
            return True
        if isinstance(condition, _COMPARISONS) and is_integer(dtype_of(condition.a)):
            return bool(self.analyzer.can_prove(condition))
        return number(condition) == 1

    def _same(self, a: Expr, b: Expr) -> bool:
        """Whether two expressions are one element of a tensor, or equal as they stand."""
        if same(a, b):
            return True
        if not (isinstance(a, TensorLoad) and isinstance(b, TensorLoad)):
            return False
        pairs = zip(a.indices, b.indices, strict=True)
        return a.source.same_as(b.source) and all(
            self.analyzer.can_prove_equal(i, j) for i, j in pairs
        )


def _size(axis: Axis) -> Expr:
    """The extent of an axis as an index."""
    extent = axis.extent
    return constant(extent, INDEX) if isinstance(extent, int) else convert(extent, INDEX)


def _comparisons(condition: Expr) -> Iterator[Expr]:
    if isinstance(condition, tirx.And | tirx.Or):
        yield from _comparisons(condition.a)
        yield from _comparisons(condition.b)
    elif isinstance(condition, _COMPARISONS):
        yield condition
