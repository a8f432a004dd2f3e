"""Schedules of one task that MetaSchedule evolves, batch by batch, as a session sees them.

`Search` is one design space: what is known of it, and what it is asked. Processes think about it
(`thinking`). `Evolution` keeps what the searches of a task proposed and was not yet tried, and says
what the next schedule is worth: a share of the kernel's time, halved for a search whenever a batch
of it brought nothing, or less than another search did. Trials go to those that promise most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import tvm

from ...config import HardwareProfile
from ...kernels.cpu.contraction.panels import without_constants
from ..measure.trial_record import Trial
from ..session.choices import TRACE_CHOICE
from ..session.settings import Settings
from ..session.tasks import Task, without_stamps
from .proposing import Ask, propose

NOTHING = 0.01  # a batch that saves less of the time has brought nothing
NEAR_BEST = 0.5  # of what the best search promises: one that promises less waits


class Search:
    """One design space of one task.

    Parameters
    ----------
    workload : str
        JSON of the PrimFunc without stamps.
    space : str
    seed : int
    seeds : sequence of (text, us)
        See `Evolving`.
    known : sequence of (text, us or None)
        Measured before; None for a failure.
    trials : int
        Most schedules to propose.
    batch : int
        Schedules a batch.
    propose : callable
        A function of a module that a process calls with a `Place` and a `proposing.Ask`: the next
        texts.
    """

    def __init__(
        self,
        workload: str,
        space: str,
        *,
        seed: int,
        seeds: Sequence[tuple[str, float]] = (),
        known: Sequence[tuple[str, float | None]] = (),
        trials: int,
        batch: int,
        propose: Callable = propose,
    ) -> None:
        self.space, self.batch = space, batch
        self.propose = propose
        self._workload, self._seed = workload, seed
        self._seeds = tuple(seeds)
        self._told = list(known)
        self._left = trials
        self.thinks = False
        self.out: set[str] = set()  # proposed and not measured

    @property
    def goes_on(self) -> bool:
        """Whether it may propose more, or what it proposed is still out."""
        return self._left > 0 or bool(self.out)

    @property
    def is_free(self) -> bool:
        """Whether it can be asked: it knows what came of all that it proposed."""
        return self._left > 0 and not self.thinks and not self.out

    def ask(self) -> Ask:
        """The request for the next batch; from now on it thinks."""
        self.thinks = True
        batch = min(self.batch, self._left)
        told = tuple(self._told)
        return Ask(self._workload, self.space, self._seed, told, self._left, batch, self._seeds)

    def found(self, texts: Iterable[str]) -> None:
        """Takes the answer to `ask`."""
        self.thinks = False
        self.out = set(texts)
        self._left -= len(self.out)

    def tell(self, text: str, us: float | None) -> None:
        """What came of a schedule that it, or another search of the task, proposed."""
        self.out.discard(text)
        self._told.append((text, us))


@dataclass
class _Worth:
    """What a search promises: a share of the kernel's time that its next batch saves.

    `before` is the kernel's best time when its last batch was found, `best` that of the batch.
    """

    share: float
    before: float = math.inf
    best: float = math.inf

    def begin(self, best_us: float | None) -> None:
        """A batch is found."""
        self.before, self.best = math.inf if best_us is None else best_us, math.inf

    def judge(self, best_us: float | None) -> None:
        """All of the batch was tried; `best_us` is the kernel's best time now."""
        is_best = best_us is None or self.best <= best_us
        if not (is_best and self.best < (1 - NOTHING) * self.before):
            self.share /= 2


class Evolution:
    """Batches of one or several searches.

    Parameters
    ----------
    searches : iterable of Search
        Design spaces that compete: each is asked while it promises half of what the best one does,
        and left when it has nothing to say.
    share : float
        Of the kernel's time that a first batch is expected to save.
    """

    def __init__(self, searches: Iterable[Search], share: float) -> None:
        self._worth = {search: _Worth(share) for search in searches}
        self._batch = max((s.batch for s in self._worth), default=1)
        self._ready: dict[str, _Worth] = {}
        self._best_us: float | None = None

    def next(self) -> str | None:
        """The schedule to try next; None while none is known."""
        return max(self._ready, key=lambda text: self._ready[text].share, default=None)

    def take(self, text: str) -> None:
        """`text` is being tried."""
        del self._ready[text]

    def tell(self, trials: Iterable[Trial], best_us: float | None) -> None:
        """Takes results. `best_us` is the best time of the kernel so far, by whatever choice."""
        if self._best_us is None and best_us is not None:
            for worth in self._worth.values():
                worth.before = best_us  # of batches that were found before anything was measured
        for trial in trials:
            for search, worth in self._worth.items():
                proposed = trial.text in search.out
                search.tell(trial.text, trial.us)
                if proposed and trial.us is not None:
                    worth.best = min(worth.best, trial.us)
                if proposed and not search.out:
                    worth.judge(best_us)
        self._best_us = best_us

    @property
    def free(self) -> list[Search]:
        """The searches that can be asked, those that promise most first."""
        least = NEAR_BEST * max((w.share for s, w in self._worth.items() if s.goes_on), default=0.0)
        found = [s for s, worth in self._worth.items() if s.is_free and worth.share >= least]
        return sorted(found, key=self.promise, reverse=True)

    def promise(self, search: Search) -> float:
        """The share of the kernel's time that a search's next schedule is expected to save."""
        return self._worth[search].share / self._batch

    @property
    def expected_share(self) -> float:
        """The share that the next schedule is expected to save; 0 where none is known."""
        text = self.next()
        return 0.0 if text is None else self._ready[text].share / self._batch

    def found(self, search: Search, texts: Iterable[str]) -> None:
        """Takes what a search proposes; one that proposes nothing is left."""
        texts = [text for text in dict.fromkeys(texts) if not self._knows(text)]
        search.found(texts)
        worth = self._worth[search]
        if texts:
            worth.begin(self._best_us)
            self._ready |= dict.fromkeys(texts, worth)
        else:
            self.give_up(search)

    def give_up(self, search: Search) -> None:
        """Leaves a search that failed."""
        del self._worth[search]

    def _knows(self, text: str) -> bool:
        """Whether another search proposes it just now."""
        return any(text in search.out for search in self._worth)


BATCH = 8
LEFT_TO_TVM = ("fallback", "stock")  # classes whose kernels are TVM's own schedules on a GPU


def evolution_of(
    task: Task, hw: HardwareProfile, settings: Settings, known: Sequence[Trial]
) -> Evolution | None:
    """The schedules that compete with a task's untuned kernel; None where nothing is evolved.

    On a GPU these are for the operators that no kernel class of this package writes; on a CPU for
    all.
    """
    spaces = [space for space in ("own", "stock") if space in settings.spaces]
    if not spaces or (hw.kind == "cuda" and task.kernel_class not in LEFT_TO_TVM):
        return None
    workload = tvm.ir.save_json(without_constants(without_stamps(task.workload)))
    traces = [t for t in known if t.kind == TRACE_CHOICE]
    tried = [(t.text, t.us) for t in traces if t.checked]
    unchecked = sorted((t for t in traces if not t.checked), key=lambda t: (t.us, t.text))
    seeds = [(t.text, t.us) for t in unchecked[:BATCH]]
    searches = [
        Search(
            workload,
            space,
            seed=settings.seed,
            seeds=seeds if space == spaces[0] else (),
            known=tried,
            trials=settings.trials_per_task,
            batch=BATCH,
        )
        for space in spaces
    ]
    return Evolution(searches, settings.evolved_gain)
