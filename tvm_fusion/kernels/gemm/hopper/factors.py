"""Factors of rows that come first in an epilogue are put into the accumulators.

    y = gelu(acc * r[m] + b[n])   ->   y = gelu(acc' + b[n])     acc' = acc * r[m]

where the unfused graph rounds ``acc * r`` to half precision: the accumulators can then be kept in
that precision, which a sum in float32 cannot, and the epilogue be put off to the next tile. (An
RMSNorm whose statistic is applied behind the product has that form.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var

from ...contraction.model import Binding
from ...program.expr import HALF_DTYPES, dtype_of, rebuild, same, substitute, variables
from ..epilogue_pairs import partner_vars
from .model import HopperSegment


def take_row_factors(segments: Sequence[HopperSegment]) -> list[HopperSegment]:
    """The segments with the factors of all products taken out; as they were where one has none."""
    products = [p for segment in segments for p in segment.products]
    if any(p.stored_dtype in HALF_DTYPES or p.scaled_dtype is None for p in products):
        return list(segments)
    found = [_Taker(segment).take() for segment in segments]
    return list(segments) if None in found else found


class _Taker:
    """Looks for the factor of each accumulator of a segment."""

    def __init__(self, segment: HopperSegment):
        self.segment = segment
        self.accumulators = {p.accumulator: None for p in segment.products}
        others = partner_vars(segment.partners, len(segment.products))
        self.alias = dict(zip(others, self.accumulators, strict=True))
        self.bound: dict[Var, Expr] = {}
        self.same_for_columns = {load.var for load in segment.loads if not load.per_column}
        self.failed = False

    def take(self) -> HopperSegment | None:
        """The segment with its factors; None where an accumulator occurs without the same one."""
        bindings = []
        for binding in self.segment.bindings:
            if self._is_row_level(binding.value):
                self.bound[binding.var] = substitute(binding.value, self.bound)
                self.same_for_columns.add(binding.var)
            bindings.append(Binding(binding.var, self._visit(binding.value)))
        outputs = [replace(o, value=self._visit(o.value)) for o in self.segment.outputs]
        factors = tuple(self.accumulators.values())
        if self.failed or None in factors:
            return None
        return replace(
            self.segment, bindings=tuple(bindings), outputs=tuple(outputs), factors=factors
        )

    def _visit(self, expr: Expr) -> Expr:
        if isinstance(expr, Var):
            self.failed |= self._own(expr) is not None
            return expr
        if isinstance(expr, tirx.Mul):
            for accumulator, factor in ((expr.a, expr.b), (expr.b, expr.a)):
                own = self._own(accumulator)
                if own is not None and self._is_row_level(factor):
                    self._note(own, substitute(factor, self.bound))
                    return accumulator
        return rebuild(expr, self._visit)

    def _own(self, expr: Expr) -> Var | None:
        """The accumulator that an expression is, in this column or in its partner."""
        if not isinstance(expr, Var):
            return None
        return self.alias.get(expr, expr if expr in self.accumulators else None)

    def _note(self, accumulator: Var, factor: Expr) -> None:
        known = self.accumulators[accumulator]
        self.failed |= known is not None and not same(known, factor)
        self.accumulators[accumulator] = factor

    def _is_row_level(self, expr: Expr) -> bool:
        """Whether a float32 expression is made of what all columns share."""
        loads: list[Expr] = []
        _collect_loads(expr, loads)
        inputs = set(variables(expr))
        return dtype_of(expr) == "float32" and not loads and inputs <= self.same_for_columns


def _collect_loads(expr: Expr, found: list[Expr]) -> Expr:
    if isinstance(expr, TensorLoad):
        found.append(expr)
        return expr
    return expr if isinstance(expr, Var) else rebuild(expr, lambda e: _collect_loads(e, found))
