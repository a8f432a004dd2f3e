"""Traits of operators, as bits: what decides which families need not be asked about a group."""

from __future__ import annotations

from typing import NamedTuple

REDUCES = 1
ROLLED = 2  # a reduction that pointwise kernels do not unroll
TRANSPOSES = 4
MULTIPLIES = 8
SUMS_ROWS = 16  # a reduction that keeps the contiguous axis
SUMS_COLUMNS = 32
READABLE = 64  # has blocks
MULTIPLIES_TWICE = MULTIPLIES << 4


class Needs(NamedTuple):
    """Traits that a group must have all of, and those that it may have none of."""

    present: int = 0
    absent: int = 0

    def allow(self, traits: int) -> bool:
        return traits & self.present == self.present and not traits & self.absent


def together(some: int, more: int) -> int:
    """The traits of some operators and of more of them."""
    return some | more | (some & more & MULTIPLIES) << 4
