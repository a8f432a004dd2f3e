"""Where the training data lie: a query outside is not answered from them.

A launch is inside if there is training data of its kernel class, if every feature lies within the
range that several graphs reached in the class (with some tolerance), and if a training sample of
the class is about as near as training samples are to each other. Features that grow with the bytes
moved are kept apart: they decide only by their ranges, so that more bytes can only lead from below
the hull through it to above it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np

from .features import BYTE_FEATURES, FREE_FEATURES

# Intervals that hold as often as they say: quantiles of the errors on graphs that were not trained
# on (conformal prediction; Vovk, Gammerman, Shafer: Algorithmic Learning in a Random World, 2005).
#
# An error is the absolute log of measured over predicted. The scores are errors over the usual
# error
# of their kind of launch (its kernel class), so that one set of scores serves all kinds, and kinds
# that are predicted badly get wide intervals.

ALL = "all"
# Errors that the pooled median counts as where a kind has few of its own.
PRIOR_ERRORS = 10


@dataclass(frozen=True)
class Intervals:
    """Sorted scores, and the usual error of each kind.

    Attributes
    ----------
    scores : ascending
    usual : median error by kind, and of `ALL`
    """

    scores: np.ndarray
    usual: Mapping[str, float] = field(hash=False)

    @staticmethod
    def of(errors: Sequence[float], kinds: Sequence[str]) -> Intervals:
        """Intervals from log errors (with their signs or without) and their kinds."""
        size = np.abs(np.asarray(errors, float))
        pooled = max(float(np.median(size)), 1e-4) if len(size) else 1.0
        usual = {ALL: pooled}
        for kind in sorted(set(kinds)):
            own = size[[k == kind for k in kinds]]
            weight = len(own) / (len(own) + PRIOR_ERRORS)
            usual[kind] = weight * float(np.median(own)) + (1 - weight) * pooled
        scale = np.array([usual[k] for k in kinds])
        return Intervals(np.sort(size / scale), usual)

    def width(self, kind: str, coverage: float) -> float:
        """Half the interval of log(measured), so that a share `coverage` of them lie in it.

        Infinite where there are too few scores to say.
        """
        usual = self.usual.get(kind, max(self.usual.values()))
        return usual * quantile(self.scores, coverage)

    def to_json(self) -> dict[str, Any]:
        return {
            "scores": [round(float(s), 4) for s in self.scores],
            "usual": {k: round(v, 6) for k, v in sorted(self.usual.items())},
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Intervals:
        return Intervals(np.array(data["scores"], float), dict(data["usual"]))


def quantile(ascending: np.ndarray, coverage: float) -> float:
    """The ceil((n + 1) coverage)-th smallest of n scores: a new one, exchangeable with them, is at
    most as large with at least that probability. Infinite if n is too small for that.
    """
    rank = math.ceil((len(ascending) + 1) * coverage)
    if rank <= 0:
        return -math.inf
    return float(ascending[rank - 1]) if rank <= len(ascending) else math.inf


# Share of the range seen for a feature that a query may lie beyond it, and bounds of that in units
# of the feature (logarithms).
TOLERANCE = 0.1
LEAST_TOLERANCE = 0.05
MOST_TOLERANCE = 0.2
# A query may be so many times further from its nearest sample than nearly all samples are.
DISTANCE_TOLERANCE = 1.5
NEARLY_ALL = 0.98
VARIES = 1e-3  # standard deviation of a feature that does
LEAST_DISTANCE = 1.0  # squared, in standard deviations
STANDING = 150  # samples of a class that are kept
FEW = 5  # graphs with launches of a class; with fewer it counts as unknown
SUPPORT = 3  # graphs that have to reach the end of a range: one may be odd
BYTES = len(BYTE_FEATURES)
USED = BYTES + next(i for i, name in enumerate(FREE_FEATURES) if name.startswith("is_"))


class Place(Enum):
    """Where a query lies. BELOW and ABOVE: the bytes it moves alone are outside the range."""

    INSIDE = "inside"
    BELOW = "below"
    ABOVE = "above"
    OUTSIDE = "outside"


@dataclass(frozen=True)
class Shell:
    """The training samples of one class: the range of each feature, and samples that stand for all.

    Attributes
    ----------
    low, high : (features,) range, tolerance included
    centre, scale : (free features,) what makes free features comparable; scale 0 for constant ones
    samples : (n, free features) some of the samples, so that no other one is far from all of them
    reach : squared distance from the nearest of them that counts as near
    """

    low: np.ndarray
    high: np.ndarray
    centre: np.ndarray
    scale: np.ndarray
    samples: np.ndarray
    reach: float

    @staticmethod
    def around(points: np.ndarray, graphs: np.ndarray) -> Shell:
        """The shell of (n, features) samples of some graphs."""
        low, high = _supported(points, graphs), -_supported(-points, graphs)
        slack = np.minimum(TOLERANCE * (high - low), MOST_TOLERANCE) + LEAST_TOLERANCE
        free = points[:, BYTES:].astype(float)
        centre, spread = free.mean(axis=0), free.std(axis=0)
        scale = np.where(spread > VARIES, 1 / np.maximum(spread, VARIES), 0.0)
        scaled = np.unique(np.round((free - centre) * scale, 4), axis=0)
        standing, distances = _standing_for(scaled)
        usual = max(_usual_distance(scaled), float(np.quantile(distances, NEARLY_ALL)))
        reach = DISTANCE_TOLERANCE**2 * max(usual, LEAST_DISTANCE)
        numbers = (low - slack, high + slack, centre, scale, standing)
        return Shell(*(np.round(x, 4) for x in numbers), round(reach, 4))

    def place(self, row: np.ndarray) -> Place:
        """Where one row of features lies."""
        below, above = row < self.low, row > self.high
        if not (np.count_nonzero(below) or np.count_nonzero(above)):
            return Place.OUTSIDE if self._far(row[BYTES:]) else Place.INSIDE
        if below[BYTES:].any() or above[BYTES:].any() or self._far(row[BYTES:]):
            return Place.OUTSIDE
        less, more = below[:BYTES].any(), above[:BYTES].any()
        if less and more:
            return Place.OUTSIDE
        return Place.BELOW if less else Place.ABOVE

    def _far(self, free: np.ndarray) -> bool:
        point = (free - self.centre) * self.scale
        distance = self._squares - self._twice @ point
        return float(distance.min()) + float(point @ point) > self.reach

    @cached_property
    def _twice(self) -> np.ndarray:
        return 2 * self.samples

    @cached_property
    def _squares(self) -> np.ndarray:
        return (self.samples**2).sum(axis=1)


@dataclass(frozen=True)
class Hull:
    """The shells of all classes with enough samples."""

    shells: Mapping[str, Shell] = field(hash=False)

    @staticmethod
    def of(rows: np.ndarray, classes: Sequence[str], graphs: Sequence[str]) -> Hull:
        """The hull of (n, features) rows, their classes and the graphs that they are from."""
        shells = {}
        for name in sorted(set(classes)):
            own = np.flatnonzero([c == name for c in classes])
            sources = np.array(graphs)[own]
            if len(set(sources)) >= FEW:
                shells[name] = Shell.around(rows[own, :USED], sources)
        return Hull(shells)

    def place(self, kernel_class: str, row: np.ndarray) -> Place:
        """Where one row of features lies."""
        shell = self.shells.get(kernel_class)
        return Place.OUTSIDE if shell is None else shell.place(row[:USED])

    def to_json(self) -> dict[str, Any]:
        return {
            name: {f.name: np.asarray(getattr(shell, f.name)).tolist() for f in fields(Shell)}
            for name, shell in sorted(self.shells.items())
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Hull:
        shells = {}
        for name, parts in data.items():
            arrays = {k: np.array(parts[k], float) for k in parts if k != "reach"}
            shells[name] = Shell(**arrays, reach=float(parts["reach"]))
        return Hull(shells)


def _supported(points: np.ndarray, graphs: np.ndarray) -> np.ndarray:
    """What each feature went down to in `SUPPORT` graphs at least."""
    least = np.array([points[graphs == g].min(axis=0) for g in sorted(set(graphs))])
    return np.sort(least, axis=0)[min(SUPPORT, len(least)) - 1]


def _usual_distance(scaled: np.ndarray) -> float:
    """Squared distance to the next sample that nearly all samples keep."""
    if len(scaled) < 2:
        return 0.0
    nearest = [np.partition(((scaled - point) ** 2).sum(axis=1), 1)[1] for point in scaled]
    return float(np.quantile(nearest, NEARLY_ALL))


def _standing_for(scaled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Up to `STANDING` samples, always the one that is furthest from those taken so far; squared
    distances of all samples from them.
    """
    taken = [0]
    distance = ((scaled - scaled[0]) ** 2).sum(axis=1)
    while len(taken) < STANDING and distance.max() > 0:
        taken.append(int(distance.argmax()))
        distance = np.minimum(distance, ((scaled - scaled[taken[-1]]) ** 2).sum(axis=1))
    return scaled[sorted(taken)], distance
