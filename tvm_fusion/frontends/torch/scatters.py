"""Operators that write at places which are data, as scatters that add, multiply or take the
greatest, which are converted (`operators`).

    scatter_reduce(x, 0, i, y, "mean", include_self=False)
      ->  x' = 0 where i writes;  scatter_add(x', 0, i, y) / scatter_add(0, 0, i, 1)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_aten = torch.ops.aten
Tensor = torch.Tensor


def _first_value(reduce: str, dtype: torch.dtype) -> Any:
    """What changes nothing in a reduction."""
    if reduce in ("sum", "mean"):
        return 0
    if reduce == "prod":
        return 1
    if dtype == torch.bool:
        return reduce == "amin"
    if dtype.is_floating_point:
        return float("inf" if reduce == "amin" else "-inf")
    ends = torch.iinfo(dtype)
    return ends.max if reduce == "amin" else ends.min


def _scatter_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    """Means, and what does not count the elements that are there."""
    if reduce != "mean" and include_self:
        return NotImplemented
    if x.ndim == 0:
        rows = (x.reshape(1), 0, index.reshape(-1), source.reshape(-1))
        return _aten.scatter_reduce.two(*rows, reduce, include_self=include_self).reshape(())
    source = source[tuple(slice(size) for size in index.shape)]
    ones = torch.ones(index.shape, dtype=torch.int64, device=x.device)
    counts = torch.zeros(x.shape, dtype=torch.int64, device=x.device).scatter_add(dim, index, ones)
    if not include_self:
        x = torch.where(counts > 0, _first_value(reduce, x.dtype), x).to(x.dtype)
    kind = "sum" if reduce == "mean" else reduce
    result = _aten.scatter_reduce.two(x, dim, index, source, kind)
    if reduce != "mean":
        return result
    counts = counts + 1 if include_self else counts.clamp(min=1)
    rounding = None if x.is_floating_point() else "floor"
    return torch.div(result, counts, rounding_mode=rounding).to(x.dtype)


def _index_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    if x.ndim == 0:
        x, source = x.reshape(1), source.reshape(-1)
        return _index_reduce(x, 0, index, source, reduce, include_self=include_self).reshape(())
    shape = [1] * x.ndim
    shape[dim] = -1
    places = index.long().reshape(shape).expand(source.shape)
    return torch.scatter_reduce(x, dim, places, source, reduce, include_self=include_self)


_BY_OLD_NAME = {"add": "sum", "multiply": "prod"}


def _scatter(x: Tensor, dim: int, index: Tensor, source: Tensor, *, reduce: str) -> Tensor:
    return torch.scatter_reduce(x, dim, index, source, _BY_OLD_NAME[reduce])


def _scatter_value(x: Tensor, dim: int, index: Tensor, value: Any, *, reduce: str) -> Tensor:
    source = torch.full(index.shape, value, dtype=x.dtype, device=x.device)
    return torch.scatter_reduce(x, dim, index, source, _BY_OLD_NAME[reduce])


def _put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    flat = x.reshape(-1).index_put([index.reshape(-1)], source.reshape(-1), accumulate)
    return flat.reshape(x.shape)


def _masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """The values of a row in the places of the mask, one after the other."""
    x, mask = torch.broadcast_tensors(x, mask)
    if 0 in x.shape or 0 in source.shape:
        return x.clone()
    places = (mask.reshape(-1).long().cumsum(0) - 1).clamp(min=0)
    return torch.where(mask, source.reshape(-1)[places].reshape(x.shape), x)


def _histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Counts in equal ranges, the last with its end; of all of x where none are given."""
    flat = x.reshape(-1)
    low, high = min, max
    if low == high:
        low, high = flat.amin(), flat.amax()
        equal = low == high
        low, high = torch.where(equal, low - 1, low), torch.where(equal, high + 1, high)
    inside = (flat >= low) & (flat <= high)
    places = ((flat - low) * bins / (high - low)).long().clamp(0, bins - 1)
    return torch.zeros(bins, dtype=x.dtype, device=x.device).scatter_add(
        0, places, inside.to(x.dtype)
    )


SCATTERS: dict[Any, Callable[..., Any]] = {
    _aten.histc.default: _histc,
    _aten.index_reduce.default: _index_reduce,
    _aten.masked_scatter.default: _masked_scatter,
    _aten.put.default: _put,
    _aten.scatter.reduce: _scatter,
    _aten.scatter.value_reduce: _scatter_value,
    _aten.scatter_reduce.two: _scatter_reduce,
}
