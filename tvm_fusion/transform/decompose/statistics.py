"""mean, variance and standard deviation, and sums and products of half tensors.

    mean(x)       -> sum(x) * (1 / n)
    variance(x)   -> mean((x - mean(x))^2)         (of the population, as relax.variance is)
    std(x)        -> sqrt(variance(x))
    sum(x: half)  -> half(sum(float32(x)))         (prod alike)

With a symbolic n, mean stays one `relax.mean`, whose PrimFunc knows how to divide by n.
Does not handle: integer tensors, unknown shapes, 0-d tensors (left alone).
"""

from tvm.ir import Call
from tvm.relax import Expr, op

from .opening import (
    FLOAT_DTYPES,
    HALF_DTYPES,
    Opening,
    Rule,
    dtype_of,
    normalize_axes,
    shape_of,
    static_size,
)


def emit_variance(
    o: Opening, x: Expr, axes: list[int], *, keepdims: bool = True
) -> tuple[Expr, Expr]:
    """(x - mean(x), variance of x): two passes, so that a large mean costs no precision."""
    centered = o.emit("centered", op.subtract(x, o.mean("mean", x, axes)))
    square = o.emit("square", op.multiply(centered, centered))
    return centered, o.mean("variance", square, axes, keepdims=keepdims)


def _reduced_axes(call: Call) -> list[int] | None:
    """The axes a reduction of a float tensor of known shape runs over; None if it is not one."""
    (x,) = call.args
    shape = shape_of(x)
    if not shape or dtype_of(x) not in FLOAT_DTYPES:
        return None
    return normalize_axes(call.attrs.axis, len(shape)) or None


def _mean(o: Opening, call: Call) -> Expr | None:
    (x,) = call.args
    axes = _reduced_axes(call)
    if axes is None:
        return None
    dtype = dtype_of(x)
    if dtype not in HALF_DTYPES and not static_size([shape_of(x)[axis] for axis in axes]):
        return None
    result = o.mean("out", o.widen("in", x), axes, keepdims=bool(call.attrs.keepdims))
    return o.narrow("half", result, dtype)


def _variance(o: Opening, call: Call) -> Expr | None:
    (x,) = call.args
    axes = _reduced_axes(call)
    if axes is None:
        return None
    keepdims = bool(call.attrs.keepdims)
    _, variance = emit_variance(o, o.widen("in", x), axes, keepdims=keepdims)
    return o.narrow("half", variance, dtype_of(x))


def _std(o: Opening, call: Call) -> Expr | None:
    (x,) = call.args
    axes = _reduced_axes(call)
    if axes is None:
        return None
    keepdims = bool(call.attrs.keepdims)
    _, variance = emit_variance(o, o.widen("in", x), axes, keepdims=keepdims)
    return o.narrow("half", o.emit("out", op.sqrt(variance)), dtype_of(x))


def _half_reduction(reduce) -> Rule:
    def rule(o: Opening, call: Call) -> Expr | None:
        (x,) = call.args
        if dtype_of(x) not in HALF_DTYPES:
            return None
        wide = reduce(o.widen("in", x), call.attrs.axis, bool(call.attrs.keepdims))
        return o.narrow("half", o.emit("out", wide), dtype_of(x))

    return rule


RULES: dict[str, Rule] = {
    "relax.mean": _mean,
    "relax.variance": _variance,
    "relax.std": _std,
    "relax.sum": _half_reduction(op.sum),
    "relax.prod": _half_reduction(op.prod),
}
