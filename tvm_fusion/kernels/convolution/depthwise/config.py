"""Configurations of the direct convolution kernel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DepthwiseConfig:
    """What a thread computes, and how many threads are a block.

    Attributes
    ----------
    channels : int
        Channels that a thread reads side by side.
    filters : int
        Filters of a thread: those of its channels where a filter has one, else of one group.
    columns : int
        Neighbouring positions of a thread along the innermost window.
    rows : int
        Positions along the next one that a thread walks down.
    lanes, tasks : int
        Threads of a block along filters, and along strips of positions.
    rolls : bool
        Whether an element of the data is read once for all taps of the rows that the thread walks
        down: their sums are held together.
    shared : bool
        Whether weights lie in shared memory, else in registers.
    """

    channels: int
    filters: int
    columns: int
    rows: int
    lanes: int
    tasks: int
    rolls: bool
    shared: bool

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.lanes * self.tasks
