"""Divisions in indices, hidden where TVM's simplification of iterators gets them wrong.

    x[(5 - i) // 2 * 2 + (5 - i) % 2]      x[((5 - i) // 2 | 0) * 2 + ((5 - i) % 2 | 0)]
    x[z % 4 * 8 + (z + 1) % 4]             x[z % 4 * 8 + ((z + 1) % 4 | 0)]

`IterMapSimplify` splits ``5 - i`` over `i` in [0, 6) into ``i // -2 + 2`` and ``-(i % -2)``,
wrong for every second `i`. It pads `z` for the division of ``z + 1``, and takes other parts of `z`
for parts of what it has padded: it makes ``(z + 1) % 4 * 9`` of the second. `FlattenBuffer` puts
that into the indices of loads and stores. It leaves alone what it cannot read, and a compiler drops
an or with 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Expr, TensorLoad

from ...kernels.program.expr import DIVISIONS, dtype_of, number
from ...transform.functions.functions import with_functions

_LINEAR = (tirx.Add, tirx.Sub, tirx.Mul)
_DIVISIONS = frozenset(DIVISIONS)
_OF_TWO = _DIVISIONS.union(_LINEAR)


def with_hidden_divisions(mod: tvm.IRModule) -> tvm.IRModule:
    """A module in whose PrimFuncs no division of a descending number is open to `IterMapSimplify`,
    nor is one of a number and a constant in an access that divides the number otherwise, too;
    those without any stay as they are.
    """
    functions = {}
    for gvar, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc):
            func = _Shifts(_hidden_falling(func)).hidden()
        functions[gvar] = func
    return with_functions(mod, functions)


def _hidden_falling(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with every division of a descending number hidden."""
    falling = _falling_names(func)

    def hide(division: Expr) -> Expr:
        dtype = dtype_of(division)
        if not dtype.startswith(("int", "uint")) or not _falls(division.a, falling):
            return division
        return tirx.bitwise_or(division, tirx.IntImm(dtype, 0))

    body = tvm_ffi.structural_map(func.body, [(kind, hide) for kind in DIVISIONS])
    return func if body.same_as(func.body) else func.with_body(body)


def _falling_names(func: tirx.PrimFunc) -> set[tirx.Var]:
    """The variables that are bound to something descending: simplification puts it in for them."""
    falling: set[tirx.Var] = set()

    def see(binding: tirx.Bind) -> None:
        if _falls(binding.value, falling):
            falling.add(binding.var)

    tvm_ffi.structural_walk(func.body, [(tirx.Bind, see)])
    return falling


def _falls(expr: Expr, falling: Collection[tirx.Var], sign: int = 1) -> bool:
    """Whether a variable counts downwards in an integer expression that stands `sign` times."""
    if isinstance(expr, tirx.Var):
        return sign < 0 or expr in falling
    if isinstance(expr, tirx.Add):
        return _falls(expr.a, falling, sign) or _falls(expr.b, falling, sign)
    if isinstance(expr, tirx.Sub):
        return _falls(expr.a, falling, sign) or _falls(expr.b, falling, -sign)
    if isinstance(expr, tirx.Mul):
        factor = next((x for x in (expr.a, expr.b) if isinstance(x, tirx.IntImm)), None)
        if factor is not None:
            other = expr.b if expr.a.same_as(factor) else expr.a
            return _falls(other, falling, sign if factor.value >= 0 else -sign)
    if isinstance(expr, tirx.Cast):
        return _falls(expr.value, falling, sign)
    if isinstance(expr, DIVISIONS):
        return _falls(expr.a, falling, sign)
    return sign < 0 and not isinstance(expr, tirx.IntImm)


class _Shifts:
    """The divisions in a function's indices, with bound variables looked through.

    Of a bound variable it is found out once what its value is made of: values are bound to values,
    and each access of a kernel is made of most of them.
    """

    def __init__(self, func: tirx.PrimFunc) -> None:
        self.func = func
        self.bound: dict[tirx.Var, Expr] = {}
        self._sums: dict[tirx.Var, tuple[Counter, int]] = {}
        self._with_shifted: dict[tirx.Var, bool] = {}
        self._undivided: dict[tirx.Var, frozenset[tirx.Var] | None] = {}
        tvm_ffi.structural_walk(func.body, [(tirx.Bind, self._bind)])

    def _bind(self, binding: tirx.Bind) -> None:
        self.bound[binding.var] = binding.value

    def hidden(self) -> tirx.PrimFunc:
        """The function with the indices of its loads and stores hidden where they need it."""

        def access(node: TensorLoad | tirx.BufferStore) -> TensorLoad | tirx.BufferStore:
            found = self._meeting(node.indices)
            if not found:
                return node
            indices = [self._hide(i, found) for i in node.indices]
            if isinstance(node, TensorLoad):
                return tirx.BufferLoad(node.source, indices)
            return tirx.BufferStore(node.buffer, node.value, indices)

        kinds = (TensorLoad, tirx.BufferStore)
        body = tvm_ffi.structural_map(self.func.body, [(kind, access) for kind in kinds])
        return self.func if body.same_as(self.func.body) else self.func.with_body(body)

    def _meeting(self, indices: Sequence[Expr]) -> list[Expr]:
        """Divisions of a number and a constant beside others of a part of that number."""
        return [d for d in self._shifted(indices) if self._meets(d, indices)]

    def _hide(self, index: Expr, found: Sequence[Expr]) -> Expr:
        """The index with an or around each of its terms in which one of `found` is."""
        if isinstance(index, _LINEAR):
            return type(index)(self._hide(index.a, found), self._hide(index.b, found))
        if any(e.same_as(d) for e in self._shifted([index]) for d in found):
            return tirx.bitwise_or(index, tirx.IntImm(dtype_of(index), 0))
        return index

    def _parts(self, expr: Expr) -> tuple[Expr, ...]:
        """Of what `IterMapSimplify` reads, the operands; of a bound variable its value."""
        kind = type(expr)
        if kind in _OF_TWO:
            return expr.a, expr.b
        if kind is tirx.Cast:
            return (expr.value,)
        value = self.bound.get(expr) if kind is tirx.Var else None
        return () if value is None else (value,)

    def _inside(self, exprs: Sequence[Expr]) -> list[Expr]:
        """All that the expressions are made of, a variable once."""
        found, todo, seen = [], list(exprs), set()
        while todo:
            expr = todo.pop()
            if type(expr) is tirx.Var:
                if expr in seen:
                    continue
                seen.add(expr)
            found.append(expr)
            todo += self._parts(expr)
        return found

    def _shifted(self, exprs: Sequence[Expr]) -> list[Expr]:
        """The divisions of a number and a constant that the expressions are made of."""
        found, todo, seen = [], list(exprs), set()
        while todo:
            expr = todo.pop()
            if type(expr) is tirx.Var:
                if expr in seen or not self._has_shifted(expr):
                    continue
                seen.add(expr)
            elif self._is_shifted(expr):
                found.append(expr)
            todo += self._parts(expr)
        return found

    def _has_shifted(self, var: tirx.Var) -> bool:
        """Whether any is in what a variable is bound to."""
        if var not in self._with_shifted:
            self._with_shifted[var] = bool(self._shifted(self._parts(var)))
        return self._with_shifted[var]

    def _terms(self, expr: Expr) -> tuple[Counter, int]:
        """How often each term of a sum is in it, and its constant."""
        terms: Counter = Counter()
        return terms, self._add_terms(expr, 1, terms)

    def _add_terms(self, expr: Expr, sign: int, terms: Counter) -> int:
        """Counts the terms of a sum that stands `sign` times; returns its constant."""
        kind = type(expr)
        if kind is tirx.IntImm:
            return sign * int(expr.value)
        if kind is tirx.Add or kind is tirx.Sub:
            start = self._add_terms(expr.a, sign, terms)
            return start + self._add_terms(expr.b, sign if kind is tirx.Add else -sign, terms)
        if kind is tirx.Cast:
            return self._add_terms(expr.value, sign, terms)
        if kind is tirx.Var and expr in self.bound:
            if expr not in self._sums:
                self._sums[expr] = self._terms(self.bound[expr])
            counts, constant = self._sums[expr]
            for term, count in counts.items():
                terms[term] += sign * count
            return sign * constant
        terms[tvm_ffi.StructuralKey(expr)] += sign
        return 0

    def _is_shifted(self, expr: Expr) -> bool:
        if type(expr) not in _DIVISIONS:
            return False
        size = number(expr.b)
        return bool(size) and self._terms(expr.a)[1] % size != 0

    def _meets(self, division: Expr, indices: Sequence[Expr]) -> bool:
        """Whether what a division divides is divided elsewhere, and not by a multiple apart: as it
        is where it is a sum, which is an iterator of its own, else any part of it. A rest, or what
        a constant was added to before it was divided, is a part of such a number, too.
        """
        (own, shift), size = self._terms(division.a), number(division.b)
        parts = self._inside([division.a]) if len(own) == 1 else ()
        if any(isinstance(e, (tirx.FloorMod, tirx.Mod)) or self._is_shifted(e) for e in parts):
            return True
        owned = {e for e in parts if isinstance(e, tirx.Var) and e not in self.bound}
        todo, seen = [(i, False) for i in indices], set()
        while todo:
            expr, divided = todo.pop()
            if type(expr) is tirx.Var:
                if (expr, divided) in seen:
                    continue
                seen.add((expr, divided))
                if (unbound := self._unbound(expr)) is not None:
                    if divided and not owned.isdisjoint(unbound):
                        return True
                    continue
            elif type(expr) in _DIVISIONS:
                terms, other = self._terms(expr.a)
                if terms == own:
                    if (other - shift) % size:
                        return True
                    continue
                divided = True
            todo += ((part, divided) for part in self._parts(expr))
        return False

    def _unbound(self, var: tirx.Var) -> frozenset[tirx.Var] | None:
        """The unbound variables that a variable is made of; None where a division is among it."""
        if var not in self._undivided:
            inside = self._inside([var])
            divided = any(type(e) in _DIVISIONS for e in inside)
            unbound = (e for e in inside if type(e) is tirx.Var and e not in self.bound)
            self._undivided[var] = None if divided else frozenset(unbound)
        return self._undivided[var]
