"""When each launch of a call begins and ends.

The virtual machine calls back before and after each function that it calls, builtins among them,
which takes some ten microseconds a launch, half a one of it within the function. On a CPU that is
the clock of the functions, and calls without it, in turns with these, say what lies between them.
On a GPU it says only in which order functions are called, and the times are those of their kernels
(CUPTI, through torch's profiler), or of CUDA events around each function where there is no torch
with CUDA.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...errors import BuildError
from ...transform.memory.arenas import HOST_FUNCTIONS
from ..build.version_names import launches_of
from ..calls.compiled_module import CompiledModule
from ..graphs.driver import CudaDriver
from .plan_timing import device_events
from .timing import L2_CLEANING_BYTES, Timing, has_torch_cuda, l2_cleaner

WARM_CALLS = 2
ATTEMPTS = 3  # CUPTI loses events now and then
_NO_LAUNCHES = ("vm.builtin.", *HOST_FUNCTIONS)
_DEFAULT_STREAM = 0


@dataclass(frozen=True, slots=True)
class Span:
    """A launch: a function of the module, and when it ran.

    Attributes
    ----------
    name : str
        Of the PrimFunc, or of the library's function.
    begin_us, end_us : float
        Since the first launch of the call began.
    busy_us : float
        In kernels; less than the time between begin and end where several kernels have gaps.
    """

    name: str
    begin_us: float
    end_us: float
    busy_us: float


Call = list[Span]


@dataclass(frozen=True, slots=True)
class Recorded:
    """Calls of a module.

    Attributes
    ----------
    clock : str
        "wall", "kernel" or "event".
    calls : list of Call
    whole_us : list of float
        Of each call the time from the begin of its first launch to the end of its last one, where
        that is not what recording it took.
    """

    clock: str
    calls: list[Call]
    whole_us: list[float]

    @classmethod
    def on_gpu(cls, clock: str, calls: list[Call]) -> Recorded:
        """Calls whose launches queue up on a device, which recording does not delay."""
        return cls(clock, calls, [call[-1].end_us if call else 0.0 for call in calls])


def recorded_calls(
    module: CompiledModule,
    inputs: Sequence[Any],
    kernels: Mapping[str, Sequence[str]],
    repeats: int = 20,
) -> Recorded:
    """Runs a module, and returns the launches of each call.

    Parameters
    ----------
    module : CompiledModule
    inputs : sequence
        Tensors of any kind.
    kernels : mapping of str to sequence of str
        The kernels that each function launches on a GPU, as `Built.kernels` has them.
    repeats : int
        Calls to record, after `WARM_CALLS` others.

    Raises
    ------
    BuildError
        CUPTI does not report all kernels.
    """
    if module.device.type != "cuda":
        return wall_spans(module, inputs, repeats)
    if has_torch_cuda():
        return Recorded.on_gpu("kernel", _cupti_spans(module, inputs, kernels, repeats))
    return Recorded.on_gpu("event", _event_spans(module, inputs, repeats))


@contextmanager
def called(module: CompiledModule, note: Callable[[str, bool], None]) -> Iterator[None]:
    """Calls `note(name, before)` before and after each function that the module calls, builtins of
    the virtual machine left out.
    """

    def instrument(_function: Any, name: str, before: bool, _result: Any, *_arguments: Any) -> int:
        if not name.startswith(_NO_LAUNCHES):
            note(name, before)
        return 0  # the machine goes on as usual

    module.vm.set_instrument(instrument)
    try:
        yield
    finally:
        module.vm._set_instrument(None)


def wall_spans(module: CompiledModule, inputs: Sequence[Any], repeats: int = 20) -> Recorded:
    """The launches of each call on a CPU, by the clock; before each a call that is not recorded is
    timed as a whole.
    """
    spans: list[tuple[str, float, float]] = []
    begun = 0.0

    def note(name: str, before: bool) -> None:
        nonlocal begun
        now = time.perf_counter()
        if before:
            begun = time.perf_counter()
        else:
            spans.append((name, begun * 1e6, now * 1e6))

    arguments, runs, whole_us = module.arguments(inputs), [], []
    for _ in range(WARM_CALLS + repeats):
        began = time.perf_counter()
        module.run(arguments)
        whole_us.append((time.perf_counter() - began) * 1e6)
        spans.clear()
        with called(module, note):
            module.run(arguments)
        runs.append(_from_its_begin(spans))
    return Recorded("wall", runs[WARM_CALLS:], whole_us[WARM_CALLS:])


def kernel_walls(
    module: CompiledModule, inputs: Sequence[Any], repeats: int = 20
) -> list[tuple[str, Timing]]:
    """The functions of a call on a CPU in the order in which they run, and how long each takes."""
    calls = wall_spans(module, inputs, repeats).calls
    return [
        (spans[0].name, Timing.of([one.busy_us for one in spans], "wall"))
        for spans in zip(*calls, strict=True)
    ]


def names_called(module: CompiledModule, inputs: Sequence[Any]) -> list[str]:
    """The functions of a call in the order in which they are called."""
    names: list[str] = []
    with called(module, lambda name, before: names.append(name) if before else None):
        module.run(module.arguments(inputs))
    return names


def _cupti_spans(
    module: CompiledModule,
    inputs: Sequence[Any],
    kernels: Mapping[str, Sequence[str]],
    repeats: int,
) -> list[Call]:
    """By the kernels, the L2 cleaned before each call."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    names = names_called(module, inputs)
    own = {kernel for name in names for kernel in kernels.get(name, ())}
    filler = torch.zeros(L2_CLEANING_BYTES // 8, dtype=torch.int64, device="cuda")
    arguments = module.arguments(inputs)
    for _ in range(WARM_CALLS):
        module.run(arguments)
    torch.cuda.synchronize()
    for _ in range(ATTEMPTS):
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(repeats):
                filler.max()
                torch.cuda.synchronize()
                module.run(arguments)
                torch.cuda.synchronize()
        events = [event for event in device_events(profiler) if event[0] in own]
        found = by_function(events, names, kernels, repeats)
        if found is not None:
            return found
    raise BuildError(
        f"CUPTI reports {len(events)} kernels of {repeats} calls, which is not what the module "
        "launches: end other profilers, or run it without torch, on CUDA events"
    )


def by_function(
    events: Sequence[tuple[str, float, float]],
    names: Sequence[str],
    kernels: Mapping[str, Sequence[str]],
    repeats: int,
) -> list[Call] | None:
    """The kernels of several equal calls by the functions that launched them; None where they are
    not as many as should be. A function without kernels of its own (a library's) has none.

    Examples
    --------
    >>> [call] = by_function([("k", 5, 7), ("m", 8, 9)], ["f"], {"f": ("k", "m")}, 1)
    >>> call
    [Span(name='f', begin_us=0, end_us=4, busy_us=3)]
    """
    counts = [launches_of(kernels.get(name, ())) for name in names]
    if len(events) != repeats * sum(counts):
        return None
    calls, position = [], 0
    for _ in range(repeats):
        spans, busy = [], []
        for name, count in zip(names, counts, strict=True):
            part = events[position : position + count]
            position += count
            if part:
                spans.append((name, part[0][1], max(end for _, _, end in part)))
                busy.append(sum(end - begin for _, begin, end in part))
        calls.append(_from_its_begin(spans, busy))
    return calls


def _event_spans(module: CompiledModule, inputs: Sequence[Any], repeats: int) -> list[Call]:
    """By CUDA events around each function, the L2 cleaned before each call."""
    import tvm_ffi

    clean = tvm_ffi.get_global_func(l2_cleaner(module.device))
    driver, arguments, calls = CudaDriver(module.device.index), module.arguments(inputs), []
    marks: list[tuple[str, int]] = []

    def note(name: str, _before: bool) -> None:
        event = driver.new_event(timed=True)
        driver.record(event, _DEFAULT_STREAM)
        marks.append((name, event))

    with driver.current(), called(module, note):
        for _ in range(WARM_CALLS + repeats):
            marks.clear()
            clean()
            driver.synchronize()
            module.run(arguments)
            driver.synchronize()
            first = marks[0][1] if marks else 0
            times = [(name, driver.elapsed_us(first, event)) for name, event in marks]
            pairs = zip(times[::2], times[1::2], strict=True)
            calls.append(_from_its_begin([(n, begin, end) for (n, begin), (_, end) in pairs]))
            for _, event in marks:
                driver.destroy_event(event)
    return calls[WARM_CALLS:]


def _from_its_begin(
    spans: Sequence[tuple[str, float, float]], busy: Sequence[float] | None = None
) -> Call:
    """Spans since the first of them began; each is busy all the time unless it is said."""
    zero = spans[0][1] if spans else 0.0
    busy = [end - begin for _, begin, end in spans] if busy is None else busy
    return [
        Span(name, begin - zero, end - zero, us)
        for (name, begin, end), us in zip(spans, busy, strict=True)
    ]
