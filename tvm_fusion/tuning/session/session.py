"""A tuning session: MetaSchedule's task scheduler over the tasks of a plan, until the trials, the
time or the gains are used up.

    RoundRobin -- each task in turn --> TaskSearch (a PySearchStrategy): a batch of candidates
        |                                                     ^
        +--> Builder --> Runner --> a future of each candidate+     database: each trial at once

Builder and runner only ask for work and hand out promises: processes build and measure while the
scheduler goes on to other tasks, and all is driven by whoever waits (`step`). An interrupt, a limit
of time or an error is "no more candidates"; an interrupt or a kill loses no more than the trials
that run.
"""

from __future__ import annotations

import datetime
import logging
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

from ...errors import TargetError
from ..database.replay import module_of
from ..database.trial import MOST_US, Trial
from ..measure.building import POLL_S, Job, Place, Workshop
from ..measure.measuring import Measurement, Measurements, Meter
from ..measure.processes import LOST, Answer, Worker, scratch_folder, wait_for
from ..search.space import as_in_a_program, class_space, round_robin, tune_context
from ..search.task_search import TaskSearch, TaskState, function_of
from .choices import DEFAULT, TRACE_CHOICE, Choice
from .finals import Finals
from .settings import Settings, TimeLimit

logger = logging.getLogger(__name__)

MOST_TRIALS = 1 << 30
BATCH = 8  # candidates of a task at once
WARM_UP = 16  # measured schedules after which xgboost ranks others
EXCERPT = 600  # characters of an error of a runner that is not ours
DROPPED = ms.runner.RunnerResult(None, "dropped")


class Keeper(Protocol):
    """Where trials are kept: `database.Database`."""

    def add(self, workload: tvm.tirx.PrimFunc, target: Any, trial: Trial) -> None: ...


@dataclass
class Session:
    """See the module docstring.

    Attributes
    ----------
    builders : sequence of Worker
        See `make_builders`.
    watch : callable
        Called with the session after each trial (`command.shown`).
    limit : TimeLimit, optional
        By default the minutes of the settings, from now on; the session leaves `joint_s` of it.
    joint_s : float
        To be left for runs of contested cuts, while there are any that may win.
    builder, runner : ms.builder.Builder and ms.runner.Runner, optional
        In place of this package's. What a runner of MetaSchedule measures is checked by nobody: its
        trials are kept as unchecked ones.
    cost_model : ms.cost_model.CostModel, optional
        Ranks schedules; by default an `XGBModel`.
    records : ms.database.Database, optional
        Takes the record of each candidate as well.
    trials : int
        So far.
    failed : list of Trial
        Those of this session that gave no time.
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
    builder: Any = None
    runner: Any = None
    cost_model: Any = None
    records: Any = None
    trials: int = 0
    failed: list[Trial] = field(default_factory=list)
    ended: str = ""

    def __post_init__(self) -> None:
        self.limit = self.limit or TimeLimit(self.settings.minutes)
        self._batch: list[Job] = []  # proposed last: TVM hands it to the builder at once
        self._paths: dict[str, Job] = {}  # trials that are under way
        self._waiting: list[Job] = []  # built, to be measured
        self._error: BaseException | None = None
        self._interrupts: list[int] = []

    def run(self) -> None:
        """Runs until trials, time or gains are used up; then the finals.

        What is under way when it ends, by a KeyboardInterrupt too, is dropped; the processes stay.
        """
        self.target = self.place.resolved()[0]
        with scratch_folder() as folder:
            symbol = "main" if self.runner is not None else ""  # what runners of TVM call
            self._shop = Workshop(self.builders, self.place, self.settings, folder, symbol)
            self._measurements = Measurements(self.meters, self._shop, self.settings)
            self._finals = Finals(self.states, self._shop, self._measurements, self.settings)
            try:
                with held_interrupts() as self._interrupts:
                    try:
                        self._schedule()
                    finally:
                        if self._error is not None:
                            raise self._error
                if self._interrupts:
                    raise KeyboardInterrupt
                self.ended = self._why_over()
                if self.runner is None:
                    self._finals.run(self._has_measured)
            finally:
                self._shop.drop()
                self._measurements.stop()
                self._drop(self._paths.values())

    def _schedule(self) -> None:
        states = sorted(self.states, key=lambda s: -s.total_us)
        with as_in_a_program():
            round_robin().tune(
                [self._context(state) for state in states],
                [max(state.weight, 0.5) for state in states],
                max_trials_global=MOST_TRIALS,  # what is dropped is none, which TVM does not know
                max_trials_per_task=MOST_TRIALS,
                num_trials_per_iter=BATCH,
                builder=self.builder or KernelBuilder(self),
                runner=self.runner or CheckingRunner(self),
                measure_callbacks=[],
                database=None,
                cost_model=self.cost_model or ms.cost_model.XGBModel(num_warmup_samples=WARM_UP),
            )

    def _context(self, state: TaskState) -> ms.TuneContext:
        return tune_context(
            module_of(state.task.workload),
            self.target,
            class_space(len(state.choices)),
            TaskSearch(state, self),
            name=state.task.name,
            seed=self.settings.seed,
        )

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
    def is_partly_predicted(self) -> bool:
        """Whether `total_us` has kernels that were not measured yet."""
        return any(s.task.count and s.best_us is None for s in self.states)

    def _why_over(self) -> str:
        """Why no trial begins any more."""
        if self.limit.is_near:
            return "the time is up"
        if not self.left:
            return "all trials are made"
        if any(s.next_choices(1, 0.0) or s.evolved_gain_us(1) for s in self.states):
            return f"no trial is expected to save {100 * self.settings.least_gain:g} % of the time"
        return "nothing is left to try"

    # ---- what a search asks
    @property
    def left(self) -> int:
        """Trials that may still begin."""
        return max(0, self.settings.trials - self.trials)

    @property
    def is_over(self) -> bool:
        """Whether no trial is to begin."""
        return self.limit.is_near or not self.left or self.is_ending

    @property
    def is_ending(self) -> bool:
        """Whether it was interrupted, or failed."""
        return bool(self._interrupts) or self._error is not None

    @property
    def least_us(self) -> float:
        """What a trial must be expected to save."""
        return self.settings.least_gain * self.total_us

    def is_late_for(self, seconds: float) -> bool:
        """Whether something that takes so long would end too late."""
        return self.limit.left_s < self.limit.kept_s + seconds

    def guarded(self, function: Callable, *arguments: Any, at_the_end: bool = False) -> Any:
        """`function(*arguments)`, `at_the_end` too. What it raises ends the session, behind TVM's
        scheduler: an exception that passes through it may lose its type.
        """
        if self.is_ending and not at_the_end:
            return None
        try:
            return function(*arguments)
        except BaseException as error:
            self._error = self._error or error
            return None

    def proposed(self, state: TaskState, choices: Sequence[Choice]) -> list[Job]:
        """Choices of a task become trials, which TVM hands to the builder next."""
        self._batch = [self._shop.job(state, choice) for choice in choices]
        for job in self._batch:
            self.trials += 1
            state.pending.add(job.choice.text)
            self._paths[str(job.path)] = job
        return self._batch

    # ---- what builder and runner ask
    @property
    def batch(self) -> list[Job]:
        """The trials that were proposed last."""
        return self._batch

    def job_at(self, path: str) -> Job:
        """The trial whose library is, or will be, at a path."""
        return self._paths[path]

    def begin(self, job: Job) -> None:
        """Has a trial's library built; before it that of the untuned kernel beside which it is
        measured, if that is of a session before.
        """
        state = job.state
        if self.runner is None and not (
            DEFAULT in (job.choice.text, *state.pending)
            or self._shop.library(state, DEFAULT) is not None
            or self._shop.is_asked(state, DEFAULT)
        ):
            self._shop.begin(self._shop.job(state, state.choices[0], trial=False))
        self._shop.begin(job)

    def measured(self, job: Job, candidate: Any, result: Any) -> None:
        """Takes the result of a trial; what a runner that is not ours measured makes one. Its
        failures are not kept: they may be of the runner.
        """
        if job.result is None and self.runner is None:
            return  # the session ends: it is dropped
        self._paths.pop(str(job.path), None)
        if job.result is None:
            job.result = result
            samples = tuple(float(s) * 1e6 for s in result.run_secs or ())
            if result.error_msg is None and samples and all(0 < us < MOST_US for us in samples):
                self._note(job, "ok", Measurement(samples))
            else:
                why = result.error_msg or f"no time: {[float(s) for s in result.run_secs or ()]} s"
                self._note(job, "error", why=str(why)[-EXCERPT:], is_kept=False)
        trial = job.state.trials.get(job.choice.text)
        if self.records is not None and trial is not None and trial.ok:
            self._record(job, candidate, trial)

    def _record(self, job: Job, candidate: Any, trial: Trial) -> None:
        """Puts a trial into a database of MetaSchedule."""
        workload = job.state.task.workload
        func = function_of(workload) if job.choice.kind == TRACE_CHOICE else workload
        self.records.commit_tuning_record(
            ms.database.TuningRecord(
                candidate.sch.trace,
                self.records.commit_workload(module_of(func)),
                [us * 1e-6 for us in trial.samples_us],
                self.target,
                candidate.args_info,
            )
        )

    def step(self, seconds: float = POLL_S) -> None:
        """Collects what is done, begins what can be, and waits for something at most so long."""
        for job, answer in self._shop.collect():
            self._has_built(job, answer)
        for jobs, answer in self._measurements.collect():
            self._has_measured(jobs, answer)
        if self.limit.is_near:
            self._drop(self._lost())
        self._measure_next()
        if seconds:
            wait_for([*self._shop.busy, *self._measurements.busy], seconds)

    def build_all(self, jobs: Sequence[Job]) -> None:
        """Waits until libraries are there, or never will be."""
        while not self.is_ending and any(job.built is None and job.result is None for job in jobs):
            self.step()

    # ---- on the way
    def _lost(self, is_lost: Callable[[Job], bool] = lambda job: True) -> list[Job]:
        """The trials that nothing was measured of, which are forgotten."""
        lost = [*self._shop.drop(is_lost), *self._measurements.drop(is_lost)]
        lost += filter(is_lost, self._waiting)
        self._waiting = [job for job in self._waiting if job not in lost]
        return lost

    def _drop(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            if job.trial and job.result is None:
                job.result = DROPPED
                job.state.pending.discard(job.choice.text)
                self.trials -= 1

    def _has_built(self, job: Job, answer: Answer) -> None:
        if answer.status == LOST:
            raise TargetError(f"nothing can be built: {answer.why}; try the same command again")
        if answer.status != "ok":
            status = "build" if answer.status == "error" else answer.status
            if job.trial:
                self._note(job, status, why=answer.why)
            else:
                logger.warning("%s is left: %s", job.state.task.name, answer.why)
                job.state.is_closed = True
                self._drop(self._lost(lambda one: one.state is job.state))
        elif job.trial:
            self._waiting += [job] if self.runner is None else []
        else:
            self._shop.keep(job)

    def _measure_next(self) -> None:
        for meter in self._measurements.free:
            job = next(filter(self._can_be_measured, self._waiting), None)
            if job is None:
                return
            self._waiting.remove(job)
            choices = [job.built]
            if job.choice.text != DEFAULT:
                choices = [self._shop.library(job.state, DEFAULT), job.built]
            self._measurements.begin(meter, choices, [job], self.settings.repeats)

    def _can_be_measured(self, job: Job) -> bool:
        """The untuned kernel of a task comes first."""
        state = job.state
        known = state.untuned_us is not None and self._shop.library(state, DEFAULT) is not None
        return known or job.choice.text == DEFAULT

    def _has_measured(self, jobs: list[Job], answer: Answer) -> None:
        for position, job in enumerate(jobs):
            if answer.status != "ok":
                self._note(job, answer.status, why=answer.why)
                continue
            found = answer.value[position - len(jobs)]
            if not found.why:
                self._shop.keep(job)
            self._note(job, "wrong" if found.why else "ok", found, found.why)

    def _note(
        self,
        job: Job,
        status: str,
        found: Measurement | None = None,
        why: str = "",
        is_kept: bool = True,
    ) -> None:
        """Takes what came of a trial, and keeps it in the database."""
        ok = status == "ok"
        trial = Trial(
            kind=job.choice.kind,
            text=job.choice.text,
            status=status,
            us=found.us if ok else None,
            spread=found.spread if ok else None,
            samples_us=tuple(found.samples_us) if ok else (),
            error=found.error if found is not None else None,
            predicted_us=job.choice.predicted_us,
            why=why,
            date=datetime.date.today().isoformat(),
        )
        state = job.state
        if is_kept:
            self.keeper.add(state.task.workload, self.target, trial)
        state.tell(trial)
        job.result = job.result or ms.runner.RunnerResult(
            [us * 1e-6 for us in trial.samples_us] if ok else None, None if ok else why or status
        )
        if not ok:
            self.failed.append(trial)
            logger.info("%s %s: %s: %s", state.task.name, trial.text[:80], status, why)
            job.path.unlink(missing_ok=True)
        if state.broken:
            self._drop(self._lost(lambda one: one.state is state))
        if not self.limit.is_near:  # what was dropped then is not taken up again
            self.limit.kept_s = self._finals.seconds() + self._wanted_joint_s
        self.watch(self)

    @property
    def _wanted_joint_s(self) -> float:
        contested = any(rival.is_open for state in self.states for rival in state.rivals)
        return self.joint_s if contested else 0.0


@derived_object
class KernelBuilder(ms.builder.PyBuilder):
    """Has the kernels of candidates written and compiled in processes, each in a limit of time and
    memory. A result is the path where the library will be: `CheckingRunner` waits for it; another
    runner wants it there.

    TVM's `LocalBuilder` makes a new pool of processes for each batch, and waits for all of it.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session

    def build(self, build_inputs: Sequence[ms.builder.BuilderInput]) -> list[Any]:
        """Paths, or why there is none."""
        jobs = self.session.batch[: len(build_inputs)]
        self.session.guarded(self._begin, jobs)
        return [self._result(job) for job in jobs]

    def _result(self, job: Job) -> Any:
        why = job.result and job.result.error_msg
        if not why and self.session.runner is not None and job.built is None:
            why = DROPPED.error_msg
        return ms.builder.BuilderResult(None if why else str(job.path), why)

    def _begin(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self.session.begin(job)
        if self.session.runner is not None:
            self.session.build_all(jobs)


@derived_object
class CheckingRunner(ms.runner.PyRunner):
    """Has libraries checked against a float64 reference and timed beside the untuned kernel, in
    processes here or at servers.

    TVM's `LocalRunner` and `RPCRunner` time only: these know neither what a candidate should
    compute nor what ended a process.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session

    def run(self, runner_inputs: Sequence[ms.runner.RunnerInput]) -> list[Any]:
        """Promises of results."""
        jobs = [self.session.job_at(one.artifact_path) for one in runner_inputs]
        return [Promised(self.session, job) for job in jobs]


@derived_object
class Promised(ms.runner.PyRunnerFuture):
    """The result of a trial: whoever waits for it drives the session."""

    def __init__(self, session: Session, job: Job) -> None:
        super().__init__()
        self.session, self.job = session, job

    def done(self) -> bool:
        """Whether it is there."""
        self.session.guarded(self.session.step, 0.0)
        return self.job.result is not None or self.session.is_ending

    def result(self) -> Any:
        """Waits for it; at an end of the session it is that the trial was dropped."""
        while self.job.result is None and not self.session.is_ending:
            self.session.guarded(self.session.step)
        return self.job.result or DROPPED


@contextmanager
def held_interrupts() -> Iterator[list[int]]:
    """Within the block, SIGINT adds to the list that is yielded and does nothing else. Of a thread
    that is not the main one signals are none of its business: nothing is held.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)
