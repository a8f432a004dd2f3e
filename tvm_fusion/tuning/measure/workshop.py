"""Builders, and the libraries that they made for a session."""

from __future__ import annotations

import itertools
import logging
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

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


@dataclass
class Job:
    """One choice of a task on its way through a session."""

    state: TaskState
    choice: Choice
    path: Path
    built: BuiltChoice | None = None


class Workshop:
    """Builds choices and keeps the libraries.

    Parameters
    ----------
    builders : sequence of Worker
    place : Place
    settings : Settings
    folder : Path
        Where libraries are written.
    """

    def __init__(
        self, builders: Sequence[Worker], place: Place, settings: Settings, folder: Path
    ) -> None:
        self.builders, self.place, self.folder = builders, place, folder
        self._limit_s = settings.build_timeout_s
        self._building: dict[Worker, Job] = {}
        self._took_s: list[float] = []
        self._libraries: dict[tuple[str, str], BuiltChoice] = {}
        self._texts: dict[str, str] = {}
        self._numbers = itertools.count()

    @property
    def is_free(self) -> bool:
        """Whether a builder has nothing to do."""
        return len(self._building) < len(self.builders)

    @property
    def busy(self) -> list[Worker]:
        """The builders that have something to do."""
        return list(self._building)

    @property
    def usual_s(self) -> float:
        """What building a choice takes, by those so far; 0 where there was none."""
        return statistics.median(self._took_s) if self._took_s else 0.0

    def begin(self, state: TaskState, choice: Choice) -> None:
        """Has a free builder build a choice."""
        builder = next(b for b in self.builders if b not in self._building)
        job = Job(state, choice, self.folder / f"{next(self._numbers)}.so")
        request = BuildRequest(self.text(state), choice.kind, choice.text, self.place, job.path)
        self._building[builder] = job
        builder.send(build_choice, (request,), self._limit_s)

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
        return found

    def abandon(self) -> list[Job]:
        """Ends all that is being built; the jobs that are lost."""
        lost = list(self._building.values())
        for builder in self._building:
            builder.stop()
        self._building.clear()
        return lost

    def keep(self, job: Job) -> None:
        """Keeps the library of a job: it is right."""
        self._libraries[job.state.task.key, job.choice.text] = job.built

    def library(self, state: TaskState, text: str) -> BuiltChoice | None:
        """The library of a choice, if it was built in this session."""
        return self._libraries.get((state.task.key, text))

    def have(
        self,
        wanted: Iterable[tuple[TaskState, Choice]],
        is_late: Callable[[], bool] = lambda: False,
    ) -> None:
        """Builds the libraries that are not there, until it is late; those that cannot be built are
        logged.
        """
        left = [(s, choice) for s, choice in wanted if self.library(s, choice.text) is None]
        while (left and not is_late()) or self._building:
            while left and self.is_free and not is_late():
                self.begin(*left.pop(0))
            wait_for(self.busy, POLL_S)
            for job, answer in self.collect():
                if job.built is not None:
                    self.keep(job)
                else:
                    logger.warning("%s %s: %s", job.state.task.name, job.choice.text, answer.why)

    def text(self, state: TaskState) -> str:
        """The workload of a task as JSON."""
        key = state.task.key
        if key not in self._texts:
            self._texts[key] = tvm.ir.save_json(state.task.workload)
        return self._texts[key]
