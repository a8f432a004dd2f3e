"""Which keys a query sees: the conditions that are linear in the key and the query, and the rest.

key <= query + 3 and key >= query - 100 and ids[key] == ids[query]
  -> bounds: key <= 1 * query + 3, key >= 1 * query - 100        rest: ids[key] == ids[query]

Which tiles of keys follow for a tile of queries is up to each form. Forms that look at the keys of
each block when they run also take limits that the batch decides:

visible = n < lengths[b] and n > m - 512 and not padding[b, n]
  below   lengths[b]        every key at or above is hidden from the whole block
  least   m - 511           the smallest one over the block's rows counts
  rest    n > m - 512 and not padding[b, n]     what is left to be asked at each point
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var

from ...contraction.model import INDEX, Axis, Simplifier, equal_sizes
from ...program.expr import (
    conjunction,
    conjuncts,
    constant,
    dtype_of,
    is_integer,
    linear_form,
    number,
    rebuild,
    substitute,
    uses_any,
)
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
    for condition in conjuncts(attention.visible):
        found = _bound(attention, condition)
        (rest if found is None else bounds).append(condition if found is None else found)
    return Range(tuple(bounds), tuple(rest))


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


# Keys that cannot match a query: conditions ``f(query) == g(key)``.
#
#     documents[b, i] == documents[b, j], a tile of queries of documents 3 ... 5
#       -> from the first to the last tile of keys with a document within 3 ... 5
#       -> each query's first and last key, where the keys of each document stand together


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """A key is visible only where both are equal; `query` is over batch and queries, `key` over
    batch and keys.
    """

    query: Expr
    key: Expr


def split_match(attention: Attention, keys: Range) -> tuple[Match | None, Range]:
    """The first condition on single points that is such an equality of integers, if there is one,
    and what remains.
    """
    for condition in keys.rest:
        found = _match(attention, condition)
        if found is not None:
            rest = tuple(other for other in keys.rest if other is not condition)
            return found, Range(keys.bounds, rest)
    return None, keys


def _match(attention: Attention, condition: Expr) -> Match | None:
    queries = [axis.var for axis in attention.queries]
    keys = [axis.var for axis in attention.keys]
    names = [binding.var for binding in attention.bindings]
    if not isinstance(condition, tirx.EQ) or not is_integer(dtype_of(condition.a)):
        return None
    if dtype_of(condition.a) != dtype_of(condition.b) or uses_any(condition, names):
        return None
    for query, key in ((condition.a, condition.b), (condition.b, condition.a)):
        if not uses_any(query, keys) and not uses_any(key, queries) and uses_any(key, keys):
            return Match(query, key)
    return None


_LESS = (tirx.LT, tirx.LE)
_GREATER = (tirx.GT, tirx.GE)


@dataclass(frozen=True, slots=True, eq=False)
class KeyLimits:
    """Bounds of the keys' flat number, int64, over batch and queries.

    Attributes
    ----------
    least : no key below any of these is visible.
    below : no key at or above any of these is visible.
    rest : condition that a key within the bounds has to meet besides, or None.
    """

    least: tuple[Expr, ...]
    below: tuple[Expr, ...]
    rest: Expr | None


def key_limits(attention: Attention, rows: Sequence[Var]) -> KeyLimits:
    """The bounds in `visible`; those that depend on `rows` (variables) stay in `rest` too."""
    least, below, rest = [], [], []
    env: dict[Var, Expr] = {}
    for binding in attention.bindings:
        env[binding.var] = substitute(binding.value, env)
    simplify = Simplifier(a for g in attention.groups.values() for a in g)
    for condition in conjuncts(attention.visible):
        bound = _limit(substitute(condition, env), attention)
        if bound is None:
            rest.append(condition)
            continue
        is_upper, value = bound
        (below if is_upper else least).append(simplify(value))
        if uses_any(value, rows):
            rest.append(condition)
    return KeyLimits(tuple(least), tuple(below), conjunction(*rest))


def _limit(condition: Expr, attention: Attention) -> tuple[bool, Expr] | None:
    """(whether it is an upper bound, its value): ``n < value`` or ``n >= value``; or None."""
    if not isinstance(condition, _LESS + _GREATER) or not is_integer(dtype_of(condition.a)):
        return None
    low, high = condition.a, condition.b
    if isinstance(condition, _GREATER):
        low, high = high, low
    strict = isinstance(condition, tirx.LT | tirx.GT)
    form = linear_form(_wide(low) - _wide(high), [axis.var for axis in attention.keys])
    if form is None or not attention.keys:
        return None
    sign = _sign(form[0], attention.keys)
    hidden = [attention.score, *(axis.var for axis in attention.keys)]
    if sign is None or uses_any(form[1], hidden):
        return None
    one = constant(1, INDEX)
    if sign > 0:  # n + rest < 0
        value = constant(0, INDEX) - form[1]
        return True, value if strict else value + one
    return False, form[1] + one if strict else form[1]


def _sign(coefficients: Sequence[Expr], keys: Sequence[Axis]) -> int | None:
    """1 or -1 where the coefficients are those of the keys' flat number or its negative."""
    for sign in (1, -1):
        stride = constant(1, INDEX)
        for coefficient, axis in zip(reversed(coefficients), reversed(keys), strict=True):
            if not _equal(coefficient, stride * constant(sign, INDEX)):
                break
            extent = axis.extent
            size = constant(extent, INDEX) if isinstance(extent, int) else extent
            stride = stride * size
        else:
            return sign
    return None


def _equal(a: Expr, b: Expr) -> bool:
    if number(a) is not None and number(b) is not None:
        return number(a) == number(b)
    return equal_sizes(a, b)


def _wide(expr: Expr) -> Expr:
    """An integer expression in int64; indices are far from where narrower ones wrap around."""
    if isinstance(expr, tirx.Cast) and is_integer(dtype_of(expr.value)):
        return _wide(expr.value)
    if isinstance(expr, tirx.IntImm):
        return constant(int(expr.value), INDEX)
    if isinstance(expr, Var | TensorLoad) or not isinstance(
        expr, tirx.Add | tirx.Sub | tirx.Mul | tirx.Min | tirx.Max
    ):
        return expr if dtype_of(expr) == INDEX else tirx.Cast(INDEX, expr)
    return rebuild(expr, _wide)
