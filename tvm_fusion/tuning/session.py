"""A tuning session: which trial next, until the trials, the minutes or the gains are used up.

    states (one a task) -- the most valuable proposal --> builders --> measurer(s) --> database
          ^                                                                              |
          +------------------------------- results --------------------------------------+

Builders work ahead of the measurements. What is in the database already is not measured again; an
interrupt or a kill loses no more than the trials that run.
"""

from __future__ import annotations

import datetime
import itertools
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import tvm

from .building import BuildRequest, BuiltChoice, Place, build_choice, enter
from .choices import DEFAULT, Choice
from .measuring import Measurement, MeasureRequest
from .meters import Meter
from .processes import Answer, Worker, wait_for
from .settings import Settings
from .state import TaskState
from .trial_record import Trial

logger = logging.getLogger(__name__)

AHEAD = 2  # built choices that wait for each measurer
POLL_S = 0.5
STARTING_S = 60.0  # a process imports TVM and torch


class Keeper(Protocol):
    """Where trials are kept: `database.Database`."""

    def add(self, workload: tvm.tirx.PrimFunc, target: Any, trial: Trial) -> None: ...


@dataclass
class _Job:
    """One trial on its way."""

    state: TaskState
    choice: Choice
    path: Path
    built: BuiltChoice | None = None


@dataclass
class Session:
    """See the module docstring.

    Attributes
    ----------
    states : sequence of TaskState
    keeper : Keeper
    place : Place
    settings : Settings
    meters : sequence of Meter
    watch : callable
        Called with the session after each trial (`progress`).
    """

    states: Sequence[TaskState]
    keeper: Keeper
    place: Place
    settings: Settings
    meters: Sequence[Meter]
    watch: Callable[[Session], None] = lambda session: None
    trials: int = 0
    _libraries: dict[tuple[str, str], BuiltChoice] = field(default_factory=dict)
    _texts: dict[str, str] = field(default_factory=dict)

    def run(self) -> None:
        """Runs until trials, minutes or gains are used up; KeyboardInterrupt ends it cleanly."""
        self.started = time.monotonic()
        self.folder = Path(tempfile.mkdtemp(prefix="tvm_fusion_tune_"))
        self._numbers = itertools.count()
        count = self.settings.builders or max(1, (os.cpu_count() or 2) - 1)
        limit = (self.settings.build_memory_bytes,)
        self._builders = [Worker(f"builder {i}", (enter, limit)) for i in range(count)]
        self._building: dict[Worker, _Job] = {}
        self._waiting: list[_Job] = []
        self._measuring: dict[Worker, tuple[list[_Job], Meter]] = {}
        self.target = self.place.resolved()[0]
        try:
            self._restore_untuned()
            while self._step():
                pass
            self._finals()
        finally:
            for worker in (*self._builders, *(m.worker for m in self.meters)):
                worker.stop()
            shutil.rmtree(self.folder, ignore_errors=True)

    # ---- what a watcher may ask
    @property
    def seconds(self) -> float:
        """Since the session began."""
        return time.monotonic() - self.started

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
        limit = self.settings.minutes * 60
        return self.trials >= self.settings.trials or bool(limit and self.seconds >= limit)

    # ---- steps
    def _step(self) -> bool:
        """Collects what is done and begins what can be; whether there is something to wait for."""
        for worker, job in list(self._building.items()):
            if (answer := worker.collect()) is not None:
                del self._building[worker]
                self._has_built(job, answer)
        for worker, (jobs, _) in list(self._measuring.items()):
            if (answer := worker.collect()) is not None:
                del self._measuring[worker]
                self._has_measured(jobs, answer)
        self._measure_next()
        self._build_next()
        busy = [*self._building, *self._measuring]
        if busy:
            wait_for(busy, POLL_S)
        return bool(busy)

    def _build_next(self) -> None:
        for builder in self._builders:
            ahead = len(self._waiting) + len(self._building)
            if builder.busy:
                continue
            if self.is_over or ahead >= len(self._builders) + AHEAD * len(self.meters):
                return
            found = self._most_valuable()
            if found is None:
                return
            state, choice = found
            self.trials += 1
            self._build(builder, state, choice)

    def _most_valuable(self) -> tuple[TaskState, Choice] | None:
        """The proposal that is expected to save most, if that is worth a trial."""
        found = [(s.propose(), s) for s in self.states]
        found = [(p, s) for p, s in found if p is not None]
        if not found:
            return None
        proposal, state = max(found, key=lambda f: (f[0].gain_us, f[1].task.predicted_us))
        if proposal.gain_us < self.settings.least_gain * self.total_us:
            return None
        state.take(proposal)
        return state, proposal.choice

    def _build(self, builder: Worker, state: TaskState, choice: Choice) -> None:
        job = self._building[builder] = _Job(state, choice, self._new_path())
        self._send_build(builder, job)

    def _send_build(self, builder: Worker, job: _Job) -> None:
        text = self._text(job.state)
        request = BuildRequest(text, job.choice.kind, job.choice.text, self.place, job.path)
        limit = self.settings.build_timeout_s + STARTING_S
        builder.send(build_choice, (request,), limit)

    def _has_built(self, job: _Job, answer: Answer) -> None:
        if answer.status == "ok":
            job.built = answer.value
            self._waiting.append(job)
        else:
            status = "build" if answer.status == "error" else answer.status
            self._note(job, status, why=answer.why)

    def _measure_next(self) -> None:
        for meter in self.meters:
            if meter.worker.busy or not self._waiting:
                continue
            position = self._next_waiting()
            if position is None:
                return
            job = self._waiting.pop(position)
            untuned = self._libraries.get((job.state.task.key, DEFAULT))
            choices = [c for c in (untuned, job.built) if c is not None]
            self._send(meter, job.state, choices, [job], self.settings.repeats)

    def _next_waiting(self) -> int | None:
        """What can be measured: the untuned kernel of a task comes first."""
        for position, job in enumerate(self._waiting):
            if job.choice.text == DEFAULT or job.state.untuned_us is not None:
                return position
        return None

    def _send(
        self,
        meter: Meter,
        state: TaskState,
        choices: Sequence[BuiltChoice],
        jobs: list[_Job],
        repeats: int,
    ) -> None:
        request = MeasureRequest(
            self._text(state),
            state.task.outputs,
            tuple(choices),
            repeats,
            self.place,
            self.settings.seed,
        )
        meter.send(request, self.settings.run_timeout_s + STARTING_S)
        self._measuring[meter.worker] = (jobs, meter)

    def _has_measured(self, jobs: list[_Job], answer: Answer) -> None:
        if answer.status != "ok":
            for job in jobs:
                self._note(job, answer.status, why=answer.why)
            return
        for job, found in zip(jobs, answer.value[-len(jobs) :], strict=True):
            self._note_measured(job, found)

    def _note_measured(self, job: _Job, found: Measurement) -> None:
        if found.why:
            self._note(job, "wrong", why=found.why, error=found.error)
        else:
            self._libraries[job.state.task.key, job.choice.text] = job.built
            self._note(job, "ok", found.samples_us, found.spread, found.error, found.us)

    def _note(
        self,
        job: _Job,
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
            logger.info("%s %s: %s: %s", job.state.task.name, trial.text[:80], status, why)
        self.keeper.add(job.state.task.workload, self.target, trial)
        job.state.tell([trial])
        if status != "ok":
            job.path.unlink(missing_ok=True)
        self.watch(self)

    # ---- the untuned kernels of a session before, and the finals
    def _restore_untuned(self) -> None:
        """Builds the untuned kernels that were measured before: each trial runs beside one."""
        known = [s for s in self.states if s.untuned_us is not None]
        self._have((s, s.choices[0]) for s in known)

    def _have(self, wanted: Iterable[tuple[TaskState, Choice]]) -> None:
        """Builds the libraries that this session has not built yet."""
        left = [
            _Job(state, choice, self._new_path())
            for state, choice in wanted
            if (state.task.key, choice.text) not in self._libraries
        ]
        running: dict[Worker, _Job] = {}
        while left or running:
            for builder in self._builders:
                if left and not builder.busy:
                    job = running[builder] = left.pop(0)
                    self._send_build(builder, job)
            wait_for(list(running), POLL_S)
            for builder, job in list(running.items()):
                if (answer := builder.collect()) is not None:
                    del running[builder]
                    if answer.status == "ok":
                        self._libraries[job.state.task.key, job.choice.text] = answer.value
                    else:
                        logger.warning(
                            "%s %s: %s", job.state.task.name, job.choice.text, answer.why
                        )

    def _finals(self) -> None:
        """Times the best choices of each task beside the untuned one, with more samples."""
        states = [s for s in self.states if s.needs_final]
        finalists = {
            s.task.key: [Choice(t.kind, t.text, t.predicted_us) for t in s.finalists()]
            for s in states
        }
        self._have((s, choice) for s in states for choice in finalists[s.task.key])
        for state in states:
            built = [
                (choice, self._libraries[state.task.key, choice.text])
                for choice in finalists[state.task.key]
                if (state.task.key, choice.text) in self._libraries
            ]
            if len(built) > 1 and built[0][0].text == DEFAULT:
                self._final(state, built)

    def _final(self, state: TaskState, built: Sequence[tuple[Choice, BuiltChoice]]) -> None:
        meter = self.meters[0]
        jobs = [_Job(state, choice, library.path, library) for choice, library in built]
        libraries = [library for _, library in built]
        self._send(meter, state, libraries, jobs, self.settings.final_repeats)
        while (answer := meter.worker.collect()) is None:
            wait_for([meter.worker], POLL_S)
        del self._measuring[meter.worker]
        if answer.status != "ok":  # what was measured of each by itself stays
            logger.warning("%s: no final: %s", state.task.name, answer.why)
            return
        self._has_measured(jobs, answer)

    def _new_path(self) -> Path:
        return self.folder / f"{next(self._numbers)}.so"

    def _text(self, state: TaskState) -> str:
        """The workload as JSON."""
        key = state.task.key
        if key not in self._texts:
            self._texts[key] = tvm.ir.save_json(state.task.workload)
        return self._texts[key]
