"""The best choices of each task, timed side by side with its untuned kernel at the end."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..measure.building import POLL_S, Job, Workshop
from ..measure.measuring import Measurements
from ..measure.processes import Answer, wait_for
from ..search.task_search import TaskState
from .choices import DEFAULT, Choice
from .settings import Settings

logger = logging.getLogger(__name__)

CLEAN_US = 500.0  # beside each sample: the caches are cleaned (256 MB on an H200 take 100 us)


@dataclass(frozen=True)
class Finals:
    """Those of a session."""

    states: Sequence[TaskState]
    shop: Workshop
    measurements: Measurements
    settings: Settings

    def seconds(self) -> float:
        """About how long they would take now, by what building and measuring took so far."""
        builds, spent = 0, 0.0
        for state in self._due():
            texts = [trial.text for trial in state.finalists()]
            builds += sum(self.shop.library(state, text) is None for text in texts)
            samples = len(texts) * self.settings.final_repeats
            spent += self.measurements.usual_s(state)
            spent += samples * (state.untuned_us + CLEAN_US) * 1e-6
        rounds = math.ceil(builds / max(1, len(self.shop.builders)))
        return rounds * self.shop.usual_s + spent / max(1, len(self.measurements.meters))

    def run(self, has_measured: Callable[[list[Job], Answer], None]) -> None:
        """Builds what is missing and measures all; `has_measured` takes each answer."""
        finals = [
            (s, [Choice(t.kind, t.text, t.predicted_us) for t in s.finalists()])
            for s in self._due()
        ]
        self.shop.have((s, choice) for s, choices in finals for choice in choices)
        left = []
        for state, choices in finals:
            found = [(c, self.shop.library(state, c.text)) for c in choices]
            jobs = [Job(state, c, b.path, built=b) for c, b in found if b is not None]
            if len(jobs) > 1 and jobs[0].choice.text == DEFAULT:
                left.append(jobs)
        while left or self.measurements.busy:
            for meter in self.measurements.free[: len(left)]:
                jobs = left.pop(0)
                built = [job.built for job in jobs]
                self.measurements.begin(meter, built, jobs, self.settings.final_repeats)
            wait_for(self.measurements.busy, POLL_S)
            for jobs, answer in self.measurements.collect():
                if answer.status == "ok":
                    has_measured(jobs, answer)
                else:  # what was measured of each by itself stays
                    logger.warning("%s: no final: %s", jobs[0].state.task.name, answer.why)

    def _due(self) -> list[TaskState]:
        return [state for state in self.states if state.needs_final]
