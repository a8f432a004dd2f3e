"""What a command is doing, on standard error while it does it.

Stages are records of the logger `tvm_fusion.progress`, which says nothing unless someone listens.
With `rich` on a terminal the running stage is a line with a clock that goes away at the end;
elsewhere a stage that has lasted for two seconds is one plain line.
"""

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any, TextIO

PATIENCE_S = 2.0
stages = logging.getLogger("tvm_fusion.progress")


@contextlib.contextmanager
def shown(file: TextIO | None = None) -> Iterator[None]:
    """Show the stages of what runs within."""
    file = file or sys.stderr
    handler = _live(file) or _Lines(file)
    before = stages.level, stages.propagate
    stages.setLevel(logging.INFO)
    stages.propagate = False
    stages.addHandler(handler)
    try:
        yield
    finally:
        stages.removeHandler(handler)
        stages.level, stages.propagate = before
        handler.close()


class _Lines(logging.Handler):
    """A line for each stage that takes long."""

    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self._file = file
        self._timer: threading.Timer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self._stop()
        self._timer = threading.Timer(PATIENCE_S, self._print, [record.getMessage()])
        self._timer.daemon = True
        self._timer.start()

    def close(self) -> None:
        self._stop()
        super().close()

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the file was closed
            print(f"tvm_fusion: {text} ...", file=self._file, flush=True)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class _Live(logging.Handler):
    """The running stage and its clock."""

    def __init__(self, progress: Any) -> None:
        super().__init__()
        self._progress, self._task = progress, None
        progress.start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(record.getMessage(), total=None)

    def close(self) -> None:
        self._progress.stop()
        super().close()


def _live(file: TextIO) -> _Live | None:
    if not file.isatty():
        return None
    try:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    except ImportError:
        return None
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return _Live(Progress(*columns, console=Console(file=file), transient=True))
