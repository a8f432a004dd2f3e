"""FoldFactors: factors of an operand of a matrix product move behind it, or into the weight.

    n = f16(f32(x) * r * g)           x: f16 [M, K]    r: f32 [M, 1]    g: const [K]
    y = matmul(n, W)                  W: const [K, N], the sum in float32
->  p = matmul(x, g[:, None] * W)     folded at compile time
    y = p * r

The norm's full-size result is gone: what is left of an RMSNorm is a statistic for each row, and a
factor in the epilogue of the product. Likewise

    matmul(x, f16(w) * s)             w: int8 [K, N]   s: [N] or [1, N]
->  matmul(x, f16(w)) * s

A factor with one value for each row of the left operand or each column of the right one moves
behind the product; so does a number. One along the summed axis of the left operand is folded into
a constant weight, in float32 and rounded once.

Done only where the scaled tensor disappears (products are all that reads it) and the tensor below
has the operand's own type: the sum is float32, and the result is rounded after the factors. Not
exact: roundings of the scaled tensor fall away and one of the weight is added.

Does not handle (left alone): factors along the summed axis that are no constants, or whose weight
is none or is read by more than products; weights that would overflow or lose precision; the mean of
a layer norm, since the difference of two large sums would cancel; half softmax rows, whose
exponentials are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import tvm
from tvm import relax
from tvm.relax import Expr, op
from tvm.relax.expr_functor import mutator

from ...ir.weights import numbers
from ..decompose.opening import compute_dtype, dtype_of, shape_of
from ..functions.functions import rewrite_functions
from .constant_weights import constant, identity
from .factors import Along, Factor, Level, constant_behind, is_constant, is_one, padded_shape
from .foldable import Product, Survey
from .readers import BlockwiseMutator, Parts


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.FoldFactors")
class FoldFactors:
    """See the module docstring. Runs after `Decompose`, before LegalizeOps; a module with nothing
    to fold is returned as it is.

    Parameters
    ----------
    rounding : str
        `Policy.rounding`: "exact" folds nothing.
    """

    def __init__(self, rounding: str = "fast") -> None:
        self.rounding = rounding

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        if self.rounding != "fast":
            return mod
        folder = _Folder(mod)
        return rewrite_functions(mod, folder.builder_, folder.fold_function)


@mutator
class _Folder(BlockwiseMutator):
    """Replaces the bindings of products."""

    def fold_function(self, func: relax.Function) -> relax.Function | None:
        """The function with its factors folded, or None where there was nothing to fold."""
        if not isinstance(func.body, relax.SeqExpr):
            return None
        self.survey = Survey(func)
        if not any(p.folds for p in self.survey.products.values()):
            return None
        self.parts = Parts(self.builder_, func)
        self.known = {}
        folded = self.visit_expr(func)
        return self.parts.tagged(relax.analysis.remove_all_unused(folded))

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        product = self.survey.products.get(binding.var)
        if product is None or not product.folds:
            super().visit_var_binding_(binding)
            return
        name, call = binding.var.name, binding.value
        wide = compute_dtype(dtype_of(call))
        left, right = (self._operand(name, product, place) for place in (0, 1))
        result: Expr = op.matmul(left, right, out_dtype=wide)
        for behind, inverse in self._behind(name, product, wide):
            result = self.parts.bind(name, "product", result)
            result = op.divide(result, behind) if inverse else op.multiply(result, behind)
        if wide != dtype_of(call):
            result = op.astype(self.parts.bind(name, "wide", result), dtype_of(call))
        self.parts.finish(self.visit_var_def(binding.var), result)

    def _operand(self, name: str, product: Product, place: int) -> Expr:
        """What takes the place of an operand."""
        side = product.sides[place]
        if place == 1 and (weight := self.survey.weight(product)) is not None:
            found = constant_behind(side.operand, self.survey.lookup)
            return self._shaped(name, weight, found, shape_of(side.operand))
        if not side.chosen:
            return self.visit_expr(side.operand)
        tensor, level = self.visit_expr(side.level.source), side.level
        dtype = dtype_of(side.operand)
        if dtype_of(tensor) != dtype:
            tensor = self._once(name, "cast", tensor, (dtype,), lambda: op.astype(tensor, dtype))
        return self._shaped(name, tensor, level, shape_of(side.operand))

    def _shaped(self, name: str, tensor: Expr, level: Level, shape: list) -> Expr:
        """A tensor below some steps as the operand above them, but for their factors."""
        if level.flipped:
            axes = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
            source = tensor
            tensor = self._once(name, "flip", source, (), lambda: op.permute_dims(source, axes))
        if level.reshaped:
            below = tensor
            tensor = self._once(
                name, "rows", below, tuple(map(str, shape)), lambda: op.reshape(below, shape)
            )
        return tensor

    def _behind(self, name: str, product: Product, dtype: str) -> Iterator[tuple[Expr, bool]]:
        """The factors that stand behind a product, and whether they divide it."""
        for side in product.sides:
            shape = shape_of(side.operand)
            for inverse in (False, True):
                chain = [f for f in side.factors(Along.KEPT) if f.inverse is inverse]
                if chain:
                    parts = [self._behind_one(name, f, shape, dtype) for f in chain]
                    yield self._multiplied(name, parts), inverse

    def _behind_one(self, name: str, factor: Factor, shape: list, dtype: str) -> Expr:
        """A factor of an operand of this shape as one of the product: [..., M, 1] or [..., N]."""
        wanted = _shape_behind(factor, shape_of(factor.value), shape)
        if is_constant(factor.value):
            return _constant_behind(factor.value, wanted, dtype)
        value = self.visit_expr(factor.value)
        if dtype_of(value) != dtype:
            narrow = value
            value = self._once(name, "factor", value, (dtype,), lambda: op.astype(narrow, dtype))
        if wanted is None:
            return value
        key = tuple(map(str, wanted))
        return self._once(name, "factor", value, key, lambda: op.reshape(value, wanted))

    def _multiplied(self, name: str, parts: list[Expr]) -> Expr:
        """The product of factors, the smaller ones first."""
        first, *rest = sorted(parts, key=lambda part: len(shape_of(part)))
        for part in rest:
            before = first
            key = (hash(part),)
            first = self._once(
                name, "factor", before, key, lambda a=before, b=part: op.multiply(a, b)
            )
        return first

    def _once(self, name: str, part: str, source: Expr, key: tuple, make: Callable) -> Expr:
        """`make()` bound to a new variable, one for all products of a block that need the same."""
        at = identity(source) if is_constant(source) else hash(source)
        known = (part, at, *key)
        if known not in self.known:
            self.known[known] = self.parts.bind(name, part, make())
        return self.known[known]


def _shape_behind(factor: Factor, own: list, operand: list) -> list | None:
    """The shape in which a factor of shape `own` stands behind the product; None: its own."""
    if all(map(is_one, own)):
        return [] if own else None
    if factor.reshaped:
        return [*operand[:-1], own[-1]]
    if factor.flipped:
        own = padded_shape(own, max(2, len(own)))
        return [*own[:-2], own[-1], own[-2]]
    return None


def _constant_behind(value: Expr, wanted: list | None, dtype: str) -> Expr:
    """A constant factor in another shape and type; a number has no axes, and LegalizeOps writes it
    into the PrimFunc.
    """
    array = numbers(value).astype(dtype)
    extents = None if wanted is None else [int(extent) for extent in wanted]
    return constant(array if extents is None else array.reshape(extents), dtype)
