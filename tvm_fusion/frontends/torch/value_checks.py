"""Functions of PyTorch that read values while they run, as others that read none.

    torch.cov(x)                     raises where weights sum to 0, warns of too few columns
    F.gaussian_nll_loss(x, y, var)   raises where a variance is negative
    x.narrow(0, start, 2)            start is a tensor
    torch.quantile(x, 0.3)           PyTorch 2.11 looks whether 0.3 is one of 0 to 1

torch.export stops at these. `no_values_read` has them traced without checks of values, so that what
is compiled computes where eager execution raises; nothing else of them differs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    PendingUnbackedSymbolNotFound,
)
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .ctc import ctc_loss
from .solvers import least_squares

Tensor = torch.Tensor

READS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
    PendingUnbackedSymbolNotFound,
)


class no_values_read(TorchFunctionMode):
    """A context in which functions of `FUNCTIONS` are those that read no values."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """A call of any function of PyTorch."""
        other, kwargs = FUNCTIONS.get(func), kwargs or {}
        if other is not None:
            named = dict(kwargs)  # what has an `input` among these functions takes it first
            given = (named.pop("input"), *args) if "input" in named else args
            result = other(*given, **named)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)


def _cov(
    x: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:
    """Covariances of rows; a norm below 0 counts as 0."""
    rows = x.reshape(1, -1) if x.ndim < 2 else x
    weights = [w for w in (fweights, aweights) if w is not None]
    weight = math.prod(weights[1:], start=weights[0]) if weights else None
    weighted = rows if weight is None else rows * weight
    total = rows.shape[1] if weight is None else weight.sum()
    centred = rows - (weighted.sum(1) / total).unsqueeze(1)
    norm = total - correction
    if aweights is not None and correction:
        norm = total - correction * (weight * aweights).sum() / total
    norm = norm.clamp(min=0) if isinstance(norm, Tensor) else max(norm, 0)
    product = centred @ (centred if weight is None else centred * weight).t().conj()
    return (product / norm).squeeze()


def _corrcoef(x: Tensor) -> Tensor:
    covariance = _cov(x)
    if covariance.ndim == 0:
        return covariance / covariance
    deviation = torch.sqrt(covariance.diagonal().real)
    found = covariance / deviation[:, None] / deviation[None]
    if not found.is_complex():
        return found.clip(-1, 1)
    return torch.complex(found.real.clip(-1, 1), found.imag.clip(-1, 1))


def _gaussian_nll_loss(
    x: Tensor,
    target: Tensor,
    var: Any,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Any:
    if not isinstance(var, Tensor) or reduction not in ("none", "mean", "sum"):
        return NotImplemented
    if var.shape != x.shape and var.shape == x.shape[:-1]:
        var = var.unsqueeze(-1)
    differing = [b for a, b in zip(x.shape, var.shape, strict=False) if a != b]
    if var.ndim != x.ndim or sum(differing) > 1:
        return NotImplemented  # which says what is wrong
    var = var.clamp(min=eps)
    loss = 0.5 * (torch.log(var) + (x - target) ** 2 / var)
    loss = loss + 0.5 * math.log(2 * math.pi) if full else loss
    return {"none": loss, "mean": loss.mean(), "sum": loss.sum()}[reduction]


def _narrow(x: Tensor, dim: int, start: Any, length: int) -> Any:
    if not isinstance(start, Tensor):
        return NotImplemented
    first = torch.where(start < 0, start + x.shape[dim], start)
    return x.index_select(dim, first + torch.arange(length, device=x.device))


def _quantile_of(ignores_nan: bool) -> Callable[..., Tensor]:
    """Between neighbours in order; NaN is last, and counts where it is not ignored."""

    def quantile(
        x: Tensor,
        q: Any,
        dim: int | None = None,
        keepdim: bool = False,
        *,
        interpolation: str = "linear",
        out: Tensor | None = None,
    ) -> Any:
        if out is not None or interpolation not in _BETWEEN or x.numel() == 0:
            return NotImplemented
        if x.ndim == 0:
            return quantile(x.reshape(1), q, 0, interpolation=interpolation)
        q = q if isinstance(q, Tensor) else torch.full((), q, dtype=x.dtype, device=x.device)
        rows = x.reshape(-1) if dim is None else x.movedim(dim, -1)
        ordered, size = torch.sort(rows, -1)[0], rows.shape[-1]
        last = (~torch.isnan(ordered)).sum(-1, keepdim=True) - 1
        if ignores_nan:
            last = last.clamp(min=0)
        ranks = q.reshape(-1) * (last if ignores_nan else size - 1)
        if not ignores_nan:
            ranks = torch.where(last < size - 1, size - 1, ranks)
        ranks = ranks.to(x.dtype)
        low, weight = _BETWEEN[interpolation](ranks)
        places = torch.stack([low, torch.ceil(ranks) if weight is not None else low]).long()
        below, above = (ordered.gather(-1, place) for place in places)
        found = below if weight is None else torch.lerp(below, above, weight)
        if keepdim:
            shape = [1] * x.ndim if dim is None else [*x.movedim(dim, -1).shape[:-1], 1]
            found = found.movedim(-1, 0).reshape(-1, *shape)
            found = found if dim is None else found.movedim(-1, dim % x.ndim + 1)
        else:
            found = found.movedim(-1, 0)
        return found if q.ndim else found.squeeze(0)

    return quantile


# Ranks in, the place below and the share of the one above out; None where one place is all.
_BETWEEN: dict[str, Callable[[Tensor], tuple[Tensor, Tensor | None]]] = {
    "linear": lambda ranks: (torch.floor(ranks), ranks - torch.floor(ranks)),
    "midpoint": lambda ranks: (torch.floor(ranks), torch.full_like(ranks, 0.5)),
    "lower": lambda ranks: (torch.floor(ranks), None),
    "higher": lambda ranks: (torch.ceil(ranks), None),
    "nearest": lambda ranks: (torch.round(ranks), None),
}


def _combinations(x: Tensor, r: int = 2, with_replacement: bool = False) -> Any:
    """By places that are known, and not by a mask whose True ones PyTorch 2.11 counts."""
    if x.ndim != 1 or r < 1:
        return NotImplemented
    of = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    places = list(of(range(x.shape[0]), r))
    return x[torch.tensor(places, dtype=torch.int64, device=x.device).reshape(-1, r)]


def _lstsq(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return torch.return_types.linalg_lstsq(least_squares(*args, **kwargs))


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    F.ctc_loss: ctc_loss,
    F.gaussian_nll_loss: _gaussian_nll_loss,
    torch.Tensor.corrcoef: _corrcoef,
    torch.Tensor.cov: _cov,
    torch.Tensor.nanquantile: _quantile_of(ignores_nan=True),
    torch.Tensor.narrow: _narrow,
    torch.Tensor.quantile: _quantile_of(ignores_nan=False),
    torch.combinations: _combinations,
    torch.corrcoef: _corrcoef,
    torch.cov: _cov,
    torch.linalg.lstsq: _lstsq,
    torch.nanquantile: _quantile_of(ignores_nan=True),
    torch.narrow: _narrow,
    torch.quantile: _quantile_of(ignores_nan=False),
}
