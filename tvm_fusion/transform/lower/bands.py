"""Matrices with one value between two diagonals and another one outside: the masks of causal and of
local attention.

    element(..., i, j) = inside   where lowest <= j - i <= highest
                         outside  elsewhere
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm import tirx
from tvm.ir import Expr

DTYPES = frozenset(("bool", "float16", "bfloat16", "float32", "int8", "int32", "int64"))
LEAST_SIDE = 2
FIRST_LOOK = 64  # rows and columns that are looked at before all of a matrix is


@dataclass(frozen=True, slots=True)
class Band:
    """See the module docstring. A bound that no element of the matrix reaches is None."""

    inside: float
    outside: float
    lowest: int | None
    highest: int | None
    dtype: str

    def element(self, *index: tirx.Var) -> Expr:
        """The element at some indices, the last two of which are i and j."""
        i, j = index[-2:]
        bounds = []
        if self.lowest is not None:
            bounds.append(i + self.lowest <= j)
        if self.highest is not None:
            bounds.append(j <= i + self.highest)
        condition = bounds[0] if len(bounds) == 1 else tirx.And(*bounds)
        values = (tirx.const(value, self.dtype) for value in (self.inside, self.outside))
        return tirx.Select(condition, *values)


def banded(array: np.ndarray) -> Band | None:
    """The band that the last two axes of an array are, equal along all axes before; else None."""
    if array.ndim < 2 or min(array.shape[-2:]) < LEAST_SIDE or array.dtype.name not in DTYPES:
        return None
    planes = array.reshape(-1, *array.shape[-2:])
    corner = planes[0, :FIRST_LOOK, :FIRST_LOOK]
    if not _is_toeplitz(corner) or not all(np.array_equal(p, planes[0]) for p in planes[1:]):
        return None
    plane = planes[0]
    if not _is_toeplitz(plane):
        return None
    along = _diagonals(plane)
    changes = np.flatnonzero(along[1:] != along[:-1]) + 1
    first = 1 - len(plane)  # j - i of the first diagonal
    if not 1 <= len(changes) <= 2 or len(np.unique(along)) != 2:
        return None
    inside, outside = along[changes[0]], along[0]
    lowest = int(changes[0]) + first
    highest = int(changes[1]) + first - 1 if len(changes) == 2 else None
    return Band(inside.item(), outside.item(), lowest, highest, array.dtype.name)


def _diagonals(plane: np.ndarray) -> np.ndarray:
    """The elements of the first column from the last row up, then those of the first row."""
    return np.concatenate([plane[:0:-1, 0], plane[0]])


def _is_toeplitz(plane: np.ndarray) -> bool:
    """Whether each diagonal has one value; a NaN equals nothing."""
    return bool(np.array_equal(plane[1:, 1:], plane[:-1, :-1]))
