"""Divisions of what counts downwards, hidden from TVM's simplification of iterators.

    x[(5 - i) // 2 * 2 + (5 - i) % 2]      x[((5 - i) // 2 | 0) * 2 + ((5 - i) % 2 | 0)]

`IterMapSimplify` splits ``5 - i`` over `i` in [0, 6) into ``i // -2 + 2`` and ``-(i % -2)``, wrong
for every second `i`; `FlattenBuffer` puts that into the indices of loads and stores. It leaves
alone what it cannot read, and a compiler drops an or with 0.
"""

from __future__ import annotations

from collections.abc import Collection

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Expr

from ...kernels.program.expr import dtype_of
from ...transform.functions.functions import with_functions

_DIVISIONS = (tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod)


def with_hidden_divisions(mod: tvm.IRModule) -> tvm.IRModule:
    """A module in whose PrimFuncs no division of a descending number is open to `IterMapSimplify`;
    those in which nothing descends stay as they are.
    """
    functions = {}
    for gvar, func in mod.functions_items():
        functions[gvar] = _hidden(func) if isinstance(func, tirx.PrimFunc) else func
    return with_functions(mod, functions)


def _hidden(func: tirx.PrimFunc) -> tirx.PrimFunc:
    falling = _falling_names(func)

    def hide(division: Expr) -> Expr:
        dtype = dtype_of(division)
        if not dtype.startswith(("int", "uint")) or not _falls(division.a, falling):
            return division
        return tirx.bitwise_or(division, tirx.IntImm(dtype, 0))

    body = tvm_ffi.structural_map(func.body, [(kind, hide) for kind in _DIVISIONS])
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
    if isinstance(expr, _DIVISIONS):
        return _falls(expr.a, falling, sign)
    return sign < 0 and not isinstance(expr, tirx.IntImm)
