"""Conversions of integers that grow evenly along the keys, done once for each tile.

    float32(j - i)  at column j = j0 + 8 * t + v   ->   float32(j0 - i) + (8 * t + v)

A conversion takes as long as a special function; the sum is exact up to 2^24.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var

from ...contraction.model import Axis, Binding, fresh_var
from ...gemm.epilogue_loads import holds_load
from ...program.expr import convert, dtype_of, is_integer, linear_form, number, rebuild, uses_any

if TYPE_CHECKING:
    from .points import Points


@dataclass(frozen=True, slots=True, eq=False)
class Offset:
    """``var = float32(value)``, which grows by `step` with each key."""

    var: Var
    value: Expr
    step: int

    def start(self, points: Points, half: int, column: Expr) -> Expr:
        """Its value at a row of a thread and a column."""
        value = points.frame.rewrite(self.value, points.unclamped(half, column))
        return convert(convert(value, "int32"), "float32")


def take_offsets(
    key: Axis, bindings: tuple[Binding, ...], value: Expr
) -> tuple[tuple[Binding, ...], Expr, tuple[Offset, ...]]:
    """Bindings and a value with placeholders for such conversions, and these."""
    found: list[Offset] = []
    names = [binding.var for binding in bindings]

    def visit(expr: Expr) -> Expr:
        if isinstance(expr, Var | TensorLoad):
            return expr
        if isinstance(expr, tirx.Cast) and dtype_of(expr) == "float32":
            taken = _offset(key, expr.value, names, len(found))
            if taken is not None:
                found.append(taken)
                return taken.var
        return rebuild(expr, visit)

    bindings = tuple(Binding(b.var, visit(b.value)) for b in bindings)
    return bindings, visit(value), tuple(found)


def _offset(key: Axis, expr: Expr, names: list[Var], count: int) -> Offset | None:
    if not is_integer(dtype_of(expr)) or holds_load(expr) or uses_any(expr, names):
        return None
    form = linear_form(expr, [key.var]) if uses_any(expr, [key.var]) else None
    step = None if form is None else number(form[0][0])
    return None if not step else Offset(fresh_var(f"o{count}", "float32"), expr, int(step))
