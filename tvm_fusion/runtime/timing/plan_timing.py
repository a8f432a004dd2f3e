"""Device times of launches that queue up behind a cleaned L2 cache, read from CUPTI.

A sample is one run of a plan. Before it the device is kept busy, and the L2 is filled with other
data, by kernels that nobody waits for: by the time they end, all launches of the plan are in the
queue, and the time from the start of its first to the end of its last kernel holds the device's own
gaps between launches and nothing of the host.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm

from ...errors import BuildError, Unsupported
from ...ir.graph import FusionGraph, OpKind
from ...plan.group_view import dtype_bytes
from .launch_kernels import SYMBOL
from .timing import L2_CLEANING_BYTES, apart

if TYPE_CHECKING:
    from .launch_kernels import Key, LaunchWriter

# Device memory for the tensors of one graph: each once, views as views.

ALIGNMENT = 256
POISON = 0xFF  # bytes of NaN in every float


class Buffers:
    """Tensors by name, allocated when first asked for.

    Attributes
    ----------
    params : names of the function's parameters, in order
    results : names of what it returns, tuples flattened
    """

    def __init__(self, graph: FusionGraph, writer: LaunchWriter, device: Any) -> None:
        self._graph, self._writer, self._device = graph, writer, device
        self._by_name = {t.name: t for t in graph.tensors}
        self._tensors: dict[Key, Any] = {}
        self._bytes: dict[Key, Any] = {}
        inner = (t for t in graph.tensors if not (t.is_inner or t.is_constant))
        self.params = tuple(t.name for t in inner if t.producer is None)
        self.results = writer.results()

    def tensor(self, key: Key) -> Any:
        """The TVM tensor of a name."""
        if key not in self._tensors:
            self._tensors[key] = self._make(key)
        return self._tensors[key]

    def _make(self, key: Key) -> Any:
        if key.startswith("constant "):
            return self._writer.constant(key).copyto(self._device)
        shape, dtype = self.type_of(key)
        return self.memory(key)._create_view(shape, dtype)

    def type_of(self, key: Key) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of a tensor of the graph.

        Raises
        ------
        Unsupported
            An extent is symbolic.
        """
        tensor = self._by_name[key]
        if not all(isinstance(e, int) for e in tensor.shape):
            raise Unsupported(f"{key} has symbolic extents")
        return tensor.shape, tensor.dtype

    def memory(self, key: Key) -> Any:
        """The bytes of a tensor, as a TVM tensor; a view has those of what it looks at."""
        source = self.source(key)
        if source.startswith("constant "):
            return self.tensor(source)
        if source not in self._bytes:
            shape, dtype = self.type_of(source)
            self._bytes[source] = self.allocate(prod(shape) * dtype_bytes(dtype))
        return self._bytes[source]

    def allocate(self, size: int) -> Any:
        """New bytes on the device."""
        return tvm.runtime.empty((max(size, ALIGNMENT),), "uint8", self._device)

    def source(self, key: Key) -> Key:
        """The tensor that a view looks at; any other tensor is its own."""
        if key.startswith("constant "):
            return key
        while (producer := self._by_name[key].producer) is not None:
            op = self._graph.ops[producer]
            if op.kind is not OpKind.VIEW:
                break
            tensor = self._graph.tensors[op.inputs[0]]
            if tensor.is_constant:
                raise Unsupported("a view of a constant")
            key = tensor.name
        return key

    def fill(self, key: Key, value: Any) -> None:
        """Copies an array or a tensor of the same shape and dtype into a buffer."""
        target = self.tensor(key)
        if isinstance(value, np.ndarray):
            target.copyfrom(np.ascontiguousarray(value).reshape(value.shape))  # also without axes
        elif isinstance(value, tvm.runtime.Tensor):
            value.copyto(target)
        else:
            tvm.runtime.from_dlpack(value.detach().contiguous()).copyto(target)

    def poison(self, key: Key) -> None:
        """Fills a tensor with bytes that are NaN in every floating-point dtype."""
        memory = self.memory(key)
        if self._device.type == "cuda" and (torch := sys.modules.get("torch")) is not None:
            torch.from_dlpack(memory).fill_(POISON)
        else:
            memory.copyfrom(np.full(memory.shape, POISON, "uint8"))


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
            raise BuildError(
                "the profiler does not report all kernels of the plans; end other profilers"
            )
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
    """Name, start and end (in microseconds) of what ran on the device, by start, each from where
    those before it have ended.
    """
    events = [
        (e.name(), e.start_ns(), e.duration_ns())
        for e in profiler.profiler.kineto_results.events()
        if e.device_type().name == "CUDA"
    ]
    zero = min((start for _, start, _ in events), default=0)  # a float holds no ns since 1970
    events.sort(key=lambda event: event[1])
    times = apart(((ns - zero) / 1e3, (ns - zero + took) / 1e3) for _, ns, took in events)
    return [(name, *time) for (name, _, _), time in zip(events, times, strict=True)]


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
