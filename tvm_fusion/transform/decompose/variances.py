"""Variances that a model writes out in operators of its own: mean((x - mean(x))^2).

    m = mean(x, axes, keepdims)    d = x - m    v = mean(d * d, axes)    ->  {v: m}

The square may be d * d, d ** 2 or square(d).
"""

import tvm
from tvm import relax
from tvm.ir import Call
from tvm.relax import Expr, Var

from .opening import normalize_axes, shape_of


def written_out(func: relax.Function) -> dict[Var, Var]:
    """The mean within each variance of a function, by the variable that holds the variance; both
    are bound in one block.
    """
    found: dict[Var, Var] = {}

    def visit(expr: Expr) -> None:
        for block in expr.blocks if isinstance(expr, relax.SeqExpr) else ():
            bound = {b.var: b.value for b in block.bindings if isinstance(b, relax.VarBinding)}
            centers = {var: _center(value, bound) for var, value in bound.items()}
            found.update({var: center for var, center in centers.items() if center is not None})

    relax.analysis.post_order_visit(func, visit)
    return found


def _center(value: Expr, bound: dict[Var, Expr]) -> Var | None:
    if not _is(value, "relax.mean"):
        return None
    difference = _look(_root(value.args[0], bound), bound)
    if not _is(difference, "relax.subtract"):
        return None
    x, center = difference.args
    mean = _look(center, bound)
    if not _is(mean, "relax.mean") or not mean.args[0].same_as(x) or not mean.attrs.keepdims:
        return None
    shape = shape_of(x)
    if not isinstance(center, Var) or not shape:
        return None
    inner, outer = (set(normalize_axes(c.attrs.axis, len(shape))) for c in (mean, value))
    return center if inner == outer else None


def _root(square: Expr, bound: dict[Var, Expr]) -> Expr | None:
    """d where `square` is the square of d."""
    value = _look(square, bound)
    if _is(value, "relax.multiply") and value.args[0].same_as(value.args[1]):
        return value.args[0]
    if _is(value, "relax.power") and _number(value.args[1]) == 2:
        return value.args[0]
    return value.args[0] if _is(value, "relax.square") else None


def _look(expr: Expr | None, bound: dict[Var, Expr]) -> Expr | None:
    """What a variable is bound to."""
    while isinstance(expr, Var) and expr in bound:
        expr = bound[expr]
    return expr


def _is(value: Expr | None, name: str) -> bool:
    return isinstance(value, Call) and value.op == tvm.ir.Op.get(name)


def _number(value: Expr) -> float | None:
    """The value of a constant of one element."""
    held = value.value if isinstance(value, tvm.ir.Constant) else None
    if not isinstance(held, tvm.runtime.Tensor):
        return held
    array = held.numpy()
    return float(array.item()) if array.size == 1 else None
