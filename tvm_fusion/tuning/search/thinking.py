"""Processes in which schedules are evolved while a session builds and measures."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..measure.building import Place
from ..measure.processes import Answer, Worker, stop_all
from ..session.settings import Settings
from .proposing import enter_thinking
from .task_schedules import Search

if TYPE_CHECKING:
    from ..session.task_state import TaskState

logger = logging.getLogger(__name__)

TINY_US = 1e-9  # what saves nothing is not thought about


class Thinkers:
    """A process for each design space, started when something is first evolved in it.

    A search whose process dies or does not answer in time is given up; the next one gets a new
    process, and what is evolved there for other tasks is built anew from what was measured.

    Parameters
    ----------
    place : Place
    settings : Settings
    """

    def __init__(self, place: Place, settings: Settings) -> None:
        self._place, self._settings = place, settings
        self._workers: dict[str, Worker] = {}
        self._asked: dict[Worker, tuple[TaskState, Search]] = {}

    @property
    def busy(self) -> list[Worker]:
        """The processes that think."""
        return list(self._asked)

    def begin(self, states: Iterable[TaskState], least_us: float) -> None:
        """Has free processes think about the searches that promise most, where that is `least_us`
        or more.
        """
        found = [(gain, state, s) for state in states for s, gain in state.promising()]
        for gain_us, state, search in sorted(found, key=lambda one: one[0], reverse=True):
            if gain_us < max(least_us, TINY_US):
                return
            worker = self._worker(search.space)
            if worker not in self._asked:
                self._asked[worker] = state, search
                limit_s = self._settings.evolve_timeout_s
                worker.send(search.propose, (self._place, search.ask()), limit_s)

    def collect(self) -> None:
        """Gives the searches what was found since the last call."""
        for worker, (state, search) in list(self._asked.items()):
            if (answer := worker.collect()) is not None:
                del self._asked[worker]
                if answer.status == "ok":
                    state.evolution.found(search, answer.value)
                else:
                    _log(state, search, answer)
                    state.evolution.give_up(search)

    def stop(self) -> None:
        """Ends all processes."""
        stop_all(list(self._workers.values()))
        self._asked.clear()

    def _worker(self, space: str) -> Worker:
        if space not in self._workers:
            setup = (enter_thinking, (self._settings.build_memory_bytes,))
            self._workers[space] = Worker(f"evolution in {space} spaces", setup, torch=False)
        return self._workers[space]


def _log(state: TaskState, search: Search, answer: Answer) -> None:
    expected = answer.status == "error" and answer.why.startswith("Unsupported")
    level = logging.INFO if expected else logging.WARNING
    text = "%s: nothing is evolved in %s spaces: %s: %s"
    logger.log(level, text, state.task.name, search.space, answer.status, answer.why)
