"""What is being done, how much of how much, and how long it took.

    with stage("kernels written", 12) as one:
        one.step()

Stages are records of the logger `tvm_fusion.progress`, which says nothing unless someone listens
(`host.progress`); a stage that has ended is a line of the logger `tvm_fusion.time`, and all of them
within `table` are lines of it once more when that ends:

    compile                    9.12 s
      reading the model        2.10 s   23%
      planning                 5.60 s   61%
        lowering (3)           1.90 s   21%
        deciding (3)           3.20 s   35%
      building the kernels     1.31 s   14%
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

from . import interrupts

progress = logging.getLogger("tvm_fusion.progress")
times = logging.getLogger("tvm_fusion.time")

Item = TypeVar("Item")


@dataclass(eq=False, slots=True)
class Stage:
    """Work that is shown while it runs.

    Attributes
    ----------
    title : str
    total : int or None
        Steps, where their number is known.
    done : int
        Steps that are done.
    began : float
        By `time.monotonic`.
    ended : bool
    """

    title: str
    total: int | None = None
    done: int = 0
    began: float = field(default_factory=time.monotonic)
    ended: bool = False

    def step(self, count: int = 1) -> None:
        """Some more is done; raises KeyboardInterrupt if an interrupt got lost before."""
        interrupts.check()
        self.done += count
        self.tell()

    def tell(self) -> None:
        """Shows the stage as it is."""
        if progress.isEnabledFor(logging.INFO):
            progress.info("%s", self, extra={"stage": self})

    def __str__(self) -> str:
        if self.total is None:
            return f"{self.title}: {self.done}" if self.done else self.title
        return f"{self.title}: {self.done} of {self.total}"


@contextmanager
def stage(title: str, total: int | None = None) -> Iterator[Stage]:
    """Work with a title, within."""
    one = Stage(title, total)
    interrupts.check()
    one.tell()
    with _timed(title):
        try:
            yield one
        finally:
            one.ended = True
            one.tell()
            times.info("%s: %.3f s", one, time.monotonic() - one.began)


def stepped(title: str, items: Iterable[Item], total: int) -> Iterator[Item]:
    """The items, each of which is a step of a stage."""
    with stage(title, total) as one:
        for item in items:
            yield item
            one.step()


# ---- The table of all stages of something.


@dataclass(eq=False, slots=True)
class _Row:
    """Stages of one title within the same ones, together."""

    title: str
    seconds: float = 0.0
    times: int = 0
    inner: dict[str, _Row] = field(default_factory=dict)

    def lines(self, whole_s: float, depth: int = 0) -> Iterator[tuple[str, str, str]]:
        """Title, seconds and share of the whole, of this one and those within."""
        count = f" ({self.times})" if self.times > 1 else ""
        share = f"{self.seconds / max(whole_s, 1e-9):.0%}" if depth else ""
        yield f"{'  ' * depth}{self.title}{count}", f"{self.seconds:.2f} s", share
        for row in self.inner.values():
            yield from row.lines(whole_s, depth + 1)


_current: ContextVar[_Row | None] = ContextVar("stage", default=None)


@contextmanager
def _timed(title: str) -> Iterator[None]:
    """Adds what runs within to the table that is open in this thread, if there is one."""
    outer = _current.get()
    if outer is None:
        yield
        return
    row = outer.inner.setdefault(title, _Row(title))
    token, began = _current.set(row), time.monotonic()
    try:
        yield
    finally:
        _current.reset(token)
        row.seconds += time.monotonic() - began
        row.times += 1


@contextmanager
def table(title: str) -> Iterator[None]:
    """Logs the stages of this thread within, when all is done; within another table they are a part
    of that.
    """
    if _current.get() is not None or not times.isEnabledFor(logging.INFO):
        with _timed(title):
            yield
        return
    whole = _Row(title)
    token, began = _current.set(whole), time.monotonic()
    try:
        yield
    finally:
        _current.reset(token)
        whole.seconds = time.monotonic() - began
        rows = list(whole.lines(whole.seconds))
        width = max(len(name) for name, _, _ in rows)
        for name, seconds, share in rows:
            times.info("%s", f"{name:{width}}  {seconds:>9}  {share:>4}".rstrip())
