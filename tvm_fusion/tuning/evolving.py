"""Schedules of one task that MetaSchedule evolves, batch by batch, as a session sees them.

`Search` is one design space: what is known of it, and what it is asked. Processes think about it
(`thinking`). `Evolution` keeps what the searches of a task proposed and was not yet tried, and says
what the next schedule is worth: a share of the kernel's time, halved whenever a batch brought
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .proposing import Ask, propose
from .trial_record import Trial

NOTHING = 0.01  # a batch that saves less of the time has brought nothing


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


class Evolution:
    """Batches of one or several searches.

    Parameters
    ----------
    searches : iterable of Search
        Design spaces that compete: each is asked in turn, and left when it has nothing to say.
    share : float
        Of the kernel's time that a first batch is expected to save.
    """

    def __init__(self, searches: Iterable[Search], share: float) -> None:
        self._searches = list(searches)
        self._batch = max((s.batch for s in self._searches), default=1)
        self._share = share
        self._ready: list[str] = []
        self._best_before: float | None = None

    def next(self) -> str | None:
        """The schedule to try next; None while none is known."""
        return self._ready[0] if self._ready else None

    def take(self, text: str) -> None:
        """`text` is being tried."""
        self._ready.remove(text)

    def tell(self, trials: Iterable[Trial], best_us: float | None) -> None:
        """Takes results. `best_us` is the best time of the kernel so far, by whatever choice."""
        if self._best_before is None:
            self._best_before = best_us
        for trial in trials:
            for search in self._searches:
                proposed = trial.text in search.out
                search.tell(trial.text, trial.us)
                if proposed and not search.out:
                    self._judge(best_us)

    @property
    def free(self) -> list[Search]:
        """The searches that can be asked, those whose turn is next first."""
        return [search for search in self._searches if search.is_free]

    @property
    def expected_share(self) -> float:
        """The share of the kernel's time that the next schedule is expected to save."""
        return self._share / self._batch

    def found(self, search: Search, texts: Iterable[str]) -> None:
        """Takes what a search proposes; one that proposes nothing is left."""
        texts = [text for text in dict.fromkeys(texts) if not self._knows(text)]
        search.found(texts)
        self._searches.remove(search)
        if texts:
            self._searches.append(search)
            self._ready += texts

    def give_up(self, search: Search) -> None:
        """Leaves a search that failed."""
        self._searches.remove(search)

    def _knows(self, text: str) -> bool:
        """Whether another search proposes it just now."""
        return any(text in search.out for search in self._searches)

    def _judge(self, best_us: float | None) -> None:
        """Notes what a batch brought."""
        before, self._best_before = self._best_before, best_us
        if best_us is None or (before is not None and best_us > (1 - NOTHING) * before):
            self._share /= 2
