"""Where conditions on an axis change, so that a loop can be cut there.

   for j < 9: y[j] = if_then_else(1 <= j and j < 8, x[j - 1], 0)
-> for j < 1: y[j] = 0;  for j < 7: y[1 + j] = x[j];  for j < 1: y[8 + j] = 0
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.ir import Expr, Var
from tvm.ir.prim.expr import CmpExpr

from ...program.expr import constant, dtype_of, number
from ..nests.nests import Nest
from .rewrite import Substitute, branches, free_variables, is_conditional, loads, nodes

# More cuts than a pad or a concatenation of a few tensors needs would only be code.
MOST_CUTS = 4


def cuts(item: Nest, axis: int, size: int) -> list[int]:
    """Positions on an axis of the nest, between 0 and `size`, at which a condition changes.

    Only conditions that decide about a load count, and only those that depend on nothing else.
    """
    found: set[int] = set()
    for member in item.members:
        var = member.axes[axis].var
        for expr in nodes(*member.stage.expressions()):
            if is_conditional(expr) and loads(*branches(expr)[1:]):
                found.update(_changes(branches(expr)[0], var))
    inside = sorted(c for c in found if 0 < c < size)
    return inside if len(inside) <= MOST_CUTS else []


def _changes(condition: Expr, var: Var) -> set[int]:
    """Where comparisons of `var` with constants change."""
    found = set()
    for expr in nodes(condition):
        if isinstance(expr, CmpExpr) and set(free_variables(expr)) == {var} and not loads(expr):
            change = _change(expr, var)
            if change is not None:
                found.add(change)
    return found


def _change(comparison: CmpExpr, var: Var) -> int | None:
    """The first value of `var` for which a comparison is another than for smaller ones."""
    if isinstance(comparison, tirx.EQ | tirx.NE):
        return None
    analyzer = tvm.sym.Analyzer()

    def difference(at: int) -> int | None:
        env = {var: constant(at, dtype_of(var))}
        side = Substitute(env)(comparison.a), Substitute(env)(comparison.b)
        return number(analyzer.simplify(side[0] - side[1]))

    at_zero, at_one, at_two = difference(0), difference(1), difference(2)
    if None in (at_zero, at_one, at_two) or at_one - at_zero != at_two - at_one:
        return None
    slope = at_one - at_zero
    if slope not in (1, -1):
        return None
    root = -at_zero * slope
    # The difference is slope * (var - root): if it rises, `<` and `>=` change at the root.
    changes_at_root = isinstance(comparison, tirx.LT | tirx.GE) == (slope == 1)
    return root if changes_at_root else root + 1
