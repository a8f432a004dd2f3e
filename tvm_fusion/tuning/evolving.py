"""Schedules of one task that MetaSchedule evolves, batch by batch.

`evolve.Evolving` proposes; this keeps what was proposed and not yet tried, and says what the next
batch is worth: a share of the kernel's time, halved whenever a batch brought nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from .trial_record import Trial

NOTHING = 0.01  # a batch that saves less of the time has brought nothing


class Proposer(Protocol):
    """What `evolve.Evolving` is to a session."""

    def ask(self, n: int) -> list[str]: ...

    def tell(self, results: Iterable[tuple[str, float | None]]) -> None: ...


class Evolution:
    """Batches of one or several proposers.

    Parameters
    ----------
    proposers : sequence of Proposer
        Design spaces that compete: each is asked in turn, and left when it has nothing to say.
    batch : int
        Schedules a batch.
    share : float
        Of the kernel's time that a first batch is expected to save.
    """

    def __init__(self, proposers: Iterable[Proposer], batch: int, share: float) -> None:
        self._proposers = list(proposers)
        self._batch, self._share = batch, share
        self._turn = 0
        self._ready: list[tuple[str, Proposer]] = []
        self._out: dict[str, Proposer] = {}
        self._results: dict[int, list[tuple[str, float | None]]] = {}
        self._best_before: float | None = None

    def next(self) -> str | None:
        """The schedule to try next; None while a batch is out, or when there are no more."""
        if not self._ready and not self._out:
            self._ask()
        return self._ready[0][0] if self._ready else None

    def take(self, text: str) -> None:
        """`text` is being tried."""
        for entry in self._ready:
            if entry[0] == text:
                self._ready.remove(entry)
                self._out[text] = entry[1]
                return

    def tell(self, trials: Iterable[Trial], best_us: float | None) -> None:
        """Takes results; those of a whole batch go to its proposer together.

        `best_us` is the best time of the kernel so far, by whatever choice.
        """
        for trial in trials:
            proposer = self._out.pop(trial.text, None)
            if proposer is not None:
                self._results.setdefault(id(proposer), []).append((trial.text, trial.us))
        if self._out or self._ready:
            return
        for proposer in self._proposers:
            if results := self._results.pop(id(proposer), None):
                proposer.tell(results)
                self._judge(best_us)

    @property
    def expected_share(self) -> float:
        """The share of the kernel's time that the next schedule is expected to save."""
        return self._share / self._batch

    def _judge(self, best_us: float | None) -> None:
        """Notes what a batch brought."""
        before, self._best_before = self._best_before, best_us
        if best_us is None or (before is not None and best_us > (1 - NOTHING) * before):
            self._share /= 2

    def _ask(self) -> None:
        while self._proposers:
            proposer = self._proposers[self._turn % len(self._proposers)]
            texts = proposer.ask(self._batch)
            if texts:
                self._turn += 1
                self._ready = [(text, proposer) for text in texts]
                return
            self._proposers.remove(proposer)
