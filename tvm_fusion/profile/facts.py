"""What a profile found, as values: the source of its text, its JSON and its trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..runtime.timing.spans import Call, Recorded
from ..runtime.timing.timing import TimeReport, Timing

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class KernelProfile:
    """One launch of a call.

    Attributes
    ----------
    name : str
        Name of its PrimFunc, or of a library's function.
    label : str
        What it computes, in the words of the report.
    kernel_class : str or None
        None for what the plan does not know (a function of a library, of another code generator).
    time : TimeReport
        In its kernels.
    bytes : int or None
        Read and written, by the plan's ledger.
    limit_us : float or None
        The least time by the model: that of the resource of the device that is needed longest.
    """

    name: str
    label: str
    kernel_class: str | None
    time: TimeReport
    bytes: int | None = None
    limit_us: float | None = None

    @property
    def bytes_per_s(self) -> float | None:
        """Memory bandwidth that it reached."""
        return None if self.bytes is None else _ratio(self.bytes * 1e6, self.time.median_us)

    @property
    def limit_share(self) -> float | None:
        """Share of the device's limit that it reached."""
        return None if self.limit_us is None else _ratio(self.limit_us, self.time.median_us)

    def to_json(self) -> dict[str, Any]:
        """As a JSON-able dict."""
        derived = {"bytes_per_s": self.bytes_per_s, "limit_share": self.limit_share}
        return asdict(self) | derived


@dataclass(frozen=True, slots=True)
class ModuleProfile:
    """A module, before or after fusion.

    Attributes
    ----------
    launches : int
        Kernels of a call on a GPU, calls of functions on a CPU.
    call : TimeReport
        Time of a call, as `compile` reports it.
    span : TimeReport
        From the begin of the first launch to the end of the last, one call behind the other.
    busy : TimeReport
        In kernels.
    gaps : TimeReport
        Between them.
    kernels : tuple of KernelProfile
        In the order in which they run.
    bytes : int or None
        Memory traffic of all kernels by the ledger.
    memory_bytes : int or None
        Device memory at the peak of a call, as planned.
    measured_memory_bytes : int or None
        The same as a GPU saw it.
    example : list of Span
        The recorded call whose time in kernels is the median one, for a trace.
    """

    launches: int
    call: TimeReport
    span: TimeReport
    busy: TimeReport
    gaps: TimeReport
    kernels: tuple[KernelProfile, ...]
    bytes: int | None
    memory_bytes: int | None = None
    measured_memory_bytes: int | None = None
    example: Call = field(default_factory=list, repr=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        """As a JSON-able dict."""
        data = {
            name: getattr(self, name)
            for name in ("launches", "bytes", "memory_bytes", "measured_memory_bytes")
        }
        times = {name: asdict(getattr(self, name)) for name in ("call", "span", "busy", "gaps")}
        return data | times | {"kernels": [kernel.to_json() for kernel in self.kernels]}


@dataclass(frozen=True, slots=True)
class Profile:
    """A function of a model before and after fusion.

    Attributes
    ----------
    function : str
    target : str
        Name of the hardware profile.
    unfused, fused : ModuleProfile
    sizes : Mapping of str to int
        What symbolic sizes were taken to be.
    threads : int or None
        Threads of kernels on a CPU.
    memory_bytes_per_s : float
        What the device's memory gives.
    version : int
    """

    function: str
    target: str
    unfused: ModuleProfile
    fused: ModuleProfile
    sizes: Mapping[str, int] = field(default_factory=dict, hash=False)
    threads: int | None = None
    memory_bytes_per_s: float = 0.0
    version: int = FORMAT_VERSION

    def to_json(self) -> dict[str, Any]:
        """As a JSON-able dict; the verdict says what the quartiles of the calls allow to say."""
        verdict = self.fused.call.verdict(self.unfused.call)
        plain = ("version", "function", "target", "threads", "memory_bytes_per_s")
        return {name: getattr(self, name) for name in plain} | {
            "sizes": dict(self.sizes),
            "verdict": verdict and verdict.value,
            "before": self.unfused.to_json(),
            "after": self.fused.to_json(),
        }


def of_calls(found: Recorded) -> tuple[TimeReport, TimeReport, TimeReport, Call]:
    """What whole calls take, the times in kernels and between them, and the call of median time in
    kernels.
    """
    busy = [sum(span.busy_us for span in call) for call in found.calls]
    gaps = [max(0.0, all_ - in_) for all_, in_ in zip(found.whole_us, busy, strict=True)]
    ordered = sorted(zip(busy, found.calls, strict=True), key=lambda pair: pair[0])
    samples = (found.whole_us, busy, gaps)
    return (*(report_of(us, found.clock) for us in samples), ordered[len(ordered) // 2][1])


def report_of(samples_us: Sequence[float], clock: str) -> TimeReport:
    """Median, quartiles and count of samples."""
    return TimeReport.of(Timing.of(list(samples_us), clock))


def _ratio(amount: float, us: float | None) -> float | None:
    return amount / us if us else None
