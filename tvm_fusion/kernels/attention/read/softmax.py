"""Weights as a softmax: a factor of each row times ``exp(logit)``, and what rows are in its terms.

    W = exp(a - r) / l    with r = max a, l = sum exp(a - r)
      = front * exp(a)         front = exp(-r) / l
    l = exp(-r) * exp(lse)     lse = log(sum exp(a))
    O = sum W * V = front * exp(lse) * result = result          all factors cancel

Which maximum is subtracted, and where the division stands, makes no difference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import tvm_ffi
from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var
from tvm.ir.prim.expr import CmpExpr

from ....errors import Unsupported
from ...contraction.model import Binding, fresh_var
from ...program.expr import conjunction, constant, dtype_of
from ...program.program import ReduceKind
from .algebra import (
    FLOAT,
    Algebra,
    Linear,
    Power,
    choice,
    is_call,
    is_minus_infinity,
    value_of,
    write_linear,
)
from .conditions import Conditions, number_last
from .model import INVISIBLE
from .space import Space
from .witness import every_row_sees_a_key

# Which keys a logit leaves visible: the conditions behind -inf, and what is left without them.
#
# where(j <= i, s, -inf)  ->  s,  visible j <= i        (1 - cast(mask)) * -1e9  ->  0, visible mask
#
# A number far below zero, such as -1e9, is taken for -inf only where the caller says so: it hides a
# key next to visible ones, while the keys of a row that has nothing else keep weights.

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


class Softmax:
    """The softmax in the weights of an attention.

    Attributes
    ----------
    visible : conditions of a key that is visible.
    front : factors of a row: ``weights = front * exp(logit)``.
    result, lse : placeholders of the model.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self.algebra = Algebra(space)
        self.conditions = Conditions(space, self.algebra)
        self.result = fresh_var("result", "float32")
        self.lse = fresh_var("lse", "float32")
        self.front, self._raw_logit, hidden = self._parts(space.weights(), "the weights")
        if space.score_position is None:
            raise Unsupported("the weights do not come of a product")
        if not any(space.score in space.leaves(term) for term, _ in self._raw_logit.terms):
            raise Unsupported("the weights hold no exponential of the scores")
        self._hidden = hidden
        self._faint: Split | None = None
        taken = split(self.conditions, self._raw_logit)
        self._use(taken)
        if taken.faint > -math.inf and not self._rows_are_seen(taken):
            self._faint = taken
            self._use(split(self.conditions, self._raw_logit, NOTHING_FINITE))

    def _parts(self, expr: Expr, name: str) -> tuple[Power, Linear, list[Expr]]:
        """What each row has in front of an exponential, its exponent, and conditions of keys."""
        space = self.space
        power = self.algebra.power(expr)
        for part, _ in power.factors:
            if space.at_keys(part):
                raise Unsupported(
                    f"{name} have a factor of each key that is no exponential: {part}"
                )
        shift, logit = Linear([], power.exponent.constant), Linear()
        for term, coefficient in power.exponent.terms:
            if not space.has_rows(term):
                logit.terms.append((term, coefficient))
            elif space.at_keys(term):
                raise Unsupported(f"{name} are raised by a mix of keys and rows: {term}")
            else:
                shift.terms.append((term, coefficient))
        keys, rows = [], []
        for condition in power.conditions:
            for part in self.conditions.conjuncts(condition):
                (keys if space.at_keys(part) else rows).append(part)
        front = Power(power.coefficient, power.factors, shift, rows)
        return front, logit, keys

    def _use(self, taken: Split) -> None:
        """Takes conditions and logit as they were taken apart."""
        self._in_logit, self._kept = taken.conditions, taken.logit
        self._zeroed = self._without(self._hidden, self._in_logit)
        self.visible = [*self._in_logit, *self._zeroed]

    def _rows_are_seen(self, taken: Split) -> bool:
        """Whether a row without a visible key has no weights, or there is none."""
        if not self._without(taken.conditions, self._hidden):
            return True
        space = self.space
        return every_row_sees_a_key([*map(space.expand, self.visible)], space.axes, space.keys)

    def logit(self) -> tuple[Expr, list[Binding]]:
        """What is raised at each key, without what hides keys, and a temporary that it reads.

        Numbers far below zero that do not hide are moved up to where float32 holds the score
        beside them: differences between logits of one row are the same, but for those that leave
        no weight anyway.
        """
        logit = write_linear(self._kept)
        if self._faint is None:
            return logit, []
        plain = Binding(fresh_var("plain", FLOAT), logit)
        return _raised(plain.var, self._faint.faint), [plain]

    def of_row(self, lse: Expr) -> Expr:
        """The logarithm of the sum of a row's weights, from that of the logits as they are."""
        if self._faint is None:
            return lse
        least, value = (constant(v, FLOAT) for v in (INVISIBLE, self._faint.faint))
        low = lse < constant(INVISIBLE / 2, FLOAT)
        return tirx.Select(low, (lse - least) + value, lse)

    def _without(self, conditions: list[Expr], known: list[Expr]) -> list[Expr]:
        equal = self.space.equal
        return [c for c in conditions if not any(equal(c, k) for k in known)]

    # ---- rows

    def reduced(self, power: Power) -> Power:
        """A product with sums of exponentials and the second product in terms of the model."""
        algebra = self.algebra
        exponent = self.reduced_sum(power.exponent)
        found = Power(power.coefficient, [], exponent, list(power.conditions))
        for part, sign in power.factors:
            row = self.space.rows.get(part) if isinstance(part, Var) else None
            if isinstance(part, Var) and part.same_as(self.space.raw):
                lse = Power(1.0, [(self.result, 1)], Linear([(self.lse, 1.0)]))
                found = algebra.times(found, algebra.times(lse, self.reduced(self.front)), sign)
            elif row is not None and row.kind is ReduceKind.SUM:
                found = algebra.times(found, self._sum(row.body), sign)
            else:
                found = algebra.times(found, Power(1.0, [(part, sign)]))
        return found

    def reduced_sum(self, total: Linear) -> Linear:
        """A sum with logarithms of sums of exponentials in terms of the model."""
        found = Linear([], total.constant)
        for term, coefficient in total.terms:
            inner = term.args[0] if is_call(term, "tirx.log") else None
            if not isinstance(inner, Var) or inner not in self.space.rows:
                self.algebra.include(found, term, coefficient)
                continue
            power = self.reduced(self.algebra.power(inner))
            if power.coefficient <= 0:
                raise Unsupported("the logarithm of a sum over the keys that is not positive")
            logarithm = Linear(list(power.exponent.terms), power.exponent.constant)
            logarithm.constant += math.log(power.coefficient)
            for part, sign in power.factors:
                self.algebra.include(logarithm, tirx.log(part), sign)
            found = self.algebra.plus(found, logarithm, coefficient)
        return found

    def _sum(self, body: Expr) -> Power:
        """The sum over the keys of `body` in terms of `lse`."""
        front, logit, hidden = self._parts(body, "the terms of a sum over the keys")
        space = self.space
        difference = self.algebra.plus(logit, self._raw_logit, -1.0)
        if any(space.at_keys(term) for term, _ in difference.terms):
            raise Unsupported("a sum over the keys is of other exponentials than the weights")
        zeroed = self._without(hidden, self._in_logit)
        if self._without(zeroed, self._zeroed) or self._without(self._zeroed, zeroed):
            raise Unsupported("a sum over the keys hides other keys than the weights")
        exponent = self.algebra.plus(front.exponent, difference)
        front = Power(front.coefficient, front.factors, exponent, front.conditions)
        lse = Power(1.0, [], Linear([(self.lse, 1.0)]))
        return self.algebra.times(lse, self.reduced(front))

    # ---- conditions of rows

    def is_seen(self, condition: Expr) -> bool:
        """Whether a condition of a row says that it has a visible key (or more: it may hold where
        the model's result is 0 all the same). Conditions that hide what has no weight join
        `visible`.
        """
        found = self._any(condition)
        if found is None:
            return False
        self._hide_faint(found)
        new = self._without(found, self.visible)
        if not all(self._has_no_weight(c) for c in new):
            return False
        self.visible += new
        return True

    def _hide_faint(self, known: list[Expr]) -> None:
        """Numbers far below zero hide where a row counts only if a key has all conditions."""
        faint, before = self._faint, self.visible
        if faint is None or self._without(faint.conditions, [*known, *before]):
            return
        self._faint = None
        self._use(faint)
        self.visible += self._without(before, self.visible)

    def _any(self, condition: Expr) -> list[Expr] | None:
        """The conditions c of ``any key has all c``, or None if `condition` is something else."""
        inner, negate = self.space.open(condition), False
        while isinstance(inner, tirx.Not):
            inner, negate = self.space.open(inner.a), not negate
        if isinstance(inner, CmpExpr):
            inner = number_last(inner)
        if isinstance(inner, tirx.LE):
            inner, negate = tirx.GT(inner.a, inner.b), not negate
        row, empty = self._row_and_bound(inner)
        if row is None:
            return None
        if isinstance(inner, tirx.EQ):
            negate = not negate
        kind, body = row.kind, row.body
        if is_minus_infinity(empty) and kind is ReduceKind.MAX and not negate:
            return self._finite(body, value_of(empty))
        if value_of(empty) != 0 or not self._is_truth(body):
            return None
        if kind is ReduceKind.MIN and negate:  # not all hidden
            return self._finite_conjuncts(self.conditions.boolean(body, negate=True))
        if kind in (ReduceKind.MAX, ReduceKind.SUM) and not negate:
            return self._finite_conjuncts(self.conditions.boolean(body))
        return None

    def _is_truth(self, body: Expr) -> bool:
        """Whether an expression is a condition, or a number that is never below 0."""
        two = self.conditions.two_valued(body)
        return dtype_of(body).startswith(("bool", "uint")) or (
            two is not None and min(two[1:]) >= 0
        )

    def _row_and_bound(self, expr: Expr):
        """A reduction of a row and what it is compared with."""
        rows = self.space.rows
        compared = isinstance(expr, tirx.NE | tirx.GT | tirx.EQ)
        side = self.space.open(expr.a) if compared else expr
        while isinstance(side, tirx.Cast):
            side = self.space.open(side.value)
        if not isinstance(side, Var) or side not in rows:
            return None, None
        return rows[side], expr.b if compared else constant(0, dtype_of(side))

    def _finite_conjuncts(self, condition: Expr) -> list[Expr]:
        """Conditions of a key, those that compare its logit with -inf taken apart."""
        found = []
        for part in self.conditions.conjuncts(condition):
            inner = part.a if isinstance(part, tirx.Not) else part
            wanted = tirx.EQ if isinstance(part, tirx.Not) else tirx.NE | tirx.GT
            holds_score = self.space.score in self.space.leaves(part)
            if holds_score and isinstance(inner, wanted) and is_minus_infinity(inner.b):
                found += self._finite(inner.a, value_of(inner.b))
            else:
                found.append(part)
        return found

    def _finite(self, logit: Expr, least: float) -> list[Expr]:
        """When a logit is not -inf, or above the least number: no condition hides the key, and no
        mask adds -inf.
        """
        hiding = max(least, NOTHING_FINITE)
        taken = split(self.conditions, self.algebra.linear(logit), hiding)
        conditions = taken.conditions
        for term, _ in taken.logit.terms:
            if self._may_be_infinite(term):
                conditions.append(tirx.NE(term, constant(-float("inf"), dtype_of(term))))
        return conditions

    def _may_be_infinite(self, term: Expr) -> bool:
        """Whether a term of a logit is read from a mask: from memory, another number each key."""
        space, loads = self.space, []
        if space.score in space.leaves(term):
            return False
        tvm_ffi.structural_walk(space.expand(term), [(TensorLoad, loads.append)])
        return any(space.at_keys(index) for load in loads for index in load.indices)

    def _has_no_weight(self, condition: Expr) -> bool:
        """Whether a key that a condition hides has the logit -inf anyway."""
        if not isinstance(condition, tirx.NE) or not is_minus_infinity(condition.b):
            return False
        equal = self.space.equal
        return any(c > 0 and equal(term, condition.a) for term, c in self._kept.terms)


def _raised(logit: Expr, faint: float) -> Expr:
    """A logit whose values near `faint` are near `INVISIBLE` instead, and none but -inf is much
    below.
    """
    value, least, nothing = (constant(v, FLOAT) for v in (faint, INVISIBLE, -math.inf))
    raised = tirx.Select(logit > nothing, tirx.Max(logit - value, least) + least, nothing)
    return tirx.Select(logit > constant(faint / 2, FLOAT), logit, raised)
