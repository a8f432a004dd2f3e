"""Draws the sizes and parts of a program: sizes log-uniform, a third of them odd."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F

from ..instance import Sizes, wide

T = TypeVar("T")
Function = Callable[[torch.Tensor], torch.Tensor]

ODD_SHARE = 1 / 3
ALIGNED = 8  # what sizes that are not odd are multiples of, from twice of it on
ELEMENTS = 1 << 20, 1 << 27  # of the largest input
FEWEST = 1 << 10  # of them at a small scale

SMOOTH: tuple[Function, ...] = (
    torch.tanh,
    F.silu,
    torch.sigmoid,
    lambda x: x * 0.5 + 0.25,
    lambda x: torch.exp(x * 0.1),
    lambda x: x / (1 + x.abs()),
)
EXACT: tuple[Function, ...] = (lambda x: x, torch.neg, torch.abs, lambda x: x * 0.5, wide)
"""Round nothing, so that the order of elements is that of float64."""


class Draw:
    """Random parts of one program; equal keys give equal ones.

    Parameters
    ----------
    key : str
        Of the program.
    sizes : Sizes
        Draws its inputs. The scale narrows the ranges of sizes, and changes nothing else.
    """

    def __init__(self, key: str, sizes: Sizes) -> None:
        self._random = random.Random(key)
        self._sizes = sizes

    def size(self, low: int, high: int) -> int:
        """A size from `low` to `high`, which is scaled."""
        return self._between(low, max(low, high * self._sizes.scale))

    def beside(self, *extents: int) -> int:
        """The size of a further axis, by the number of elements that all have."""
        elements = 1
        for extent in extents:
            elements *= extent
        scaled = (max(FEWEST, bound * self._sizes.scale) for bound in ELEMENTS)
        return self._between(*(max(1.0, bound / elements) for bound in scaled))

    def rows(self, low: int = 64, high: int = 1 << 15) -> tuple[int, int]:
        """Rows and their width, that from `low` to `high`."""
        width = self.size(low, high)
        return self.beside(width), width

    def along(self) -> tuple[tuple[int, ...], int]:
        """A shape of two or three axes, and one of these, which is 64 to 8192 long."""
        length = self.size(64, 1 << 13)
        axis = self.one_of((-1, 0, 1))
        if axis == 0:
            return (length, self.beside(length)), axis
        if axis == -1:
            return (self.beside(length), length), axis
        inner = self.size(2, 512)
        return (self.beside(length, inner), length, inner), axis

    def count(self, low: int, high: int) -> int:
        """A whole number, evenly, whatever the scale."""
        return self._random.randint(low, high)

    def one_of(self, choices: Sequence[T]) -> T:
        """One of them, evenly."""
        return self._random.choice(choices)

    def chance(self, share: float = 0.5) -> bool:
        """True in a share of the cases."""
        return self._random.random() < share

    def normal(self, *shape: int, deviation: float = 1.0) -> torch.Tensor:
        """Normal values."""
        return self._sizes.normal(*shape, deviation=deviation)

    def labels(self, count: int, classes: int) -> torch.Tensor:
        """Classes drawn evenly, int64."""
        return torch.randint(0, classes, (count,), device=self._sizes.device)

    def ones(self, size: int) -> torch.Tensor:
        """As weights of norms begin."""
        return torch.ones(size, dtype=self._sizes.dtype, device=self._sizes.device)

    def smooth(self) -> Function:
        """A function of an element."""
        return self.one_of(SMOOTH)

    def exact(self) -> Function:
        """One that rounds nothing."""
        return self.one_of(EXACT)

    def _between(self, low: float, high: float) -> int:
        value = max(1, round(low * (high / low) ** self._random.random()))
        if self.chance(ODD_SHARE):
            return value | 1
        return value if value < 2 * ALIGNED else value // ALIGNED * ALIGNED
