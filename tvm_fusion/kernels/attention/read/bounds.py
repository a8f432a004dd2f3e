"""Which keys a query sees: the conditions that are linear in the key and the query, and the rest.

key <= query + 3 and key >= query - 100 and ids[key] == ids[query]
  -> bounds: key <= 1 * query + 3, key >= 1 * query - 100        rest: ids[key] == ids[query]

Which tiles of keys follow for a tile of queries is up to each form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr

from ...program.expr import constant, dtype_of, is_integer, linear_form, number, uses_any
from .model import Attention


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """``key <= slope * query + rest`` (`upper`), or ``key >= ...``; `rest` is over the batch."""

    upper: bool
    slope: int
    rest: Expr


@dataclass(frozen=True, slots=True, eq=False)
class Range:
    """Conditions on a key: all `bounds`, and whatever `rest` says of single points."""

    bounds: tuple[Bound, ...]
    rest: tuple[Expr, ...]


def key_range(attention: Attention) -> Range:
    """The bounds among the conditions of an attention, and the other conditions."""
    if attention.visible is None:
        return Range((), ())
    bounds, rest = [], []
    for condition in _conjuncts(attention.visible):
        found = _bound(attention, condition)
        (rest if found is None else bounds).append(condition if found is None else found)
    return Range(tuple(bounds), tuple(rest))


def _conjuncts(condition: Expr) -> Iterator[Expr]:
    if isinstance(condition, tirx.And):
        yield from _conjuncts(condition.a)
        yield from _conjuncts(condition.b)
    else:
        yield condition


def _bound(attention: Attention, condition: Expr) -> Bound | None:
    sides = {tirx.LE: (1, 0), tirx.LT: (1, -1), tirx.GE: (-1, 0), tirx.GT: (-1, -1)}
    if type(condition) not in sides or len(attention.keys) != 1 or len(attention.queries) > 1:
        return None
    if not is_integer(dtype_of(condition.a)):
        return None
    sign, shift = sides[type(condition)]
    # condition: difference <= 0
    difference = (condition.a - condition.b) * constant(sign, dtype_of(condition.a))
    difference = difference - constant(shift, dtype_of(difference))
    axes = [axis.var for axis in (*attention.keys, *attention.queries)]
    form = linear_form(difference, axes)
    if form is None or uses_any(form[1], [b.var for b in attention.bindings]):
        return None
    factors = [number(factor) for factor in form[0]]
    if None in factors or factors[0] not in (1, -1):
        return None
    along, rest = factors[0], form[1]
    slope = factors[1] if len(factors) > 1 else 0
    # along * key + slope * query + rest <= 0
    rest = rest if along < 0 else rest * constant(-1, dtype_of(rest))
    return Bound(along > 0, int(-slope * along), rest)
