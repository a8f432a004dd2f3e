"""Tensors of PyTorch whose floats are to be float64, widened where they are read.

A weight of a product or a table is four times as large in float64 as it is in float16, and of most
tables few rows are read: what is `Narrow` stays as it is until an operation computes with it, and a
product widens it piece by piece.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..reference import EXTREMES, LARGEST

LEAST = 1 << 16  # elements of what is not widened at once
PIECE = 1 << 22  # elements that are widened at a time: 32 MB of float64
_MOVES = ("reshape", "squeeze", "as_strided", "expand", "permute", "contiguous")


@dataclass(frozen=True, slots=True)
class Narrow:
    """A tensor that stands for the same in float64."""

    tensor: Any

    def __getattr__(self, name: str) -> Any:
        """What moves its elements gives another one; anything else is the tensor's."""
        found = getattr(self.tensor, name)
        if name not in _MOVES:
            return found
        return lambda *how: Narrow(found(*how))

    def take(self, places: Any) -> Any:
        """Some elements in float64."""
        return widened(self.tensor.take(places))

    def wide(self) -> Any:
        """It in float64."""
        return widened(self.tensor)


def narrow(tensor: Any) -> Any:
    """A tensor that is widened where it is read, if that saves memory; else in float64."""
    large = tensor.numel() >= LEAST and _extremes(tensor) is not None
    return Narrow(tensor) if large else widened(tensor)


def wide(value: Any) -> Any:
    """A tensor, or what stands for one, in float64."""
    return value.wide() if isinstance(value, Narrow) else value


def widened(tensor: Any) -> Any:
    """Floats in float64 as `reference.widen_nodes` widens constants; others stay."""
    extremes = _extremes(tensor)
    if extremes is None:
        return tensor
    found = tensor.double()
    if not bool((tensor.abs() >= min(extremes)).any()):
        return found
    size = found.abs()
    for extreme in extremes:
        found = sys.modules["torch"].where(size == extreme, LARGEST * found.sign(), found)
    return found


def contracted(names: str, factors: Sequence[Any]) -> Any:
    """The `einsum` of factors, of which those that are narrow are widened by pieces.

    Parameters
    ----------
    names : str
        As `torch.einsum` takes them, "ab,bc->ac".
    factors : sequence of torch.Tensor or Narrow
        An axis for each letter.
    """
    torch = sys.modules["torch"]
    given, _, left = names.partition("->")
    letters = given.split(",")
    largest = max(
        (i for i, factor in enumerate(factors) if isinstance(factor, Narrow)),
        key=lambda i: factors[i].numel(),
        default=None,
    )
    axis = None if largest is None else _split(letters[largest], left, factors[largest].shape)
    if axis is None:
        return torch.einsum(names, *map(wide, factors))
    extents = {
        x: e
        for own, f in zip(letters, factors, strict=True)
        for x, e in zip(own, f.shape, strict=True)
    }
    factors = [
        f.tensor if isinstance(f, Narrow) and axis in own else wide(f)
        for own, f in zip(letters, factors, strict=True)
    ]
    out = factors[0].new_empty([extents[x] for x in left], dtype=torch.float64)
    for first, count in _pieces(extents[axis], factors[largest].numel()):
        parts = [
            widened(f.narrow(own.index(axis), first, count)) if axis in own else f
            for own, f in zip(letters, factors, strict=True)
        ]
        out.narrow(left.index(axis), first, count).copy_(torch.einsum(names, *parts))
    return out


def _extremes(tensor: Any) -> tuple[float, ...] | None:
    return EXTREMES.get(str(tensor.dtype).removeprefix("torch."))


def _split(own: str, left: str, shape: Sequence[int]) -> str | None:
    """The longest axis of a factor that the result has, too."""
    axes = [(extent, x) for x, extent in zip(own, shape, strict=True) if x in left]
    return max(axes)[1] if axes else None


def _pieces(extent: int, elements: int) -> Iterator[tuple[int, int]]:
    """Where pieces of an axis begin, and how long they are."""
    step = max(1, extent * PIECE // max(1, elements))
    return ((first, min(step, extent - first)) for first in range(0, extent, step))
