"""Normalisations.

    layer_norm(x, g, b)  -> (x - mean) * rsqrt(variance + eps) * g + b
    group_norm(x, g, b)  -> the same on x as [N, groups, C / groups, ...], and back
    instance_norm(x,g,b) -> the same per channel
    rms_norm(x, w)       -> x * rsqrt(mean(x^2) + eps) * w
    batch_norm(x, ...)   -> x * s + t,  s = g * rsqrt(var + eps),  t = b - mean * s   (inference)

The statistics, the scale and the shift are computed in float32 for half tensors, and the result is
rounded once. s and t of a batch norm with constant parameters fold into two constants.
Does not handle: batch norm in training form, axes that are not ascending, channels that are not a
static multiple of the groups, unknown shapes (left alone).
"""

from collections.abc import Sequence
from itertools import pairwise

import tvm
from tvm import relax
from tvm.ir import Call
from tvm.relax import Expr, op

from .opening import Opening, Rule, dtype_of, normalize_axes, shape_of
from .statistics import emit_variance


def _standardize(o: Opening, x: Expr, axes: list[int], epsilon: float) -> Expr:
    centered, variance = emit_variance(o, x, axes)
    return o.emit("normal", op.multiply(centered, _rsqrt(o, variance, epsilon)))


def _rsqrt(o: Opening, variance: Expr, epsilon: float) -> Expr:
    """rsqrt(variance + epsilon)"""
    shifted = o.emit("shifted", op.add(variance, o.const(float(epsilon), variance)))
    return o.emit("rsqrt", op.rsqrt(shifted))


def _affine(o: Opening, x: Expr, gamma: Expr | None, beta: Expr | None, shape: Sequence) -> Expr:
    """x * gamma + beta, both reshaped to `shape`; None leaves its half out."""
    if gamma is not None:
        gamma = o.reshape("gamma", o.widen("gamma", gamma), shape)
        x = o.emit("scaled", op.multiply(x, gamma))
    if beta is not None:
        beta = o.reshape("beta", o.widen("beta", beta), shape)
        x = o.emit("out", op.add(x, beta))
    return x


def _scale_and_shift(call: Call) -> tuple[Expr | None, Expr | None]:
    _, gamma, beta, *_ = call.args
    return gamma if call.attrs.scale else None, beta if call.attrs.center else None


def _parameter_shape(shape: Sequence, axes: Sequence[int]) -> list | None:
    """The shape in which a parameter over ascending `axes` broadcasts against a tensor."""
    if not axes or any(a >= b for a, b in pairwise(axes)):
        return None
    return [shape[axis] if axis in axes else 1 for axis in range(axes[0], len(shape))]


def _layer_norm(o: Opening, call: Call) -> Expr | None:
    x = call.args[0]
    shape = shape_of(x)
    if shape is None:
        return None
    axes = normalize_axes(call.attrs.axes, len(shape))
    parameter_shape = _parameter_shape(shape, axes)
    if parameter_shape is None:
        return None
    normal = _standardize(o, o.widen("in", x), axes, call.attrs.epsilon)
    result = _affine(o, normal, *_scale_and_shift(call), parameter_shape)
    return o.narrow("half", result, dtype_of(x))


def _rms_norm(o: Opening, call: Call) -> Expr | None:
    x, weight = call.args
    shape = shape_of(x)
    if shape is None:
        return None
    axes = normalize_axes(call.attrs.axes, len(shape))
    parameter_shape = _parameter_shape(shape, axes)
    if parameter_shape is None:
        return None
    wide = o.widen("in", x)
    mean = o.mean("mean", o.emit("square", op.multiply(wide, wide)), axes)
    normal = o.emit("normal", op.multiply(wide, _rsqrt(o, mean, call.attrs.epsilon)))
    result = _affine(o, normal, weight, None, parameter_shape)
    return o.narrow("half", result, dtype_of(x))


def _instance_norm(o: Opening, call: Call) -> Expr | None:
    x = call.args[0]
    shape = shape_of(x)
    if shape is None:
        return None
    (channel,) = normalize_axes(call.attrs.channel_axis, len(shape))
    axes = normalize_axes(call.attrs.axes, len(shape))
    normal = _standardize(o, o.widen("in", x), axes, call.attrs.epsilon)
    parameter_shape = _parameter_shape(shape, [channel])
    result = _affine(o, normal, *_scale_and_shift(call), parameter_shape)
    return o.narrow("half", result, dtype_of(x))


def _group_norm(o: Opening, call: Call) -> Expr | None:
    x = call.args[0]
    shape = shape_of(x)
    if shape is None:
        return None
    (channel,) = normalize_axes(call.attrs.channel_axis, len(shape))
    groups = int(call.attrs.num_groups)
    channels = shape[channel]
    if not isinstance(channels, tvm.tirx.IntImm) or int(channels) % groups:
        return None
    split = [groups, int(channels) // groups]
    grouped_shape = [*shape[:channel], *split, *shape[channel + 1 :]]
    axes = normalize_axes(call.attrs.axes, len(shape))
    axes = sorted({channel + 1, *(axis if axis < channel else axis + 1 for axis in axes)})
    grouped = o.widen("in", o.reshape("grouped", x, grouped_shape))
    normal = _standardize(o, grouped, axes, call.attrs.epsilon)
    parameter_shape = [*split, *[1] * (len(shape) - channel - 1)]
    result = _affine(o, normal, *_scale_and_shift(call), parameter_shape)
    return o.reshape("ungrouped", o.narrow("half", result, dtype_of(x)), shape)


def _batch_norm(o: Opening, call: Call) -> Expr | None:
    x, _, _, moving_mean, moving_variance = call.args
    shape = shape_of(x)
    if shape is None or call.attrs.training:
        return None
    (channel,) = normalize_axes(call.attrs.axis, len(shape))
    gamma, beta = _scale_and_shift(call)
    scale = _rsqrt(o, o.widen("variance", moving_variance), call.attrs.epsilon)
    if gamma is not None:
        scale = o.emit("scale", op.multiply(o.widen("gamma", gamma), scale))
    offset = o.emit("offset", op.multiply(o.widen("mean", moving_mean), scale))
    if beta is None:
        shift = o.emit("shift", op.negative(offset))
    else:
        shift = o.emit("shift", op.subtract(o.widen("beta", beta), offset))
    result = _affine(o, o.widen("in", x), scale, shift, _parameter_shape(shape, [channel]))
    result = o.narrow("half", result, dtype_of(x))
    return relax.Tuple([result, moving_mean, moving_variance])


RULES: dict[str, Rule] = {
    "relax.nn.layer_norm": _layer_norm,
    "relax.nn.rms_norm": _rms_norm,
    "relax.nn.instance_norm": _instance_norm,
    "relax.nn.group_norm": _group_norm,
    "relax.nn.batch_norm": _batch_norm,
}
