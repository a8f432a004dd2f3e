"""Reads a fused PrimFunc as attention: two products with a softmax over the keys between them.

    S[b, h, i, j] = sum_d q[b, i, h, d] * k[b, j, h, d]
    P = softmax_j(where(j <= i, 0.125 * S, -inf))        ->   logit 0.125 * score, visible n <= m
    y[b, i, h, e] = sum_j P[b, h, i, j] * v[b, j, h, e]       y[b, m, h, e] = result

The parts live in `model` (the value), `products` (which reductions are the products), `space`
(expressions at a point), `softmax` (the weights), `conditions` (visible keys) and `outputs`.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm_ffi
from tvm import tirx
from tvm.ir import Expr, Var

from ....errors import Unsupported
from ...contraction.inline import Inliner, collapse
from ...contraction.model import Axis, Binding, Operand, Simplifier
from ...contraction.results import Position, two_factors
from ...program.definitions import Definition, read_definitions, read_params
from ...program.expr import (
    HALF_DTYPES,
    conjunction,
    constant,
    dtype_of,
    substitute,
    uses_any,
    variables,
)
from .algebra import folded, product_of, value_of
from .model import Attention
from .outputs import Placed, Writer, place
from .products import find_products, without_casts
from .softmax import Softmax
from .space import Space, reduction_axes

# The operands of an attention: q, k and v over its axes, with factors that belong elsewhere taken.
#
# S = sum_d (0.125 * q[b, h, m, d]) * k[b, h // 4, n, d]  ->  q[...], k[...], logit 0.125 * score

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


def analyze_attention(func: tirx.PrimFunc, exact: bool = False) -> Attention:
    """Read a fused PrimFunc as attention.

    Parameters
    ----------
    func : tirx.PrimFunc
        s_tir blocks over buffers that are parameters or local, as FuseTIR leaves them.
    exact : bool
        Keep every rounding of the unfused graph; refused, since the weights of a running softmax
        are relative to another maximum than those that the graph rounds.

    Returns
    -------
    attention : Attention
        The query axis is the one that only scores depend on; where there are several (heads that
        share their keys), it is the one that masks compare with the key, or else the last one, and
        the others belong to the batch.

    Raises
    ------
    Unsupported
        Anything else than two products with a softmax over the keys between them, with the reason.
    """
    if exact:
        raise Unsupported("the roundings of an unfused softmax cannot be kept (rounding = exact)")
    definitions = read_definitions(func)
    params = read_params(func)
    if any(d.dtype == "float64" for d in definitions):
        raise Unsupported("attention in float64")
    space = Space(find_products(definitions))
    softmax = Softmax(space)
    operands = Operands(space)
    by_buffer = space.products.definitions
    placed = [place(space, by_buffer[p.var], i) for i, p in enumerate(params) if p.var in by_buffer]
    writer = Writer(softmax)
    outputs = [writer.output(p) for p in placed]
    name = func.attrs.get("global_symbol") if func.attrs is not None else None
    return _Builder(space, softmax, operands).build(
        None if name is None else str(name), params, placed, outputs, writer.bindings
    )


class _Builder:
    """Names the axes and puts the parts together."""

    def __init__(self, space: Space, softmax: Softmax, operands: Operands) -> None:
        self.space, self.softmax, self.operands = space, softmax, operands
        self._logit, self._visible, self._bindings = self._point()
        self.q, self.k = self._in_order()

    def build(self, name, params, placed: Sequence[Placed], outputs, output_bindings) -> Attention:
        space, operands = self.space, self.operands
        batch, queries, features = self._axes()
        values = [self._of_model(o.value) for o in outputs]
        whole = [(p, o, v) for p, o, v in zip(placed, outputs, values, strict=True) if p.full]
        rows = [(o, v) for p, o, v in zip(placed, outputs, values, strict=True) if not p.full]
        if not whole:
            raise Unsupported("no output of the second product")
        found = [Binding(b.var, self._of_model(b.value)) for b in output_bindings]
        roots, bindings = collapse([v for _, _, v in whole], found)
        row_values = [_expanded(v, found) for _, v in rows]
        for value in row_values:
            if uses_any(value, [axis.var for axis in features]):
                raise Unsupported("an output of rows that differs between features")
        return Attention(
            name,
            tuple(params),
            batch,
            queries,
            tuple(space.keys),
            tuple(operands.terms),
            features,
            self.q,
            self.k,
            operands.values,
            space.score,
            self._logit,
            self._visible,
            self._bindings,
            self.softmax.result,
            self.softmax.lse,
            tuple(_with(o, v) for (_, o, _), v in zip(whole, roots, strict=True)),
            tuple(_with(o, v) for (o, _), v in zip(rows, row_values, strict=True)),
            bindings,
            operand_dtype(operands),
            weight_dtype(space.products.weights),
        )

    def _point(self) -> tuple[Expr, Expr | None, tuple[Binding, ...]]:
        """Logit and condition of a key, with the temporaries both read."""
        factor = self.operands.score_factor
        env = {} if factor is None else {self.space.score: self.space.score * factor}
        logit, more = self.softmax.logit()
        visible = conjunction(*self.softmax.visible)
        roots = [logit] if visible is None else [logit, visible]
        known = (*self.space.bindings, *more)
        bindings = [Binding(b.var, folded(substitute(b.value, env))) for b in known]
        roots, bindings = collapse([folded(substitute(root, env)) for root in roots], bindings)
        return roots[0], None if visible is None else roots[1], bindings

    def _in_order(self) -> tuple[Operand, Operand]:
        """Q and K: the factor without the keys, and the one with them."""
        keys = {axis.var for axis in self.space.keys}
        first, second = self.operands.first, self.operands.second
        at_keys = [not keys.isdisjoint(variables_of(o)) for o in (first, second)]
        if at_keys[0] == at_keys[1]:
            raise Unsupported("the keys are in both factors of a score, or in none")
        return (second, first) if at_keys[0] else (first, second)

    def _axes(self) -> tuple[tuple[Axis, ...], tuple[Axis, ...], tuple[Axis, ...]]:
        """Batch, query and feature axes."""
        axes = self.space.axes
        q, k, v = map(variables_of, (self.q, self.k, self.operands.values))
        point = set(variables(*self._point_values()))
        features = tuple(a for a in axes if a.var in v and a.var not in q | k | point)
        only_scores = [a for a in axes if a.var in q | point and a.var not in k | v]
        query = self._query(only_scores)
        batch = tuple(a for a in axes if a not in features and a is not query)
        return batch, () if query is None else (query,), features

    def _point_values(self) -> list[Expr]:
        values = [self._logit, *(b.value for b in self._bindings)]
        return values if self._visible is None else [*values, self._visible]

    def _query(self, candidates: Sequence[Axis]) -> Axis | None:
        """The axis that masks compare with the key, else the last one of the scores."""
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        keys = [axis.var for axis in self.space.keys]
        compared = [
            axis
            for axis in candidates
            if any(_compares(e, axis.var, keys) for e in self._point_values())
        ]
        place = {var: i for i, var in enumerate(variables(*self.space.score_position))}
        return max(compared or candidates, key=lambda axis: place.get(axis.var, -1))

    def _of_model(self, expr: Expr) -> Expr:
        """An output's value with the constant factor of the values, and the logarithm of a row."""
        softmax, factor = self.softmax, self.operands.value_factor
        env = {softmax.lse: softmax.of_row(softmax.lse)}
        if factor is not None:
            env[softmax.result] = softmax.result * factor
        if factor is None and env[softmax.lse] is softmax.lse:
            return expr
        return folded(substitute(expr, env))


def _compares(expr: Expr, query: Var, keys: Sequence[Var]) -> bool:
    """Whether an index of the query and one of the key meet in arithmetic or a comparison."""
    found: list[Expr] = []
    kinds = (tirx.LE, tirx.LT, tirx.GE, tirx.GT, tirx.Sub, tirx.Add)
    tvm_ffi.structural_walk(expr, [(kind, found.append) for kind in kinds])
    for meeting in found:
        sides = [_indices(side) for side in (meeting.a, meeting.b)]
        for a, b in (sides, sides[::-1]):
            if query in a and any(key in b for key in keys):
                return True
    return False


def _indices(expr: Expr) -> set[Var]:
    """Variables of an integer expression without loads; none for anything else."""
    while isinstance(expr, tirx.Cast):
        expr = expr.value
    return set(variables(expr)) if dtype_of(expr).startswith("int") else set()


def _expanded(expr: Expr, bindings: Sequence[Binding]) -> Expr:
    """`expr` with all temporaries put in."""
    for binding in reversed(bindings):
        expr = substitute(expr, {binding.var: binding.value})
    return expr


def _with(output, value: Expr):
    return type(output)(output.param, output.indices, value, output.dtype)
