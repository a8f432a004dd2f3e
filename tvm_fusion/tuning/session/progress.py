"""Progress of a session on standard error: a bar where `rich` is installed and someone looks, else
lines.
"""

from __future__ import annotations

import math
import sys
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .session import Session

LINE_EVERY_S = 10.0


class Lines(AbstractContextManager):
    """A line every few seconds."""

    def __init__(self) -> None:
        self._said = 0.0

    def __exit__(self, *exception) -> None:
        return None

    def __call__(self, session: Session) -> None:
        if time.monotonic() - self._said >= LINE_EVERY_S:
            self._said = time.monotonic()
            print(status(session), file=sys.stderr, flush=True)


class Bar(AbstractContextManager):
    """A bar of `rich`."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._bar = Progress(*columns, transient=True)
        self._task = self._bar.add_task("tuning")

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *exception) -> None:
        self._bar.stop()

    def __call__(self, session: Session) -> None:
        self._bar.update(
            self._task,
            total=session.settings.trials,
            completed=session.trials,
            description=status(session),
        )


def status(session: Session) -> str:
    """Trials, best time, gain so far and time left, in a line."""
    best, untuned = session.total_us, session.untuned_us
    gain = f", {100 * (1 - best / untuned):.1f} % less than untuned" if untuned > best else ""
    left_s = session.limit.left_s
    left = f", {left_s / 60:.1f} min left" if math.isfinite(left_s) else ""
    partly = " (partly predicted)" if session.is_partly_predicted else ""
    trials = f"{session.trials} of {session.settings.trials} trials"
    return f"{trials}, kernels {best:.1f} us{partly}{gain}{left}"


def shown() -> Lines | Bar:
    """What fits standard error."""
    if sys.stderr.isatty():
        try:
            return Bar()
        except ImportError:
            pass
    return Lines()
