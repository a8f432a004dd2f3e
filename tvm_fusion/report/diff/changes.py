"""The changes from one side to the other: kernels joined, split, of another class, new or gone, and
refusals that came or went.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from ...plan.differ import DisjointSets
from ...runtime.timing.timing import TimeReport
from ..facts import RefusalReport
from .sides import Kernel, Side, matched

FORMAT_VERSION = 1


class Change(Enum):
    """What became of some kernels."""

    SAME = "same"
    CLASS = "other class"
    JOINED = "joined"
    SPLIT = "split"
    REGROUPED = "regrouped"
    NEW = "new"
    GONE = "gone"


@dataclass(frozen=True)
class KernelChange:
    """Kernels of both sides that compute the same operators."""

    change: Change
    before: tuple[Kernel, ...]
    after: tuple[Kernel, ...]

    @property
    def predicted_us(self) -> tuple[float, float]:
        return tuple(sum(k.predicted_us for k in side) for side in (self.before, self.after))

    @property
    def bytes(self) -> tuple[float, float]:
        return tuple(sum(k.bytes for k in side) for side in (self.before, self.after))

    @property
    def times(self) -> tuple[TimeReport, TimeReport] | None:
        """Measured times, where all kernels ran on a clock; quartiles are sums of quartiles."""
        sides = tuple(_sum([k.measured for k in side]) for side in (self.before, self.after))
        return None if None in sides else sides

    @property
    def saved_us(self) -> float:
        """What the change saves: as measured where the samples tell, else as predicted."""
        if self.times is not None:
            before, after = self.times
            even = after.ratio(before) is None
            return 0.0 if even else before.median_us - after.median_us
        return self.predicted_us[0] - self.predicted_us[1]


def _sum(times: Sequence[TimeReport | None]) -> TimeReport | None:
    if not times or any(t is None or t.median_us is None for t in times):
        return None
    names = ("median_us", "low_us", "high_us")
    parts = [sum(getattr(t, name) for t in times) for name in names]
    return TimeReport(*parts, min(t.samples for t in times), times[0].clock)


@dataclass(frozen=True)
class Difference:
    """All that differs between two sides.

    Attributes
    ----------
    before, after : Side
    matched : int
        Operators that both sides have.
    only_before, only_after : tuple of str
        Operators that one side has.
    kernels : tuple of KernelChange
        The dearest difference first; those that are the same last.
    came, went : tuple of RefusalReport
    """

    before: Side
    after: Side
    matched: int
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    kernels: tuple[KernelChange, ...]
    came: tuple[RefusalReport, ...]
    went: tuple[RefusalReport, ...]

    @property
    def changed(self) -> tuple[KernelChange, ...]:
        return tuple(k for k in self.kernels if k.change is not Change.SAME)

    @property
    def made(self) -> dict[str, tuple[str, str]]:
        """What differs in what both were made for and by."""
        names = dict.fromkeys((*self.before.made, *self.after.made))
        pairs = {n: (self.before.made.get(n, ""), self.after.made.get(n, "")) for n in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dict; pairs are (before, after)."""
        verdict = self.after.time.verdict(self.before.time)
        return {
            "version": FORMAT_VERSION,
            "files": [self.before.name, self.after.name],
            "made": {name: list(pair) for name, pair in self.made.items()},
            "operators": {
                "matched": self.matched,
                "only_before": list(self.only_before),
                "only_after": list(self.only_after),
            },
            "launches": [self.before.launches, self.after.launches],
            "bytes": [self.before.bytes, self.after.bytes],
            "predicted_us": [self.before.predicted_us, self.after.predicted_us],
            "time": [asdict(self.before.time), asdict(self.after.time)],
            "verdict": verdict and verdict.value,
            "kernels": [_kernel_json(k) for k in self.kernels],
            "came": [asdict(refusal) for refusal in self.came],
            "went": [asdict(refusal) for refusal in self.went],
        }


def _kernel_json(change: KernelChange) -> dict[str, Any]:
    verdict = change.times and change.times[1].verdict(change.times[0])
    return {
        "change": change.change.value,
        "before": [asdict(k) for k in change.before],
        "after": [asdict(k) for k in change.after],
        "predicted_us": list(change.predicted_us),
        "bytes": list(change.bytes),
        "verdict": verdict and verdict.value,
    }


def difference(before: Side, after: Side) -> Difference:
    """What differs from one side to the other."""
    same = matched(before, after)
    alone = [op for op in after.tokens if op not in same]
    # operators of the second side by their names in the first, or by ones that are not there
    renamed = {**same, **{op: f"+{op}" for op in alone}}
    kernels = sorted(_changes(before, after, renamed), key=_dearest)
    old, new = _refusals(before, {}), _refusals(after, renamed)
    return Difference(
        before,
        after,
        len(same),
        tuple(op for op in before.tokens if op not in set(same.values())),
        tuple(alone),
        tuple(kernels),
        tuple(refusal for key, refusal in new.items() if key not in old),
        tuple(refusal for key, refusal in old.items() if key not in new),
    )


def _dearest(change: KernelChange) -> tuple[bool, float]:
    return change.change is Change.SAME, -abs(change.saved_us)


def _changes(before: Side, after: Side, renamed: Mapping[str, str]) -> list[KernelChange]:
    """Kernels of both sides in sets that share operators."""
    number: dict[str, int] = {}
    sets, owned = DisjointSets(), []
    for side, names in ((before, {}), (after, renamed)):
        ops = [frozenset(names.get(op, op) for op in k.ops) for k in side.kernels]
        owned.append(list(zip(side.kernels, ops, strict=True)))
        for group in ops:
            sets.join(number.setdefault(op, len(number)) for op in group)
    found: dict[int, tuple[list, list]] = {}
    for i, side in enumerate(owned):
        for kernel, ops in side:
            root = sets.root(number[min(ops)])
            found.setdefault(root, ([], []))[i].append((kernel, ops))
    return [_change(*pair) for pair in found.values()]


def _change(
    before: list[tuple[Kernel, frozenset[str]]], after: list[tuple[Kernel, frozenset[str]]]
) -> KernelChange:
    kernels = tuple(tuple(kernel for kernel, _ in side) for side in (before, after))
    counts = len(before), len(after)
    if 0 in counts:
        change = Change.GONE if counts[0] else Change.NEW
    elif {ops for _, ops in before} == {ops for _, ops in after}:
        classes = [{ops: k.kernel_class for k, ops in side} for side in (before, after)]
        change = Change.SAME if classes[0] == classes[1] else Change.CLASS
    elif counts[0] > 1 and counts[1] == 1:
        change = Change.JOINED
    elif counts[0] == 1 and counts[1] > 1:
        change = Change.SPLIT
    else:
        change = Change.REGROUPED
    return KernelChange(change, *kernels)


def _refusals(side: Side, renamed: Mapping[str, str]) -> dict[Any, RefusalReport]:
    """Refusals by what they are about."""
    found = {}
    for refusal in side.refusals:
        ends = [frozenset(renamed.get(e, e) for e in p.split("..")) for p in refusal.where]
        found[refusal.code, frozenset(ends)] = refusal
    return found
