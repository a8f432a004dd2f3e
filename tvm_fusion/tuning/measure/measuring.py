"""Libraries as times: run in a process of its own that holds one task's inputs and reference.

A trial is right before it is timed: its outputs, poisoned before, are compared with a reference
(`case`).
"""

from __future__ import annotations

import statistics
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import tvm

from ...kernels.cpu.contraction.panels import without_constants
from ...runtime.timing.plan_timing import relative_spread
from ..session.tasks import without_stamps
from .building import BuiltChoice, Place
from .case import Case, wrong
from .processes import Worker
from .site import Here, Site, ends_with_device


@dataclass(frozen=True, slots=True)
class MeasureRequest:
    """Libraries of one task to be checked and timed side by side.

    Attributes
    ----------
    workload : str
        JSON of the PrimFunc.
    outputs : int
        How many of its last parameters it writes.
    choices : tuple of BuiltChoice
        The first is the untuned one.
    repeats : int
    place : Place
    seed : int
        Of the inputs.
    """

    workload: str
    outputs: int
    choices: tuple[BuiltChoice, ...]
    repeats: int
    place: Place
    seed: int = 0

    def moved(self, path_of: Callable[[Path], str]) -> MeasureRequest:
        """The request with its libraries at other paths."""
        choices = [replace(c, path=Path(path_of(c.path))) for c in self.choices]
        return replace(self, choices=tuple(choices))


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one choice of a request does.

    Attributes
    ----------
    samples_us : tuple of float
        Empty where its numbers are wrong.
    error : float or None
        Relative to the largest number of the reference.
    why : str
        What is wrong with its numbers; empty where they are right.
    reference : "float64" or "untuned"
    """

    samples_us: tuple[float, ...] = ()
    error: float | None = None
    why: str = ""
    reference: str = "float64"

    @property
    def us(self) -> float:
        """The median time of a call in microseconds."""
        return statistics.median(self.samples_us)

    @property
    def spread(self) -> float:
        """Interquartile range over median."""
        return relative_spread(self.samples_us)


def prepare(request: MeasureRequest, site: Site | None = None) -> Case:
    """The tensors of a request's task with what its outputs should be."""
    case = _case(request, site)
    if case.wanted is None:
        case.expect(request.choices[0])
    return case


def measure(request: MeasureRequest, site: Site | None = None) -> list[Measurement]:
    """Checks the choices of a request and times those that are right, interleaved."""
    case = prepare(request, site)
    calls = [case.call(choice) for choice in request.choices]
    verdicts = [wrong(case.run(call), case.wanted) for call in calls]
    right = [i for i, (why, _) in enumerate(verdicts) if not why]
    found = [Measurement(error=e, why=why, reference=case.reference) for why, e in verdicts]
    if right:
        kernels = [request.choices[i].kernels for i in right]
        samples = case.site.samples([calls[i] for i in right], kernels, request.repeats)
        for i, times in zip(right, samples, strict=True):
            found[i] = Measurement(tuple(times), verdicts[i][1], "", case.reference)
    return found


def warm_up() -> None:
    """Imports what measuring takes long to import."""
    with suppress(ImportError):
        import torch  # noqa: F401


def prepare_here(request: MeasureRequest) -> None:
    """As `prepare`, on the device of this process, which ends where an error takes the device."""
    with ends_with_device(request.place.resolved()[0]):
        prepare(request)


def measure_here(request: MeasureRequest) -> list[Measurement]:
    """As `measure`, on the device of this process, which ends where an error takes the device."""
    with ends_with_device(request.place.resolved()[0]):
        return measure(request)


_kept: OrderedDict[tuple, Case] = OrderedDict()


def _case(request: MeasureRequest, site: Site | None) -> Case:
    """The tensors of a request's task; those of the last tasks are kept while there is room."""
    key = (request.workload, request.seed, request.place.target, id(site))
    if key not in _kept:
        func = without_constants(without_stamps(tvm.ir.load_json(request.workload)))
        target = request.place.resolved()[0]
        site = site or Here.of(target)
        while len(_kept) > 1 and sum(t.bytes for t in _kept.values()) > site.room_bytes:
            _kept.popitem(last=False)
        _kept[key] = Case(func, request.outputs, request.seed, target, site)
    _kept.move_to_end(key)
    return _kept[key]


def forget() -> None:
    """Drops all tensors that are kept."""
    _kept.clear()


class Meter(Protocol):
    """What measures: a process on this machine, or one for a server elsewhere.

    What is not ready has to connect before it is sent anything. `connect` asks its worker for that;
    `held` is how many other meters of the session are connected.
    """

    worker: Worker

    @property
    def is_ready(self) -> bool: ...

    def connect(self, held: int) -> None: ...

    def send(self, request: MeasureRequest, limit_s: float) -> None: ...


class LocalMeter:
    """Measures in a process of its own on this machine.

    Parameters
    ----------
    gpu : int, optional
        Which GPU, by its number; None takes the first.
    """

    def __init__(self, gpu: int | None = None) -> None:
        environment = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}
        on_gpu = bool(tvm.cuda(0).exist)  # whose kernels torch's profiler times
        self.worker = Worker("measurer", (warm_up, ()), environment, torch=on_gpu)

    @property
    def is_ready(self) -> bool:
        """Always: there is nothing to connect with."""
        return True

    def connect(self, held: int) -> None:
        """Nothing."""

    def send(self, request: MeasureRequest, limit_s: float) -> None:
        """Asks for the measurements of a request."""
        self.worker.send(measure_here, (request,), limit_s, before=(prepare_here, (request,)))
