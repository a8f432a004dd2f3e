"""What is being done, how much of how much, and how long it took.

    with stage("kernels written", 12) as one:
        one.step()

Stages are records of the logger `tvm_fusion.progress`, which says nothing unless someone listens
(`host.progress`); a stage that has ended is a line of the logger `tvm_fusion.time`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
