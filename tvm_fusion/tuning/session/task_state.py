"""What is known of one task while it is tuned, and which choices are worth a trial next."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..database.trial import Trial
from ..search.surrogate import Surrogate, expected_gain
from .choices import DEFAULT, TRACE_CHOICE, Choice
from .settings import Settings
from .tasks import Task

OPEN = 1.15  # a cut whose kernels take longer than this many times those of the plan is given up
NOTHING = 0.01  # a batch of schedules that saves less of the time has brought nothing


@dataclass
class TaskState:
    """One task on its way.

    Attributes
    ----------
    task : Task
    choices : list of Choice
        Of its kernel class, `default` first.
    settings : Settings
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
