"""One task on its way: what is known of it, which trials are worth their time, and the strategy by
which MetaSchedule asks for them.

    generate_measure_candidates    the untuned kernel, favourites of kernels like it, configurations
                                   of its class as the cost model and what was measured rank them;
                                   then batches of schedules (`evolve`)
    notify_runner_results          what came of them

A task ends, as far as MetaSchedule is concerned, when no trial is expected to save enough, or when
the session ends.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tvm import s_tir, tirx
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate

from ...errors import Unsupported
from ...kernels.cpu.contraction.panels import without_constants
from ..database.replay import module_of
from ..database.trial import Trial
from ..session.choices import DEFAULT, TRACE_CHOICE, Choice
from ..session.settings import Settings
from ..session.tasks import Task, without_stamps
from .evolve import Evolved, arguments
from .space import annotate
from .surrogate import Surrogate, expected_gain

logger = logging.getLogger(__name__)

OPEN = 1.15  # a cut whose kernels take longer than this many times those of the plan is given up
NOTHING = 0.01  # a batch of schedules that saves less of the time has brought nothing


@dataclass
class TaskState:
    """One task on its way.

    Attributes
    ----------
    choices : list of Choice
        Of its kernel class, `default` first.
    is_evolved : bool
        Whether schedules of TVM's space compete with its class.
    favourites : tuple of str
        Texts that were best for kernels like it: tried with `default`.
    rivals : list of Rival
        Where it is a kernel of other cuts than the plan's: those cuts.
    seeds : tuple of (text, us)
        Schedules that were measured elsewhere, or that nobody checked.
    trials : dict of str to Trial
        By text.
    pending : set of str
        Texts that are being tried.
    evolved_share : float
        Of the kernel's time, that the next batch of schedules is expected to save.
    is_closed : bool
        Whether there are no more trials of it in this session.
    """

    task: Task
    choices: list[Choice]
    settings: Settings
    is_evolved: bool = False
    favourites: tuple[str, ...] = ()
    rivals: list[Rival] = field(default_factory=list, repr=False)
    seeds: tuple[tuple[str, float], ...] = ()
    trials: dict[str, Trial] = field(default_factory=dict)
    pending: set[str] = field(default_factory=set)
    evolved_share: float = 0.0
    is_closed: bool = False

    def __post_init__(self) -> None:
        texts = [choice.like or choice.text for choice in self.choices]
        usual = self.choices[0].predicted_us or self.task.predicted_us
        predicted = [choice.predicted_us or usual for choice in self.choices]
        self._surrogate = Surrogate(texts, predicted, self.settings.spread)
        self.evolved_share = self.settings.evolved_gain if self.is_evolved else 0.0

    # ---- results
    @property
    def untuned_us(self) -> float | None:
        """Measured time of the untuned kernel."""
        trial = self.trials.get(DEFAULT)
        return trial.us if trial is not None else None

    @property
    def best_us(self) -> float | None:
        """The best measured time."""
        return min((t.us for t in self.trials.values() if t.us is not None), default=None)

    @property
    def current_us(self) -> float:
        """The best time of one launch, predicted where nothing was measured."""
        return self.best_us or self.task.predicted_us

    @property
    def left(self) -> int:
        """Trials that it may still have."""
        spent = len(self.trials) + len(self.pending)
        return 0 if self.broken or self.is_closed else max(0, self.settings.trials_per_task - spent)

    @property
    def broken(self) -> bool:
        """Whether not even the untuned kernel runs: there is nothing to compare with."""
        trial = self.trials.get(DEFAULT)
        return trial is not None and trial.us is None

    @property
    def weight(self) -> float:
        """Launches of the plan; a kernel of another cut counts as half of one while that cut may
        win.
        """
        if self.task.count:
            return self.task.count
        return 0.5 if any(rival.is_open for rival in self.rivals) else 0.0

    @property
    def total_us(self) -> float:
        """Of all launches of the plan that use the kernel."""
        return self.weight * self.current_us

    def restore(self, trials: Iterable[Trial]) -> None:
        """Takes what was measured in sessions before."""
        self.trials.update({t.text: t for t in trials})

    def tell(self, trial: Trial) -> None:
        """Takes a result of this session."""
        self.trials[trial.text] = trial
        self.pending.discard(trial.text)

    def finalists(self) -> list[Trial]:
        """The choices to be timed side by side, the untuned one first."""
        ok = [t for t in self.trials.values() if t.us is not None and t.text != DEFAULT]
        best = sorted(ok, key=lambda t: (t.us, t.text))[: self.settings.finalists]
        return [self.trials[DEFAULT], *best]

    @property
    def needs_final(self) -> bool:
        """Whether there are choices to tell apart that were not timed side by side."""
        if self.untuned_us is None or len(found := self.finalists()) < 2:
            return False
        return any(len(t.samples_us) < self.settings.final_repeats for t in found)

    # ---- the next trials
    def next_choices(self, count: int, least_us: float) -> list[Choice]:
        """Choices of the class to try at once, those that are expected to save most first; none
        where no trial is expected to save `least_us` of the plan's time.

        Each takes for granted that those before it turn out as expected.
        """
        count, known = min(count, self.left), DEFAULT in self.trials
        if not self.weight or not count:
            return []
        found = [] if known or DEFAULT in self.pending else [self.choices[0]]
        if "class" not in self.settings.spaces:
            return found
        tried = self.trials.keys() | self.pending
        left = {i: c for i, c in enumerate(self.choices) if c.text not in tried and i}
        found += [c for c in left.values() if c.text in self.favourites]
        left = {i: c for i, c in left.items() if c not in found}
        expected = {
            i: trial.us
            for i, choice in enumerate(self.choices)
            if (trial := self.trials.get(choice.text)) is not None and trial.us is not None
        }
        while left and len(found) < count:
            mean, deviation = self._surrogate.beliefs(expected)
            best_us = self.best_us or math.exp(mean[0])
            gains = {i: expected_gain(mean[i], deviation[i], best_us) for i in left}
            best = max(left, key=lambda i: (gains[i], -i))
            if self.weight * gains[best] < least_us:
                break
            found.append(left.pop(best))
            expected[best] = math.exp(mean[best])
        return found[:count]

    def evolved_gain_us(self, batch: int) -> float:
        """What a trial of the next batch of schedules is expected to save of the plan's time."""
        return 0.0 if not self.left else self.total_us * self.evolved_share / batch

    def judge(self, texts: Sequence[str], before_us: float | None) -> None:
        """All of a batch of schedules was tried; `before_us` was the kernel's best time then."""
        times = [self.trials[t].us for t in texts if t in self.trials and self.trials[t].us]
        if before_us is not None and min(times, default=before_us) > (1 - NOTHING) * before_us:
            self.evolved_share /= 2

    @property
    def schedules(self) -> list[tuple[str, float | None]]:
        """The schedules that were measured, with their microseconds."""
        return [(t.text, t.us) for t in self.trials.values() if t.kind == TRACE_CHOICE]


@dataclass(frozen=True, eq=False)
class Rival:
    """The kernels of two ways to cut one region.

    Attributes
    ----------
    now, other : tuple of TaskState
        Those of the plan and those of the other cut.
    launch_us : float
        What a launch costs beside its kernel.
    """

    now: tuple[TaskState, ...]
    other: tuple[TaskState, ...]
    launch_us: float

    @property
    def is_open(self) -> bool:
        """Whether the best times so far may still turn."""
        states = (*self.now, *self.other)
        if any(s.broken for s in states):
            return False
        if any(s.untuned_us is None for s in states):
            return True
        return self._time(self.other) <= OPEN * self._time(self.now)

    def _time(self, states: Sequence[TaskState]) -> float:
        return sum(s.current_us for s in states) + self.launch_us * len(states)


class Session(Protocol):
    """What a search knows of the session: what a trial has to save, when to end, what came of
    candidates.
    """

    settings: Settings

    @property
    def left(self) -> int: ...

    @property
    def is_over(self) -> bool: ...

    @property
    def least_us(self) -> float: ...

    def is_late_for(self, seconds: float) -> bool: ...

    def guarded(self, function: Callable, *arguments: Any, at_the_end: bool = False) -> Any: ...

    def proposed(self, state: Any, choices: Sequence[Choice]) -> list[Any]: ...

    def measured(self, trial: Any, candidate: MeasureCandidate, result: Any) -> None: ...


@derived_object
class TaskSearch(ms.search_strategy.PySearchStrategy):
    """See the module docstring."""

    def __init__(self, state: TaskState, session: Session) -> None:
        super().__init__()
        self.state, self.session = state, session
        self._evolved: Evolved | None = None
        self._batch = 1
        self._model: Any = None
        self._trials: list[Any] = []  # of the last batch, as the session has them
        self._schedules: list[str] = []  # of the last batch, and the best time before it
        self._before_us: float | None = None

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        self._target = context.target

    def pre_tuning(
        self,
        max_trials: int,
        num_trials_per_iter: int,
        design_spaces: Sequence[s_tir.Schedule],
        database: Any = None,
        cost_model: Any = None,
    ) -> None:
        """Takes the size of a batch and the model that ranks schedules."""
        self._batch, self._model = num_trials_per_iter, cost_model

    def post_tuning(self) -> None:
        """Nothing."""

    def generate_measure_candidates(self) -> list[MeasureCandidate] | None:
        """The next batch; None at the end."""
        return self.session.guarded(self._next) or None

    def notify_runner_results(
        self, candidates: Sequence[MeasureCandidate], results: Sequence[Any]
    ) -> None:
        """Takes what came of a batch."""
        self.session.guarded(self._tell, candidates, results, at_the_end=True)

    def clone(self) -> TaskSearch:
        """Another search of the same task."""
        return TaskSearch(self.state, self.session)

    def _next(self) -> list[MeasureCandidate]:
        session, count = self.session, min(self._batch, self.session.left)
        if session.is_over or count < 1:
            return []
        choices = self.state.next_choices(count, session.least_us)
        found = [(choice, self._configuration(choice)) for choice in choices]
        found = found or self._evolve(count)
        self._trials = session.proposed(self.state, [choice for choice, _ in found])
        return [candidate for _, candidate in found]

    def _configuration(self, choice: Choice) -> MeasureCandidate:
        sch = s_tir.Schedule(module_of(self.state.task.workload))
        annotate(sch, len(self.state.choices), self.state.choices.index(choice), choice.text)
        return MeasureCandidate(sch, arguments(sch))

    def _evolve(self, count: int) -> list[tuple[Choice, MeasureCandidate]]:
        """A batch of schedules, where that is worth its time."""
        state, session = self.state, self.session
        self._schedules = []
        gain_us = state.evolved_gain_us(self._batch)
        if gain_us < session.least_us or not gain_us or session.is_late_for(self._took_s):
            return []
        try:
            if self._evolved is None:
                self._evolved = self._search()
            proposed = self._evolved.next(min(count, state.left))
        except Unsupported as why:
            logger.info("%s: no schedules: %s", state.task.name, why)
            proposed = []
        if not proposed or self._took_s > session.settings.evolve_timeout_s:
            state.evolved_share = 0.0
        self._schedules = [text for text, _ in proposed]
        self._before_us = state.best_us
        return [(Choice(TRACE_CHOICE, text), candidate) for text, candidate in proposed]

    @property
    def _took_s(self) -> float:
        return self._evolved.seconds if self._evolved is not None else 0.0

    def _search(self) -> Evolved:
        state = self.state
        return Evolved(
            function_of(state.task.workload),
            self._target,
            self._model,
            known=state.schedules,
            seeds=state.seeds,
            trials=state.settings.trials_per_task,
            batch=self._batch,
            seed=state.settings.seed,
        )

    def _tell(self, candidates: Sequence[MeasureCandidate], results: Sequence[Any]) -> None:
        for trial, candidate, result in zip(self._trials, candidates, results, strict=True):
            self.session.measured(trial, candidate, result)
        self._trials = []
        if self._schedules and self._evolved is not None:
            self._evolved.tell([(t, us) for t, us in self.state.schedules if t in self._schedules])
            self.state.judge(self._schedules, self._before_us)
            self._schedules = []


def function_of(workload: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function that schedules of a workload are of."""
    return without_constants(without_stamps(workload))
