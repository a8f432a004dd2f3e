"""Converters for other sizes of images: a new element is a sum of a few old ones an axis.

    y[i, j] = sum of  x[rows[s, i], columns[t, j]] * row_shares[s, i] * column_shares[t, j]

over taps s, t: two of them an axis for linear interpolation, four for a cubic one; with antialias
as many as the filter covers of the old elements. Places and shares are tables, computed as PyTorch
does (`UpSample.h`, `UpSampleKernel.cpp` of ATen); as there, an element whose share is 0 counts
where it is no number.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx
from tvm import relax

from ....errors import FrontendError
from ..importer import Importer, bound_arguments
from ..indexing import taken
from ..operators import HALVES, Converter

_aten = torch.ops.aten


@dataclass(frozen=True)
class Resize:
    """Sizes of an axis before and after.

    Attributes
    ----------
    old, new : int
    align_corners : bool
        Whether the first and the last element stay where they are, or the edges around them.
    factor : float, optional
        Which is not always what the sizes say.
    dtype : str
        In which places are computed.
    """

    old: int
    new: int
    align_corners: bool
    factor: float | None
    dtype: str

    @property
    def step(self) -> np.floating:
        """Old elements a new one."""
        number = np.dtype(self.dtype).type
        if self.align_corners:
            return number(self.old - 1) / number(max(1, self.new - 1)) * number(self.new > 1)
        return number(1 / self.factor) if self.factor else number(self.old) / number(self.new)

    def centres(self) -> np.ndarray:
        """Where new elements [new] are among the old ones, rounded once as in a fused
        multiply-add.
        """
        i, step = np.arange(self.new, dtype="longdouble"), np.longdouble(self.step)
        exact = step * i if self.align_corners else step * (i + 0.5) - 0.5
        return exact.astype(self.dtype)


@dataclass(frozen=True)
class Taps:
    """Old elements of each new one, `places` [taps, new], and their `shares` [taps, new]."""

    places: np.ndarray
    shares: np.ndarray


def linear_taps(axis: Resize) -> Taps:
    """The neighbours on both sides."""
    low, share = _split(np.maximum(axis.centres(), 0), axis.old)
    high = low if axis.old == axis.new else np.minimum(low + 1, axis.old - 1)
    return Taps(np.stack([low, high]), np.stack([1 - share, share]))


def cubic_taps(axis: Resize) -> Taps:
    """Two neighbours on each side, those at the edges more than once."""
    low, share = _split(axis.centres(), axis.old)
    places = np.clip(low + np.arange(-1, 3)[:, None], 0, axis.old - 1)
    distances = np.stack([1 + share, share, 1 - share, 2 - share])
    return Taps(places, _cubic(distances, a=-0.75))


def _split(centres: np.ndarray, old: int) -> tuple[np.ndarray, np.ndarray]:
    """The element before each centre, and how far behind it the centre is."""
    low = np.minimum(np.floor(centres), old - 1)
    return low.astype("int64"), np.clip(centres - low, 0, 1)


def _cubic(distances: np.ndarray, a: float) -> np.ndarray:
    """Keys' kernel."""
    x = np.abs(distances)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def filtered_taps(axis: Resize, reach: int, resize: Callable[..., torch.Tensor]) -> Taps:
    """Those that a filter covers, which is as much wider as the image gets smaller.

    Their shares are what PyTorch makes of the identity, whether they are 0 is a matter of rounding.
    Where the filter covers fewer than elsewhere, its last element stands for the rest, too, and has
    its share in as many parts.
    """
    if axis.old == axis.new:
        return Taps(np.arange(axis.new)[None], np.ones((1, axis.new)))
    number, step = np.dtype(axis.dtype).type, axis.step
    centres = (float(step) * (np.arange(axis.new) + 0.5)).astype(number)
    support = number(reach * max(step, number(1)))
    begins = np.maximum(((centres - support).astype("float64") + 0.5).astype("int64"), 0)
    ends = np.minimum(((centres + support).astype("float64") + 0.5).astype("int64"), axis.old)
    counts = ends - begins
    taps = np.arange(counts.max())[:, None]
    places = np.minimum(begins + taps, ends - 1)
    # two pixels wide: of images of one PyTorch 2.14 makes rows that are all alike
    pixels = torch.eye(axis.old, dtype=getattr(torch, axis.dtype))[None, :, :, None].repeat(
        1, 1, 1, 2
    )
    matrix = resize(pixels, [axis.new, 2], axis.align_corners, axis.factor, None)[0, :, :, 0]
    shares = matrix.numpy()[places, np.arange(axis.new)].astype("float64")
    return Taps(places, shares / np.where(taps < counts - 1, 1, counts.max() - counts + 1))


TAPS: dict[str, Callable[[Resize], Taps]] = {
    "upsample_linear1d.vec": linear_taps,
    "upsample_bilinear2d.vec": linear_taps,
    "upsample_trilinear3d.vec": linear_taps,
    "upsample_bicubic2d.vec": cubic_taps,
    "_upsample_bilinear2d_aa.default": functools.partial(
        filtered_taps, reach=1, resize=_aten._upsample_bilinear2d_aa.default
    ),
    "_upsample_bicubic2d_aa.default": functools.partial(
        filtered_taps, reach=2, resize=_aten._upsample_bicubic2d_aa.default
    ),
}


def _resized(taps_of: Callable[[Resize], Taps]) -> Converter:
    def convert(importer: Importer, node: fx.Node) -> relax.Expr:
        args, dtype = bound_arguments(node), importer.dtype_of(node)
        source = node.all_input_nodes[0]
        old, new = source.meta["val"].shape[2:], node.meta["val"].shape[2:]
        if not all(isinstance(size, int) for size in (*old, *new)):
            raise FrontendError("an image of symbolic size: give its sizes as numbers")
        wide = "float32" if dtype in HALVES else dtype
        factors = _factors(args, len(new))
        axes = [
            taps_of(Resize(*sizes, args["align_corners"], factor, wide))
            for *sizes, factor in zip(old, new, factors, strict=True)
        ]
        x = importer.cast(importer.value_of(source), wide)
        if math.prod(len(taps.places) for taps in axes) <= _MOST_TERMS:
            y = _terms(importer, x, axes, 2)
        else:
            y = _sums(importer, x, axes)
        return importer.cast(y, dtype)

    return convert


_MOST_TERMS = 8
"""As many as three axes have with two each. They are one kernel, which reads any layout, and with
more it is slower than a kernel an axis: bilinear and bicubic, 64 x 32 x 32 to twice the size on one
thread of a CPU, 329 and 2,084 us written out, 96 and 168 as sums."""


def _factors(args: dict[str, Any], rank: int) -> Sequence[float | None]:
    if "scale_factors" in args:
        return args["scale_factors"] or [None] * rank
    return [args["scales_h"], args["scales_w"]]


def _terms(importer: Importer, x: relax.Expr, axes: Sequence[Taps], axis: int) -> relax.Expr:
    """The sum written out, of the last axis first: x has its new sizes before `axis`."""
    if not axes:
        return x
    dtype, count = str(x.ty.dtype), axes[0].places.shape[1]
    shape = (count, *[1] * (len(axes) - 1))
    total = None
    for places, shares in zip(axes[0].places, axes[0].shares, strict=True):
        part = taken(importer, x, relax.const(places, "int64"), axis)
        part = _terms(importer, part, axes[1:], axis + 1)
        share = relax.const(shares.reshape(shape).astype(dtype), dtype)
        part = importer.emit(relax.op.multiply(part, share))
        total = part if total is None else importer.emit(relax.op.add(total, part))
    return total


def _sums(importer: Importer, x: relax.Expr, axes: Sequence[Taps]) -> relax.Expr:
    """A sum over the taps of each axis, of the last one first."""
    dtype = str(x.ty.dtype)
    for axis, taps in reversed(list(enumerate(axes, start=2))):
        table = relax.const(np.ascontiguousarray(taps.places.T), "int64")
        parts = taken(importer, x, table, axis)  # [.., new, taps, ..]
        shape = (*taps.shares.T.shape, *[1] * (len(axes) + 1 - axis))
        shares = relax.const(taps.shares.T.reshape(shape).astype(dtype), dtype)
        x = importer.emit(relax.op.sum(importer.emit(relax.op.multiply(parts, shares)), axis + 1))
    return x


CONVERTERS: dict[str, Converter] = {name: _resized(taps) for name, taps in TAPS.items()}


# ---- Sizes that are not known, and integers, which are rounded: by PyTorch's decompositions.


def _kept(original: Any) -> Callable[..., Any]:
    def decompose(x: torch.Tensor, output_size: Any, *options: Any) -> Any:
        known = all(isinstance(n, int) for n in itertools.chain(x.shape[2:], output_size or ()))
        if known and x.is_floating_point():
            return NotImplemented
        return torch._decomp.decomposition_table[original](x, output_size, *options)

    return decompose


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    operator: _kept(operator)
    for operator in (
        _aten.upsample_linear1d.vec,
        _aten.upsample_bilinear2d.vec,
        _aten.upsample_trilinear3d.vec,
        _aten.upsample_bicubic2d.vec,
    )
}
