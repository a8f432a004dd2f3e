"""The operands of an attention: q, k and v over its axes, with factors that belong elsewhere taken.

S = sum_d (0.125 * q[b, h, m, d]) * k[b, h // 4, n, d]  ->  q[...], k[...], logit 0.125 * score
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.ir import Expr, Var

from ....errors import Unsupported
from ...contraction.index import Simplifier
from ...contraction.inline import Inliner, collapse
from ...contraction.model import Axis, Operand
from ...contraction.results import Position
from ...contraction.sums import two_factors
from ...program.definitions import Definition
from ...program.expr import HALF_DTYPES, constant, dtype_of, variables
from .products import without_casts
from .space import Space, reduction_axes
from .terms import product_of, value_of

FLOATS = (*HALF_DTYPES, "float32")


def variables_of(operand: Operand) -> set[Var]:
    """All variables that an operand reads."""
    return set(variables(operand.value, *(b.value for b in operand.bindings)))


class Operands:
    """The factors of both products.

    Attributes
    ----------
    first, second, values : Operand
        The two factors of the score in the order of the PrimFunc, and V.
    terms : axes of the sum of a score.
    score_factor, value_factor : what was taken out of q and k, and of v; None for 1.
    dtypes : what the operands are stored in.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        score = space.score_definition
        self.terms, inner = reduction_axes(score, "d")
        env = {**score.at(space.score_position), **inner}
        pair = two_factors(score)
        factors: list[Expr] = []
        self.first, self.second = (
            self._operand(factor, env, self.terms, factors) for factor in pair
        )
        self.score_factor = product_of(factors) if factors else None
        value_factors: list[Expr] = []
        result = space.products.result
        env = {**result.at(space.position), **space.reduced}
        self.values = self._operand(space.products.values, env, space.keys, value_factors)
        self.value_factor = product_of(value_factors) if value_factors else None
        self.dtypes = [
            _stored(operand, factor)
            for operand, factor in zip(
                (self.first, self.second, self.values),
                (*pair, space.products.values),
                strict=True,
            )
        ]

    def _operand(
        self, factor: Expr, env: dict[Var, Expr], axes: Sequence[Axis], taken: list[Expr]
    ) -> Operand:
        """One factor; what does not differ along `axes` goes to `taken`, where that leaves a load
        or is a number.
        """
        space = self.space
        simplify = Simplifier([*space.axes, *space.keys, *self.terms])
        inliner = Inliner(space.products.definitions, False, simplify, _refuse_reduction)
        root = inliner.resolve(factor, env)
        (value,), bindings = collapse([root], inliner.bindings)
        numbers, others, kept = [], [], []
        names = {axis.var for axis in axes} | {b.var for b in bindings}
        for part, below in _factors(value):
            if value_of(part):
                numbers.append(constant(value_of(part) ** (-1 if below else 1), "float32"))
            elif names.isdisjoint(variables(part)):
                one = constant(1, "float32")
                others.append(tirx.Div(one, part) if below else part)
            else:
                kept.append((part, below))
        rest = product_of(part for part, below in kept if not below)
        plain = kept and not any(below for _, below in kept) and Operand(rest).load is not None
        if plain and not bindings:
            taken += [*numbers, *others]
            return Operand(rest)
        taken += numbers
        divisors = [part for part, below in kept if below]
        rest = product_of([part for part, below in kept if not below] + others)
        return Operand(tirx.Div(rest, product_of(divisors)) if divisors else rest, bindings)


def _factors(expr: Expr, below: bool = False) -> list[tuple[Expr, bool]]:
    """Factors of a product, and whether each divides."""
    if isinstance(expr, tirx.Mul):
        return [*_factors(expr.a, below), *_factors(expr.b, below)]
    if isinstance(expr, tirx.Div):
        return [*_factors(expr.a, below), *_factors(expr.b, not below)]
    return [(expr, below)]


def _stored(operand: Operand, factor: Expr) -> tuple[str, bool]:
    """The dtype an operand has in memory, and whether it is there as it is."""
    if operand.load is not None:
        return dtype_of(operand.load), True
    return dtype_of(without_casts(factor)), False


def weight_dtype(weights: Expr) -> str:
    """The dtype in which the unfused graph has the weights: the narrowest on the way."""
    found = dtype_of(weights)
    while isinstance(weights, tirx.Cast):
        weights = weights.value
        found = dtype_of(weights) if dtype_of(weights) in HALF_DTYPES else found
    return found


def operand_dtype(operands: Operands) -> str:
    """The one dtype of q, k and v; computed operands follow those that are stored."""
    plain = {dtype for dtype, is_plain in operands.dtypes if is_plain}
    dtypes = plain or {dtype for dtype, _ in operands.dtypes}
    if len(dtypes) > 1:
        raise Unsupported(f"q, k and v of different dtypes: {', '.join(sorted(dtypes))}")
    (dtype,) = dtypes
    if dtype not in FLOATS:
        raise Unsupported(f"attention in {dtype}")
    return dtype


def _refuse_reduction(read: Definition, _: Position) -> Expr:
    raise Unsupported(f"q, k or v reads {read.buffer.name}, a reduction of the same kernel")
