"""Operators that write at places which are data, as scatters that add, multiply or take the
greatest, which are converted.

    scatter_reduce(x, 0, i, y, "mean", include_self=False)
      ->  x' = 0 where i writes;  scatter_add(x', 0, i, y) / scatter_add(0, 0, i, 1)

To a scatter an index below 0 is out of range, as it is to `index_copy` and `index_add`; those of
`index_put`, `index_fill` and `put` count from the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from tvm import relax, sym

from tvm_fusion.errors import FrontendError

from ..importer import Importer, bound_arguments, size_of
from ..indexing import never_counted_back
from ..operators import Converter, span

_aten = torch.ops.aten
Tensor = torch.Tensor


def _scattered(importer: Importer, node: fx.Node) -> relax.Expr:
    """Scatters that replace, and those that reduce with what was there: at each index, in order."""
    args = bound_arguments(node)
    kind = args.get("reduce", "sum" if node.target is _aten.scatter_add.default else None)
    if kind not in _SCATTERED or not args.get("include_self", True):
        raise FrontendError(
            f"scatter_reduce by {kind!r}, or without the elements that are there: use another"
        )
    x, axis = importer.value_of(args["self"]), args["dim"]
    shape, is_number = list(x.ty.shape), x.ty.ndim == 0
    if is_number:
        x, axis, shape = importer.emit(relax.op.reshape(x, [1])), 0, [1]
    index = never_counted_back(importer, args["index"], shape[axis])
    sizes = [size_of(n, importer.symbols) for n in args["index"].meta["val"].shape] or [1]
    dtype, reduction = str(x.ty.dtype), _SCATTERED[kind]
    if "value" in args:
        source = importer.emit(relax.op.broadcast_to(relax.const(args["value"], dtype), sizes))
    else:
        source = _first_of(importer, importer.operand(args["src"], dtype), sizes)
    index, source = (
        y if y.ty.ndim == len(sizes) else importer.emit(relax.op.reshape(y, sizes))
        for y in (index, source)
    )
    if dtype == "bool" and kind is not None:  # a sum is true where one is, a product where all are
        x, source = (importer.cast(y, "int8") for y in (x, source))
        reduction = "max" if reduction in ("add", "max") else "min"
    result = importer.emit(relax.op.scatter_elements(x, index, source, axis, reduction))
    result = importer.emit(relax.op.reshape(result, [])) if is_number else result
    return importer.cast(result, dtype)


def _first_of(importer: Importer, source: relax.Expr, sizes: Sequence[Any]) -> relax.Expr:
    """Of the source only as much is read as there are indices."""
    for axis, (has, size) in enumerate(zip(source.ty.shape, sizes, strict=False)):
        if not sym.Analyzer().can_prove_equal(has, size):
            source = span(importer, source, axis, 0, size)
    return source


_SCATTERED = {None: "update", "sum": "add", "prod": "mul", "amax": "max", "amin": "min"}

CONVERTERS: dict[str, Converter] = {
    "scatter.src": _scattered,
    "scatter.value": _scattered,
    "scatter_add.default": _scattered,
    "scatter_reduce.two": _scattered,
}


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


def _written_along(operator: Any) -> Callable[..., Any]:
    """`index_copy` or `index_add` as itself, with an index of one axis, of a tensor of one axis or
    more; of complex numbers and of symbolic sizes as `index_put`.
    """

    def written(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1) -> Any:
        if alpha != 1:
            source = source * alpha
        if x.ndim == 0:
            rows = (x.reshape(1), 0, index.reshape(1), source.reshape(1))
            return operator(*rows).reshape(())
        if index.ndim == 0:
            return operator(x, dim, index.reshape(1), source.reshape(-1) if x.ndim == 1 else source)
        sizes = (*x.shape, *index.shape, *source.shape)
        if x.is_complex() or any(isinstance(n, torch.SymInt) for n in sizes):
            place = torch.where(index < 0, index - x.shape[dim], index)
            indices = [None] * (dim % x.ndim) + [place]
            return _aten.index_put(x, indices, source, operator is _aten.index_add.default)
        return NotImplemented if alpha == 1 else operator(x, dim, index, source)

    return written


def _max_unpool(x: Tensor, indices: Tensor, output_size: Sequence[int], *_: Any) -> Tensor:
    """Each channel's values at places of that channel's image."""
    rank = len(output_size)
    shape = [*x.shape[: x.ndim - rank], *output_size]
    flat = x.new_zeros([*shape[: x.ndim - rank], math.prod(output_size)])
    return flat.scatter(-1, indices.flatten(-rank), x.flatten(-rank)).reshape(shape)


def _one_hot(index: Tensor, num_classes: int = -1) -> Any:
    """Compared with all classes, behind a look for it among them: one that is none is an error."""
    if num_classes <= 0:
        return NotImplemented
    classes = torch.arange(num_classes, device=index.device)
    found = classes.index_select(0, index.reshape(-1)).reshape(index.shape)
    return (found.unsqueeze(-1) == classes).to(torch.int64)


def _masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """The values of a row in the places of the mask, one after the other."""
    x, mask = torch.broadcast_tensors(x, mask)
    if 0 in x.shape or 0 in source.shape:
        return x.clone()
    places = (mask.reshape(-1).long().cumsum(0) - 1).clamp(min=0)
    return torch.where(mask, source.reshape(-1)[places].reshape(x.shape), x)


def _histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Counts in equal ranges, the last with its end; of all of x where none are given."""
    if x.numel() == 0:
        return x.new_zeros(bins)
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


# ---- Counts of values between edges, and the places of what is not zero.
#
#     histogram(x, 4, range=(0, 1))  ->  edges = linspace(0, 1, 5)
#                                        scatter_add(0, searchsorted(edges, x, right=True) - 1, 1)
#     nonzero_static(x, size=n)      ->  scatter(-1, cumsum(x != 0) - 1, the places of all elements)
#
# The last range has its end; what is outside of all, and NaN, is not counted.


def _between(left: Tensor, right: Tensor, bins: int) -> Tensor:
    """`linspace`, from both ends to the middle, of ends that are data."""
    step, i = (right - left) / bins, torch.arange(bins + 1, device=left.device)
    return torch.where(i < (bins + 1) // 2, left + step * i, right - step * (bins - i))


def _edges(x: Tensor, bins: Sequence[int], given: Sequence[float] | None) -> list[Tensor]:
    """The edges along each axis of points (a row each); of the least to the greatest if none are
    given. Ends that are equal are moved apart.
    """
    rows, ends = x.reshape(-1, len(bins)), []
    for axis in range(len(bins)):
        if given is not None:
            low, high = (x.new_full((), value) for value in given[2 * axis : 2 * axis + 2])
        elif rows.shape[0] == 0:
            low, high = x.new_zeros(()), x.new_ones(())
        else:
            low, high = rows[:, axis].amin(), rows[:, axis].amax()
        equal = low == high
        ends.append((torch.where(equal, low - 0.5, low), torch.where(equal, high + 0.5, high)))
    return [_between(*pair, count) for pair, count in zip(ends, bins, strict=True)]


def _counted(
    x: Tensor, edges: Sequence[Tensor], *, weight: Tensor | None = None, density: bool = False
) -> Tensor:
    """How many points lie between edges along each axis, or the sum of their weights."""
    bins = [edge.shape[0] - 1 for edge in edges]
    rows = x.reshape(-1, len(bins))
    inside = torch.ones(rows.shape[:1], dtype=torch.bool, device=x.device)
    places = torch.zeros(rows.shape[:1], dtype=torch.int64, device=x.device)
    for axis, (edge, count) in enumerate(zip(edges, bins, strict=True)):
        column = rows[:, axis].contiguous()
        inside = inside & (column >= edge[0]) & (column <= edge[-1])
        found = torch.searchsorted(edge, column, right=True) - 1
        places = places * count + found.clamp(0, count - 1)
    values = torch.ones_like(places, dtype=x.dtype) if weight is None else weight.reshape(-1)
    counts = x.new_zeros(math.prod(bins))
    counts = counts.scatter_add(0, places, torch.where(inside, values, 0).to(x.dtype))
    counts = counts.reshape(bins)
    if not density:
        return counts
    counts = counts / counts.sum()
    for axis, edge in enumerate(edges):
        counts = counts / edge.diff().reshape([-1] + [1] * (len(bins) - axis - 1))
    return counts


def _of_bins(
    x: Tensor,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    weight: Tensor | None = None,
    density: bool = False,
) -> Tensor:
    return _counted(x, _edges(x, bins, range), weight=weight, density=density)


def _edges_of_bins(
    x: Tensor, bins: Sequence[int], *, range: Sequence[float] | None = None, **_: Any
) -> list[Tensor]:
    return _edges(x, bins, range)


def _histogram(
    x: Tensor, bins: int = 100, *, range: Sequence[float] | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    (edges,) = _edges(x, [bins], range)
    return _counted(x, [edges], **options), edges


def _histogram_of_edges(x: Tensor, bins: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return _counted(x, [bins], **options), bins.clone()


def _nonzero_static(x: Tensor, *, size: int, fill_value: int = -1) -> Tensor:
    """The places of the first elements that are not zero, a row each."""
    if x.ndim == 0 or x.numel() == 0 or size == 0:
        return torch.full((size, x.ndim), fill_value, dtype=torch.int64, device=x.device)
    found = (x != 0).reshape(-1)
    rows = found.to(torch.int64).cumsum(0) - 1
    rows = torch.where(found & (rows < size), rows, size)  # one row more takes all others
    number = torch.arange(x.numel(), device=x.device)
    columns = []
    for axis, extent in enumerate(x.shape):
        stride = math.prod(x.shape[axis + 1 :])
        places = torch.full((size + 1,), fill_value, dtype=torch.int64, device=x.device)
        columns.append(places.scatter(0, rows, number // stride % extent)[:size])
    return torch.stack(columns, 1)


SCATTERS: dict[Any, Callable[..., Any]] = {
    _aten._histogramdd_bin_edges.default: _edges_of_bins,
    _aten._histogramdd_from_bin_cts.default: _of_bins,
    _aten._histogramdd_from_bin_tensors.default: _counted,
    _aten.histc.default: _histc,
    _aten.histogram.bin_ct: _histogram,
    _aten.histogram.bins_tensor: _histogram_of_edges,
    _aten.index_add.default: _written_along(_aten.index_add.default),
    _aten.index_copy.default: _written_along(_aten.index_copy.default),
    _aten.index_reduce.default: _index_reduce,
    _aten.masked_scatter.default: _masked_scatter,
    _aten.max_unpool2d.default: _max_unpool,
    _aten.max_unpool3d.default: _max_unpool,
    _aten.nonzero_static.default: _nonzero_static,
    _aten.one_hot.default: _one_hot,
    _aten.put.default: _put,
    _aten.scatter.reduce: _scatter,
    _aten.scatter.value_reduce: _scatter_value,
    _aten.scatter_reduce.two: _scatter_reduce,
}
