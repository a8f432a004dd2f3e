"""Convolutions whose windows do not lie over each other: taps that are channels.

    x[n, 16 p + r, 16 q + s, c] * w[f, r, s, c]   ->   x'[n, p, r, q, sc] * w'[f, r, sc]

      x'[n, p, r, q, sc] = x[n, 16 p + r, 16 q + sc // 3, sc % 3]       48 channels of a tap

Nothing moves: data and weights are read as they lie. Taps beside channels become channels where
both are neighbours in memory; those of a window with steps that the TMA does not take are a window
of one position.
"""

from __future__ import annotations

from dataclasses import replace

from tvm import tirx

from ..contraction.model import INDEX, Axis, Simplifier, fresh_var
from ..contraction.windows import Window, Windows
from ..gpu.access import affine_access, window_access
from ..gpu.tensor_map import MAX_STEP
from ..program.expr import constant, variables
from ..program.extents import equal_sizes, is_below
from .geometry import Convolution, Put


def in_patches(convolution: Convolution) -> Convolution:
    """The convolution with more channels or smaller steps, where windows do not overlap; itself
    where they do, and of data that is put together of parts.
    """
    if convolution.sources:
        return convolution
    found = _with_channels(convolution)
    for number in reversed(range(len(found.windows))):
        window = found.windows[number]
        if window.stride > MAX_STEP and _is_apart(window):
            found = _split(found, number)
    return found


def _is_apart(window: Window) -> bool:
    """Whether each position has elements of its own, none of them padding."""
    steps = (window.dilation, window.before, window.expansion, window.repeats)
    plain = window.taps > 1 and steps == (1, 0, 1, 1)
    return (
        plain
        and window.stride == window.taps
        and window.low == 0
        and is_below(window.size * window.taps - 1, window.high)
    )


def _with_channels(c: Convolution) -> Convolution:
    """Taps of the window whose elements are neighbours beside the channels become channels."""
    access = window_access(
        Windows(c.windows, c.channel_dim, c.group, c.channels, c.data, c.coordinates)
    )
    if access is None or c.group is not None or c.channels is None:
        return c
    if not equal_sizes(access.channel, 1):
        return c
    size = c.channels_of_group
    near = [
        i
        for i, w in enumerate(c.windows)
        if _is_apart(w) and equal_sizes(access.strides[w.dim], size)
    ]
    if not near:
        return c
    (number,) = near[:1]
    window = c.windows[number]
    channels = Axis(fresh_var("channel", INDEX), window.taps * size)
    weights = Put(
        {
            window.tap.var: tirx.FloorDiv(channels.var, constant(size, INDEX)),
            c.channels.var: tirx.FloorMod(channels.var, constant(size, INDEX)),
        },
        Simplifier([*_axes(c), channels]),
    ).operand(c.weights)
    load = weights.load
    shape = [int(n) for n in load.source.ty.shape]
    read = set(variables(*load.indices))
    others = [a for a in _axes(c) if a.var in read]
    lies = affine_access(load.indices, shape, {"k": (channels,), "others": others})
    if lies is None or not lies.contiguous("k") or len(lies.digits["k"]) > 1:
        return c
    at, channel = c.coordinates[window.dim], c.coordinates[c.channel_dim]
    place = at * constant(window.taps, INDEX)
    where = {
        at: place + tirx.FloorDiv(channel, constant(size, INDEX)),
        channel: tirx.FloorMod(channel, constant(size, INDEX)),
    }
    channels_at = Axis(channel, channels.extent)
    windows = list(c.windows)
    windows[number] = replace(window, tap=None, stride=1, high=window.size)
    return replace(
        c,
        windows=tuple(windows),
        channels=channels,
        weights=weights,
        weight_dims=(),
        data=Put(where, Simplifier([Axis(at, window.size), channels_at]))(c.data),
    )


def _split(c: Convolution, number: int) -> Convolution:
    """A window as two: one of positions, and behind it one of taps."""
    window = c.windows[number]
    at, tap = c.coordinates[window.dim], fresh_var("tap", INDEX)
    where = {at: at * constant(window.taps, INDEX) + tap}
    positions = replace(window, tap=None, stride=1, high=window.size)
    taps = replace(window, dim=len(c.coordinates), axis=None, stride=1, high=window.taps)
    return replace(
        c,
        windows=(*c.windows[:number], positions, taps, *c.windows[number + 1 :]),
        coordinates=(*c.coordinates, tap),
        data=Put(where, Simplifier([Axis(at, window.size), Axis(tap, window.taps)]))(c.data),
    )


def _axes(c: Convolution) -> list[Axis]:
    return [*c.segment.space, *c.product.k]
