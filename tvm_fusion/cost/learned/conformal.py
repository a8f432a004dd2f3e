"""Intervals that hold as often as they say: quantiles of the errors on graphs that were not trained
on (conformal prediction; Vovk, Gammerman, Shafer: Algorithmic Learning in a Random World, 2005).

An error is the absolute log of measured over predicted. The scores are errors over the usual error
of their kind of launch (its kernel class), so that one set of scores serves all kinds, and kinds
that are predicted badly get wide intervals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

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
