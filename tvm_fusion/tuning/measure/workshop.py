"""The builders of a session, and the libraries that they made."""

from __future__ import annotations

import itertools
import logging
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm

from ...host.cores import available_cores
from ..session.choices import Choice
from ..session.settings import Settings
from ..session.task_state import TaskState
from .building import BuildRequest, BuiltChoice, Place, build_choice, enter
from .processes import Answer, Worker, wait_for

logger = logging.getLogger(__name__)

POLL_S = 0.5


def make_builders(settings: Settings) -> list[Worker]:
    """Processes that write and compile kernels, started when they are first needed."""
    count = settings.builders or max(1, available_cores() - 1)
    setup = (enter, (settings.build_memory_bytes,))
    return [Worker(f"builder {i}", setup, torch=False) for i in range(count)]


@dataclass(eq=False)
class Job:
    """One choice of a task on its way through a session.

    Attributes
    ----------
    state : TaskState
    choice : Choice
    path : Path
        Of its library.
    trial : bool
        Whether it is to be measured; else its library alone is wanted.
    built : BuiltChoice or None
    result : tvm.s_tir.meta_schedule.runner.RunnerResult or None
        What came of it; None on the way.
    """

    state: TaskState
    choice: Choice
    path: Path
    trial: bool = True
    built: BuiltChoice | None = None
    result: Any = None


class Workshop:
    """Builds choices, in the order in which it is asked, and keeps the libraries.

    Parameters
    ----------
    builders : sequence of Worker
    place : Place
    settings : Settings
    folder : Path
        Where libraries are written.
    symbol : str
        The name of each library's function; by default one that no other has.
    """

    def __init__(
        self,
        builders: Sequence[Worker],
        place: Place,
        settings: Settings,
        folder: Path,
        symbol: str = "",
    ) -> None:
        self.builders, self.place, self.folder, self._symbol = builders, place, folder, symbol
        self._limit_s = settings.build_timeout_s
        self._queue: deque[Job] = deque()
        self._building: dict[Worker, Job] = {}
        self._took_s: list[float] = []
        self._libraries: dict[tuple[str, str], BuiltChoice] = {}
        self._texts: dict[str, str] = {}
        self._numbers = itertools.count()

    @property
    def busy(self) -> list[Worker]:
        """The builders that have something to do."""
        return list(self._building)

    @property
    def usual_s(self) -> float:
        """What building a choice takes, by those so far; 0 where there was none."""
        return statistics.median(self._took_s) if self._took_s else 0.0

    def job(self, state: TaskState, choice: Choice, trial: bool = True) -> Job:
        """A choice on its way."""
        return Job(state, choice, self.folder / f"{next(self._numbers)}.so", trial)

    def begin(self, job: Job) -> None:
        """Asks for the library of a choice."""
        self._queue.append(job)
        self._go_on()

    def is_asked(self, state: TaskState, text: str) -> bool:
        """Whether the library of a choice is on its way."""
        jobs = (*self._queue, *self._building.values())
        return any(job.state is state and job.choice.text == text for job in jobs)

    def have(self, wanted: Iterable[tuple[TaskState, Choice]]) -> None:
        """Builds the libraries that are not there; those that cannot be built are logged."""
        for state, choice in wanted:
            if self.library(state, choice.text) is None:
                self.begin(self.job(state, choice, trial=False))
        while self.busy:
            wait_for(self.busy, POLL_S)
            for job, answer in self.collect():
                if job.built is not None:
                    self.keep(job)
                else:
                    logger.warning("%s %s: %s", job.state.task.name, job.choice.text, answer.why)

    def collect(self) -> list[tuple[Job, Answer]]:
        """What was built since the last call, and what was not and why."""
        found = []
        for builder, job in list(self._building.items()):
            if (answer := builder.collect()) is not None:
                del self._building[builder]
                if answer.status == "ok":
                    job.built = answer.value
                    self._took_s.append(answer.seconds)
                found.append((job, answer))
        self._go_on()
        return found

    def drop(self, is_dropped: Callable[[Job], bool] = lambda job: True) -> list[Job]:
        """Ends what is being built and forgets what is to be; the jobs that are lost."""
        lost = [job for job in (*self._queue, *self._building.values()) if is_dropped(job)]
        self._queue = deque(job for job in self._queue if job not in lost)
        for builder, job in list(self._building.items()):
            if job in lost:
                builder.stop()
                del self._building[builder]
        return lost

    def keep(self, job: Job) -> None:
        """Keeps the library of a job: it is right."""
        self._libraries[job.state.task.key, job.choice.text] = job.built

    def library(self, state: TaskState, text: str) -> BuiltChoice | None:
        """The library of a choice, if it was built in this session."""
        return self._libraries.get((state.task.key, text))

    def text(self, state: TaskState) -> str:
        """The workload of a task as JSON."""
        key = state.task.key
        if key not in self._texts:
            self._texts[key] = tvm.ir.save_json(state.task.workload)
        return self._texts[key]

    def _go_on(self) -> None:
        for builder in self.builders:
            if not self._queue:
                return
            if builder not in self._building:
                job = self._building[builder] = self._queue.popleft()
                kind, text = job.choice.kind, job.choice.text
                request = BuildRequest(
                    self.text(job.state), kind, text, self.place, job.path, self._symbol
                )
                builder.send(build_choice, (request,), self._limit_s)
