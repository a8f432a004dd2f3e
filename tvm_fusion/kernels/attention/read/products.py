"""Which reductions of a PrimFunc are the two products of attention, by what they read.

S = sum over d of Q * K        reads no reduction                  the scores
r = max over j of f(S)         reads S                             a reduction of a row
O = sum over j of g(S, r) * V  one factor reads S, the other none  the values
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var

from ....errors import Unsupported
from ...contraction.results import two_factors
from ...program.definitions import Definition
from ...program.expr import dtype_of, is_integer, number, variables
from ...program.program import ReduceKind


@dataclass(frozen=True, slots=True, eq=False)
class Products:
    """The definitions of a PrimFunc by buffer, and what of them is attention.

    `weights` and `values` are the factors of the product `result`; `reductions` are the buffers of
    reductions that a buffer is computed from, at any distance.
    """

    definitions: Mapping[Var, Definition]
    reductions: Mapping[Var, frozenset[Var]]
    result: Definition
    weights: Expr
    values: Expr

    def is_score(self, definition: Definition) -> bool:
        """Whether a reduction is a sum of products of what is no reduction."""
        return is_product(definition) and not self.reductions[definition.buffer]


def find_products(definitions: Sequence[Definition]) -> Products:
    """The products of an attention.

    Raises
    ------
    Unsupported
        There is no product with weights that are computed from another one, or several.
    """
    reductions: dict[Var, frozenset[Var]] = {}
    by_buffer = {d.buffer: d for d in definitions}
    for definition in definitions:
        reductions[definition.buffer] = _behind(definition.value, by_buffer, reductions)
    found = []
    for definition in definitions:
        pair = _weights_and_values(definition, by_buffer, reductions)
        if pair is not None:
            found.append(Products(by_buffer, reductions, definition, *pair))
    if len(found) > 1:
        found = [p for p in found if _features(p)] or found[-1:]
    if not found:
        raise Unsupported("no product of weights that come of another product: not attention")
    if len(found) > 1:
        names = ", ".join(p.result.buffer.name for p in found)
        raise Unsupported(f"several products of weights in one kernel: {names}")
    return found[0]


def is_product(definition: Definition) -> bool:
    """Whether a definition is a sum of products of floats."""
    return (
        definition.kind is ReduceKind.SUM
        and number(definition.initial) == 0
        and not is_integer(definition.dtype)
        and isinstance(without_casts(definition.value), tirx.Mul)
    )


def without_casts(expr: Expr) -> Expr:
    """An expression before it is rounded or widened."""
    while isinstance(expr, tirx.Cast) and not is_integer(dtype_of(expr.value)):
        expr = expr.value
    return expr


def buffers_read(expr: Expr) -> list[Var]:
    """The buffers that an expression loads from."""
    found: list[TensorLoad] = []
    tvm_ffi.structural_walk(expr, [(TensorLoad, found.append)])
    return [load.source for load in found]


def _behind(
    expr: Expr, definitions: Mapping[Var, Definition], reductions: Mapping[Var, frozenset[Var]]
) -> frozenset[Var]:
    """The reductions that an expression is computed from."""
    found: frozenset[Var] = frozenset()
    for buffer in buffers_read(expr):
        if buffer in definitions:
            found |= reductions.get(buffer, frozenset())
            if definitions[buffer].kind is not None:
                found |= {buffer}
    return found


def _weights_and_values(
    definition: Definition,
    definitions: Mapping[Var, Definition],
    reductions: Mapping[Var, frozenset[Var]],
) -> tuple[Expr, Expr] | None:
    """The factor of a product that comes of another product, and the one that comes of none."""
    if not is_product(definition):
        return None
    pair = two_factors(definition)
    behind = [_behind(factor, definitions, reductions) for factor in pair]
    if bool(behind[0]) == bool(behind[1]):
        return None
    weights, values = pair if behind[0] else pair[::-1]
    of_product = any(is_product(definitions[b]) for b in behind[0] | behind[1])
    return (weights, values) if of_product else None


def _features(products: Products) -> bool:
    """Whether the values have an axis that the weights do not."""
    extents = zip(products.result.axes, products.result.shape, strict=True)
    axes = {axis for axis, extent in extents if axis is not None and extent != 1}
    return bool(axes & (set(variables(products.values)) - set(variables(products.weights))))
