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
    """The divisions in a function's indices, with bound variables looked through."""

    def __init__(self, func: tirx.PrimFunc) -> None:
        self.func = func
        self.bound: dict[tirx.Var, Expr] = {}
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
        shifted = [e for e in self._inside(indices) if self._is_shifted(e)]
        return [d for d in shifted if self._meets(d, indices)]

    def _hide(self, index: Expr, found: Sequence[Expr]) -> Expr:
        """The index with an or around each of its terms in which one of `found` is."""
        if isinstance(index, _LINEAR):
            return type(index)(self._hide(index.a, found), self._hide(index.b, found))
        if any(e.same_as(d) for e in self._inside([index]) for d in found):
            return tirx.bitwise_or(index, tirx.IntImm(dtype_of(index), 0))
        return index

    def _parts(self, expr: Expr) -> tuple[Expr, ...]:
        """Of what `IterMapSimplify` reads, the operands; of a bound variable its value."""
        if isinstance(expr, (*_LINEAR, *DIVISIONS)):
            return expr.a, expr.b
        if isinstance(expr, tirx.Cast):
            return (expr.value,)
        value = self.bound.get(expr) if isinstance(expr, tirx.Var) else None
        return () if value is None else (value,)

    def _inside(self, exprs: Sequence[Expr]) -> list[Expr]:
        """All that the expressions are made of, a variable once."""
        found, todo, seen = [], list(exprs), set()
        while todo:
            expr = todo.pop()
            if isinstance(expr, tirx.Var):
                if expr in seen:
                    continue
                seen.add(expr)
            found.append(expr)
            todo += self._parts(expr)
        return found

    def _terms(self, expr: Expr, sign: int = 1) -> tuple[Counter, int]:
        """How often each term of a sum is in it, and its constant."""
        if isinstance(expr, tirx.IntImm):
            return Counter(), sign * int(expr.value)
        if isinstance(expr, tirx.Add | tirx.Sub):
            a, start = self._terms(expr.a, sign)
            b, more = self._terms(expr.b, sign if isinstance(expr, tirx.Add) else -sign)
            a.update(b)
            return a, start + more
        parts = () if isinstance(expr, (tirx.Mul, *DIVISIONS)) else self._parts(expr)
        if parts:
            return self._terms(parts[0], sign)
        return Counter({tvm_ffi.StructuralKey(expr): sign}), 0

    def _is_shifted(self, division: Expr) -> bool:
        if not isinstance(division, DIVISIONS):
            return False
        size = number(division.b)
        return bool(size) and self._terms(division.a)[1] % size != 0

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
            if isinstance(expr, tirx.Var):
                if (expr, divided) in seen:
                    continue
                seen.add((expr, divided))
                if divided and expr in owned:
                    return True
            if isinstance(expr, DIVISIONS):
                terms, other = self._terms(expr.a)
                if terms == own:
                    if (other - shift) % size:
                        return True
                    continue
                divided = True
            todo += ((part, divided) for part in self._parts(expr))
        return False
