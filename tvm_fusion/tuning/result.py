"""What a tuning session returns."""

from __future__ import annotations

from dataclasses import dataclass

from ..plan.plan import FusionPlan
from .choices import DEFAULT
from .lookup import TunedKernels
from .state import TaskState


@dataclass(frozen=True)
class TunedTask:
    """What tuning found for one kernel.

    Attributes
    ----------
    name : str
    count : int
        Launches of the plan; 0 for a kernel of a cut that could be made otherwise.
    trials, failed : int
        All that the database has, and those of them that did not give a time.
    untuned_us, best_us : float or None
        Measured; None where nothing ran.
    choice : str
        The kernel to be used.
    """

    name: str
    count: int
    trials: int
    failed: int
    untuned_us: float | None
    best_us: float | None
    choice: str

    @property
    def is_timed(self) -> bool:
        """Whether it was measured, untuned and as it is to be used."""
        return self.untuned_us is not None and self.best_us is not None


@dataclass(frozen=True)
class TuneResult:
    """What a session did.

    Attributes
    ----------
    tasks : tuple of TunedTask
    plan : FusionPlan
        The plan as measurements settle it, kept in the database.
    trials : int
        Of this session.
    seconds : float
    interrupted : bool
        Whether it was ended by the user; the same call goes on.
    ended : str
        Why there were no more trials.
    """

    tasks: tuple[TunedTask, ...]
    plan: FusionPlan
    trials: int
    seconds: float
    interrupted: bool
    ended: str

    @property
    def untimed(self) -> tuple[TunedTask, ...]:
        """The plan's kernels that were not measured."""
        return tuple(t for t in self.tasks if t.count and not t.is_timed)

    @property
    def untuned_us(self) -> float:
        """Time of the plan's kernels untuned, without those that were not measured."""
        return sum(t.count * t.untuned_us for t in self.tasks if t.is_timed)

    @property
    def best_us(self) -> float:
        """Time of the same kernels tuned."""
        return sum(t.count * t.best_us for t in self.tasks if t.is_timed)


def tuned_task(state: TaskState, kernels: TunedKernels) -> TunedTask:
    """What the database has for a task, trials of other sessions that share it included."""
    trials = {trial.text: trial for trial in kernels.source.trials(state.task.workload)}
    untuned, best = trials.get(DEFAULT), kernels.trial(state.task.workload)
    if untuned is not None and not untuned.checked:
        untuned = None
    return TunedTask(
        state.task.name,
        state.task.count,
        len(trials),
        sum(trial.us is None for trial in trials.values()),
        untuned.us if untuned is not None else None,
        best.us if best is not None else None,
        best.text if best is not None else "none",
    )
