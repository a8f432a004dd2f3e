"""Progress on standard error: a bar where `rich` is installed and someone looks, else lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Progress(Protocol):
    """Shows what is being done."""

    def start(self, title: str) -> None:
        """The next step begins."""

    def done(self, result: str) -> None:
        """The step ended; one line about it."""


class Lines:
    """A line a step."""

    def __init__(self, steps: int) -> None:
        self.steps, self.step = steps, 0
        self.title, self.began = "", 0.0

    def start(self, title: str) -> None:
        self.step += 1
        self.title, self.began = title, time.perf_counter()

    def done(self, result: str) -> None:
        taken = time.perf_counter() - self.began
        line = f"[{self.step}/{self.steps}] {self.title} ({taken:.1f} s): {result}"
        print(line, file=sys.stderr, flush=True)


class Bar(Lines):
    """A bar of `rich`, with the lines above it."""

    def __init__(self, steps: int, progress: object) -> None:
        super().__init__(steps)
        self.progress = progress
        self.task = progress.add_task("", total=steps)

    def start(self, title: str) -> None:
        super().start(title)
        self.progress.update(self.task, description=title)

    def done(self, result: str) -> None:
        taken = time.perf_counter() - self.began
        self.progress.console.print(f"{self.title} ({taken:.1f} s): {result}", markup=False)
        self.progress.advance(self.task)


@contextmanager
def progress(steps: int) -> Iterator[Progress]:
    """Progress over a number of steps."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress
    except ImportError:
        yield Lines(steps)
        return
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield Lines(steps)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with RichProgress(*columns, console=console, transient=True) as bar:
        yield Bar(steps, bar)
