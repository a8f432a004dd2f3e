"""The minutes of a session, and what of them is kept for its end."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field


@dataclass
class TimeLimit:
    """The time of a call of `tune`, from its beginning.

    Attributes
    ----------
    minutes : float
        0 is no limit.
    kept_s : float
        What is to be left when the trials end.
    """

    minutes: float
    kept_s: float = 0.0
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self.began

    @property
    def left_s(self) -> float:
        """Of all, 0 at least; infinite without a limit."""
        return max(0.0, self.minutes * 60 - self.seconds) if self.minutes else math.inf

    @property
    def is_near(self) -> bool:
        """Whether the trials have to end."""
        return self.left_s <= self.kept_s

    def share(self, part: float, most_s: float) -> float:
        """A part of the minutes, in seconds; `most_s` at most, and without a limit."""
        return min(most_s, part * self.minutes * 60) if self.minutes else most_s
