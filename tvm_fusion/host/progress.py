"""What a command is doing, on standard error while it does it.

With `rich` on a terminal each running stage (`host.stages`) is a line with a bar, what is done of
what, and a clock, which go away at the end; elsewhere a stage that has lasted for two seconds is a
plain line, and another one every ten seconds while its count grows.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, TextIO

from .stages import Stage, progress
from .terminal import is_plain

PATIENCE_S = 2.0
AGAIN_S = 10.0
LEAST_S = 0.01  # between two looks


@contextlib.contextmanager
def shown(file: TextIO | None = None, quiet: bool = False) -> Iterator[None]:
    """Show the stages of what runs within, unless that is to be quiet."""
    if quiet:
        yield
        return
    file = file or sys.stderr
    handler = _live(file) or _Lines(file)
    before = progress.level, progress.propagate
    progress.setLevel(logging.INFO)
    progress.propagate = False
    progress.addHandler(handler)
    try:
        yield
    finally:
        progress.removeHandler(handler)
        progress.level, progress.propagate = before
        handler.close()


class _Lines(logging.Handler):
    """Lines for stages that take long; of stages within others the innermost that does."""

    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self._file = file
        self._running: list[Stage] = []
        self._timer: threading.Timer | None = None
        self._last, self._said, self._when = None, "", 0.0

    def emit(self, record: logging.LogRecord) -> None:
        one: Stage = record.stage
        if one.ended:
            self._running = [other for other in self._running if other is not one]
        elif one not in self._running:
            self._running.append(one)
        if not self._running:
            self._stop()
        elif self._timer is None:
            self._wait()

    def close(self) -> None:
        self._running = []
        self._stop()
        super().close()

    def _wait(self) -> None:
        self._timer = threading.Timer(max(PATIENCE_S, LEAST_S), self._look)
        self._timer.daemon = True
        self._timer.start()

    def _look(self) -> None:
        with self.lock:
            now = time.monotonic()
            long = [one for one in self._running if now >= one.began + PATIENCE_S]
            if long and (long[-1] is not self._last or now >= self._when + AGAIN_S):
                self._say(long[-1], now)
            self._timer = None
            if self._running:
                self._wait()

    def _say(self, one: Stage, now: float) -> None:
        text = str(one)
        if text != self._said:
            with contextlib.suppress(OSError, ValueError):  # the file was closed
                print(f"tvm_fusion: {text} ...", file=self._file, flush=True)
        self._last, self._said, self._when = one, text, now

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Live(logging.Handler):
    """The running stages with their bars and clocks."""

    def __init__(self, shown: Any) -> None:
        super().__init__()
        self._shown, self._tasks = shown, {}
        shown.start()

    def emit(self, record: logging.LogRecord) -> None:
        one: Stage = record.stage
        if one.ended:
            if one in self._tasks:
                self._shown.remove_task(self._tasks.pop(one))
            return
        count = str(one).removeprefix(one.title).removeprefix(": ")
        how = {"total": one.total, "completed": one.done, "count": count}
        if one in self._tasks:
            self._shown.update(self._tasks[one], description=one.title, **how)
        else:
            self._tasks[one] = self._shown.add_task(one.title, **how)

    def close(self) -> None:
        self._shown.stop()
        super().close()


def _live(file: TextIO) -> _Live | None:
    if is_plain(file):
        return None
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    except ImportError:
        return None
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[count]}", markup=False),
        TimeElapsedColumn(),
    )
    return _Live(Progress(*columns, console=Console(file=file), transient=True))
