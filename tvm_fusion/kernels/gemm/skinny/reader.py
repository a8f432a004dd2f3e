"""An operand at a block of points: which loads they share, in wide copies, and their expressions.

    w[n, k // 8] >> (k % 8 * 4) & 15     at k = 32 c + (0 ... 31):
      one fetch of w[n, 4 c ... 4 c + 3] (16 bytes), and 32 expressions with constant shifts

A block is `steps` consecutive terms of `width` consecutive columns. Every load of the operand whose
elements lie at constant distances becomes one `Fetch`; any other is read point by point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var
from tvm.ir.prim.expr import RShift

from ...contraction.index import Simplifier
from ...contraction.model import INDEX, Binding, fresh_var
from ...contraction.reader import Axis, Contraction
from ...gpu.memory import WIDEST
from ...program.expr import (
    bytes_of,
    constant,
    dtype_of,
    flatten,
    is_if_then_else,
    is_integer,
    known_factor,
    number,
    rebuild,
    same,
    substitute,
    variables,
)
from .fetch import Blocks, Copy, Env, Fetch, runs_of, widest_piece


@dataclass(slots=True, eq=False)
class Reader:
    """Reads an operand at blocks of points; point number ``s * width + v``.

    Attributes
    ----------
    hint : how wide loads are cached (see `memory.copy_in`).
    fetches : loads of all points of a block.
    points : the operand's value at each point, over the placeholders of the fetches.
    """

    contraction: Contraction
    k: Blocks
    side: Blocks
    batch: tuple[Axis, ...]
    hint: str = "na"
    fetches: list[Fetch] = field(default_factory=list)
    points: list[Expr] = field(default_factory=list)
    simplify: Simplifier | None = None
    _known: list[tuple[TensorLoad, Fetch]] = field(default_factory=list)

    def read(self, value: Expr, bindings: Sequence[Binding]) -> Reader:
        """Finds the loads of an operand; returns itself."""
        env: dict[Var, Expr] = {}
        for binding in bindings:
            env[binding.var] = substitute(binding.value, env)
        value = substitute(value, env)
        ranges = [*self.batch, *self.side.ranges(), *self.k.ranges()]
        self.simplify = Simplifier(ranges)
        at = [
            {**self.k.at(s), **self.side.at(v)}
            for s in range(self.k.size)
            for v in range(self.side.size)
        ]
        self.points = [self._visit(value, at, p) for p in range(len(at))]
        return self

    def varies_with(self, expr: Expr, wanted: Sequence[Var | None]) -> bool:
        """Whether an expression over placeholders depends on one of some variables."""
        found = list(variables(expr))
        for fetch in self.fetches:
            if any(var in fetch.holders.values() for var in found):
                found += variables(*(i for copy in fetch.copies for i in copy.indices))
        return any(var in found for var in wanted if var is not None)

    def holder(self, var: Expr) -> tuple[Fetch, int] | None:
        """The fetch and slot that a placeholder stands for."""
        for fetch in self.fetches:
            for slot, holder in fetch.holders.items():
                if holder.same_as(var):
                    return fetch, slot
        return None

    def needed(self, wanted: Sequence[Var]) -> list[Fetch]:
        """The fetches that hold `wanted` elements."""
        return [f for f in self.fetches if any(h in wanted for h in f.holders.values())]

    # ---- analysis

    def _visit(self, expr: Expr, at: Sequence[Env], p: int) -> Expr:
        """`expr` at point `p` over placeholders."""
        if isinstance(expr, TensorLoad):
            fetch = self._fetch(expr, at)
            slot = fetch.slots[p]
            return fetch.holders.setdefault(slot, fresh_var("h", fetch.dtype))
        if is_if_then_else(expr):
            return substitute(expr, at[p])
        if isinstance(expr, Var):
            return at[p].get(expr, expr)
        if is_integer(dtype_of(expr)) and not _has_load(expr):
            return self.simplify(substitute(expr, at[p]))
        if isinstance(expr, RShift) and not _has_load(expr.b):
            return self._visit(expr.a, at, p) >> self._amount(substitute(expr.b, at[p]))
        return rebuild(expr, lambda child: self._visit(child, at, p))

    def _amount(self, expr: Expr) -> Expr:
        """How far a number is shifted; with what is known to be the most, where that varies."""
        amount = self.simplify(expr)
        if number(amount) is not None:
            return amount
        most = self.simplify.most(amount)
        return amount if most is None else tirx.Min(amount, constant(most, dtype_of(amount)))

    def _fetch(self, load: TensorLoad, at: Sequence[Env]) -> Fetch:
        for known, fetch in self._known:
            if known.same_as(load) or (known.source.same_as(load.source) and same(known, load)):
                return fetch
        fetch = self._plan(load, at)
        self._known.append((load, fetch))
        self.fetches.append(fetch)
        return fetch

    def _plan(self, load: TensorLoad, at: Sequence[Env]) -> Fetch:
        simplify, dtype = self.simplify, dtype_of(load)
        shape = next(p.shape for p in self.contraction.params if p.var.same_as(load.source))
        places = [tuple(simplify(substitute(i, env)) for i in load.indices) for env in at]
        offsets = [flatten(indices, shape, INDEX) for indices in places]
        deltas = [number(simplify(offset - offsets[0])) for offset in offsets]
        if any(delta is None for delta in deltas) or any(_has_load(i) for i in load.indices):
            copies = [Copy(indices, p, 1, bytes_of(dtype)) for p, indices in enumerate(places)]
            slots = tuple(range(len(at)))
            return Fetch(load.source, dtype, tuple(copies), slots, {}, len(at))
        copies, slot_of, total = [], {}, 0
        for start, length in runs_of(sorted(set(deltas))):
            first = deltas.index(start)
            factor = known_factor(simplify(offsets[first]), simplify._analyzer)
            piece = widest_piece(factor, length, dtype)
            copies.append(Copy(places[first], total, length, piece))
            slot_of |= {start + i: total + i for i in range(length)}
            total += -(-length * bytes_of(dtype) // WIDEST) * WIDEST // bytes_of(dtype)
        slots = tuple(slot_of[delta] for delta in deltas)
        return Fetch(load.source, dtype, tuple(copies), slots, {}, total)


def _has_load(expr: Expr) -> bool:
    if isinstance(expr, TensorLoad):
        return True
    found: list[bool] = []

    def visit(child: Expr) -> Expr:
        found.append(_has_load(child))
        return child

    rebuild(expr, visit)
    return any(found)
