"""Operators that reduce runs of rows whose lengths are data, as scatters (`scatters`).

    embedding_bag(i, w, offsets)        ->  scatter_add(0, bag of each i, w[i])
    segment_reduce(x, "max", lengths)   ->  scatter_reduce(-inf, segment of each row, x, "amax")

The run of a row is found by `searchsorted` among the ends of all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..composites import wide

_aten = torch.ops.aten
Tensor = torch.Tensor

SUM, MEAN, MAX = range(3)  # modes of embedding_bag


def _embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bags of rows of a table, without those of the padding; empty ones are zero.

    Results are the bags, the bag of each index, how many rows each has, and in which rows of the
    table its greatest elements are; how many rows it has in the other modes.
    """
    count = offsets.shape[0] - include_last_offset
    begins = offsets[:count]
    rows = torch.arange(indices.shape[0], device=weight.device)
    bags = torch.searchsorted(begins.to(torch.int64), rows, right=True) - 1
    counted = torch.ones_like(indices, dtype=torch.int64)
    if padding_idx >= 0:
        counted = (indices != padding_idx).to(torch.int64)
    sizes = torch.zeros(count, dtype=torch.int64, device=weight.device)
    sizes = sizes.scatter_add(0, bags, counted)
    chosen = wide(weight) if mode != MAX else weight
    chosen = chosen.index_select(0, indices)  # an index below 0 is out of range
    if mode == MAX:
        result, places = _greatest_of_bags(chosen, bags, counted, sizes)
        return result, bags, sizes, torch.where(places < 0, 0, indices[places.clamp(min=0)])
    given = chosen * counted[:, None]
    if per_sample_weights is not None:
        given = given * per_sample_weights[:, None]
    result = given.new_zeros(count, weight.shape[1])
    result = result.scatter_add(0, bags[:, None].expand(given.shape), given)
    if mode == MEAN:
        result = result / sizes.clamp(min=1)[:, None]
    return result.to(weight.dtype), bags, sizes, sizes


def _greatest_of_bags(
    given: Tensor, bags: Tensor, counted: Tensor, sizes: Tensor
) -> tuple[Tensor, Tensor]:
    """The greatest elements of bags, and the first places that have them, -1 of empty ones."""
    places = bags[:, None].expand(given.shape)
    valid = (counted > 0)[:, None]
    full = given.new_full((sizes.shape[0], given.shape[1]), float("-inf"))
    best = full.scatter_reduce(0, places, torch.where(valid, given, float("-inf")), "amax")
    rows = torch.arange(given.shape[0], device=given.device)[:, None]
    has_best = valid & (given == best.gather(0, places))
    first = torch.full(best.shape, given.shape[0], dtype=torch.int64, device=given.device)
    first = first.scatter_reduce(0, places, torch.where(has_best, rows, given.shape[0]), "amin")
    empty = (sizes == 0)[:, None]
    return torch.where(empty, 0.0, best), torch.where(empty, -1, first)


_REDUCTIONS = {"sum": "sum", "mean": "sum", "prod": "prod", "max": "amax", "min": "amin"}
_FIRST = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "max": float("-inf"), "min": float("inf")}


def _segment_reduce(
    data: Tensor,
    reduce: str,
    *,
    lengths: Tensor | None = None,
    indices: Tensor | None = None,
    offsets: Tensor | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
) -> Tensor:
    """Reductions of runs along an axis; what stands before it are batches, with runs of their own.

    A mean counts rows, not what it begins with; of no rows without a beginning it is NaN.
    """
    if lengths is None:
        lengths = offsets.diff(dim=-1)
    ends = lengths.to(torch.int64).cumsum(-1)
    size, lead = data.shape[axis], list(lengths.shape[:-1])
    rows = torch.arange(size, device=data.device).expand(*lead, size).contiguous()
    segments = torch.searchsorted(ends, rows, right=True)
    count = lengths.shape[-1]
    shape = list(data.shape)
    shape[axis] = count + 1  # and what is in no segment
    inner = [1] * (data.ndim - axis - 1)
    places = segments.reshape(*lead, size, *inner).expand(data.shape)
    first = _FIRST[reduce] if initial is None else initial
    given = wide(data)
    result = given.new_full(shape, first)
    result = result.scatter_reduce(axis, places, given, _REDUCTIONS[reduce]).narrow(axis, 0, count)
    if reduce == "mean":
        sizes = lengths.reshape(*lead, count, *inner)
        mean = result / sizes.clamp(min=1)
        result = torch.where(sizes > 0, mean, float("nan") if initial is None else initial)
    return result.to(data.dtype)


SEGMENTS: dict[Any, Callable[..., Any]] = {
    _aten._embedding_bag.default: _embedding_bag,
    _aten._embedding_bag_forward_only.default: _embedding_bag,
    _aten.segment_reduce.default: _segment_reduce,
}
