"""Times with their spread, and what they allow to say of two of them."""

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .timing import Timing

FUSED, UNFUSED = "fused", "unfused"


class Verdict(enum.Enum):
    """What two times say of the first."""

    FASTER = "faster"
    EVEN = "no difference"
    SLOWER = "slower"


@dataclass(frozen=True, slots=True)
class TimeReport:
    """Time of one call of the model, by us or by another compiler.

    Attributes
    ----------
    median_us, low_us, high_us : float or None
        Median and quartiles of the samples, in microseconds; None if there are none.
    samples : int
    clock : str or None
        "kernel", "event" or "wall" (see `runtime.timing.timing.Timing`).
    failure : str or None
        Why there is no time.
    """

    median_us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    samples: int = 0
    clock: str | None = None
    failure: str | None = None

    @classmethod
    def of(cls, timing: "Timing") -> "TimeReport":
        """What a measurement says."""
        quartiles = (timing.low_us, timing.high_us)
        return cls(timing.median_us, *quartiles, timing.samples, timing.clock)

    def verdict(self, other: "TimeReport") -> Verdict | None:
        """Whether this one is faster than another: only where the middle halves of the samples do
        not overlap. None where one has no time.
        """
        if self.median_us is None or other.median_us is None:
            return None
        if self.high_us < other.low_us:
            return Verdict.FASTER
        return Verdict.SLOWER if self.low_us > other.high_us else Verdict.EVEN

    def ratio(self, other: "TimeReport") -> float | None:
        """How many times longer the other takes; None where the samples do not tell them apart."""
        if self.verdict(other) in (None, Verdict.EVEN) or not self.median_us:
            return None
        return other.median_us / self.median_us
