"""How long modules take, compared fairly: interleaved, warmed up, medians.

On a GPU the time of a call is the sum of its kernels' times (CUPTI, through torch's profiler), and
256 MB are read before each timed call, so that no call finds its inputs in the L2 or pays for what
the one before left dirty in it. Without torch, CUDA events around the call stand in for it. On a
CPU it is wall-clock time.
"""

import enum
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi

from ...host.stages import stepped
from ..calls.compiled_module import CompiledModule
from ..calls.tensors import to_tvm

# Times with their spread, and what they allow to say of two of them.

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


L2_CLEANING_BYTES = 256 << 20  # five times the L2 of an H200
_MIN_SAMPLE_S = 200e-6  # shorter calls are repeated within a sample, above the timer's noise
_MIN_REPEATS = 3
_SETTLE_S = 0.003  # TVM's workers spin for about a millisecond, OpenMP's for less
_SPAN = "tvm_fusion.timing:"
_CLEANER = "tvm_fusion.clean_l2"


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of one call.

    Attributes
    ----------
    median_us, low_us, high_us : float
        Median and quartiles over the samples, in microseconds.
    samples : int
        Number of samples.
    clock : str
        "kernel" (sum of kernel times), "event" (CUDA events) or "wall".
    kernels : float or None
        Kernels a call launched, as the profiler saw them.
    values_us : tuple of float
        The samples in the order in which they were taken.
    """

    median_us: float
    low_us: float
    high_us: float
    samples: int
    clock: str
    kernels: float | None = None
    values_us: tuple[float, ...] = field(default=(), repr=False, compare=False)

    @classmethod
    def of(cls, samples_us: Sequence[float], clock: str, kernels: float | None = None) -> "Timing":
        """Summarise samples."""
        low, median, high = (
            statistics.quantiles(samples_us, n=4, method="inclusive")
            if len(samples_us) > 1
            else samples_us * 3
        )
        return cls(median, low, high, len(samples_us), clock, kernels, tuple(samples_us))


def time_modules(
    fns: Mapping[str, Callable[..., Any]],
    inputs: Sequence[Any],
    repeats: int = 20,
    budget_s: float = 5.0,
) -> dict[str, Timing]:
    """Time several modules (or callables) on the same inputs, interleaved.

    Parameters
    ----------
    fns : Mapping[str, Callable]
        `CompiledModule`s are timed without their input checks.
    inputs : sequence
        Tensors of any kind; for `CompiledModule`s they are moved to the device beforehand.
    repeats : int
        Samples of each.
    budget_s : float
        On a CPU, fewer samples (at least 3) are taken where `repeats` would last longer.
    """
    calls = {name: _call(fn, inputs) for name, fn in fns.items()}
    modules = {name: fn for name, fn in fns.items() if isinstance(fn, CompiledModule)}
    on_cuda = [x.device for x in (*modules.values(), *inputs) if _runs_on_cuda(x)]
    if on_cuda and len(modules) == len(fns) and not has_torch_cuda():
        return _event_times(modules, inputs, repeats)
    return time_calls(calls, on_cuda[0] if on_cuda else None, repeats, budget_s)


def time_calls(
    calls: Mapping[str, Callable[[], Any]],
    device: Any = None,
    repeats: int = 20,
    budget_s: float = 5.0,
) -> dict[str, Timing]:
    """Time callables, interleaved: by their kernels on a CUDA device, else by the clock.

    `device` is one of TVM or torch, or None for the CPU.
    """
    if getattr(device, "type", "cpu") != "cuda":
        return wall_times(calls, repeats, budget_s)
    if has_torch_cuda():
        return kernel_times(calls, repeats)
    return wall_times(calls, repeats, budget_s, wait=tvm.cuda(device.index or 0).sync)


def wall_times(
    calls: Mapping[str, Callable[[], Any]],
    repeats: int = 20,
    budget_s: float = 5.0,
    wait: Callable[[], Any] | None = None,
) -> dict[str, Timing]:
    """Time callables by the clock on the wall; `wait` blocks until their work is done.

    Before each sample there is a pause and a call that does not count: a library's worker threads
    spin on after its last call, and would take the cores from the next library's (seen on 2 cores:
    torch beside TVM 87 ms instead of 0.9).
    """

    def timed(call: Callable[[], Any], number: int = 1) -> float:
        start = time.perf_counter()
        for _ in range(number):
            call()
        if wait is not None:
            wait()
        return (time.perf_counter() - start) / number

    def sample(call: Callable[[], Any], number: int = 1) -> float:
        time.sleep(_SETTLE_S)
        timed(call)
        return timed(call, number)

    once = {name: sample(call) for name, call in calls.items()}
    numbers = {name: max(1, math.ceil(_MIN_SAMPLE_S / max(s, 1e-9))) for name, s in once.items()}
    round_s = sum(_SETTLE_S + once[name] * (1 + numbers[name]) for name in calls)
    rounds = max(_MIN_REPEATS, int(min(repeats, budget_s / round_s)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in stepped("calls timed", range(rounds), rounds):
        for name, call in calls.items():
            samples[name].append(sample(call, numbers[name]) * 1e6)
    return {name: Timing.of(values, "wall") for name, values in samples.items()}


def kernel_times(
    calls: Mapping[str, Callable[[], Any]], repeats: int = 20, warmup: int = 3
) -> dict[str, Timing]:
    """Time callables by the kernels they run on the GPU, interleaved, with a clean L2 (CUPTI)."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    filler = torch.zeros(L2_CLEANING_BYTES // 8, dtype=torch.int64, device="cuda")
    for call in calls.values():
        for _ in range(warmup):
            call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            for index, call in enumerate(calls.values()):
                filler.max()
                torch.cuda.synchronize()
                with record_function(f"{_SPAN}{index}"):
                    call()
                    torch.cuda.synchronize()
    spans, kernels = [], []
    for event in profiler.events():
        interval = (event.time_range.start, event.time_range.end)
        if event.device_type.name != "CUDA" and event.name.startswith(_SPAN):
            spans.append((int(event.name.removeprefix(_SPAN)), *interval))
        elif event.device_type.name == "CUDA" and not event.name.startswith(_SPAN):
            kernels.append(interval)
    found = attribute(spans, kernels)
    return {
        name: Timing.of(
            [us for us, _ in found[index]],
            "kernel",
            statistics.mean(count for _, count in found[index]),
        )
        for index, name in enumerate(calls)
    }


def apart(kernels: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Start and end of kernels, sorted by start, each from where those before it have ended: one
    that is launched early (`early_launches`) waits until then.

    Examples
    --------
    >>> apart([(0, 10), (8, 14), (20, 22)])
    [(0, 10), (10, 14), (20, 22)]
    """
    found, until = [], -math.inf
    for start, end in kernels:
        start = max(start, until)
        until = max(start, end)
        found.append((start, until))
    return found


def attribute(
    spans: Sequence[tuple[int, float, float]], kernels: Sequence[tuple[float, float]]
) -> dict[int, list[tuple[float, int]]]:
    """Sum kernel times over the spans they fall into, each from where those before it have ended.

    Parameters
    ----------
    spans : sequence of (label, start, end)
        Disjoint stretches of time on the host, each one call and the wait for its end.
    kernels : sequence of (start, end)
        What ran on the device; what lies in no span is left out.

    Returns
    -------
    dict[int, list[tuple[float, int]]]
        Per label and span the summed time and the number of kernels.
    """
    ordered = apart(sorted(kernels))
    found: dict[int, list[tuple[float, int]]] = {}
    position = 0
    for label, start, end in sorted(spans, key=lambda span: span[1]):
        times = []
        while position < len(ordered) and sum(ordered[position]) / 2 <= end:
            first, last = ordered[position]
            if (first + last) / 2 >= start:
                times.append(last - first)
            position += 1
        found.setdefault(label, []).append((sum(times), len(times)))
    return found


def l2_cleaner(device: Any) -> str:
    """The name of a function that cleans the L2 of a device: `f_preproc` of a `time_evaluator`.

    TVM 0.27 registers none. It returns nothing: an evaluator calls the kernel with what
    `f_preproc` left as the place of its result, which must hold no object.
    """
    source, sink = (tvm.runtime.empty((L2_CLEANING_BYTES // 2,), "uint8", device) for _ in range(2))

    def clean(*_arguments: Any) -> None:
        source.copyto(sink)

    tvm_ffi.register_global_func(_CLEANER, clean, override=True)
    return _CLEANER


def _event_times(
    modules: Mapping[str, CompiledModule], inputs: Sequence[Any], repeats: int
) -> dict[str, Timing]:
    """Time modules by CUDA events, the L2 cleaned before each sample."""
    calls = {}
    for name, module in modules.items():
        cleaner = l2_cleaner(module.device)
        evaluate = module.vm.time_evaluator(
            module.function, module.device, number=1, repeat=1, f_preproc=cleaner
        )
        calls[name] = functools.partial(evaluate, *module.arguments(inputs))
    samples: dict[str, list[float]] = {name: [] for name in modules}
    for _ in range(repeats):
        for name, call in calls.items():
            samples[name].append(call().median * 1e6)
    return {name: Timing.of(values, "event") for name, values in samples.items()}


def _call(fn: Callable[..., Any], inputs: Sequence[Any]) -> Callable[[], Any]:
    return bound(fn, inputs) if isinstance(fn, CompiledModule) else lambda: fn(*inputs)


def bound(module: CompiledModule, inputs: Sequence[Any]) -> Callable[[], Any]:
    """A module bound to inputs, as `CompiledModule.bind`; what it writes into those that are not on
    its device, or lie as they must not, nobody reads.
    """
    given = list(inputs)
    for number in module.writes:
        given[number] = to_tvm(given[number], module.device, module.signature.inputs[number].name)
    return module.bind(*given)


def _runs_on_cuda(value: Any) -> bool:
    device = getattr(value, "device", None)
    return getattr(device, "type", None) == "cuda"


def has_torch_cuda() -> bool:
    """Whether torch is installed and sees a CUDA device."""
    torch = sys.modules.get("torch")
    if torch is None:
        try:
            import torch
        except ImportError:
            return False
    return torch.cuda.is_available()


def device_works() -> bool:
    """Whether this process can still use the GPU: one wild access of a kernel ends that."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
