"""Which keys a logit leaves visible: the conditions behind -inf, and what is left without them.

where(j <= i, s, -inf)  ->  s,  visible j <= i        (1 - cast(mask)) * -1e9  ->  0, visible mask

A number far below zero, such as -1e9, is taken for -inf only where the caller says so: it hides a
key next to visible ones, while the keys of a row that has nothing else keep weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr

from ...program.expr import conjunction, dtype_of
from .conditions import Conditions
from .model import INVISIBLE
from .terms import Linear, choice, value_of

LEAST_FLOAT = -3.4028235677973366e38
"""Numbers below this are -inf in float32."""
NOTHING_FINITE = math.nextafter(LEAST_FLOAT, -math.inf)
"""As `hiding`: only -inf hides."""


@dataclass(slots=True, eq=False)
class Split:
    """A logit taken apart.

    Attributes
    ----------
    conditions : hold together where a key is visible.
    logit : of a visible key.
    faint : the largest of the finite constants that hide, -inf if none does.
    """

    conditions: list[Expr]
    logit: Linear
    faint: float


def split(conditions: Conditions, logit: Linear, hiding: float = INVISIBLE) -> Split:
    """The conditions of a visible key, and the logit of one that is visible.

    Constants at or below `hiding` hide.
    """
    found: list[Expr] = []
    result = Split([], Linear([], logit.constant), -math.inf)
    splitter = _Splitter(conditions, hiding, found, result)
    for term, coefficient in logit.terms:
        splitter.split(term, coefficient)
    result.conditions += conditions.conjuncts(conjunction(*found)) if found else []
    return result


class _Splitter:
    """Takes one logit apart."""

    def __init__(
        self, conditions: Conditions, hiding: float, found: list[Expr], result: Split
    ) -> None:
        self.space, self.algebra = conditions.space, conditions.algebra
        self.two_valued = conditions.two_valued
        self.hiding, self.found, self.result = hiding, found, result

    def split(self, term: Expr, coefficient: float) -> None:
        """Adds a term of the logit to what is visible, or to what hides."""
        kept = self.result.logit
        opened = self.space.open(term)
        two = self.two_valued(opened)
        if two is not None and dtype_of(opened) != "bool":
            yes, no = coefficient * two[1], coefficient * two[2]
            if yes != no and self._hides(-abs(yes - no)):
                self.found.append(two[0] if yes > no else tirx.Not(two[0]))
                kept.constant += max(yes, no)
                return
        parts = choice(opened)
        if parts is not None:
            condition, yes, no = parts
            for side, hidden, holds in ((yes, no, condition), (no, yes, tirx.Not(condition))):
                if self._hides(self._least(hidden, coefficient)):
                    self.found.append(holds)
                    self._open(side, coefficient)
                    return
        if isinstance(opened, tirx.Max) and coefficient > 0:
            for side, least in ((opened.a, opened.b), (opened.b, opened.a)):
                if self._hides(self._least(least, coefficient)):
                    self._open(side, coefficient)
                    return
        self.algebra.include(kept, term, coefficient)

    def _open(self, expr: Expr, coefficient: float) -> None:
        inside = self.algebra.linear(expr)
        self.result.logit.constant += coefficient * inside.constant
        for term, factor in inside.terms:
            self.split(term, coefficient * factor)

    def _least(self, expr: Expr, coefficient: float) -> float:
        """The number that a term brings to the logit; of a sum, its constant."""
        value = value_of(expr)
        if value is None:
            value = self.algebra.linear(expr).constant
        return coefficient * value

    def _hides(self, value: float) -> bool:
        hides = value <= self.hiding
        if hides and value >= LEAST_FLOAT:
            self.result.faint = max(self.result.faint, value)
        return hides
