"""The kernels that are slower than what they stand for: their operators one by one, as this package
or TVM alone writes them.

Both are timed beside each other, part by part, those that lose once more, then the whole plan with
and without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..check.checked_sizes import drawn_inputs
from ..check.plan_runner import LaunchSpec, PlanRunner
from ..errors import InputError
from ..flow.planned import Planned
from ..host.stages import stage
from ..runtime.timing.plan_timing import PlanTimes
from ..runtime.timing.timing import TimeReport, Timing, Verdict
from .parts import Part, Parts

Specs = tuple[LaunchSpec, ...]


@dataclass(frozen=True)
class Slow:
    """A part whose kernels are slower than what they stand for.

    Attributes
    ----------
    part : Part
    together, apart : TimeReport
        Of its kernels, and of what they stand for.
    """

    part: Part
    together: TimeReport
    apart: TimeReport

    @property
    def lost_us(self) -> float:
        return self.together.median_us - self.apart.median_us


@dataclass(frozen=True)
class SlowParts:
    """What is slower than it need be.

    Attributes
    ----------
    found : tuple of Slow
        The one that loses most first.
    timed : int
        Parts that were timed.
    plan, without : TimeReport
        Of the plan's launches, and of those without the slow kernels, if there are any.
    """

    found: tuple[Slow, ...]
    timed: int
    plan: TimeReport
    without: TimeReport


def slow_parts(parts: Parts, repeats: int = 15) -> SlowParts:
    """Finds the kernels that are slower than what they stand for.

    Raises
    ------
    TargetError
        This machine has no such device.
    InputError
        Parts of the function cannot be run launch by launch.
    """
    planned = parts.planned
    runner = PlanRunner(
        planned.low, planned.graph, planned.hw, planned.policy, planned.target, planned.tuned
    )
    whole, unfused, stock = (
        runner.specs(p.plan) for p in (planned, parts.only([], written=True), parts.only([]))
    )
    sides = {
        part: [_own(planned, specs, part) for specs in (whole, unfused, stock)]
        for part in parts.every
    }
    with stage(f"building {len(sides)} kernels and what they stand for"):
        runner.build([whole, *(specs for side in sides.values() for specs in side)])
    if not runner.can_run(whole):
        why = next(iter(runner.failures.values()), "operators that cannot be read")
        raise InputError(
            f"some launches of the plan cannot be run by themselves: {why}; give another plan"
        )
    runner.run(whole, drawn_inputs(planned.mod))
    timed = {
        part: [own, *(s for s in others if s != own and runner.can_run(s))]
        for part, (own, *others) in sides.items()
    }
    found = _slower(runner, timed, repeats)
    # twice in a row: what else the machine did meanwhile is not the kernel's fault
    found = _slower(runner, {one.part: timed[one.part] for one in found}, repeats)
    found.sort(key=lambda slow: -slow.lost_us)
    slow = {one.part for one in found}
    kept = [part for part in parts.every if part not in slow]
    rests = [runner.specs(parts.only(kept, written).plan) for written in (True, False) if slow]
    runner.build(rests)
    plan, *others = runner.time([whole, *filter(runner.can_run, rests)], repeats)
    without = min(map(_report, others), key=lambda time: time.median_us, default=TimeReport())
    return SlowParts(tuple(found), len(timed), _report(plan), without)


def _slower(runner: PlanRunner, timed: Mapping[Part, list[Specs]], repeats: int) -> list[Slow]:
    """The parts whose first launches take longer than the fastest of the others."""
    if not timed:
        return []
    with stage(f"timing {len(timed)} kernels beside what they stand for"):
        times = iter(map(_report, runner.time([s for ss in timed.values() for s in ss], repeats)))
    found = []
    for part, specs in timed.items():
        together, *others = (next(times) for _ in specs)
        apart = min(others, key=lambda time: time.median_us, default=TimeReport())
        if together.verdict(apart) is Verdict.SLOWER:
            found.append(Slow(part, together, apart))
    return found


def _own(planned: Planned, specs: Specs, part: Part) -> Specs:
    """Of the launches of a plan those that compute the operators of a part."""
    number = {op.name: op.id for op in planned.graph.ops}
    ops = {number[name] for group in part for name in group.ops}
    return tuple(spec for spec in specs if set(spec.ops) <= ops)


def _report(times: PlanTimes) -> TimeReport:
    return TimeReport.of(Timing.of(times.spans_us, times.clock))
