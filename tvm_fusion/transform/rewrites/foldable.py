"""Which operands of a function's matrix products can be replaced by tensors within them.

    n = f16(f32(x) * r * g);  y = matmul(n, W)      left operand: x in place of n

A product takes the deepest tensor from which on everything up to the operand would be left without
readers; what else it needs is told in `fold_factors`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from tvm import relax, tirx
from tvm.ir import Call
from tvm.relax import Expr, Var

from ...ir.extents import analyzer_of, bounds_of
from ...ir.weights import made, numbers
from ..decompose.opening import HALF_DTYPES, dtype_of, shape_of
from .constant_weights import identity, product_of, scaled_weight
from .factors import (
    Along,
    Factor,
    Level,
    Lookup,
    constant_behind,
    is_call,
    is_constant,
    keeps_values,
    levels,
    steps_to,
)
from .readers import Reader, Readers

PRODUCT_DTYPES = (*HALF_DTYPES, "float32", "float64")
STEPS = ("astype", "reshape", "permute_dims", "multiply", "divide")


@dataclass(slots=True, eq=False)
class Side:
    """One operand of a product: the tensors within it that could take its place, itself first, and
    which of them does.
    """

    operand: Expr
    levels: list[Level]
    chosen: int

    @property
    def level(self) -> Level:
        return self.levels[self.chosen]

    def factors(self, along: Along) -> list[Factor]:
        return [f for f in self.level.factors if f.along is along]


@dataclass(slots=True, eq=False)
class Product:
    """A matrix product and its operands."""

    var: Var
    sides: tuple[Side, Side]

    @property
    def folds(self) -> bool:
        return any(side.chosen for side in self.sides)


class Survey:
    """What can be folded in a function: begins with the deepest tensors and goes up until all of
    what is cut off is read by nothing else.
    """

    def __init__(self, func: relax.Function) -> None:
        self.readers = Readers(func)
        self._bounds = bounds_of(func)
        self.lookup: Lookup = self.readers.within
        self._weights: dict[tuple, Expr | None] = {}
        found = (self._product(var, value) for var, value in self.readers.calls())
        self.products: dict[Var, Product] = {p.var: p for p in found if p is not None}
        while self._raise():
            pass

    def _product(self, var: Var, call: Call) -> Product | None:
        if not is_call(call, "matmul") or dtype_of(call) not in PRODUCT_DTYPES:
            return None
        if any(len(shape_of(a) or ()) < 2 for a in call.args):
            return None
        product = Product(var, (self._side(call.args[0], -1), self._side(call.args[1], -2)))
        return product if product.folds else None

    def _side(self, operand: Expr, summed: int) -> Side:
        own, *below = levels(operand, summed, self.lookup)
        usable = {0: own}
        filled = self._is_filled(shape_of(operand)[summed])
        for level in below:
            if summed == -2 and any(f.along is Along.SUMMED for f in level.factors):
                break  # a factor moves into a weight, not out of one
            if not (filled or all(is_constant(f.value) for f in level.factors)):
                break  # 0 terms add up to 0, whatever they are divided by
            if _can_stand_for(operand, level):
                usable.setdefault(len(level.factors), level)
        return Side(operand, list(usable.values()), len(usable) - 1)

    def _is_filled(self, extent: Expr) -> bool:
        """Whether an axis has an element at all sizes: the sum of a softmax over none is 0."""
        if isinstance(extent, tirx.IntImm):
            return True
        return analyzer_of(self._bounds, [extent]).can_prove(extent > 0)

    def _raise(self) -> bool:
        """One round; whether any product had to keep more of an operand."""
        kept = set(self._kept())
        changed = False
        for product in self.products.values():
            left, right = product.sides
            for side in (left, right):
                while side.chosen and not self._dissolves(side, kept):
                    side.chosen -= 1
                    changed = True
            while left.chosen and not self._takes_scale(product):
                left.chosen -= 1
                changed = True
        return changed

    def _kept(self) -> Iterator[Var]:
        """The tensors that the new products and what is behind them read."""
        for product in self.products.values():
            for side in product.sides:
                if side.chosen:
                    found = (side.level.source, *(f.value for f in side.level.factors))
                    yield from (tensor for tensor in found if isinstance(tensor, Var))

    def _dissolves(self, side: Side, kept: set[Var]) -> bool:
        """Whether everything between an operand and what takes its place has no other reader."""
        return all(
            _widens(self.lookup(var)) or self._vanishes(var, kept)
            for var in steps_to(side.operand, side.level.source, self.lookup)
        )

    def _vanishes(self, var: Var, kept: set[Var]) -> bool:
        """Whether all readers of a tensor go away: products that fold, or steps to them."""
        readers = self.readers.of(var)
        return var not in kept and bool(readers) and all(self._leaves(r, kept) for r in readers)

    def _leaves(self, reader: Reader, kept: set[Var]) -> bool:
        if reader.var is None:
            return False
        product = self.products.get(reader.var)
        if product is not None:
            return product.sides[reader.argument].chosen > 0
        is_step = is_call(self.readers.lookup(reader.var), *STEPS)
        return is_step and self._vanishes(reader.var, kept)

    def _takes_scale(self, product: Product) -> bool:
        """Whether the summed factors of the left operand can go into the weight."""
        left, right = product.sides
        summed = left.factors(Along.SUMMED)
        scale = product_of(summed, self.lookup)
        if scale is None:
            return False
        if (scale == 1).all():
            return True
        return not right.chosen and self._scaled(right.operand, scale) is not None

    def weight(self, product: Product) -> Expr | None:
        """The constant in place of the weight that takes the summed factors; None: there are none
        but ones.
        """
        left, right = product.sides
        scale = product_of(left.factors(Along.SUMMED), self.lookup)
        return None if (scale == 1).all() else self._scaled(right.operand, scale)

    def _scaled(self, operand: Expr, scale: np.ndarray) -> Expr | None:
        found = constant_behind(operand, self.lookup)
        if found is None or not self._is_weight_only(found.source, operand):
            return None
        weight = found.source
        if dtype_of(weight) == "float64":
            return None  # the scale is known in float32 only
        key = (identity(weight), found.flipped, scale.tobytes())
        if key not in self._weights:
            axis = -1 if found.flipped else -2
            found = scaled_weight(numbers(weight), scale, axis)
            how = f"scaled along {axis} by {hashlib.sha256(scale.tobytes()).hexdigest()}"
            make = partial(scaled_weight, scale=scale, axis=axis)
            same = shape_of(weight), dtype_of(weight)
            self._weights[key] = None if found is None else made(how, make, weight, *same)
        return self._weights[key]

    def _is_weight_only(self, weight: Expr, operand: Expr) -> bool:
        """Whether nothing but products reads a weight: another reader would keep a second copy."""
        reads = list(self.readers.of_constant(weight))
        if isinstance(operand, Var):
            reads += self.readers.of(operand)
        return all(
            reader.var is not None
            and (reader.var in self.products or self._is_transposition(reader.var))
            for reader in reads
        )

    def _is_transposition(self, var: Var) -> bool:
        return is_call(self.readers.lookup(var), "permute_dims")


def _can_stand_for(operand: Expr, level: Level) -> bool:
    """Whether a tensor within an operand can be read in its place: it is no other rounding."""
    source = level.source
    if not keeps_values(dtype_of(source), dtype_of(operand)):
        return False
    return not is_constant(source) or dtype_of(source) != dtype_of(operand)


def _widens(value: Expr | None) -> bool:
    """Whether a tensor is a cast that costs its other readers nothing to keep."""
    return is_call(value, "astype") and keeps_values(dtype_of(value.args[0]), dtype_of(value))
