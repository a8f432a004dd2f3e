"""What the outputs of a task should be, judged by the rule of `check.rules`.

Arrays are NumPy's or torch's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...check.rules import TOLERANCES, OutputCheck, check_output, namespace

OVERFLOWING = ("float16", "float8_e4m3fn", "float8_e5m2")  # what ordinary numbers may overflow
NEAR = 0.5  # of the largest number


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an output should be.

    Attributes
    ----------
    dtype : str
    narrowest : str
        The narrowest float that the kernel reads, keeps or writes.
    reference : array
        In float64; the untuned kernel's numbers where there is no reference.
    untuned : array or None
        The untuned kernel's numbers; None where they are the reference.
    bound : array or None
        What roundings do to each element (`check.allowance`); None where that is not known.
    """

    dtype: str
    narrowest: str
    reference: Any
    untuned: Any = None
    bound: Any = None

    def check(self, given: Any) -> OutputCheck:
        """The verdict on what a kernel gives."""
        return check_output(
            given, self.untuned, self.reference, self.dtype, self.narrowest, self.bound
        )

    @property
    def arrays(self) -> list[Any]:
        """What it keeps."""
        return [a for a in (self.reference, self.untuned, self.bound) if a is not None]

    @property
    def cancels(self) -> bool:
        """Whether roundings make so much of themselves that an error above the ceiling passes."""
        if self.bound is None or self.dtype not in TOLERANCES:
            return False
        ceiling = max(TOLERANCES[name].ceiling for name in (self.dtype, self.narrowest))
        return self.check(self.untuned).limit > ceiling

    @property
    def is_near_limit(self) -> bool:
        """Whether a number of the reference is so large that a rounding may make it infinite."""
        if self.dtype not in OVERFLOWING:
            return False
        xp = namespace(self.reference)
        return bool((xp.abs(self.reference) > NEAR * TOLERANCES[self.dtype].largest).any())


def wrong(given: Sequence[Any], wanted: Sequence[Wanted]) -> tuple[str, float]:
    """Why outputs are not right (empty if they are), and the largest error that is a number."""
    worst = 0.0
    for number, (array, want) in enumerate(zip(given, wanted, strict=True)):
        check = want.check(array)
        if math.isfinite(check.error):
            worst = max(worst, check.error)
        if not check.passed:
            return f"output {number}: {check.why}", worst
    return "", worst
