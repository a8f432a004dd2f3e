"""Converters for values read at indices: `x[i]`, `x[:, i, j]`, `take`, `unfold`.

    x[:, i, :, j]    the indexed axes first (side by side they stay where they are), merged into
                     one, and read at i * extent + j

Negative indices count from the end, as in PyTorch. Where PyTorch would raise an IndexError, a CPU
raises `OutOfRange`, and a GPU reads the nearest element: never memory that is not the tensor's.
What no result depends on is not checked: `torch.where(i < 0, 0, x[i])`, rows that are cut off.
Does not handle: masks, whose results have as many elements as they have True.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import fx
from tvm import relax, tirx

from ...errors import FrontendError
from .importer import Importer, Size, bound_arguments, size_of
from .operators import Converter
from .written.known_indices import is_never_negative


def _index(importer: Importer, node: fx.Node) -> relax.Expr:
    """x[indices], where None is a whole axis."""
    args = bound_arguments(node)
    x, given = importer.value_of(args["self"]), list(args["indices"])
    axes = [axis for axis, index in enumerate(given) if index is not None]
    values = [given[axis].meta["val"] for axis in axes]
    if any(value.dtype in (torch.bool, torch.uint8) for value in values):
        raise FrontendError(
            "a mask as an index: its result has as many elements as it has True; use torch.where"
        )
    extents = [given_extent(x, axis) for axis in axes]
    if None in extents:
        return importer._index_tensor(node)
    numbers = [
        counted_from_start(importer, given[axis], extent)
        for axis, extent in zip(axes, extents, strict=True)
    ]
    if len(axes) == 1:
        return taken(importer, x, numbers[0], axes[0])
    common = torch.broadcast_shapes(*(value.shape for value in values))
    shape = [size_of(extent, importer.symbols) for extent in common]
    place = _known_place(importer, [given[axis] for axis in axes], extents)
    if place is None:
        numbers = [importer.emit(relax.op.broadcast_to(number, shape)) for number in numbers]
        inside = _all_inside(importer, numbers, extents)
        place = numbers[0]
        for number, extent in zip(numbers[1:], extents[1:], strict=True):
            factor = importer.emit(relax.op.multiply(place, relax.const(extent, "int64")))
            place = importer.emit(relax.op.add(factor, number))
        place = importer.emit(relax.op.where(inside, place, relax.const(-1, "int64")))
    at = axes[0]
    if axes != list(range(at, at + len(axes))):
        x = importer.permute(x, [*axes, *(a for a in range(x.ty.ndim) if a not in axes)])
        at = 0
    sizes = list(x.ty.shape)
    merged = [*sizes[:at], math.prod(extents), *sizes[at + len(axes) :]]
    return taken(importer, importer.emit(relax.op.reshape(x, merged)), place, at)


def _all_inside(importer: Importer, numbers: list[relax.Expr], extents: list[int]) -> relax.Expr:
    """Where each of several indices is within its axis: merged ones may be by chance."""
    inside = None
    for number, extent in zip(numbers, extents, strict=True):
        for this in (
            importer.emit(relax.op.greater_equal(number, relax.const(0, "int64"))),
            importer.emit(relax.op.less(number, relax.const(extent, "int64"))),
        ):
            inside = this if inside is None else importer.emit(relax.op.logical_and(inside, this))
    return inside


def _known_place(
    importer: Importer, indices: list[fx.Node], extents: list[int]
) -> relax.Expr | None:
    """Several indices as one in merged axes, if all are known: TVM compiles a function for each
    step of that.
    """
    known = [importer.known_values.get(index) for index in indices]
    if any(values is None for values in known):
        return None
    places = np.broadcast_arrays(*(values.numpy().astype("int64") for values in known))
    counted = [
        np.where(at < 0, at + extent, at) for at, extent in zip(places, extents, strict=True)
    ]
    inside = np.logical_and.reduce(
        [(at >= 0) & (at < extent) for at, extent in zip(counted, extents, strict=True)]
    )
    merged = np.ravel_multi_index(counted, extents, mode="clip")
    return relax.const(np.where(inside, merged, -1), "int64")


def counted_from_start(importer: Importer, index: fx.Node, extent: int) -> relax.Expr:
    """An index of PyTorch as one that is not negative, of int64."""
    number = importer.cast(importer.value_of(index), "int64")
    known = importer.known_values.get(index)
    if known is not None:
        place = known.numpy().astype("int64")
        return relax.const(np.where(place < 0, place + extent, place), "int64")
    negative = importer.emit(relax.op.less(number, relax.const(0, "int64")))
    wrapped = importer.emit(relax.op.add(number, relax.const(extent, "int64")))
    return importer.emit(relax.op.where(negative, wrapped, number))


def never_counted_back(importer: Importer, index: fx.Node, extent: Size) -> relax.Expr:
    """An index of an operator to which one below 0 is out of range, for one of TVM that counts it
    from the end.
    """
    number = importer.value_of(index)
    if is_never_negative(index):
        return number
    dtype = str(number.ty.dtype)
    known = importer.known_values.get(index)
    if known is not None and isinstance(extent, int):
        place = known.numpy()
        return relax.const(np.where(place < 0, place - extent, place), dtype)
    negative = importer.emit(relax.op.less(number, relax.const(0, dtype)))
    beyond = relax.const(extent, dtype) if isinstance(extent, int) else relax.prim_value(extent)
    beyond = importer.emit(relax.op.subtract(number, beyond))
    return importer.emit(relax.op.where(negative, beyond, number))


def given_extent(x: relax.Expr, axis: int) -> int | None:
    """The extent of an axis; None where that is symbolic."""
    extent = x.ty.shape[axis]
    return int(extent.value) if isinstance(extent, tirx.IntImm) else None


def taken(importer: Importer, x: relax.Expr, place: relax.Expr, axis: int) -> relax.Expr:
    return importer.emit(relax.op.take(x, place, axis))


def _take(importer: Importer, node: fx.Node) -> relax.Expr:
    """take(x, index): of x in one row."""
    args = bound_arguments(node)
    x = importer.value_of(args["self"])
    count = math.prod(args["self"].meta["val"].shape)
    if not isinstance(count, int):
        raise FrontendError("take from a tensor of symbolic size: give its sizes as numbers")
    flat = importer.emit(relax.op.reshape(x, [count]))
    return taken(importer, flat, counted_from_start(importer, args["index"], count), 0)


def _unfold(importer: Importer, node: fx.Node) -> relax.Expr:
    """Windows along an axis, whose elements are a last axis."""
    args = bound_arguments(node)
    x, size, step = importer.value_of(args["self"]), args["size"], args["step"]
    if x.ty.ndim == 0:
        return importer.emit(relax.op.reshape(x, [size]))
    axis = args["dimension"] % x.ty.ndim
    windows = node.meta["val"].shape[axis]
    if not isinstance(windows, int):
        raise FrontendError("windows along an axis of symbolic size: give that size as a number")
    place = np.arange(windows)[:, None] * step + np.arange(size)
    found = taken(importer, x, relax.const(place, "int64"), axis)
    axes = list(range(x.ty.ndim + 1))
    axes.append(axes.pop(axis + 1))
    return importer.permute(found, axes)


CONVERTERS: dict[str, Converter] = {
    "index.Tensor": _index,
    "take.default": _take,
    "unfold.default": _unfold,
}
