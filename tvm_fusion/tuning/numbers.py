"""Whether the numbers of a trial are right, for arrays of NumPy and of torch alike.

The rule is that of `check.rules`: the error against the float64 reference is at most twice (half:
three times) that of the untuned kernel or a few units in the last place, and below a ceiling.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..check.rules import TOLERANCES

LARGEST = {"float16": 65504.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
NEAR = 0.5  # of the largest number
DIFFERENT_INTEGERS = 1e-3  # share of elements: a rounding may flip an argmax


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
    untuned_error : float
        Of the untuned kernel, relative to the largest number of the reference.
    """

    dtype: str
    narrowest: str
    reference: Any
    untuned_error: float = 0.0

    @property
    def limit(self) -> float:
        """The largest error allowed."""
        rule = TOLERANCES.get(self.narrowest, TOLERANCES["float16"])
        return min(rule.ceiling, max(rule.floor, rule.ratio * self.untuned_error))

    @property
    def is_near_limit(self) -> bool:
        """Whether a number of the reference is so large that a rounding may make it infinite."""
        if self.dtype not in LARGEST:
            return False
        xp = _of(self.reference)
        return bool((xp.abs(self.reference) > NEAR * LARGEST[self.dtype]).any())


def wrong(given: Sequence[Any], wanted: Sequence[Wanted]) -> tuple[str, float]:
    """Why outputs are not right (empty if they are), and the largest error."""
    worst = 0.0
    for number, (array, want) in enumerate(zip(given, wanted, strict=True)):
        if "float" not in want.dtype:
            share = float(_of(array).mean(1.0 * (array != want.reference)))
            if share > DIFFERENT_INTEGERS:
                return f"output {number}: {share:.2%} of the integers differ", worst
            continue
        error, missing = error_of(array, want.reference)
        worst = max(worst, error)
        if missing:
            return f"output {number}: {missing} elements are not finite", worst
        if error > want.limit:
            return f"output {number}: error {error:.2g}, allowed {want.limit:.2g}", worst
    return "", worst


def error_of(given: Any, reference: Any) -> tuple[float, int]:
    """The error relative to the largest number of the reference, and how many elements are wrong
    whatever the error: not finite where the reference is, no number where it is one.

    Where the largest number is 0, the error itself.
    """
    xp = _of(reference)
    finite = xp.isfinite(reference)
    zero = xp.zeros_like(reference)
    widest = wide(given)
    strange = xp.isnan(widest) & ~xp.isnan(reference)
    missing = int(((finite & ~xp.isfinite(widest)) | strange).sum())
    both = finite & xp.isfinite(widest)
    if not len(finite.flatten()):
        return 0.0, missing
    largest = float(xp.abs(xp.where(finite, reference, zero)).max())
    apart = xp.where(both, widest, zero) - xp.where(both, reference, zero)
    difference = float(xp.abs(apart).max())
    return difference / (largest or 1.0), missing


def wide(array: Any) -> Any:
    """Floats in float64, anything else as it is."""
    if not isinstance(array, np.ndarray):
        return array.double() if array.is_floating_point() else array
    return array.astype("float64") if "float" in array.dtype.name else array


def _of(array: Any) -> Any:
    return np if isinstance(array, np.ndarray | np.generic) else sys.modules["torch"]
