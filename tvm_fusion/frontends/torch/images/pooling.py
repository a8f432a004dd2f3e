"""Pooling with places, or with a divisor of its own: windows are read by constant places.

    y, places = max_pool2d(x, 2, return_indices=True)

What TVM gets right of the rest is left to it (`importer` holds all results to their shapes).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import fx
from tvm import relax

from ..importer import Importer, bound_arguments
from ..indexing import taken
from ..operators import Converter
from ..orders import place_of_extremum

_aten = torch.ops.aten


def _max_pool_with_indices(importer: Importer, node: fx.Node) -> relax.Expr:
    """The maxima of windows and, where these are read, their places in the flattened image: of
    equal ones the first.
    """
    args = bound_arguments(node)
    x = importer.value_of(args["self"])
    rank = 3 if "max_pool3d" in str(node.target) else 2
    strides = args["stride"] or len(node.args) == 2  # TVM takes none of them for no number
    if strides and all(user.args[1] == 0 for user in node.users):
        by_tvm = {2: importer._max_pool2d_with_indices, 3: importer._max_pool3d_with_indices}
        return by_tvm[rank](node)
    space = [int(extent) for extent in args["self"].meta["val"].shape[-rank:]]
    places, inside = _windows(space, node.meta["val"][0].shape[-rank:], args)
    return _maxima(importer, x, places, inside, node.meta["val"][0], rank)


def _maxima(
    importer: Importer,
    x: relax.Expr,
    places: np.ndarray,
    inside: np.ndarray,
    like: torch.Tensor,
    rank: int,
) -> relax.Expr:
    """The maxima of windows and their places, in the shape of `like`: a window is a row of places
    in the flattened image, of which those inside count; one outside stands for the first inside.
    """
    first = np.take_along_axis(places, inside.argmax(-1, keepdims=True), -1)
    places = np.where(inside, places, first)
    lead = list(x.ty.shape)[: x.ty.ndim - rank]
    flat = importer.emit(
        relax.op.reshape(x, [*lead, math.prod(map(int, list(x.ty.shape)[len(lead) :]))])
    )
    values = taken(importer, flat, relax.const(places, "int64"), len(lead))
    dtype = str(x.ty.dtype)
    least = relax.const(float("-inf") if "float" in dtype else np.iinfo(dtype).min, dtype)
    values = importer.emit(relax.op.where(relax.const(inside), values, least))
    best = place_of_extremum(importer, relax.op.argmax, values, -1, keepdims=True, last_nan=True)
    shape = [*lead, *map(int, like.shape[-rank:])]
    table = importer.emit(relax.op.broadcast_to(relax.const(places, "int64"), values.ty.shape))
    return importer.emit(
        relax.Tuple(
            [
                importer.emit(
                    relax.op.reshape(importer.emit(relax.op.gather_elements(y, best, -1)), shape)
                )
                for y in (values, table)
            ]
        )
    )


def _each(value: Any, rank: int) -> list[int]:
    """An option of a pooling for each axis."""
    values = list(value) if isinstance(value, Sequence) else [value]
    return values * rank if len(values) == 1 else values


def _windows(
    space: Sequence[int], results: Sequence[int], args: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Places [windows, elements of one] in a flattened image, and which are inside of it."""
    rank = len(space)
    kernel = _each(args["kernel_size"], rank)
    stride = _each(args["stride"], rank) or kernel
    padding, dilation = _each(args["padding"], rank), _each(args["dilation"], rank)
    windows = np.array(list(itertools.product(*map(range, results))))
    taps = np.array(list(itertools.product(*map(range, kernel))))
    at = windows[:, None] * stride - np.array(padding) + taps[None] * dilation
    inside = ((at >= 0) & (at < space)).all(-1)
    steps = np.array([math.prod(space[axis + 1 :]) for axis in range(rank)])
    return (np.where(inside[..., None], at, 0) * steps).sum(-1).astype("int64"), inside


def _adaptive_max_pool(rank: int) -> Converter:
    """The maxima of as many windows as are asked for, which differ in their size."""

    def convert(importer: Importer, node: fx.Node) -> relax.Expr:
        args = bound_arguments(node)
        like = node.meta["val"][0]
        space = [int(extent) for extent in args["self"].meta["val"].shape[-rank:]]
        begins, ends = [], []
        for extent, count in zip(space, map(int, like.shape[-rank:]), strict=True):
            begins.append([i * extent // count for i in range(count)])
            ends.append([-(-(i + 1) * extent // count) for i in range(count)])
        first, last = (np.array(list(itertools.product(*at))) for at in (begins, ends))
        taps = np.array(list(itertools.product(*map(range, (last - first).max(0)))))
        at = first[:, None] + taps
        inside = (at < last[:, None]).all(-1)
        steps = np.array([math.prod(space[axis + 1 :]) for axis in range(rank)])
        places = (np.where(inside[..., None], at, 0) * steps).sum(-1).astype("int64")
        return _maxima(importer, importer.value_of(args["self"]), places, inside, like, rank)

    return convert


def _avg_pool(rank: int) -> Converter:
    """Means of windows, or their sums over a divisor that is given."""

    def convert(importer: Importer, node: fx.Node) -> relax.Expr:
        args = bound_arguments(node)
        divisor = args["divisor_override"]
        if not node.meta["val"].is_floating_point():
            return _integer_means(importer, node, rank)
        if divisor is None:
            return {2: importer._avg_pool2d, 3: importer._avg_pool3d}[rank](node)
        if args["ceil_mode"]:
            return _window_sums(importer, node, rank, divisor)
        pool = {2: importer._avg_pool2d_impl, 3: importer._avg_pool3d_impl}[rank]
        kernel = _each(args["kernel_size"], rank)
        stride = _each(args["stride"], rank) or kernel
        x = importer.value_of(args["self"])
        means = pool(x, kernel, stride, _each(args["padding"], rank), False, True)
        factor = relax.const(math.prod(kernel) / divisor, x.ty.dtype)
        return importer.emit(relax.op.multiply(importer.emit(means), factor))

    return convert


def _window_sums(importer: Importer, node: fx.Node, rank: int, divisor: float) -> relax.Expr:
    """Sums of windows, of which some end behind the image, over a divisor."""
    args, like = {**bound_arguments(node), "dilation": 1}, node.meta["val"]
    x = importer.value_of(args["self"])
    space = [int(extent) for extent in args["self"].meta["val"].shape[-rank:]]
    places, inside = _windows(space, like.shape[-rank:], args)
    lead = list(x.ty.shape)[: x.ty.ndim - rank]
    flat = importer.emit(relax.op.reshape(x, [*lead, math.prod(space)]))
    values = taken(importer, flat, relax.const(places, "int64"), len(lead))
    share, nothing = (relax.const(number, str(x.ty.dtype)) for number in (1 / divisor, 0.0))
    values = importer.emit(relax.op.multiply(values, share))
    # what stands for a place outside may be infinite: it is left out, and not multiplied by 0
    counted = importer.emit(relax.op.where(relax.const(inside), values, nothing))
    sums = importer.emit(relax.op.sum(counted, -1))
    return importer.emit(relax.op.reshape(sums, [*lead, *map(int, like.shape[-rank:])]))


def _integer_means(importer: Importer, node: fx.Node, rank: int) -> relax.Expr:
    """Means of integers, rounded towards zero."""
    args, like = {**bound_arguments(node), "dilation": 1}, node.meta["val"]
    x = importer.value_of(args["self"])
    space = [int(extent) for extent in args["self"].meta["val"].shape[-rank:]]
    places, inside = _windows(space, like.shape[-rank:], args)
    counts = inside.sum(-1)
    if args["divisor_override"] is not None:
        counts = np.full_like(counts, args["divisor_override"])
    elif args["count_include_pad"]:
        padding = _each(args["padding"], rank)
        padded = [extent + 2 * p for extent, p in zip(space, padding, strict=True)]
        shifted = {**args, "padding": [0] * rank}
        counts = _windows(padded, like.shape[-rank:], shifted)[1].sum(-1)
    lead = list(x.ty.shape)[: x.ty.ndim - rank]
    flat = importer.emit(relax.op.reshape(x, [*lead, math.prod(space)]))
    values = taken(importer, flat, relax.const(places, "int64"), len(lead))
    dtype = str(x.ty.dtype)
    counted = importer.emit(relax.op.multiply(values, relax.const(inside.astype(dtype), dtype)))
    sums = importer.emit(relax.op.sum(counted, -1))
    means = importer.emit(relax.op.divide(sums, relax.const(counts.astype(dtype), dtype)))
    return importer.emit(relax.op.reshape(means, [*lead, *map(int, like.shape[-rank:])]))


CONVERTERS: dict[str, Converter] = {
    "max_pool2d_with_indices.default": _max_pool_with_indices,
    "max_pool3d_with_indices.default": _max_pool_with_indices,
    "adaptive_max_pool2d.default": _adaptive_max_pool(2),
    "adaptive_max_pool3d.default": _adaptive_max_pool(3),
    "avg_pool2d.default": _avg_pool(2),
    "avg_pool3d.default": _avg_pool(3),
}
