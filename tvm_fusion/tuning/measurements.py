"""The measurements that are under way in a session."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .building import BuiltChoice
from .measuring import MeasureRequest
from .meters import Meter
from .processes import Answer, Worker
from .settings import Settings
from .workshop import Job, Workshop


class Measurements:
    """Has choices measured, one task at a time on each meter.

    Parameters
    ----------
    meters : sequence of Meter
    shop : Workshop
        Knows the workloads as texts.
    settings : Settings
    """

    def __init__(self, meters: Sequence[Meter], shop: Workshop, settings: Settings) -> None:
        self.meters, self._shop, self._settings = meters, shop, settings
        self._jobs: dict[Worker, list[Job]] = {}

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
                yield jobs, answer

    def stop(self) -> None:
        """Ends what is under way."""
        for worker in self._jobs:
            worker.stop()
        self._jobs.clear()
