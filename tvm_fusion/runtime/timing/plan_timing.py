"""Device times of launches that queue up behind a cleaned L2 cache, read from CUPTI.

A sample is one run of a plan. Before it the device is kept busy, and the L2 is filled with other
data, by kernels that nobody waits for: by the time they end, all launches of the plan are in the
queue, and the time from the start of its first to the end of its last kernel holds the device's own
gaps between launches and nothing of the host.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import BuildError
from .launch_kernels import SYMBOL
from .timing import L2_CLEANING_BYTES

CYCLES_PER_LAUNCH = 40_000  # about 20 us, more than the host takes to queue a launch
MIN_CYCLES = 200_000
EVENTS_PER_PROFILE = 20_000  # so that CUPTI's buffers hold them all

Interval = tuple[float, float]  # start and end in microseconds


@dataclass(frozen=True, slots=True)
class PlanTimes:
    """Times of one plan, in microseconds.

    Attributes
    ----------
    span_us : median time from the start of the first to the end of the last launch
    sum_us : median of the launches' times together, without the gaps
    spans_us : all samples of `span_us`, in the order in which they were taken
    launches_us : median time of each launch
    launch_spread : interquartile range over median of each launch's time
    clock : "kernel" (CUPTI) or "wall"
    """

    span_us: float
    sum_us: float
    spans_us: tuple[float, ...]
    launches_us: tuple[float, ...]
    launch_spread: tuple[float, ...]
    clock: str

    @property
    def spread(self) -> float:
        """Interquartile range over median of the span."""
        return relative_spread(self.spans_us)

    @classmethod
    def of(cls, samples: Sequence[Sequence[Interval]], clock: str) -> PlanTimes:
        """Summarises samples; each has an interval for every launch, in order."""
        spans = tuple(s[-1][1] - s[0][0] if s else 0.0 for s in samples)
        sums = [sum(end - start for start, end in s) for s in samples]
        each = [[end - start for start, end in one] for one in zip(*samples, strict=True)]
        return cls(
            statistics.median(spans),
            statistics.median(sums),
            spans,
            tuple(statistics.median(x) for x in each),
            tuple(relative_spread(x) for x in each),
            clock,
        )


def relative_spread(samples: Sequence[float]) -> float:
    """Interquartile range over median; 0 for fewer than two samples."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle if middle else 0.0


def device_samples(
    calls: Sequence[Sequence[Callable[[], Any]]], kernels: Sequence[Sequence[int]], repeats: int
) -> list[list[list[Interval]]]:
    """Times plans on a CUDA device, interleaved.

    Parameters
    ----------
    calls : sequence of sequences of callables
        The launches of each plan.
    kernels : sequence of sequences of int
        How many kernels each launch consists of.
    repeats : int
        Samples of each plan.

    Returns
    -------
    list
        For each plan its samples, each with (start, end) of every launch in microseconds.

    Raises
    ------
    BuildError
        The profiler lost kernels again and again.
    """
    found: list[list[list[Interval]]] = [[] for _ in calls]
    share = max(1, EVENTS_PER_PROFILE // max(1, sum(sum(k) + 3 for k in kernels)))
    attempts = 0
    while (missing := repeats - min(map(len, found))) > 0:
        rounds = min(share, missing)
        runs = profile_rounds(calls, rounds)
        if len(runs) == rounds * len(calls):
            for position, run in enumerate(runs):
                plan = position % len(calls)
                if len(run) == sum(kernels[plan]):
                    found[plan].append(by_launch(run, kernels[plan]))
        attempts += 1
        if attempts > 3 * -(-repeats // share) + 3:
            raise BuildError("the profiler does not report all kernels of the plans")
    return found


def profile_rounds(
    calls: Sequence[Sequence[Callable[[], Any]]], rounds: int
) -> list[list[Interval]]:
    """Runs all plans in turn, `rounds` times; the kernels of each run in their order."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    filler = torch.zeros(L2_CLEANING_BYTES // 8, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(rounds):
            for plan in calls:
                torch.cuda._sleep(max(MIN_CYCLES, CYCLES_PER_LAUNCH * len(plan)))
                filler.max()
                for call in plan:
                    call()
            torch.cuda.synchronize()
    return runs_of(device_events(profiler))


def device_events(profiler: Any) -> list[tuple[str, float, float]]:
    """Name, start and end (in microseconds) of what ran on the device, by start."""
    events = [
        (e.name(), e.start_ns(), e.duration_ns())
        for e in profiler.profiler.kineto_results.events()
        if e.device_type().name == "CUDA"
    ]
    zero = min((start for _, start, _ in events), default=0)  # a float holds no ns since 1970
    found = [(name, (ns - zero) / 1e3, (ns - zero + took) / 1e3) for name, ns, took in events]
    return sorted(found, key=lambda event: event[1])


def runs_of(events: Iterable[tuple[str, float, float]]) -> list[list[Interval]]:
    """The launches' kernels, a list for each stretch without any kernel of another kind.

    Examples
    --------
    >>> runs_of([("spin", 0, 1), ("launch_a", 2, 3), ("launch_b", 3, 5), ("spin", 6, 7)])
    [[(2, 3), (3, 5)]]
    """
    runs: list[list[Interval]] = []
    between = True
    for name, start, end in events:
        if not name.startswith(SYMBOL):
            between = True
            continue
        if between:
            runs.append([])
            between = False
        runs[-1].append((start, end))
    return runs


def by_launch(run: Sequence[Interval], kernels: Sequence[int]) -> list[Interval]:
    """One interval for each launch, from the start of its first to the end of its last kernel."""
    found, position = [], 0
    for count in kernels:
        part = run[position : position + count]
        found.append((part[0][0], part[-1][1]))
        position += count
    return found
