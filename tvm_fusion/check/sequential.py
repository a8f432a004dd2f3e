"""Which of two is faster: a sequential test that looks at the data several times without being
fooled by it.

Both are timed in pairs, one right after the other, who goes first changing from pair to pair: what
drifts (clocks, other processes) hits both sides of a pair, and where the two are equally fast the
differences are symmetric around zero whatever the noise looks like. After each batch the mean of
the differences is held against its standard error, and the test ends when it is `STANDARD_ERRORS`
away from zero.

A test that looks often is wrong more often than one that looks once. Here it looks at most at fixed
numbers of pairs (`LOOKS`), each twice the one before, so that by the union bound over the tails of
Student's t with n - 1 degrees of freedom

    P(some look decides, no difference) <= sum_n P(|t_(n-1)| > 3)
                                         = .0074 + .0047 + .0037 + .0031 + .0029  =  2.2 %

and half of that for "the first is faster" (`ERROR_RATE`). Fewer than 20 pairs decide nothing.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

STANDARD_ERRORS = 3.0
LOOKS = (20, 40, 80, 160, 320)
ERROR_RATE = 0.011
RUNS = 3  # whose median is one time of a pair

Pair = tuple[float, float]


class Winner(Enum):
    FIRST = "first"
    SECOND = "second"
    NEITHER = "neither"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the pairs say, in the unit of their times.

    Attributes
    ----------
    first, second : float
        Medians.
    difference : float
        Mean of second - first over the pairs: what the first saves.
    error : float
        Standard error of the difference.
    pairs : int
    """

    first: float
    second: float
    difference: float
    error: float
    pairs: int

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> Comparison:
        """Sums up at least two pairs."""
        count = len(pairs)
        saved = [second - first for first, second in pairs]
        mean = math.fsum(saved) / count
        variance = math.fsum((x - mean) ** 2 for x in saved) / (count - 1)
        return cls(
            statistics.median(first for first, _ in pairs),
            statistics.median(second for _, second in pairs),
            mean,
            math.sqrt(variance / count),
            count,
        )

    @property
    def winner(self) -> Winner:
        """The faster one, if the difference is clear."""
        if self.pairs < LOOKS[0] or abs(self.difference) <= STANDARD_ERRORS * self.error:
            return Winner.NEITHER
        return Winner.FIRST if self.difference > 0 else Winner.SECOND


@dataclass
class Budget:
    """Seconds that may be spent, by a clock that can be replaced."""

    seconds: float
    clock: Callable[[], float] = time.monotonic
    _start: float = field(init=False)

    def __post_init__(self) -> None:
        self._start = self.clock()

    @property
    def left_s(self) -> float:
        return self.seconds - (self.clock() - self._start)

    def share(self, part: float) -> Budget:
        """A budget of a part of what is left."""
        return Budget(part * self.left_s, self.clock)


def paired(
    times: Callable[[bool, int], tuple[Sequence[float], Sequence[float]]], count: int
) -> list[Pair]:
    """Times two things in pairs, each going first in half of them.

    A time of a pair is the median of `RUNS` in a row of rounds, so that one interruption is not a
    sample.

    Parameters
    ----------
    times : callable
        `times(swapped, rounds)` runs both in turn, `rounds` times, the second first if `swapped`,
        and returns the times of the first and those of the second.
    count : int
    """
    pairs = []
    for swapped, share in ((False, (count + 1) // 2), (True, count // 2)):
        if share:
            first, second = (_medians(t) for t in times(swapped, share * RUNS))
            pairs += zip(first, second, strict=True)
    return pairs


def _medians(times: Sequence[float]) -> list[float]:
    return [statistics.median(times[k : k + RUNS]) for k in range(0, len(times), RUNS)]


def settle(sample: Callable[[int], Sequence[Pair]], budget: Budget) -> Comparison | None:
    """Times two things until one is clearly faster, the looks are over, or the budget is.

    Parameters
    ----------
    sample : callable
        `sample(n)` times n pairs and returns their times.
    budget : Budget
        A batch is not begun if, as the ones before it went, it would go beyond it.

    Returns
    -------
    Comparison or None
        None if the budget did not reach for the first look.
    """
    pairs: list[Pair] = []
    if budget.left_s <= 0:
        return None
    sample(1)  # warms up: what is loaded and allocated once does not count
    start = budget.left_s
    sample(1)  # shows what a pair costs
    per_pair = start - budget.left_s
    comparison = None
    for look in LOOKS:
        missing = look - len(pairs)
        before = budget.left_s
        if missing * per_pair > before:
            break
        pairs += sample(missing)
        per_pair = (before - budget.left_s) / missing
        comparison = Comparison.of(pairs)
        if comparison.winner is not Winner.NEITHER:
            break
    return comparison
