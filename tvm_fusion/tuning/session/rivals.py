"""Which kernels of other cuts are still worth trials: those of cuts that may yet win."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .contested import Contested, sides_of
from .task_state import TaskState
from .tasks import Task

OPEN = 1.15  # a cut whose kernels take longer than this many times those of the plan is given up


@dataclass(frozen=True, eq=False)
class Rival:
    """The kernels of two ways to cut one region.

    Attributes
    ----------
    now, other : tuple of TaskState
        Those of the plan and those of the other cut.
    launch_us : float
        What a launch costs beside its kernel.
    """

    now: tuple[TaskState, ...]
    other: tuple[TaskState, ...]
    launch_us: float

    @property
    def is_open(self) -> bool:
        """Whether the best times so far may still turn."""
        states = (*self.now, *self.other)
        if any(s.broken for s in states):
            return False
        if any(s.untuned_us is None for s in states):
            return True
        return self._time(self.other) <= OPEN * self._time(self.now)

    def _time(self, states: Sequence[TaskState]) -> float:
        return sum(s.current_us for s in states) + self.launch_us * len(states)


def rivals_of(
    cuts: Iterable[Contested],
    tasks: Sequence[Sequence[Task]],
    states: Iterable[TaskState],
    launch_us: float,
) -> list[Rival]:
    """The rivals of contested cuts, but those with a kernel that nothing can write.

    Parameters
    ----------
    cuts : iterable of Contested
    tasks : sequence of sequences of Task
        Of the plan, and of each cut's plan.
    states : iterable of TaskState
        Of these tasks, each once.
    launch_us : float
    """
    by_key = {state.task.key: state for state in states}
    rivals = []
    for _, now, other in sides_of(cuts, tasks):
        sides = [tuple(by_key.get(task.key) for task in side) for side in (now, other)]
        if None not in sides[0] and None not in sides[1]:
            rivals.append(Rival(*sides, launch_us))
    return rivals
