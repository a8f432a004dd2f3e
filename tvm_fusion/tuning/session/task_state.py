"""What is known of one task while it is tuned, and which choice is worth a trial next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..measure.trial_record import Trial
from ..search.surrogate import Surrogate, expected_gain
from ..search.task_schedules import Evolution, Search
from .choices import DEFAULT, TRACE_CHOICE, Choice
from .settings import Settings
from .tasks import Task

URGENT = float("inf")
OPEN = 1.15  # a cut whose kernels take longer than this many times those of the plan is given up


@dataclass(frozen=True, slots=True)
class Proposal:
    """A choice of a task, and the microseconds of the whole plan that it is expected to save."""

    choice: Choice
    gain_us: float


@dataclass
class TaskState:
    """One task on its way.

    Attributes
    ----------
    task : Task
    choices : list of Choice
        Of its kernel class, `default` first.
    settings : Settings
    evolution : Evolution, optional
        Where schedules are evolved for it.
    favourites : tuple of str
        Texts that were best for kernels like it: tried after `default`.
    rivals : list of Rival
        Where it is a kernel of other cuts than the plan's: those cuts.
    """

    task: Task
    choices: list[Choice]
    settings: Settings
    evolution: Evolution | None = None
    favourites: tuple[str, ...] = ()
    rivals: list[Rival] = field(default_factory=list, repr=False)
    trials: dict[str, Trial] = field(default_factory=dict)
    pending: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._position = {choice.text: i for i, choice in enumerate(self.choices)}
        texts = [choice.like or choice.text for choice in self.choices]
        usual = self.choices[0].predicted_us or self.task.predicted_us
        predicted = [choice.predicted_us or usual for choice in self.choices]
        self._surrogate = Surrogate(texts, predicted, self.settings.spread)

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
    def spent(self) -> int:
        """Trials, those that run included."""
        return len(self.trials) + len(self.pending)

    @property
    def broken(self) -> bool:
        """Whether not even the untuned kernel runs: there is nothing to compare with."""
        trial = self.trials.get(DEFAULT)
        return trial is not None and trial.us is None

    @property
    def is_done(self) -> bool:
        """Whether no trial is to follow: all are spent, or there is nothing to compare with."""
        return self.broken or self.spent >= self.settings.trials_per_task

    @property
    def weight(self) -> float:
        """Launches of the plan; a kernel of another cut counts as half of one while that cut may
        win.
        """
        if self.task.count:
            return self.task.count
        return 0.5 if any(rival.is_open for rival in self.rivals) else 0.0

    def restore(self, trials: Iterable[Trial]) -> None:
        """Takes what was measured in sessions before."""
        self.trials.update({t.text: t for t in trials})

    def tell(self, trials: Iterable[Trial]) -> None:
        """Takes results of this session."""
        trials = list(trials)
        for trial in trials:
            self.trials[trial.text] = trial
            self.pending.discard(trial.text)
        if self.evolution is not None:
            self.evolution.tell([t for t in trials if t.kind == TRACE_CHOICE], self.best_us)

    def finalists(self) -> list[Trial]:
        """The choices to be timed side by side, the untuned one first."""
        ok = [t for t in self.trials.values() if t.us is not None and t.text != DEFAULT]
        best = sorted(ok, key=lambda t: (t.us, t.text))[: self.settings.finalists]
        return [self.trials[DEFAULT], *best]

    @property
    def needs_final(self) -> bool:
        """Whether there are choices to tell apart that were not timed side by side."""
        if self.untuned_us is None or len(self.trials) < 2:
            return False
        least = self.settings.final_repeats
        return any(len(t.samples_us) < least for t in self.finalists())

    # ---- the next trial
    def propose(self) -> Proposal | None:
        """The choice that is expected to save most; None where nothing is left or worth it."""
        if self.is_done:
            return None
        if DEFAULT not in self.trials:
            first = self.choices[0]
            if DEFAULT in self.pending or not self.weight:
                return None
            return Proposal(first, URGENT)
        if not self.weight:
            return None
        found = [p for p in (self._of_class(), self._evolved()) if p is not None]
        return max(found, key=lambda p: p.gain_us, default=None)

    def take(self, proposal: Proposal) -> None:
        """The proposal becomes a trial."""
        self.pending.add(proposal.choice.text)
        if proposal.choice.kind == TRACE_CHOICE:
            self.evolution.take(proposal.choice.text)

    def _of_class(self) -> Proposal | None:
        tried = self.trials.keys() | self.pending
        left = [i for i, c in enumerate(self.choices) if c.text not in tried]
        if not left or "class" not in self.settings.spaces:
            return None
        for text in self.favourites:
            if (i := self._position.get(text)) in left:
                return Proposal(self.choices[i], URGENT)
        measured = {
            i: self.trials[choice.text].us
            for i, choice in enumerate(self.choices)
            if choice.text in self.trials and self.trials[choice.text].us is not None
        }
        mean, deviation = self._surrogate.beliefs(measured)
        gains = {i: expected_gain(mean[i], deviation[i], self.best_us) for i in left}
        best = max(left, key=lambda i: (gains[i], -i))
        return Proposal(self.choices[best], self.weight * gains[best])

    def promising(self) -> list[tuple[Search, float]]:
        """The searches that can be asked, and the microseconds of the whole plan that the next
        schedule of each is expected to save.
        """
        if self.evolution is None or self.is_done:
            return []
        return [(s, self._total_us * self.evolution.promise(s)) for s in self.evolution.free]

    def _evolved(self) -> Proposal | None:
        text = self.evolution.next() if self.evolution is not None else None
        if text is None:
            return None
        return Proposal(Choice(TRACE_CHOICE, text), self._total_us * self.evolution.expected_share)

    @property
    def _total_us(self) -> float:
        """Of all launches of the plan that use the kernel."""
        return self.weight * self.current_us


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
