"""Expands loads of a kernel's own temporaries until only parameters are read.

T[i, j] = exp(x[i, j]);  y[j, i] = T[i, j] + T[i, j] * b[j]
  y at (j, i)  ->  v0 + v0 * b[j]      with the binding v0 = exp(x[i, j])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tvm import tirx
from tvm.ir import Call, Expr, TensorLoad, Var

from ...errors import Unsupported
from ..program.definitions import Definition
from ..program.expr import (
    HALF_DTYPES,
    convert,
    dtype_of,
    is_if_then_else,
    is_integer,
    number,
    rebuild,
    same,
    substitute,
    widened,
)
from .model import INDEX, Binding, fresh_var
from .pairs import Runs

# A temporary that is read under a condition cannot be bound ahead; expressions of such temporaries
# grow with the number of paths through them.
MAX_STEPS = 20_000


@dataclass(slots=True, eq=False)
class Inliner:
    """Resolves expressions at one point of a space.

    Attributes
    ----------
    definitions : by buffer.
    exact : round what is stored as half.
    simplify : knows the ranges of the axes.
    accumulate : what a read of a reduction at some indices is.
    bindings : temporaries made so far, each before its readers.
    runs : pairs of columns, where values are made of both; see `pairs`.
    conditions : those under which the present expression is evaluated.
    """

    definitions: Mapping[Var, Definition]
    exact: bool
    simplify: Callable[[Expr], Expr]
    accumulate: Callable[[Definition, tuple[Expr, ...]], Expr]
    bindings: list[Binding] = field(default_factory=list)
    runs: Runs | None = None
    conditions: list[Expr] = field(default_factory=list)
    _known: dict[Var, list[tuple[tuple[Expr, ...], Expr]]] = field(default_factory=dict)
    _steps: int = 0

    def resolve(self, expr: Expr, env: Mapping[Var, Expr], conditional: bool = False) -> Expr:
        """`expr` over axes and parameters; `conditional`: it is not evaluated at every point."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise Unsupported("the expressions around the product are too large to inline")

        def visit(child: Expr) -> Expr:
            return self.resolve(child, env, conditional)

        if isinstance(expr, Var):
            return convert(env.get(expr, expr), dtype_of(expr))
        if isinstance(expr, tirx.FloatImm):
            wide = tirx.FloatImm(widened(dtype_of(expr)), expr.value)
            return self._rounded(wide, dtype_of(expr))
        if isinstance(expr, TensorLoad):
            return self.load(expr.source, self.indices(expr.indices, env), conditional)
        if isinstance(expr, tirx.Cast):
            value = visit(expr.value)
            target = dtype_of(expr)
            return self._rounded(convert(value, widened(target)), target)
        if is_if_then_else(expr):
            return self._choose(expr, env, conditional)
        return rebuild(expr, visit)

    def indices(self, exprs: Sequence[Expr], env: Mapping[Var, Expr]) -> tuple[Expr, ...]:
        """Indices at this point, simplified."""
        return tuple(self.simplify(self._index(e, env)) for e in exprs)

    def load(self, buffer: Var, indices: tuple[Expr, ...], conditional: bool = False) -> Expr:
        """The element of `buffer` at `indices`."""
        if buffer not in self.definitions:
            if self.runs is not None:
                indices = self.runs.everywhere(indices, self.conditions)
            element = tirx.BufferLoad(buffer, list(indices))
            return convert(element, widened(dtype_of(element)))
        for known, value in self._known.setdefault(buffer, []):
            if all(same(a, b) for a, b in zip(known, indices, strict=True)):
                return value
        definition = self.definitions[buffer]
        if definition.kind is not None:
            value = self._rounded(self.accumulate(definition, indices), definition.dtype)
        else:
            body = self.resolve(definition.value, definition.at(indices), conditional)
            value = self._rounded(body, definition.dtype)
        if not conditional:
            value = self._bind(value)
            self._known[buffer].append((indices, value))
        return value

    def _bind(self, value: Expr) -> Expr:
        if isinstance(value, Var) or number(value) is not None:
            return value
        var = fresh_var(f"v{len(self.bindings)}", dtype_of(value))
        self.bindings.append(Binding(var, value))
        return var

    def _rounded(self, value: Expr, dtype: str) -> Expr:
        """`value` as the unfused graph stores it in `dtype`, if `exact` asks for that."""
        if not self.exact or dtype not in HALF_DTYPES:
            return value
        if isinstance(value, tirx.Cast) and dtype_of(value.value) == dtype:
            return value
        return tirx.Cast(dtype_of(value), tirx.Cast(dtype, value))

    def _choose(self, expr: Call, env: Mapping[Var, Expr], conditional: bool) -> Expr:
        condition = self.simplify(self.resolve(expr.args[0], env, conditional))
        known = number(condition)
        if known is not None:
            return self.resolve(expr.args[1 if known else 2], env, conditional)
        branches = []
        for holds, branch in zip((condition, tirx.Not(condition)), expr.args[1:], strict=True):
            self.conditions.append(holds)
            branches.append(self.resolve(branch, env, True))
            self.conditions.pop()
        if self.runs is not None:
            by_part = self.runs.choose(condition, self.conditions, branches)
            if by_part is not None:
                return by_part
        return tirx.if_then_else(condition, *branches)

    def _index(self, expr: Expr, env: Mapping[Var, Expr]) -> Expr:
        if isinstance(expr, tirx.IntImm):
            return tirx.IntImm(INDEX, int(expr.value))
        if isinstance(expr, Var):
            return convert(env.get(expr, expr), INDEX)
        if isinstance(expr, TensorLoad):
            return convert(self.resolve(expr, env), INDEX)
        if isinstance(expr, tirx.Cast) and is_integer(dtype_of(expr.value)):
            return self._index(expr.value, env)
        if not is_integer(dtype_of(expr)) or isinstance(expr, Call):
            return convert(self.resolve(expr, env), INDEX)
        return rebuild(expr, lambda child: self._index(child, env))


def collapse(
    roots: Sequence[Expr], bindings: Sequence[Binding]
) -> tuple[tuple[Expr, ...], tuple[Binding, ...]]:
    """Drops bindings nobody reads and puts those read once in place of the reader's variable."""
    uses: dict[Var, int] = {}
    for root in roots:
        _count(root, uses)
    live = []
    for binding in reversed(bindings):
        if uses.get(binding.var):
            _count(binding.value, uses)
            live.append(binding)
    env: dict[Var, Expr] = {}
    kept = []
    for binding in reversed(live):
        value = substitute(binding.value, env)
        if uses[binding.var] == 1 or isinstance(value, Var):
            env[binding.var] = value
        else:
            kept.append(Binding(binding.var, value))
    return (
        tuple(_round_once(substitute(root, env)) for root in roots),
        tuple(Binding(b.var, _round_once(b.value)) for b in kept),
    )


def _round_once(expr: Expr) -> Expr:
    """Drops the second of two equal roundings: f32(f16(f32(f16 x))) -> f32(f16 x)."""
    if isinstance(expr, TensorLoad):
        return expr
    expr = rebuild(expr, _round_once)
    if isinstance(expr, tirx.Cast) and isinstance(expr.value, tirx.Cast):
        inner = expr.value.value
        narrow = dtype_of(expr.value)
        if isinstance(inner, tirx.Cast) and dtype_of(inner.value) == narrow:
            return inner
    return expr


def _count(expr: Expr, uses: dict[Var, int]) -> None:
    """Adds the occurrences of every variable."""
    if isinstance(expr, Var):
        uses[expr] = uses.get(expr, 0) + 1
        return
    if isinstance(expr, TensorLoad):
        for index in expr.indices:
            _count(index, uses)
        return

    def visit(child: Expr) -> Expr:
        _count(child, uses)
        return child

    rebuild(expr, visit)
