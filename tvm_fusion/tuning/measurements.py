"""The measurements that are under way in a session."""

from __future__ import annotations

import logging
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from ..errors import TargetError
from .building import BuiltChoice
from .measuring import MeasureRequest
from .meters import Meter
from .processes import Answer, Worker
from .settings import Settings
from .state import TaskState
from .workshop import Job, Workshop

logger = logging.getLogger(__name__)

LOST = "lost"
MOST_LOST = 3  # times in a row


class Measurements:
    """Has choices measured, one task at a time on each meter.

    A meter that is lost (`processes.Answer`) three times in a row is given up.

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
        self._jobs: dict[Worker, list[Job]] = {}
        self._took_s: dict[str, list[float]] = defaultdict(list)  # by key of a task

    @property
    def busy(self) -> list[Worker]:
        """The processes that measure."""
        return list(self._jobs)

    @property
    def free(self) -> list[Meter]:
        """The meters that have nothing to do."""
        return [meter for meter in self.meters if not meter.worker.busy]

    def begin(
        self, meter: Meter, choices: Sequence[BuiltChoice], jobs: list[Job], repeats: int
    ) -> None:
        """Has choices of a task measured on a free meter; `jobs` are the last of them."""
        state = jobs[0].state
        request = MeasureRequest(
            self._shop.text(state),
            state.task.outputs,
            tuple(choices),
            repeats,
            self._shop.place,
            self._settings.seed,
        )
        self._jobs[meter.worker] = jobs
        meter.send(request, self._settings.run_timeout_s)

    def collect(self) -> Iterator[tuple[list[Job], Answer]]:
        """What was measured since the last call."""
        for worker, jobs in list(self._jobs.items()):
            if (answer := worker.collect()) is not None:
                del self._jobs[worker]
                if answer.status != "ok":
                    worker.stop()  # an error of a device stays with the process that met it
                else:
                    self._took_s[jobs[0].state.task.key].append(answer.seconds)
                self._count(worker, answer)
                yield jobs, answer

    def usual_s(self, state: TaskState) -> float:
        """What a request of the task takes, by those so far; 0 where there was none."""
        took_s = self._took_s.get(state.task.key)
        return statistics.median(took_s) if took_s else 0.0

    def _count(self, worker: Worker, answer: Answer) -> None:
        """Gives a meter up that is lost again and again."""
        self._lost[worker] = self._lost[worker] + 1 if answer.status == LOST else 0
        if self._lost[worker] >= MOST_LOST:
            logger.warning("%s is given up: %s", worker.name, answer.why)
            self.meters = [meter for meter in self.meters if meter.worker is not worker]
            if not self.meters:
                raise TargetError(f"nothing is left to measure on: {answer.why}")

    def stop(self) -> None:
        """Ends what is under way."""
        for worker in self._jobs:
            worker.stop()
        self._jobs.clear()
