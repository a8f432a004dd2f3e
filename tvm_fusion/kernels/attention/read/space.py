"""The points of an attention, and expressions over them: scores and reductions of rows get names.

Everything is read in the coordinates of the second product. At (batch, query, feature, key) a score
is the variable `score`; a reduction over the keys is a variable too, whose body is resolved at the
same coordinates.

    O[b, m, e] = sum_n P[b, m, n] V[b, n, e]
    P at (b, m, n)  ->  exp(score - row0) / row1     row0: max of score, row1: sum of its exp
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tvm
from tvm.ir import Expr, Var

from ....errors import Unsupported
from ...contraction.inline import Inliner
from ...contraction.model import INDEX, Axis, Binding, Simplifier, equal_sizes, fresh_var, size_of
from ...contraction.results import Position, coordinates
from ...program.definitions import Definition
from ...program.expr import (
    constant,
    flatten,
    number,
    same,
    substitute,
    unflatten,
    variables,
    widened,
)
from ...program.program import ReduceKind
from .products import Products, is_product


@dataclass(frozen=True, slots=True, eq=False)
class RowReduction:
    """``var = kind over all keys of body``, a number for each row."""

    var: Var
    kind: ReduceKind
    body: Expr


class Space:
    """Expressions of one attention at (axes of the result, keys).

    Attributes
    ----------
    products : which definitions are the products.
    axes, keys : coordinates of the result, and of the sum over the keys.
    score, raw : placeholders of the score and of the second product as the PrimFunc computes it.
    score_position : indices of the score in these coordinates, once one was read.
    rows : reductions over the keys, by placeholder.
    closed : temporaries that `open` leaves alone, since they are known in terms of the model.
    """

    def __init__(self, products: Products) -> None:
        self.products = products
        self.axes, self.position = coordinates(products.result.shape, "i")
        self.keys, self.reduced = reduction_axes(products.result, "n")
        if not self.keys:
            raise Unsupported("the softmax has one key")
        self.simplify = Simplifier([*self.axes, *self.keys])
        self.inliner = Inliner(products.definitions, False, self.simplify, self._accumulate)
        self.score = fresh_var("score", "float32")
        self.raw = fresh_var("weighted", "float32")
        self.score_definition: Definition | None = None
        self.score_position: Position | None = None
        self.rows: dict[Var, RowReduction] = {}
        self.closed: set[Var] = set()
        self._known: list[tuple[Definition, Position, Var]] = []
        self._leaves: dict[Var, frozenset[Var]] = {}
        self._values: dict[Var, Expr] = {}
        self._seen_bindings = 0
        self._key_vars = frozenset(axis.var for axis in self.keys) | {self.score}

    @property
    def bindings(self) -> list[Binding]:
        """Temporaries made so far, each before its readers."""
        return self.inliner.bindings

    def weights(self) -> Expr:
        """The factor of the values."""
        env = {**self.products.result.at(self.position), **self.reduced}
        return self.inliner.resolve(self.products.weights, env)

    # ---- what an expression depends on

    def open(self, expr: Expr) -> Expr:
        """The value behind a temporary, else `expr` itself."""
        self._update()
        while isinstance(expr, Var) and expr in self._values and expr not in self.closed:
            expr = self._values[expr]
        return expr

    def expand(self, expr: Expr) -> Expr:
        """`expr` with all temporaries put in."""
        self._update()
        env = {v: self.expand(self._values[v]) for v in variables(expr) if v in self._values}
        return substitute(expr, env)

    def leaves(self, expr: Expr) -> frozenset[Var]:
        """Variables that are no temporaries, here or behind temporaries."""
        self._update()
        found: set[Var] = set()
        for var in variables(expr):
            found |= self._leaves.get(var) or {var}
        return frozenset(found)

    def at_keys(self, expr: Expr) -> bool:
        """Whether an expression differs between the keys of a row."""
        return not self._key_vars.isdisjoint(self.leaves(expr))

    def has_rows(self, expr: Expr) -> bool:
        """Whether an expression reads a reduction over the keys."""
        return any(var in self.rows for var in self.leaves(expr))

    def has_raw(self, expr: Expr) -> bool:
        """Whether an expression reads the second product."""
        return self.raw in self.leaves(expr)

    def equal(self, a: Expr, b: Expr) -> bool:
        """Whether two expressions are the same behind their temporaries."""
        return same(a, b) or same(self.expand(a), self.expand(b))

    def _update(self) -> None:
        for binding in self.bindings[self._seen_bindings :]:
            self._values[binding.var] = binding.value
            found: set[Var] = set()
            for var in variables(binding.value):
                found |= self._leaves.get(var) or {var}
            self._leaves[binding.var] = frozenset(found)
        self._seen_bindings = len(self.bindings)

    # ---- reads of reductions

    def _accumulate(self, read: Definition, at: Position) -> Expr:
        if read is self.products.result:
            return self._result(at)
        if self.products.is_score(read):
            return self._score(read, at)
        for known, position, var in self._known:
            if known is read and all(same(a, b) for a, b in zip(position, at, strict=True)):
                return var
        return self._row(read, at)

    def _result(self, at: Position) -> Expr:
        if not all(same(a, b) for a, b in zip(self.position, at, strict=True)):
            raise Unsupported("the result is read at other points than are written")
        return self.raw

    def _score(self, read: Definition, at: Position) -> Expr:
        if self.score_definition not in (None, read):
            names = f"{self.score_definition.buffer.name} and {read.buffer.name}"
            raise Unsupported(f"the weights come of two products, {names}")
        if self.score_position is None:
            self.score_definition, self.score_position = read, at
        if not all(same(a, b) for a, b in zip(self.score_position, at, strict=True)):
            raise Unsupported(
                f"the score {read.buffer.name} is read at several points: the weights are no "
                "softmax over the keys alone"
            )
        return self.score

    def _row(self, read: Definition, at: Position) -> Expr:
        name = read.buffer.name
        if self.products.result.buffer in self.products.reductions[read.buffer]:
            raise Unsupported(f"{name} reduces the result of the attention")
        if any(var in self._key_vars for var in variables(*at)):
            if is_product(read):
                raise Unsupported(f"the score {name} is a product of what this kernel reduces")
            raise Unsupported(f"{name} differs between keys: a softmax over another axis")
        env = {**read.at(at), **over_keys(read, self.keys)}
        body = self.inliner.resolve(read.value, env)
        if all(extent == 1 for _, extent in read.reduced):
            return body
        var = fresh_var(f"row{len(self.rows)}", widened(read.dtype))
        self.rows[var] = RowReduction(var, checked_kind(read), body)
        self._known.append((read, at, var))
        return var


def reduction_axes(definition: Definition, prefix: str) -> tuple[list[Axis], dict[Var, Expr]]:
    """New axes for what a definition sums over, and what its own variables are in them."""
    axes, env = [], {}
    count = sum(extent != 1 for _, extent in definition.reduced)
    for var, extent in definition.reduced:
        env[var] = constant(0, INDEX)
        if extent != 1:
            env[var] = fresh_var(prefix if count == 1 else f"{prefix}{len(axes)}", INDEX)
            axes.append(Axis(env[var], extent))
    return axes, env


def over_keys(definition: Definition, keys: Sequence[Axis]) -> dict[Var, Expr]:
    """What the reduced variables of a definition are where it runs over the keys.

    Raises
    ------
    Unsupported
        It reduces another number of elements.
    """
    env = {var: constant(0, INDEX) for var, _ in definition.reduced}
    real = [(var, extent) for var, extent in definition.reduced if extent != 1]
    if not real:
        return env
    sizes = [extent for _, extent in real]
    if len(real) == len(keys) and all(map(equal_sizes, sizes, (k.extent for k in keys))):
        return env | {var: key.var for (var, _), key in zip(real, keys, strict=True)}
    if not equal_sizes(size_of(Axis(var, n) for var, n in real), size_of(keys)):
        raise Unsupported(f"{definition.buffer.name} does not reduce the keys")
    flat = flatten([k.var for k in keys], [k.extent for k in keys], INDEX)
    parts = unflatten(flat, sizes, tvm.sym.Analyzer())
    return env | {var: part for (var, _), part in zip(real, parts, strict=True)}


def checked_kind(definition: Definition) -> ReduceKind:
    """The kind of a reduction over the keys whose initial value changes nothing."""
    initial, kind, dtype = number(definition.initial), definition.kind, definition.dtype
    if dtype == "bool":
        neutral = {ReduceKind.MAX: initial == 0, ReduceKind.MIN: initial == 1}.get(kind, False)
    else:
        lowest = initial is not None and initial <= number(tvm.tirx.min_value(dtype))
        highest = initial is not None and initial >= number(tvm.tirx.max_value(dtype))
        neutral = {
            ReduceKind.SUM: initial == 0,
            ReduceKind.MAX: lowest,
            ReduceKind.MIN: highest,
        }.get(kind, False)
    if not neutral:
        raise Unsupported(f"{definition.buffer.name} is a reduction that softmax does not have")
    return kind
