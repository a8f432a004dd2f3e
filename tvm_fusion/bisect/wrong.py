"""The kernels that give wrong numbers.

The module is built with the kernels of all parts of its plan, of a half, of a quarter ..., the
other operators as TVM compiles them, and held against float64 each time, until the smallest set of
parts is left with which it is wrong. That goes on without these, until the rest is right.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ..check.compiled import judged, plainly_lowered, references_of
from ..check.verify import Verification
from ..errors import InputError
from ..host.stages import stage
from .parts import Part, Parts, smallest

logger = logging.getLogger(__name__)

MOST_SETS = 5


@dataclass(frozen=True)
class Wrong:
    """Parts with which a module is wrong, all of them needed for that.

    Attributes
    ----------
    parts : tuple of Part
    why : str
    error : float
        The largest of an output, relative to the largest number of its reference.
    inputs : sequence
        On which it is so.
    """

    parts: tuple[Part, ...]
    why: str
    error: float
    inputs: Sequence


@dataclass(frozen=True)
class WrongParts:
    """What gives wrong numbers.

    Attributes
    ----------
    found : tuple of Wrong
    builds : int
        How many modules were built and run.
    rest : Verification
        Of the module without these parts.
    """

    found: tuple[Wrong, ...]
    builds: int
    rest: Verification


class _Runs:
    """Runs plans of one function and judges them."""

    def __init__(self, parts: Parts, tolerance: float | None) -> None:
        self.parts, self.tolerance = parts, tolerance
        self.known: dict[tuple, tuple[Verification, Sequence]] = {}
        mod = plainly_lowered(parts.planned)
        self.references = references_of(parts.planned, mod)

    def verdict(self, kept: Sequence[Part]) -> tuple[Verification, Sequence]:
        key = tuple(part[0].ops for part in kept)
        if key not in self.known:
            count = f"{len(kept)} of its {len(self.parts.every)} kernels"
            with stage(f"checking the module with {count}"):
                self.known[key] = judged(self.parts.only(kept).build().built, self.references)
        return self.known[key]

    @property
    def builds(self) -> int:
        return len(self.known)

    def is_wrong(self, kept: Sequence[Part]) -> bool:
        return not self.is_right(self.verdict(kept)[0])

    def is_right(self, found: Verification) -> bool:
        """By the tolerance, where there is one, else by the rule of the check."""
        if self.tolerance is None or found.worst_error is None:
            return found.passed
        return found.worst_error <= self.tolerance


def wrong_parts(parts: Parts, tolerance: float | None = None) -> WrongParts:
    """Finds the kernels that give wrong numbers.

    Parameters
    ----------
    parts : Parts
    tolerance : float, optional
        Errors up to this one, relative to the largest number of an output, are right; by default
        the check's own rule says what is.

    Raises
    ------
    InputError
        The module is wrong without any kernel of this package.
    """
    runs, left, found = _Runs(parts, tolerance), list(parts.every), []
    rest, inputs = runs.verdict(left)
    if runs.is_right(rest):
        return WrongParts((), runs.builds, rest)
    nothing, _ = runs.verdict([])
    if not runs.is_right(nothing):
        raise InputError(
            f"wrong even where TVM compiles every operator: {nothing.why or 'the tolerance'}: no "
            "kernel is to blame; take a wider --tolerance, or look at the model"
        )
    while not runs.is_right(rest) and len(found) < MOST_SETS:
        bad = tuple(smallest(left, runs.is_wrong))
        verdict, inputs = runs.verdict(bad)
        why = verdict.why or f"error {verdict.worst_error:.3g}, above the tolerance"
        found.append(Wrong(bad, why, verdict.worst_error, inputs))
        left = [part for part in left if part not in bad]
        rest, inputs = runs.verdict(left)
    return WrongParts(tuple(found), runs.builds, rest)
