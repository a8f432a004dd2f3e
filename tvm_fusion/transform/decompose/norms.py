"""Normalisations.

    layer_norm(x, g, b)  -> (x - mean) * rsqrt(variance + eps) * g + b
    group_norm(x, g, b)  -> the same on x as [N, groups, C / groups, ...], and back
    instance_norm(x,g,b) -> the same per channel
    rms_norm(x, w)       -> x * rsqrt(mean(x^2) + eps) * w
    batch_norm(x, ...)   -> x * s + t,  s = g * rsqrt(var + eps),  t = b - mean * s

In training, the mean and variance of a batch norm are those of x over all axes but the channels,
and the running ones become ``(1 - momentum) * running + momentum * batch`` (of the population).

The statistics, the scale and the shift are computed in float32 for half tensors, and the result is
rounded once. s and t of a batch norm with constant parameters fold into two constants.
Does not handle: batch norm in training form on a CPU, axes that are not ascending, channels that
are not a static multiple of the groups, unknown shapes (left alone).
"""

from collections.abc import Sequence
from itertools import pairwise

import tvm
from tvm import relax
from tvm.ir import Call
from tvm.relax import Expr, op

from .opening import Opening, Rule, dtype_of, normalize_axes, shape_of, static_size
from .statistics import Samples, emit_moments, emit_variance, place_of

FLOAT16_MAX = 65504


def _standardize(
    o: Opening, x: Expr, axes: list[int], epsilon: float, samples: Samples | None = None
) -> Expr:
    centered, variance = emit_variance(o, x, axes, samples=samples)
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
    samples = _samples_of_groups(x, channel, split[1], axes)
    normal = _standardize(o, grouped, axes, call.attrs.epsilon, samples)
    parameter_shape = [*split, *[1] * (len(shape) - channel - 1)]
    result = _affine(o, normal, *_scale_and_shift(call), parameter_shape)
    return o.reshape("ungrouped", o.narrow("half", result, dtype_of(x)), shape)


def _samples_of_groups(x: Expr, channel: int, width: int, axes: Sequence[int]) -> Samples:
    """Elements of groups of `width` channels, read before the channels are cut into groups."""
    shape = shape_of(x)
    reduced = {axis if axis <= channel else axis - 1 for axis in axes} - {channel}

    def place(number: int, index: Sequence[Expr]) -> list[Expr]:
        ungrouped = [*index[: channel + 1], *index[channel + 2 :]]
        places = [
            place_of(number, e) if a in reduced else ungrouped[a] for a, e in enumerate(shape)
        ]
        places[channel] = index[channel] * width + place_of(number, width)
        return places

    return Samples(x, place)


def _batch_norm(o: Opening, call: Call) -> Expr | None:
    x, _, _, *running = call.args
    shape = shape_of(x)
    if shape is None or (call.attrs.training and not _opens_training(o, call)):
        return None
    (channel,) = normalize_axes(call.attrs.axis, len(shape))
    gamma, beta = _scale_and_shift(call)
    wide = o.widen("in", x)
    if call.attrs.training:
        axes = [axis for axis in range(len(shape)) if axis != channel]
        batch = [o.reshape("batch", part, [shape[channel]]) for part in emit_moments(o, wide, axes)]
        momentum = float(call.attrs.momentum)
        running = [_moved(o, old, new, momentum) for old, new in zip(running, batch, strict=True)]
        mean, variance = batch
    else:
        mean, variance = o.widen("mean", running[0]), o.widen("variance", running[1])
    scale = _rsqrt(o, variance, call.attrs.epsilon)
    if gamma is not None:
        scale = o.emit("scale", op.multiply(o.widen("gamma", gamma), scale))
    offset = o.emit("offset", op.multiply(mean, scale))
    if beta is None:
        shift = o.emit("shift", op.negative(offset))
    else:
        shift = o.emit("shift", op.subtract(o.widen("beta", beta), offset))
    result = _affine(o, wide, scale, shift, _parameter_shape(shape, [channel]))
    result = o.narrow("half", result, dtype_of(x))
    return relax.Tuple([result, *running])


def _opens_training(o: Opening, call: Call) -> bool:
    gpu = o.hw is not None and o.hw.kind != "llvm" and bool(static_size(shape_of(call.args[0])))
    return gpu or fails_whole(call)


def fails_whole(call: Call) -> bool:
    """Whether TVM cannot legalize the operator itself: it has layer, instance and group norms in
    float32 and float16 only, and divides the sums of a batch norm in training form by their number
    of elements as a float16.
    """
    if call.op.name in OF_FLOAT32_AND_FLOAT16:
        return dtype_of(call.args[0]) not in ("float32", "float16")
    if call.op.name != "relax.nn.batch_norm" or not call.attrs.training:
        return False
    x = call.args[0]
    shape = shape_of(x)
    size = static_size(shape) if shape else None
    if dtype_of(x) != "float16" or not size:
        return False
    return size > FLOAT16_MAX * int(shape[int(call.attrs.axis)])


def _moved(o: Opening, old: Expr, new: Expr, momentum: float) -> Expr:
    """The running value `old` moved towards `new` by `momentum`."""
    kept = o.widen("running", old)
    kept = o.emit("kept", op.multiply(kept, o.const(1 - momentum, kept)))
    added = o.emit("added", op.multiply(new, o.const(momentum, new)))
    return o.narrow("running_half", o.emit("moved", op.add(kept, added)), dtype_of(old))


OF_FLOAT32_AND_FLOAT16 = (
    "relax.nn.layer_norm",
    "relax.nn.instance_norm",
    "relax.nn.group_norm",
)

RULES: dict[str, Rule] = {
    "relax.nn.layer_norm": _layer_norm,
    "relax.nn.rms_norm": _rms_norm,
    "relax.nn.instance_norm": _instance_norm,
    "relax.nn.group_norm": _group_norm,
    "relax.nn.batch_norm": _batch_norm,
}
