"""Where a convolution reads its data: conditions as bounds of linear forms, and places under them.

    1 <= y + r and y + r < 19 ? x[min((y + r - 1) / 2, 8)] : 0      ->      x[(y + r - 1) // 2]

What a condition leaves of a place is told by a coordinate of that range: ``u = y + r - 1``, 0 <= u
< 18.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import tvm
from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var

from ...errors import Unsupported
from ..contraction.model import INDEX, Axis, Simplifier, fresh_var
from ..contraction.row_runs import loads_of
from ..program.expr import constant, number, rebuild, substitute, variables
from ..program.extents import larger, simplified, sized, smaller
from ..program.program import Extent

Linear = tuple[dict[Var, int], Extent]
"""Coefficients of axes, and a constant: a number, or what symbolic sizes make."""
LinearOf = Callable[[Expr], Linear | None]
"""Reads an expression as such a form; None where it is none."""


class Ranges:
    """The conditions under which data is read, as bounds of linear forms."""

    def __init__(self, conditions: Sequence[Expr], linear: LinearOf) -> None:
        self.bounds: list[Linear] = []  # that are 0 or more
        self.multiples: list[tuple[Linear, int]] = []
        self.used: set[int] = set()
        for condition in conditions:
            self._add(condition, linear)

    def _add(self, condition: Expr, linear: LinearOf) -> None:
        if isinstance(condition, tirx.EQ):
            a, b = condition.a, condition.b
            if isinstance(a, tirx.FloorMod) and number(a.b) is not None and number(b) is not None:
                at = linear(a.a)
                if at is not None and isinstance(at[1], int):
                    shifted = at[0], at[1] - int(number(b))
                    self.multiples.append((shifted, abs(int(number(a.b)))))
                    return
            halves = [tirx.GE(a, b), tirx.LE(a, b)]
        else:
            halves = [condition]
        for half in halves:
            bound = lower_bound(half, linear)
            if bound is None:
                raise Unsupported("data that is read under another condition than padding")
            self.bounds.append(bound)

    def divides(self, at: Linear, expansion: int) -> bool:
        """Whether a condition says that the linear form is a multiple."""
        for i, (form, step) in enumerate(self.multiples):
            apart = simplified(form[1] - at[1])
            if not isinstance(apart, int):
                continue
            if step == expansion and form[0] == at[0] and apart % expansion == 0:
                self.used.add(-1 - i)
                return True
        return False

    def of(self, at: Linear, expansion: int) -> tuple[Extent | None, Extent | None]:
        """The least index, and the first one beyond the last, that conditions leave; these are
        said by it from now on.
        """
        low, high, said = self._limits(at, expansion)
        self.used |= said
        return low, high

    def _limits(
        self, at: Linear, expansion: int = 1
    ) -> tuple[Extent | None, Extent | None, set[int]]:
        """The same, and which conditions say it."""
        low: Extent | None = None
        high: Extent | None = None
        said = set()
        for i, form in enumerate(self.bounds):
            times = _times(at[0], form[0])
            if times is None:
                continue
            said.add(i)
            if times > 0:  # at = times * form + c, and form >= 0
                least = simplified(-((times * form[1] - at[1]) // expansion))
                low = least if low is None else larger(low, least)
            else:
                end = simplified((at[1] - times * form[1]) // expansion + 1)
                high = end if high is None else smaller(high, end)
        return low, high, said

    def least(self, form: Mapping[Var, int], axes: Mapping[Var, Axis]) -> Extent:
        """The least value of a form that axes and conditions leave."""
        low, _, _ = self._limits((dict(form), 0))
        least = simplified(sum(n * (axes[v].extent - 1) for v, n in form.items() if n < 0))
        return least if low is None else larger(low, least)

    def most(self, form: Mapping[Var, int], axes: Mapping[Var, Axis]) -> Extent:
        """The largest one."""
        _, end, _ = self._limits((dict(form), 0))
        most = simplified(sum(n * (axes[v].extent - 1) for v, n in form.items() if n > 0))
        return most if end is None else smaller(end - 1, most)

    def forms(self) -> list[dict[Var, int]]:
        """The coefficients that conditions bound, each once."""
        found: list[dict[Var, int]] = []
        for coefficients, _ in self.bounds:
            if coefficients and not any(_times(coefficients, known) for known in found):
                found.append(coefficients)
        return found

    def pinned(self, axes: Mapping[Var, Axis]) -> list[tuple[dict[Var, int], int]]:
        """The forms that conditions and axes leave one value, and it."""
        found = []
        for form in self.forms():
            if not all(isinstance(axes[v].extent, int) for v in form):
                continue
            rising = form if max(form.values()) > 0 else {v: -n for v, n in form.items()}
            least = self.least(rising, axes)
            if isinstance(least, int) and least == self.most(rising, axes):
                found.append((rising, least))
        return found

    def check(self) -> None:
        """Every condition is that of a window."""
        conditions = {*range(len(self.bounds)), *(-1 - i for i in range(len(self.multiples)))}
        if conditions - self.used:
            raise Unsupported("data that is read under another condition than padding")


def lower_bound(condition: Expr, linear: LinearOf) -> Linear | None:
    """The linear form that is 0 or more where a condition holds; None where that is no bound."""
    pairs = {
        tirx.GE: lambda c: (c.a, c.b, 0),
        tirx.GT: lambda c: (c.a, c.b, 1),
        tirx.LE: lambda c: (c.b, c.a, 0),
        tirx.LT: lambda c: (c.b, c.a, 1),
    }
    if type(condition) not in pairs:
        return None
    more, less, strict = pairs[type(condition)](condition)
    more, less = linear(more), linear(less)
    if more is None or less is None:
        return None
    coefficients = dict(more[0])
    for var, factor in less[0].items():
        coefficients[var] = coefficients.get(var, 0) - factor
    coefficients = {v: f for v, f in coefficients.items() if f}
    return coefficients, simplified(more[1] - less[1] - strict)


def floored(value: Expr, ranges: Ranges, axes: Mapping[Var, Axis]) -> Expr:
    """A value that is read under conditions, with places as these leave them: divisions round
    down, and nothing is clamped to where it lies anyway.
    """
    names, places, back, taken = list(axes.values()), {}, {}, set()
    for form in ranges.forms():
        var = next((v for v, factor in form.items() if abs(factor) == 1), None)
        if var is None or taken & set(form):
            continue
        taken |= set(form)
        low, high = ranges.least(form, axes), ranges.most(form, axes)
        coordinate = Axis(fresh_var("at", INDEX), larger(1, simplified(high - low + 1)))
        rest = _sum({v: n for v, n in form.items() if v is not var})
        own = coordinate.var + sized(low) - rest
        names.append(coordinate)
        places[var] = own * constant(form[var], INDEX)
        back[coordinate.var] = _sum(form) - sized(low)
    simplify = Simplifier(names)

    def place(expr: Expr) -> Expr:
        expr = rebuild(expr, place)
        if isinstance(expr, tirx.Div) and number(expr.b) is not None:
            above = simplify(expr.a)
            if simplify.most(above) is not None:  # it is no less than 0
                expr = tirx.FloorDiv(above, expr.b)
        return expr

    def visit(expr: Expr) -> Expr:
        if not isinstance(expr, TensorLoad):
            return rebuild(expr, visit)
        inside = (simplify(place(substitute(i, places))) for i in expr.indices)
        return tirx.BufferLoad(expr.source, [substitute(i, back) for i in inside])

    return visit(value)


def _sum(form: Mapping[Var, int]) -> Expr:
    found = constant(0, INDEX)
    for var, factor in form.items():
        found = found + var * constant(factor, INDEX)
    return found


def _times(some: dict[Var, int], form: dict[Var, int]) -> int | None:
    """How many times coefficients are others, which are not all 0; None where they are not."""
    if not form or set(some) != set(form):
        return None
    found = {some[v] / form[v] for v in form}
    times = found.pop()
    return int(times) if not found and times == int(times) else None


def linear_of(expr: Expr, axes: Mapping[Var, Axis]) -> Linear | None:
    """An index as a linear form of axes, or None."""
    value = number(expr)
    if value is not None:
        return {}, int(value)
    if isinstance(expr, Var):
        return ({expr: 1}, 0) if expr in axes else ({}, expr)
    if _is_size(expr, axes):
        return {}, expr
    if isinstance(expr, tirx.Cast):
        return linear_of(expr.value, axes)
    if isinstance(expr, tirx.Add | tirx.Sub):
        a, b = linear_of(expr.a, axes), linear_of(expr.b, axes)
        if a is None or b is None:
            return None
        sign = 1 if isinstance(expr, tirx.Add) else -1
        found = dict(a[0])
        for var, factor in b[0].items():
            found[var] = found.get(var, 0) + sign * factor
        return {v: f for v, f in found.items() if f}, simplified(a[1] + sign * b[1])
    if isinstance(expr, tirx.Mul):
        a, b = linear_of(expr.a, axes), linear_of(expr.b, axes)
        if a is None or b is None or (a[0] and b[0]):
            return None
        form, factor = (a, b[1]) if a[0] else (b, a[1])
        if not isinstance(factor, int):
            return None
        found = {v: f * factor for v, f in form[0].items() if f * factor}
        return found, simplified(form[1] * factor)
    return None


def _is_size(expr: Expr, axes: Mapping[Var, Axis]) -> bool:
    """Whether an index is made of symbolic sizes alone."""
    read = variables(expr)
    plain = all(isinstance(v.ty, tvm.ir.PrimType) and v not in axes for v in read)
    return bool(read) and plain and not loads_of(expr)
