"""Converters for images: pooling with places or a divisor of its own, nearest elements of images of
other sizes (interpolated ones: `resizes`), sampled volumes.

    y, places = max_pool2d(x, 2, return_indices=True)    windows read by constant places, argmax

What TVM gets right of the rest is left to it (`importer` holds all results to their shapes).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx
from tvm import relax

from .importer import Importer, bound_arguments
from .indexing import taken
from .operators import Converter
from .orders import place_of_extremum

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
    best = place_of_extremum(importer, relax.op.argmax, values, -1, keepdims=True)
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


def _enlarged(importer: Importer, node: fx.Node) -> relax.Expr:
    """Whole times the size by the nearest element: `_repeated` lets no other sizes stay."""
    x = importer.value_of(bound_arguments(node)["input"])
    old, new = node.all_input_nodes[0].meta["val"].shape, node.meta["val"].shape
    for axis in range(2, len(new)):
        count = new[axis] // old[axis]
        if count > 1:
            x = importer.emit(relax.op.repeat(x, count, axis))
    return x


CONVERTERS: dict[str, Converter] = {
    "max_pool2d_with_indices.default": _max_pool_with_indices,
    "max_pool3d_with_indices.default": _max_pool_with_indices,
    "adaptive_max_pool2d.default": _adaptive_max_pool(2),
    "adaptive_max_pool3d.default": _adaptive_max_pool(3),
    "avg_pool2d.default": _avg_pool(2),
    "avg_pool3d.default": _avg_pool(3),
    "upsample_nearest1d.vec": _enlarged,
    "upsample_nearest3d.vec": _enlarged,
    "_upsample_nearest_exact1d.vec": _enlarged,
    "_upsample_nearest_exact2d.vec": _enlarged,
    "_upsample_nearest_exact3d.vec": _enlarged,
}


# ---- Decompositions of PyTorch's, where TVM's operators compute something else.

REPEATED = (
    _aten.upsample_nearest1d.vec,
    _aten.upsample_nearest3d.vec,
    _aten._upsample_nearest_exact1d.vec,
    _aten._upsample_nearest_exact2d.vec,
    _aten._upsample_nearest_exact3d.vec,
)
"""Of whole multiples they repeat elements, for which PyTorch's decompositions have tables."""


def _repeats(old: int, new: int, is_exact: bool = False) -> bool:
    """Whether the nearest elements are repeated ones: PyTorch multiplies with the inverse of the
    factor in float32, which gives another element of 41 times the size.
    """
    if old < 1 or new % old:
        return False
    if is_exact or new == old:
        return True
    places = np.arange(new, dtype=np.float32) * (np.float32(old) / np.float32(new))
    return bool((np.floor(places) == np.arange(new) // (new // old)).all())


def _nearest(original: Any) -> Callable[..., Any]:
    """Sizes that are no multiples of the old ones: TVM takes other pixels."""

    def decompose(x: torch.Tensor, output_size: Any, scale_factors: Any = None) -> Any:
        rank = x.ndim - 2
        old = x.shape[-rank:]
        new = output_size or [int(s * f) for s, f in zip(old, scale_factors, strict=True)]
        if all(_repeats(a, b) for a, b in zip(old, new, strict=True)):
            return NotImplemented
        return torch._decomp.decomposition_table[original](x, output_size, scale_factors)

    return decompose


def _repeated(original: Any) -> Callable[..., Any]:
    """Sizes that are no multiples, are not known, or are not what factors make of the old ones."""
    is_exact = "exact" in str(original)

    def decompose(x: torch.Tensor, output_size: Any, scale_factors: Any = None) -> Any:
        old = x.shape[2:]
        if output_size:
            pairs = list(zip(old, output_size, strict=True))
            whole = all(isinstance(n, int) for pair in pairs for n in pair)
        else:
            whole = all(isinstance(n, int) for n in old)
            whole = whole and all(f >= 1 and f == int(f) for f in scale_factors)
            pairs = [(n, n * int(f)) for n, f in zip(old, scale_factors, strict=True)]
        if whole and all(_repeats(a, b, is_exact) for a, b in pairs):
            return NotImplemented
        return torch._decomp.decomposition_table[original](x, output_size, scale_factors)

    return decompose


LINEAR, NEAREST = range(2)  # of grid_sample
ZEROS, BORDER, REFLECTION = range(3)


def _sampled_volume(
    x: torch.Tensor,
    grid: torch.Tensor,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
) -> torch.Tensor:
    """grid_sample of volumes [N, C, D, H, W] at [N, ..., 3], which are from -1 to 1, W first."""
    batch, channels, *space = x.shape
    places = [
        _padded(_pixel(grid[..., 2 - axis], size, align_corners), size, padding_mode, align_corners)
        for axis, size in enumerate(space)
    ]
    flat = x.reshape(batch, channels, math.prod(space))

    def taps(at: torch.Tensor) -> list[tuple[torch.Tensor, Any]]:
        """Whole numbers beside a place and their shares."""
        if interpolation_mode == NEAREST:
            return [(torch.round(at), 1.0)]
        low = torch.floor(at)
        return [(low, low + 1 - at), (low + 1, at - low)]

    total: Any = None
    for corner in itertools.product(*map(taps, places)):
        index, share = 0, 1.0
        for (at, part), size in zip(corner, space, strict=True):
            inside = (at >= 0) & (at < size)
            index = index * size + torch.where(inside, at, 0).long()
            share = share * torch.where(inside, part, 0.0)
        values = flat.gather(2, index.reshape(batch, 1, -1).expand(-1, channels, -1))
        values = values.reshape(batch, channels, *index.shape[1:]) * share.unsqueeze(1)
        total = values if total is None else total + values
    return total.to(x.dtype)


def _pixel(place: torch.Tensor, size: int, align_corners: bool) -> torch.Tensor:
    """Where a place between -1 and 1 is among pixels."""
    half = (size - 1) / 2 if align_corners else size / 2
    return place * half + (size - 1) / 2


def _padded(at: torch.Tensor, size: int, mode: int, align_corners: bool) -> torch.Tensor:
    """Places outside of an image as those inside that stand for them."""
    if mode == REFLECTION:
        low, span = (0.0, size - 1.0) if align_corners else (-0.5, float(size))
        if span == 0:
            return torch.zeros_like(at)
        away = (at - low).abs()
        turns, rest = torch.floor(away / span), torch.fmod(away, span)
        at = torch.where(torch.fmod(turns, 2) == 0, rest + low, span + low - rest)
    return at if mode == ZEROS else at.clamp(0, size - 1)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    _aten.upsample_nearest2d.vec: _nearest(_aten.upsample_nearest2d.vec),
    **{operator: _repeated(operator) for operator in REPEATED},
    _aten.grid_sampler_3d.default: _sampled_volume,
    _aten.grid_sampler_2d.default: torch._decomp.decomposition_table[_aten.grid_sampler_2d.default],
}
