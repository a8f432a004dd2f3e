"""Packing the right operand of a contraction once, before its tiles are computed.

    right[j // 32, k, j % 32] = B[k, j]

Each panel of columns is contiguous: the register tile reads it from end to end.
"""

from __future__ import annotations

from dataclasses import replace

from tvm import tirx
from tvm.ir import Expr, PrimType, Var

from ...program.expr import constant, convert, dtype_of, number
from ..nests.scope import new_buffer
from ..stages.rewrite import Substitute
from ..stages.stages import Axis, Stage, analyzer_of, simplified
from .bfloat16_pairs import pair_at
from .operands import Product, depends
from .panels import plain_load


def packed_operand(stage: Stage, product: Product, width: int, paired: bool = False) -> Stage:
    """A stage that writes the right operand of `product` in panels of `width` columns.

    Its buffer has the axes of the batch, then panel, term (or pair of terms, where they are
    `paired`) and column in the panel.
    """
    index = _index_dtype(stage)

    def axis(name: str, extent: Expr | int) -> Axis:
        size = constant(extent, index) if isinstance(extent, int) else convert(extent, index)
        return Axis(Var(name, PrimType(index)), size)

    columns = _length(product.columns, index)
    panels = analyzer_of(()).simplify(
        tirx.FloorDiv(columns + constant(width - 1, index), constant(width, index))
    )
    batch = [axis(a.var.name, a.extent) for a in product.batch]
    terms = _length(product.reduced, index)
    two = constant(2, index)
    steps = tirx.FloorDiv(terms + constant(1, index), two) if paired else terms
    panel, term = axis("panel", panels), axis("term", analyzer_of(()).simplify(steps))
    lane = axis("lane", width)
    column = panel.index * constant(width, index) + lane.index
    env = {
        a.var: convert(b.index, dtype_of(a.var)) for a, b in zip(product.batch, batch, strict=True)
    }
    env.update(_positions(product.columns, column))
    inside = depends(product.right, stage)
    binds = []

    def at(term: Expr, operand: Expr) -> Expr:
        renamed = env | _positions(product.reduced, term)
        for var, value in stage.binds:
            if var in inside:
                fresh = Var(var.name, var.ty)
                binds.append((fresh, Substitute(renamed)(value)))
                renamed[var] = fresh
        return Substitute(renamed)(operand)

    if paired:
        load = plain_load(stage, product.right)
        is_even = number(analyzer_of(()).simplify(tirx.FloorMod(terms, two))) == 0
        value = pair_at(term.index, terms, is_even, lambda k: at(k, load))
    else:
        value = convert(at(term.index, product.right), dtype_of(stage.values[0]))
    dtype = dtype_of(value)
    axes = (*batch, panel, term, lane)
    buffer = new_buffer(f"{stage.name}_right", [a.extent for a in axes], dtype)
    packed = Stage(f"{stage.name}_right", (buffer,), axes, (), (value,), binds=tuple(binds))
    return simplified(_guarded(packed, panel, column, columns, width))


def _guarded(stage: Stage, panel: Axis, column: Expr, columns: Expr, width: int) -> Stage:
    """The stage with zeros behind the last column; whole panels have a branch of their own."""
    size = number(columns)
    if size is not None and int(size) % width == 0:
        return stage
    (value,) = stage.values
    for var, bound in reversed(stage.binds):
        value = tirx.Let(var, bound, value)
    zero = constant(0, dtype_of(value))
    inner = tirx.if_then_else(tirx.LT(column, columns), value, zero)
    whole = tirx.LT(panel.index, tirx.FloorDiv(columns, constant(width, dtype_of(panel.var))))
    return replace(stage, binds=(), values=(tirx.if_then_else(whole, value, inner),))


def _length(axes: tuple[Axis, ...], dtype: str) -> Expr:
    total: Expr = constant(1, dtype)
    for a in axes:
        total = total * convert(a.extent, dtype)
    return analyzer_of(()).simplify(total)


def _positions(axes: tuple[Axis, ...], flat: Expr) -> dict[Var, Expr]:
    """Position on each axis of element number `flat`."""
    env: dict[Var, Expr] = {}
    for i in range(len(axes) - 1, -1, -1):
        extent = convert(axes[i].extent, dtype_of(flat))
        here = flat if i == 0 else tirx.FloorMod(flat, extent)
        env[axes[i].var] = convert(here, dtype_of(axes[i].var))
        flat = tirx.FloorDiv(flat, extent)
    return env


def _index_dtype(stage: Stage) -> str:
    axes = (*stage.axes, *stage.reduced)
    return "int64" if any(dtype_of(a.var) == "int64" for a in axes) else "int32"
