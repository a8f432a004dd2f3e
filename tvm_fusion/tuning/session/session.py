"""A tuning session: which trial next, until the trials, the time or the gains are used up.

    states (one a task) -- the most valuable proposal --> builders --> measurer(s) --> database
       ^  ^      |                                                                       |
       |  |      +---- what is evolved ----> thinkers                                    |
       |  +------------- schedules --------------+                                       |
       +---------------------------------- results --------------------------------------+

Builders work ahead of the measurements, and thinkers while these go on; a search is asked for more
when all that it proposed was measured. An interrupt or a kill loses no more than the trials that
run.
"""

from __future__ import annotations

import datetime
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import tvm

from ...errors import TargetError
from ..measure.building import Place
from ..measure.measurements import Measurements
from ..measure.measuring import Measurement, Meter
from ..measure.processes import LOST, Answer, Worker, scratch_folder, wait_for
from ..measure.trial_record import Trial
from ..measure.workshop import POLL_S, Job, Workshop
from ..search.thinking import Thinkers
from .choices import DEFAULT, Choice
from .settings import Settings
from .task_state import TaskState


@dataclass
class TimeLimit:
    """The time of a call of `tune`, from its beginning.

    Attributes
    ----------
    minutes : float
        0 is no limit.
    kept_s : float
        What is to be left when the trials end.
    """

    minutes: float
    kept_s: float = 0.0
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self.began

    @property
    def left_s(self) -> float:
        """Of all, 0 at least; infinite without a limit."""
        return max(0.0, self.minutes * 60 - self.seconds) if self.minutes else math.inf

    @property
    def is_near(self) -> bool:
        """Whether the trials have to end."""
        return self.left_s <= self.kept_s

    def share(self, part: float, most_s: float) -> float:
        """A part of the minutes, in seconds; `most_s` at most, and without a limit."""
        return min(most_s, part * self.minutes * 60) if self.minutes else most_s


logger = logging.getLogger(__name__)

AHEAD = 2  # built choices that wait for each measurer


class Keeper(Protocol):
    """Where trials are kept: `database.Database`."""

    def add(self, workload: tvm.tirx.PrimFunc, target: Any, trial: Trial) -> None: ...


@dataclass
class Session:
    """See the module docstring.

    Attributes
    ----------
    states : sequence of TaskState
    keeper : Keeper
    place : Place
    settings : Settings
    builders : sequence of Worker
        See `make_builders`.
    meters : sequence of Meter
    watch : callable
        Called with the session after each trial (`command.shown`).
    limit : TimeLimit, optional
        By default the minutes of the settings, from now on; the session leaves `joint_s` of it.
    joint_s : float
        To be left for runs of contested cuts, while there are any that may win.
    trials : int
        So far.
    failed : list of Trial
        Those of this session that gave no time.
    started : float
        When trials could begin (`time.monotonic`).
    ended : str
        Why there were no more trials.
    """

    states: Sequence[TaskState]
    keeper: Keeper
    place: Place
    settings: Settings
    builders: Sequence[Worker]
    meters: Sequence[Meter]
    watch: Callable[[Session], None] = lambda session: None
    limit: TimeLimit | None = None
    joint_s: float = 0.0
    trials: int = 0
    failed: list[Trial] = field(default_factory=list)
    started: float = 0.0
    ended: str = ""

    def __post_init__(self) -> None:
        self.limit = self.limit or TimeLimit(self.settings.minutes)

    def run(self) -> None:
        """Runs until trials, time or gains are used up; then the finals.

        What is under way when it ends, by a KeyboardInterrupt too, is dropped; the processes stay.
        """
        self.started = time.monotonic()
        self.target = self.place.resolved()[0]
        self._waiting: list[Job] = []
        self._thinkers = Thinkers(self.place, self.settings)
        with scratch_folder() as folder:
            self._shop = Workshop(self.builders, self.place, self.settings, folder)
            self._measurements = Measurements(self.meters, self._shop, self.settings)
            self._finals = Finals(self.states, self._shop, self._measurements, self.settings)
            try:
                self._restore_untuned()
                while self._step():
                    pass
                self.ended = self._why_over()
                self._thinkers.stop()
                self._finals.run(self._has_measured)
            finally:
                self._thinkers.stop()
                self._shop.abandon()
                self._measurements.stop()

    # ---- what a watcher may ask
    @property
    def seconds(self) -> float:
        """Since the session began, or the call of `tune` that it belongs to."""
        return self.limit.seconds

    @property
    def total_us(self) -> float:
        """The time of all launches, each with its best kernel so far."""
        return sum(s.task.count * s.current_us for s in self.states)

    @property
    def untuned_us(self) -> float:
        """The time of all launches untuned, predicted where not measured."""
        return sum(s.task.count * (s.untuned_us or s.task.predicted_us) for s in self.states)

    @property
    def is_over(self) -> bool:
        """Whether no trial is to begin."""
        return self.limit.is_near or self.trials >= self.settings.trials

    @property
    def is_partly_predicted(self) -> bool:
        """Whether `total_us` has kernels that were not measured yet."""
        return any(s.task.count and s.best_us is None for s in self.states)

    def _why_over(self) -> str:
        """Why no trial begins any more."""
        if self.limit.is_near:
            return "the time is up"
        if self.trials >= self.settings.trials:
            return "all trials are made"
        if any(s.propose() is not None for s in self._open):
            return f"no trial is expected to save {100 * self.settings.least_gain:g} % of the time"
        return "nothing is left to try"

    # ---- steps
    def _step(self) -> bool:
        """Collects what is done and begins what can be; whether there is something to wait for."""
        for job, answer in self._shop.collect():
            self._has_built(job, answer)
        for jobs, answer in self._measurements.collect():
            self._has_measured(jobs, answer)
        self._thinkers.collect()
        if self.limit.is_near:
            self._drop()
        if self.is_over:
            self._thinkers.stop()
        else:
            self._thinkers.begin(self._open, self._least_us)
        self._measure_next()
        self._build_next()
        busy = [*self._shop.busy, *self._measurements.busy, *self._thinkers.busy]
        if busy:
            wait_for(busy, POLL_S)
        return bool(busy)

    def _drop(self) -> None:
        """Forgets the trials that nothing was measured of."""
        for job in (*self._shop.abandon(), *self._measurements.drop(), *self._waiting):
            job.state.pending.discard(job.choice.text)
            self.trials -= 1
        self._waiting.clear()

    def _build_next(self) -> None:
        while self._shop.is_free and not self.is_over:
            ahead = len(self._waiting) + len(self._shop.busy)
            if ahead >= len(self.builders) + AHEAD * len(self.meters):
                return
            found = self._most_valuable()
            if found is None:
                return
            self.trials += 1
            self._shop.begin(*found)

    def _most_valuable(self) -> tuple[TaskState, Choice] | None:
        """The proposal that is expected to save most, if that is worth a trial."""
        found = [(s.propose(), s) for s in self._open]
        found = [(p, s) for p, s in found if p is not None]
        if not found:
            return None
        proposal, state = max(found, key=lambda f: (f[0].gain_us, f[1].task.predicted_us))
        if proposal.gain_us < self._least_us:
            return None
        state.take(proposal)
        return state, proposal.choice

    @property
    def _open(self) -> list[TaskState]:
        """The tasks whose trials have an untuned kernel beside them."""
        return [
            s
            for s in self.states
            if s.untuned_us is None or self._shop.library(s, DEFAULT) is not None
        ]

    @property
    def _least_us(self) -> float:
        """What a trial must be expected to save."""
        return self.settings.least_gain * self.total_us

    def _has_built(self, job: Job, answer: Answer) -> None:
        if answer.status == "ok":
            self._waiting.append(job)
        elif answer.status == LOST:
            raise TargetError(f"nothing can be built: {answer.why}")
        else:
            status = "build" if answer.status == "error" else answer.status
            self._note(job, status, why=answer.why)

    def _measure_next(self) -> None:
        for meter in self._measurements.free:
            position = self._next_waiting()
            if position is None:
                return
            job = self._waiting.pop(position)
            choices = [job.built]
            if job.choice.text != DEFAULT:
                choices = [self._shop.library(job.state, DEFAULT), job.built]
            self._measurements.begin(meter, choices, [job], self.settings.repeats)

    def _next_waiting(self) -> int | None:
        """What can be measured: the untuned kernel of a task comes first."""
        for position, job in enumerate(self._waiting):
            if job.choice.text == DEFAULT or job.state.untuned_us is not None:
                return position
        return None

    def _has_measured(self, jobs: list[Job], answer: Answer) -> None:
        if answer.status != "ok":
            for job in jobs:
                self._note(job, answer.status, why=answer.why)
            return
        for job, found in zip(jobs, answer.value[-len(jobs) :], strict=True):
            self._note_measured(job, found)

    def _note_measured(self, job: Job, found: Measurement) -> None:
        if found.why:
            self._note(job, "wrong", why=found.why, error=found.error)
        else:
            self._shop.keep(job)
            self._note(job, "ok", found.samples_us, found.spread, found.error, found.us)

    def _note(
        self,
        job: Job,
        status: str,
        samples_us: Iterable[float] = (),
        spread: float | None = None,
        error: float | None = None,
        us: float | None = None,
        why: str = "",
    ) -> None:
        trial = Trial(
            kind=job.choice.kind,
            text=job.choice.text,
            status=status,
            us=us,
            spread=spread,
            samples_us=tuple(samples_us),
            error=error,
            predicted_us=job.choice.predicted_us,
            why=why,
            date=datetime.date.today().isoformat(),
        )
        if status != "ok":
            self.failed.append(trial)
            logger.info("%s %s: %s: %s", job.state.task.name, trial.text[:80], status, why)
        self.keeper.add(job.state.task.workload, self.target, trial)
        job.state.tell([trial])
        if status != "ok":
            job.path.unlink(missing_ok=True)
        if not self.limit.is_near:  # what was dropped then is not taken up again
            self.limit.kept_s = self._finals.seconds() + self._wanted_joint_s
        self.watch(self)

    @property
    def _wanted_joint_s(self) -> float:
        contested = any(rival.is_open for state in self.states for rival in state.rivals)
        return self.joint_s if contested else 0.0

    # ---- the untuned kernels of a session before
    def _restore_untuned(self) -> None:
        """Builds the untuned kernels that were measured before: each trial runs beside one."""
        known = [s for s in self.states if s.untuned_us is not None]
        self._shop.have(((s, s.choices[0]) for s in known), lambda: self.limit.is_near)


CLEAN_US = 500.0  # beside each sample: the caches are cleaned (256 MB on an H200 take 100 us)


@dataclass(frozen=True)
class Finals:
    """Those of a session.

    Attributes
    ----------
    states : sequence of TaskState
    shop : Workshop
    measurements : Measurements
    settings : Settings
    """

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
            jobs = [Job(state, c, built.path, built) for c, built in found if built is not None]
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
