"""Outputs of an attention over its axes and placeholders.

y[b, s, c] = O[b, c // 64, s, c % 64] / l[b, c // 64, s]    at (b, h, m, e):
    indices (b, m, h * 64 + e), value result
lse[b, h, s] = r[b, h, s] + log(l[b, h, s])                 a row output, value lse
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var

from ....errors import Unsupported
from ...contraction.inline import Inliner
from ...contraction.model import Axis, Binding, Output, Simplifier, fresh_var
from ...contraction.results import Position, Result, Sum, coordinates, inverted
from ...program.definitions import Definition
from ...program.expr import dtype_of, rebuild, same, substitute, uses_any, variables, widened
from .algebra import Linear, Power, choice, is_call, value_of, write_linear, write_power
from .softmax import Softmax
from .space import Space, over_keys


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """An output with its indices over the axes of the attention; `full` has all features."""

    definition: Definition
    param: int
    position: Position
    full: bool


def place(space: Space, definition: Definition, param: int) -> Placed:
    """Where an output is written, from where it reads the result or the scores of its rows.

    Raises
    ------
    Unsupported
        It reads the weights themselves, or neither result nor rows, or no rearrangement of them.
    """
    products = space.products
    axes, indices = coordinates(definition.shape, "o")
    runs = [Axis(fresh_var(f"run{i}", "int64"), key.extent) for i, key in enumerate(space.keys)]
    name = definition.buffer.name
    found = Result(definition, param, [*axes, *runs], indices)
    inside = []

    def note(read: Definition, at: Position) -> Expr:
        if read is not products.result and not products.is_score(read):
            if products.result.buffer in products.reductions[read.buffer]:
                raise Unsupported(f"{read.buffer.name} reduces the result of the attention")
            inside.append(read)
            env = {**read.at(at), **over_keys(read, runs)}
            inliner.resolve(read.value, env)
            inside.pop()
        elif products.is_score(read) and not inside:
            raise Unsupported(f"{name} reads the weights or scores, which are not stored")
        else:
            before = found.reads.setdefault(read.buffer, at)
            if not all(same(a, b) for a, b in zip(before, at, strict=True)):
                raise Unsupported(f"{read.buffer.name} is read at several points of {name}")
        return fresh_var(read.buffer.name, widened(read.dtype))

    inliner = Inliner(products.definitions, False, Simplifier(found.axes), note)
    inliner.load(definition.buffer, indices)
    if products.result.buffer in found.reads:
        found.axes = axes
        base, base_axes = Sum(products.result, 0, space.position), space.axes
    elif space.score_definition.buffer in found.reads:
        base = Sum(space.score_definition, 0, space.score_position)
        used = set(variables(*space.score_position))
        base_axes = [axis for axis in (*space.axes, *space.keys) if axis.var in used]
    else:
        raise Unsupported(f"{name} does not depend on the attention")
    env = inverted(found, base, base_axes)
    position = tuple(space.simplify(substitute(i, env)) for i in indices)
    return Placed(definition, param, position, products.result.buffer in found.reads)


class Writer:
    """Rewrites values of outputs over `result` and `lse`; what cancels, vanishes."""

    def __init__(self, softmax: Softmax) -> None:
        self.softmax = softmax
        self.space = softmax.space
        self.bindings: list[Binding] = []
        self._known: dict[Var, Expr] = {}
        self._seen = 0

    def output(self, placed: Placed) -> Output:
        """An output in terms of the model."""
        value = self.space.inliner.load(placed.definition.buffer, placed.position)
        self._close()
        written = self.write(value)
        if uses_any(written, self.space.rows):
            raise Unsupported(
                f"{placed.definition.buffer.name} keeps a maximum or a sum of its softmax"
            )
        return Output(placed.param, placed.position, written, placed.definition.dtype)

    def _close(self) -> None:
        """Rewrites the temporaries that are whole by themselves, so that they are computed once;
        others, such as a product before its division, are opened by their readers.
        """
        for binding in self.space.bindings[self._seen :]:
            if self.space.has_raw(binding.value):
                try:
                    written = self.write(binding.value)
                except Unsupported:
                    continue
                self._bind(binding.var, written)
                self.space.closed.add(binding.var)
        self._seen = len(self.space.bindings)

    def _bind(self, var: Var, written: Expr) -> None:
        self._known[var] = fresh_var(f"u{len(self._known)}", dtype_of(written))
        self.bindings.append(Binding(self._known[var], written))

    def write(self, expr: Expr) -> Expr:
        """`expr` without reductions of rows and without the second product."""
        space = self.space
        if not (space.has_raw(expr) or space.has_rows(expr)):
            return self._carried(expr)
        if isinstance(expr, Var) and expr not in space.rows and not expr.same_as(space.raw):
            return self._temporary(expr)
        if isinstance(expr, TensorLoad):
            raise Unsupported("an index depends on the result of the attention")
        expr = space.open(expr)
        if isinstance(expr, tirx.Add | tirx.Sub) and not space.has_raw(expr):
            return self._sum(expr)
        if is_call(expr, "tirx.log", "prim.log2"):
            return self._sum(expr)
        if isinstance(expr, tirx.Mul | tirx.Div | Var):
            return self._product(expr)
        if is_call(expr, "tirx.exp", "tirx.exp2") and not space.has_raw(expr):
            return self._product(expr)
        parts = choice(expr)
        if parts is not None:
            return self._choice(expr, parts)
        return rebuild(expr, self.write)

    def _choice(self, expr: Expr, parts: Sequence[Expr]) -> Expr:
        condition, yes, no = parts
        if not self.space.has_rows(condition):
            return rebuild(expr, self.write)
        for side, other, seen in ((yes, no, condition), (no, yes, tirx.Not(condition))):
            empty = value_of(other)
            of_row = not self.space.has_raw(side) and empty == -float("inf")
            if ((empty == 0 and self.space.has_raw(side)) or of_row) and self.softmax.is_seen(seen):
                return self.write(side)
        raise Unsupported(f"a condition on a reduction over the keys: {condition}")

    def _temporary(self, var: Var) -> Expr:
        """A temporary, rewritten once; a product is opened, for what cancels behind it."""
        if var in self._known:
            return self._known[var]
        value = self.space.open(var)
        if isinstance(value, tirx.Mul | tirx.Div | Var):
            return self._product(value)
        self._bind(var, self.write(value))
        return self._known[var]

    def _carried(self, expr: Expr) -> Expr:
        """An expression that stays as it is, with the temporaries it reads."""
        for var in variables(expr):
            value = self.space.open(var)
            if value is not var and var not in self._known:
                self._known[var] = var
                self.bindings.append(Binding(var, self._carried(value)))
        return expr

    def _product(self, expr: Expr) -> Expr:
        power = self.softmax.reduced(self.softmax.algebra.power(expr))
        factors = []
        conditions = [c for c in power.conditions if not self._is_dropped(c)]
        for part, sign in power.factors:
            if part.same_as(self.softmax.result):
                factors.append((part, sign))
            elif part.same_as(expr):
                raise Unsupported(f"a maximum over the keys outside of a softmax: {expr}")
            else:
                factors.append((self.write(part), sign))
        for term, _ in power.exponent.terms:
            if self.space.has_rows(term):
                raise Unsupported(
                    "the result keeps the maximum of its row, or is normalised by another sum"
                )
            self._carried(term)
        value = write_power(Power(power.coefficient, factors, power.exponent))
        for condition in conditions:
            value = tirx.Select(self.write(condition), value, tirx.const(0.0, dtype_of(value)))
        return value

    def _is_dropped(self, condition: Expr) -> bool:
        return self.space.has_rows(condition) and self.softmax.is_seen(condition)

    def _sum(self, expr: Expr) -> Expr:
        """A sum of reductions of rows: maxima cancel against logarithms of sums."""
        found = self.softmax.reduced_sum(self.softmax.algebra.linear(expr))
        terms = []
        for term, coefficient in found.terms:
            if not self.space.has_rows(term):
                terms.append((self._carried(term), coefficient))
            elif isinstance(term, Var):
                raise Unsupported("an output keeps the maximum of its row")
            elif term.same_as(expr):
                raise Unsupported(f"an output of rows that is no logsumexp: {term}")
            else:
                terms.append((self.write(term), coefficient))
        return write_linear(Linear(terms, found.constant))
