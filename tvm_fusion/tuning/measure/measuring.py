"""Libraries as times: run in a process of its own that holds one task's inputs and reference.

A trial is right before it is timed: its outputs, poisoned before, are compared with a reference
(`case`).
"""

from __future__ import annotations

import logging
import statistics
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import tvm

from ...check.bounds.rounded_products import with_rounded_operands
from ...errors import TargetError
from ...kernels.cpu.contraction.panels import without_constants
from ...runtime.timing.plan_timing import relative_spread
from ..search.task_search import TaskState
from ..session.settings import Settings
from ..session.tasks import TF32, without_stamps
from .building import BuiltChoice, Job, Place, Workshop
from .case import Case, wrong
from .processes import BROKEN, LOST, Answer, Worker
from .site import Here, Site, ends_with_device

logger = logging.getLogger(__name__)

MOST_LOST = 3  # times in a row that a meter refuses
MOST_BROKEN = 2  # times that a measurement is lost together with its server
CHOICES = 2  # of a trial: the untuned kernel runs beside it


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
    seed : int
        Of the inputs.
    """

    workload: str
    outputs: int
    choices: tuple[BuiltChoice, ...]
    repeats: int
    place: Place
    seed: int = 0


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
        workload = tvm.ir.load_json(request.workload)
        func = without_constants(without_stamps(workload))
        if workload.attrs[TF32]:
            func = with_rounded_operands(func)
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


class Meter:
    """What measures: a process on this machine, or one for a server elsewhere.

    Attributes
    ----------
    worker : Worker
    is_ready : bool
        What is not has to connect before it is sent anything.
    """

    worker: Worker
    is_ready = True

    def connect(self, held: int) -> None:
        """Asks the worker to connect; `held` is how many other meters are connected."""

    def send(self, request: MeasureRequest, limit_s: float) -> None:
        """Asks for the measurements of a request."""
        raise NotImplementedError


class LocalMeter(Meter):
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

    def send(self, request: MeasureRequest, limit_s: float) -> None:
        self.worker.send(measure_here, (request,), limit_s, before=(prepare_here, (request,)))


# ---- the measurements that are under way in a session

Asked = tuple[MeasureRequest, list[Job]]


class Measurements:
    """Has choices measured, one task at a time on each meter.

    A measurement whose meter is lost (`processes.Answer`) says nothing of its choices and goes to
    the next meter that is free; one that is lost together with its server for the second time may
    be what ends the servers, and is a crash. A meter that is lost three times in a row, or cannot
    connect, is given up.

    Parameters
    ----------
    shop : Workshop
        Knows the workloads as texts.
    """

    def __init__(self, meters: Sequence[Meter], shop: Workshop, settings: Settings) -> None:
        self.meters, self._shop, self._settings = list(meters), shop, settings
        self._lost: Counter[Worker] = Counter()
        self._broken: Counter[tuple[str, ...]] = Counter()
        self._measuring: dict[Worker, Asked] = {}
        self._connecting: list[Worker] = []
        self._waiting: list[Asked] = []  # for a meter: those at hand have to connect first
        self._took_s: dict[str, list[float]] = defaultdict(list)  # by key of a task

    @property
    def busy(self) -> list[Worker]:
        """The processes that measure, and those that connect where a measurement waits for that."""
        return [*self._measuring, *(self._connecting if self._waiting else ())]

    @property
    def free(self) -> list[Meter]:
        """The meters that have nothing to do, those that are ready first."""
        idle = [meter for meter in self.meters if not meter.worker.busy]
        return sorted(idle, key=lambda meter: not meter.is_ready)

    def begin(
        self, meter: Meter, choices: Sequence[BuiltChoice], jobs: list[Job], repeats: int
    ) -> None:
        """Has choices of a task measured on a free meter, or on one that is ready before it; `jobs`
        are the last of them.
        """
        state = jobs[0].state
        request = MeasureRequest(
            self._shop.text(state),
            state.task.outputs,
            tuple(choices),
            repeats,
            self._shop.place,
            self._settings.seed,
        )
        if meter.is_ready:
            self._send(meter, (request, jobs))
        else:
            self._waiting.append((request, jobs))
            self._connect(meter)

    def collect(self) -> Iterator[tuple[list[Job], Answer]]:
        """What was measured since the last call.

        Raises
        ------
        TargetError
            No meter is left.
        """
        for worker, (request, jobs) in list(self._measuring.items()):
            if (answer := worker.collect()) is None:
                continue
            del self._measuring[worker]
            if answer.status in (LOST, BROKEN):
                worker.stop()
            elif answer.status == "ok":
                self._took_s[jobs[0].state.task.key].append(answer.seconds)
            self._lost[worker] = self._lost[worker] + 1 if answer.status == LOST else 0
            if answer.status == BROKEN:
                answer = self._judged(jobs, answer)
            if answer.status not in (LOST, BROKEN):
                yield jobs, answer
                continue
            self._waiting.insert(0, (request, jobs))
            if self._lost[worker] >= MOST_LOST:
                self._give_up(worker, answer)
            else:
                logger.warning("%s is lost, its trial is made again: %s", worker.name, answer.why)
        for worker in list(self._connecting):
            if (answer := worker.collect()) is not None:
                self._connecting.remove(worker)
                if answer.status != "ok":
                    self._give_up(worker, answer)
        self._go_on()

    def usual_s(self, state: TaskState) -> float:
        """What a request of the task takes, by those so far; 0 where there was none."""
        took_s = self._took_s.get(state.task.key)
        return statistics.median(took_s) if took_s else 0.0

    def drop(self, is_dropped: Callable[[Job], bool] = lambda job: True) -> list[Job]:
        """Forgets trials that wait for a meter; the jobs."""
        lost = [asked for asked in self._waiting if any(map(is_dropped, asked[1]))]
        self._waiting = [asked for asked in self._waiting if asked not in lost]
        return [job for _, jobs in lost for job in jobs]

    def stop(self) -> None:
        """Ends what is under way."""
        for worker in (*self._measuring, *self._connecting):
            worker.stop()
        self._measuring.clear()
        self._connecting.clear()
        self._waiting.clear()

    def _send(self, meter: Meter, asked: Asked) -> None:
        self._measuring[meter.worker] = asked
        request = asked[0]
        samples = len(request.choices) * request.repeats
        trials = max(1.0, samples / (CHOICES * self._settings.repeats))
        meter.send(request, trials * self._settings.run_timeout_s)

    def _connect(self, meter: Meter) -> None:
        held = sum(other.is_ready for other in self.meters if other is not meter)
        self._connecting.append(meter.worker)
        meter.connect(held)

    def _go_on(self) -> None:
        """Sends what waits to meters that are ready; has as many connect as there is work for."""
        for meter in self.free:
            if meter.is_ready and self._waiting:
                self._send(meter, self._waiting.pop(0))
            elif len(self._connecting) < len(self._waiting):
                self._connect(meter)

    def _judged(self, jobs: list[Job], answer: Answer) -> Answer:
        """The answer of a measurement whose server is gone, or a crash if that is not the first."""
        key = (jobs[0].state.task.key, *(job.choice.text for job in jobs))
        self._broken[key] += 1
        if self._broken[key] < MOST_BROKEN:
            return answer
        why = f"{self._broken[key]} servers were lost while it ran: {answer.why}"
        logger.warning("%s %s: %s", jobs[0].state.task.name, jobs[-1].choice.text[:80], why)
        return replace(answer, status="crash", why=why)

    def _give_up(self, worker: Worker, answer: Answer) -> None:
        self.meters = [meter for meter in self.meters if meter.worker is not worker]
        if not self.meters:
            raise TargetError(
                f"nothing is left to measure on: {answer.why}; "
                "what was measured is kept, and the same command goes on"
            )
        logger.warning("%s is given up: %s", worker.name, answer.why)
