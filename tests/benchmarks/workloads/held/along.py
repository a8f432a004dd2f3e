"""Programs along one axis of a tensor: scans, places of the largest, windows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..instance import Apply, Made, wide
from .draw import Draw

# ---- scans


def scan(draw: Draw) -> Made:
    """A running sum, product, maximum or logarithm of a sum, with work before and behind."""
    shape, axis = draw.along()
    length = shape[axis]
    kind = draw.one_of((_sums, _products, _largest, _log_sums, _backwards, _sums_before, _masked))
    before, after = draw.smooth(), draw.smooth()
    beside = draw.chance()

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = after(kind(before(x), axis, length))
        return found * y if beside else found

    return Apply(program), (draw.normal(*shape), draw.normal(*shape if beside else (1,)))


def _sums(x: torch.Tensor, axis: int, length: int) -> torch.Tensor:
    return torch.cumsum(x, axis)


def _products(x: torch.Tensor, axis: int, length: int) -> torch.Tensor:
    return torch.cumprod(1 + wide(x) / length, axis).to(x.dtype)


def _largest(x: torch.Tensor, axis: int, length: int) -> torch.Tensor:
    return torch.cummax(x, axis).values


def _log_sums(x: torch.Tensor, axis: int, length: int) -> torch.Tensor:
    return torch.logcumsumexp(x, axis)


def _backwards(x: torch.Tensor, axis: int, length: int) -> torch.Tensor:
    return torch.cumsum(x.flip(axis), axis).flip(axis)


def _sums_before(x: torch.Tensor, axis: int, length: int) -> torch.Tensor:
    return torch.cumsum(x, axis) - x


def _masked(x: torch.Tensor, axis: int, length: int) -> torch.Tensor:
    return torch.cumsum(torch.where(x > 0, x, 0), axis)


# ---- places


def places(draw: Draw) -> Made:
    """The largest or the least of an axis, where it stands, or both."""
    shape, axis = draw.along()
    before = draw.exact()
    kind = draw.one_of((_argmax, _argmin, _max, _min, _top, _sorted))
    return Apply(lambda x: kind(before(x), axis)), (draw.normal(*shape),)


def _argmax(x: torch.Tensor, axis: int) -> torch.Tensor:
    return torch.argmax(x, axis)


def _argmin(x: torch.Tensor, axis: int) -> torch.Tensor:
    return torch.argmin(x, axis, keepdim=True)


def _max(x: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    found = torch.max(x, axis)
    return found.values * 2, found.indices


def _min(x: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    found = torch.min(x, axis, keepdim=True)
    return x - found.values, found.indices


def _top(x: torch.Tensor, axis: int) -> torch.Tensor:
    return torch.topk(x, 1, axis).values  # which of equal ones it takes is left open


def _sorted(x: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, order = torch.sort(x, dim=axis, stable=True)
    return values.narrow(axis, 0, 1), order.narrow(axis, 0, 1)


# ---- windows


def pool(draw: Draw) -> Made:
    """A pool in 1, 2 or 3 dimensions with any window, stride, padding and dilation."""
    dims = draw.count(1, 3)
    largest = draw.chance()
    least, most = (0, 64, 16, 12)[dims], (0, 1 << 14, 256, 64)[dims]
    window = [draw.count(2, (0, 11, 11, 5)[dims]) for _ in range(dims)]
    stride = [draw.count(1, k) for k in window]
    padding = [draw.count(0, k // 2) for k in window]
    extents = [max(draw.size(least, most), 2 * k) for k in window]
    kind = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[dims - 1]
    how = {"stride": stride, "padding": padding, "ceil_mode": draw.chance(0.2)}
    if not largest:
        kind = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[dims - 1]
        how["count_include_pad"] = draw.chance()
    elif draw.chance(0.3):
        how["dilation"] = 2
    channels = draw.size(3, 256)
    batch = draw.beside(channels, *extents)
    before, after = draw.one_of((torch.relu, lambda x: x, draw.smooth())), draw.smooth()
    return Apply(lambda x: after(kind(before(x), window, **how))), (
        draw.normal(batch, channels, *extents),
    )
