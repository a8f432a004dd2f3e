"""mean, variance and standard deviation, and sums and products of half tensors.

    mean(x)       -> sum(x) * (1 / n)
    variance(x)   -> mean((x - mean(x))^2)         (of the population, as relax.variance is)
    std(x)        -> sqrt(variance(x))
    sum(x: half)  -> half(sum(float32(x)))         (prod alike)

Where a GPU would read x twice for that, since it cannot hold what one mean is over, the variance is
that of x shifted by a number k near each mean, from two sums in one pass:

    d = x - k    m = mean(d)    mean(x) = k + m    variance(x) = mean(d^2) - m^2, at least 0

k is the median of three medians of three elements each (Tukey's ninther), so that the squares are
about as small as the variance, however large the mean is, a single outlier is no shift, and equal
elements have no variance. The relative error is of the order of 1e-7 (1 + (k - mean)^2 / variance);
k is off by about 0.45 standard deviations (of three elements alone by 0.67, which makes one of a
hundred variances over few rows less exact than the check of `compile` allows). A mean of
(x - mean(x))^2 in a model's own operators is a variance, too. With a symbolic n, mean stays one
`relax.mean`, whose PrimFunc knows how to divide by n.
Does not handle: integer tensors, unknown shapes, 0-d tensors (left alone).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm
from tvm import relax, te, tirx
from tvm.ir import Call
from tvm.relax import Expr, Var, op

from ...ir.weights import numbers
from ..rewrites.reduction_stages import needs_stages
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

PICKED = 9  # elements that a shift is made of
SHIFT_ATTR = "tvm_fusion.shift"
"""What is computed of medians of elements and cancels out: any numbers in its place are right."""


@dataclass(frozen=True)
class Samples:
    """Where `PICKED` elements of what each mean is over lie.

    Attributes
    ----------
    tensor : Expr
        The tensor that holds them, before it is widened or reshaped.
    place : callable
        Their indices there, by number and by the indices of the mean, whose reduced axes have
        extent 1.
    """

    tensor: Expr
    place: Callable[[int, Sequence[Expr]], list[Expr]]


def emit_variance(
    o: Opening, x: Expr, axes: list[int], *, keepdims: bool = True, samples: Samples | None = None
) -> tuple[Expr, Expr]:
    """(x - mean(x), variance of x): two passes, so that a large mean costs no precision, or one
    over shifted elements; `samples` as for `emit_moments`.
    """
    if _takes_one_pass(o, x, axes):
        mean, variance = emit_moments(o, x, axes, samples)
        centered = o.emit("centered", op.subtract(x, mean))
        if not keepdims:
            variance = o.emit("squeezed", op.squeeze(variance, axes))
        return centered, variance
    centered = o.emit("centered", op.subtract(x, o.mean("mean", x, axes)))
    square = o.emit("square", op.multiply(centered, centered))
    return centered, o.mean("variance", square, axes, keepdims=keepdims)


def emit_moments(
    o: Opening, x: Expr, axes: list[int], samples: Samples | None = None
) -> tuple[Expr, Expr]:
    """(mean, variance) of x over `axes`, which stay as axes of extent 1, in one pass.

    `samples` are of x itself where they are not given. They are read for each of their two uses,
    in different kernels, so that neither waits for the other.
    """
    mean, spread = _emit_spread(o, x, axes, samples)
    return mean, _at_least_zero(o, spread)


def _emit_spread(
    o: Opening, x: Expr, axes: list[int], samples: Samples | None = None
) -> tuple[Expr, Expr]:
    """The mean of x, and its variance but for a rounding below 0."""
    samples = samples or _samples_of(o, x, axes)
    kept = [1 if axis in axes else extent for axis, extent in enumerate(shape_of(x))]
    shifted = o.emit("shifted_in", op.subtract(x, _typical(o, samples, kept)))
    square = o.emit("square", op.multiply(shifted, shifted))
    offset = o.mean("offset", shifted, axes)
    moment = o.mean("moment", square, axes)
    lost = o.emit("offset_square", op.multiply(offset, offset))
    spread = o.emit("spread", op.subtract(moment, lost))
    return o.emit("mean", op.add(_typical(o, samples, kept), offset)), spread


def _at_least_zero(o: Opening, spread: Expr) -> Expr:
    """The variance; NaN stays NaN, which a maximum with 0 would hide."""

    def clamp(value: te.Tensor) -> te.Tensor:
        def at(*index: Expr) -> Expr:
            zero = tirx.const(0.0, value.dtype)
            return tirx.Select(value(*index) < zero, zero, value(*index))

        return te.compute(value.shape, at, name="at_least_zero")

    return o.emit("variance", o.builder.call_te(clamp, spread))


def _typical(o: Opening, samples: Samples, shape: list[Expr]) -> Expr:
    """A number near each mean, widened."""

    def median(first: int) -> Callable[[te.Tensor], te.Tensor]:
        def compute(tensor: te.Tensor) -> te.Tensor:
            def at(*index: Expr) -> Expr:
                # of elements that lie apart: neighbours may be alike
                places = (samples.place(number, index) for number in range(first, PICKED, 3))
                return _median(*(tensor(*place) for place in places))

            return te.compute(shape, at, name="median")

        return compute

    def typical(a: te.Tensor, b: te.Tensor, c: te.Tensor) -> te.Tensor:
        return te.compute(shape, lambda *i: _median(a(*i), b(*i), c(*i)), name="typical")

    # four operators, whose results a kernel keeps: in one, the loads would be spelled out 25 times
    medians = [o.emit("median", o.builder.call_te(median(n), samples.tensor)) for n in range(3)]
    found = o.builder.call_te(typical, *medians, primfunc_attrs={SHIFT_ATTR: 1})
    return o.widen("typical", o.emit("typical", found))


def _median(a: Expr, b: Expr, c: Expr) -> Expr:
    return tirx.max(tirx.min(a, b), tirx.min(tirx.max(a, b), c))


def _samples_of(o: Opening, x: Expr, axes: list[int]) -> Samples:
    tensor = _before_widening(o, x)
    extents = shape_of(tensor)

    def place(number: int, index: Sequence[Expr]) -> list[Expr]:
        places = enumerate(zip(extents, index, strict=True))
        return [place_of(number, e) if axis in axes else i for axis, (e, i) in places]

    return Samples(tensor, place)


def place_of(number: int, extent: Expr) -> int:
    """Where one of `PICKED` elements is among `extent`, from the first to the last."""
    return number * (int(extent) - 1) // (PICKED - 1)


def _before_widening(o: Opening, x: Expr) -> Expr:
    """What `x` is the widened form of: reading an element of that needs no widened tensor."""
    value = next((binding.value for binding in o.bindings if binding.var.same_as(x)), None)
    if value is None and isinstance(x, Var):
        value = o.builder.lookup_binding(x)
    if not isinstance(value, Call):
        return x
    if value.op == tvm.ir.Op.get("relax.astype"):
        return value.args[0]
    if value.op == tvm.ir.Op.get("relax.reshape"):
        inner = _before_widening(o, value.args[0])
        if not inner.same_as(value.args[0]):
            return o.emit("narrow", op.reshape(inner, shape_of(x)))
    return x


def _takes_one_pass(o: Opening, x: Expr, axes: list[int]) -> bool:
    """Whether the statistics of x over `axes` are taken in one pass."""
    shape = shape_of(x)
    if o.hw is None or o.hw.kind == "llvm" or not static_size(shape):
        return False
    return needs_stages([int(extent) for extent in shape], axes, o.hw)


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
    keepdims = bool(call.attrs.keepdims)
    if o.spread is not None:
        variance = _at_least_zero(o, o.spread)
        return variance if keepdims else o.emit("out", op.squeeze(variance, axes))
    if o.is_center and dtype not in HALF_DTYPES and _takes_one_pass(o, x, axes):
        mean, o.spread = _emit_spread(o, x, axes)
        return mean
    result = o.mean("out", o.widen("in", x), axes, keepdims=keepdims)
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


# ---- Variances that a model writes out in operators of its own: mean((x - mean(x))^2).
#
#     m = mean(x, axes, keepdims)    d = x - m    v = mean(d * d, axes)    ->  {v: m}
#
# The square may be d * d, d ** 2 or square(d).


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
    return float(numbers(held).item()) if held.numel() == 1 else None
