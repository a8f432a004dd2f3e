"""The measurements that are under way in a session."""

from __future__ import annotations

import logging
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...errors import TargetError
from ..session.settings import Settings
from ..session.task_state import TaskState
from .building import BuiltChoice
from .measuring import MeasureRequest, Meter
from .processes import BROKEN, LOST, Answer, Worker
from .workshop import Job, Workshop

logger = logging.getLogger(__name__)

MOST_LOST = 3  # times in a row that a meter refuses
MOST_BROKEN = 2  # times that a measurement is lost together with its server
CHOICES = 2  # of a trial: the untuned kernel runs beside it

Asked = tuple[MeasureRequest, list[Job]]


class Measurements:
    """Has choices measured, one task at a time on each meter.

    A measurement whose meter is lost (`processes.Answer`) says nothing of its choices and goes to
    the next meter that is free; one that is lost together with its server for the second time may
    be what ends the servers, and is a crash. A meter that is lost three times in a row, or cannot
    connect, is given up.

    Parameters
    ----------
    meters : sequence of Meter
    shop : Workshop
        Knows the workloads as texts.
    settings : Settings
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
            if answer.status != "ok":
                worker.stop()  # an error of a device stays with the process that met it
            else:
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

    def drop(self) -> list[Job]:
        """Forgets what waits for a meter; the jobs."""
        dropped = [job for _, jobs in self._waiting for job in jobs]
        self._waiting.clear()
        return dropped

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
