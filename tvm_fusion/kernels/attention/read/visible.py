"""The range of keys that a query sees, where conditions on indices say so.

    n <= m + 3 and m - n < 100                  keys m - 99 ... m + 3
    n <= m and documents[m] == documents[n]     keys 0 ... m, and more conditions than these

Whoever walks over tiles of keys leaves out those beyond the range.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tvm import tirx
from tvm.ir import Expr, Var

from ...contraction.model import INDEX, Simplifier
from ...program.expr import constant, convert, dtype_of, is_integer, linear_form, number, variables
from .model import Attention

_SIDES = {tirx.LE: (1, 0), tirx.LT: (1, 1), tirx.GE: (-1, 0), tirx.GT: (-1, 1)}


class VisibleRange(NamedTuple):
    """Keys ``low <= key < high`` that a query may see; None: from the first, to the last.

    `low` and `high` are over the query's axis (and sizes), and may lie outside of 0 ... N. With
    `whole`, a key is visible if and only if it lies in the range; else other conditions hide some
    of its keys.
    """

    low: Expr | None
    high: Expr | None
    whole: bool


def visible_range(attention: Attention) -> VisibleRange:
    """The range of visible keys of a query.

    It takes the conditions that all keys have to meet and that compare the index of the key with a
    linear function of the query's: ``key <= query + c``, ``query - key < c``, ``key < c``,
    ``key == query``. Attentions with several key or query axes have no range.
    """
    if attention.visible is None:
        return VisibleRange(None, None, True)
    if len(attention.keys) != 1 or len(attention.queries) > 1:
        return VisibleRange(None, None, False)
    axes = (*attention.queries, *attention.keys)
    simplify = Simplifier(axes)
    key = attention.keys[0].var
    known = {axis.var for axis in axes} | set(_sizes(attention))
    low: Expr | None = None
    high: Expr | None = None
    whole = True
    for condition in _conjuncts(attention.visible):
        bounds = list(_bounds(condition, key, known))
        whole = whole and bool(bounds)
        for is_upper, bound in bounds:
            if is_upper:
                end = bound + constant(1, INDEX)
                high = simplify(end if high is None else tirx.Min(high, end))
            else:
                low = simplify(bound if low is None else tirx.Max(low, bound))
    return VisibleRange(low, high, whole)


def _sizes(attention: Attention) -> Iterator[Var]:
    """Variables that sizes of parameters are made of."""
    for param in attention.params:
        yield from variables(*(n for n in param.shape or () if not isinstance(n, int)))


def _conjuncts(condition: Expr) -> Iterator[Expr]:
    if isinstance(condition, tirx.And):
        yield from _conjuncts(condition.a)
        yield from _conjuncts(condition.b)
    else:
        yield condition


def _bounds(condition: Expr, key: Var, known: set[Var]) -> Iterator[tuple[bool, Expr]]:
    """``(True, b)`` for key <= b and ``(False, b)`` for key >= b; nothing for other conditions."""
    if not isinstance(condition, tirx.EQ) and type(condition) not in _SIDES:
        return
    a, b = condition.a, condition.b
    if not is_integer(dtype_of(a)) or not set(variables(a, b)) <= known:
        return
    form = linear_form(convert(a, INDEX) - convert(b, INDEX), [key])
    if form is None or number(form[0][0]) not in (1, -1):
        return
    along, rest = int(number(form[0][0])), convert(form[1], INDEX)
    if isinstance(condition, tirx.EQ):
        equal = rest * constant(-along, INDEX)
        yield from ((True, equal), (False, equal))
        return
    sign, strict = _SIDES[type(condition)]
    # sign * (along * key + rest) + strict <= 0
    if sign * along > 0:
        yield True, rest * constant(-along, INDEX) - constant(strict, INDEX)
    else:
        yield False, rest * constant(-along, INDEX) + constant(strict, INDEX)
