"""What the trials so far say of the choices that were not tried: a Gaussian process.

It models log(measured / predicted) over the choices of one task: what was measured corrects the
prediction of choices like it, and the more the more alike they are. With the kernel
k(a, b) = s^2 exp(-d(a, b) / l), d the number of settings by which two choices differ (numbers by
the logarithm of their ratio), mean and variance are those of Rasmussen and Williams, "Gaussian
Processes for Machine Learning", equations 2.25 and 2.26.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..session.choices import fields_of

LEAST_US = 1e-3
FARTHEST = 1.0  # between two values of one setting, however far apart


@dataclass(frozen=True, slots=True)
class Spread:
    """How far predictions of one kernel are off, all as logarithms.

    Attributes
    ----------
    rank : of predictions of one task's choices against each other
    task : of all predictions of one task together
    noise : of a measurement
    length : differing settings after which what was measured says 1/e as much
    """

    rank: float
    task: float
    noise: float
    length: float


class Surrogate:
    """Beliefs about the choices of one task.

    Parameters
    ----------
    texts : sequence of str
        The choices.
    """

    def __init__(self, texts: Sequence[str], predicted_us: Sequence[float], spread: Spread) -> None:
        self.spread = spread
        self.prior = np.log(np.maximum(predicted_us, LEAST_US))
        self._likeness = np.exp(-_distances([fields_of(t) for t in texts]) / spread.length)

    def beliefs(self, measured: Mapping[int, float]) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the logarithm of each choice's microseconds.

        Parameters
        ----------
        measured : mapping of int to float
            Microseconds of choices that were tried, by position.
        """
        covariance = self.spread.rank**2 * self._likeness + self.spread.task**2
        if not measured:
            return self.prior.copy(), np.sqrt(np.diag(covariance))
        at = np.array(sorted(measured))
        seen = np.log([measured[i] for i in at]) - self.prior[at]
        inner = covariance[np.ix_(at, at)] + self.spread.noise**2 * np.eye(len(at))
        gain = np.linalg.solve(inner, covariance[at]).T
        mean = self.prior + gain @ seen
        variance = np.diag(covariance) - np.einsum("ij,ji->i", gain, covariance[at])
        return mean, np.sqrt(np.maximum(variance, 0.0))


def expected_gain(mean: float, deviation: float, best_us: float) -> float:
    """The microseconds that a choice is expected to be faster than the best one so far.

    The expected improvement of a log-normal time (Jones, Schonlau and Welch 1998, equation 15, for
    the logarithm): E[max(0, best - t)].
    """
    best = math.log(best_us)
    if deviation < 1e-9:
        return max(0.0, best_us - math.exp(mean))
    z = (best - mean) / deviation
    expected = math.exp(mean + deviation**2 / 2)
    return max(0.0, best_us * _normal(z) - expected * _normal(z - deviation))


def _normal(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))


def _distances(choices: Sequence[Mapping[str, str]]) -> np.ndarray:
    names = sorted({name for choice in choices for name in choice})
    total = np.zeros((len(choices), len(choices)))
    for name in names:
        values = [choice.get(name) for choice in choices]
        numbers = [_number(v) for v in values]
        if all(x is not None for x in numbers):
            logs = np.array(numbers)
            total += np.minimum(np.abs(logs[:, None] - logs[None, :]), FARTHEST)
        else:
            kinds = np.array([str(v) for v in values])
            total += FARTHEST * (kinds[:, None] != kinds[None, :])
    return total


def _number(text: str | None) -> float | None:
    """The binary logarithm of a setting, if it is a number; 0 counts as a half."""
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return math.log2(value) if value > 0 else (-1.0 if value == 0 else None)
