"""How a load or store moves through memory when an axis advances."""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var

from ...program.expr import constant, dtype_of, flatten, number
from .rewrite import Substitute, free_variables, loads, nodes


def offset(buffer: Var, indices: list[Expr]) -> Expr:
    """Linear offset of an element."""
    dtype = dtype_of(indices[0]) if indices else "int64"
    return flatten(indices, list(buffer.ty.shape), dtype)


def stride(buffer: Var, indices: list[Expr], var: Var, analyzer: tvm.sym.Analyzer) -> int | None:
    """Elements by which an access moves when `var` grows by 1; None if that varies."""
    at = offset(buffer, indices)
    if var not in free_variables(at):
        return 0
    if any(var in free_variables(load) for load in loads(at)):
        return None
    ahead = Substitute({var: tirx.Add(var, constant(1, dtype_of(var)))})(at)
    return number(analyzer.simplify(ahead - at))


def load_stride(load: TensorLoad, var: Var, analyzer: tvm.sym.Analyzer) -> int | None:
    """`stride` of a load."""
    return stride(load.source, list(load.indices), var, analyzer)


def has_division(expr: Expr) -> bool:
    """Whether an index computation divides."""
    return any(
        isinstance(e, tirx.FloorDiv | tirx.FloorMod | tirx.Div | tirx.Mod) for e in nodes(expr)
    )
