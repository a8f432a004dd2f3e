"""What a tuning session returns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...plan.plan import FusionPlan
from ..database.trial import Trial
from ..search.task_search import TaskState
from .choices import DEFAULT
from .lookup import TunedKernels

_SHOWN = 3  # kernels that a result prints, those that gained most
_WIDEST = 60  # characters of a choice there; traces are long
NUMBER = re.compile(r"[-+]?\d[\d.]*(e[-+]?\d+)?|\b(inf|nan)\b")


@dataclass(frozen=True)
class TunedTask:
    """What tuning found for one kernel.

    Attributes
    ----------
    name : str
    launches : int
        Of the plan; 0 for a kernel of a cut that could be made otherwise.
    trials, failed : int
        All that the database has, and those of them that did not give a time.
    untuned_us, best_us : float or None
        Measured; None where nothing ran.
    choice : str
        The kernel to be used.
    """

    name: str
    launches: int
    trials: int
    failed: int
    untuned_us: float | None
    best_us: float | None
    choice: str

    @property
    def is_timed(self) -> bool:
        """Whether it was measured, untuned and as it is to be used."""
        return self.untuned_us is not None and self.best_us is not None

    def __str__(self) -> str:
        if not self.is_timed:
            return f"  {self.name}: not measured"
        times_of = f"{self.launches} x " if self.launches > 1 else ""
        times = f"{times_of}{self.untuned_us:.1f} -> {self.best_us:.1f} us"
        choice = self.choice if len(self.choice) <= _WIDEST else self.choice[:_WIDEST] + "..."
        return f"  {self.name}: {times}, {self.trials} trials: {choice}"


@dataclass(frozen=True)
class Failures:
    """The trials of a session that gave no time, and why most of them did.

    Attributes
    ----------
    count : int
    commonest : int
        How many of them failed for the commonest cause.
    status, why : str
        Of one of these.
    """

    count: int
    commonest: int
    status: str
    why: str

    def __str__(self) -> str:
        return (
            f"{self.count} trials failed; {self.commonest} of them alike: {self.status}: {self.why}"
        )


@dataclass(frozen=True)
class TuneResult:
    """What a session did.

    Attributes
    ----------
    tasks : tuple of TunedTask
        The kernels of all functions, equal ones once.
    plan : FusionPlan, or dict of str to FusionPlan
        The plan as measurements settle it, kept in the database; of a module of several functions
        that of each, by name.
    trials : int
        Of this session.
    seconds : float
    interrupted : bool
        Whether it was ended by the user; the same call goes on.
    ended : str
        Why there were no more trials.
    failures : Failures or None
        Of this session, if there were any.
    functions : tuple of str
        What was tuned, by name; `main` for a model of one function.
    database : Path
        The folder that holds what was found.
    """

    tasks: tuple[TunedTask, ...]
    plan: FusionPlan | dict[str, FusionPlan]
    trials: int
    seconds: float
    interrupted: bool
    ended: str
    failures: Failures | None = None
    functions: tuple[str, ...] = ("main",)
    database: Path = field(kw_only=True)

    def __str__(self) -> str:
        """What was tuned, before and after, and how to use it, in ten lines at most."""
        timed = [t for t in self.tasks if t.launches and t.is_timed]
        best = sorted(timed, key=lambda t: t.launches * (t.best_us - t.untuned_us))
        lines = [self.done, self.times]
        lines += [str(task) for task in best[:_SHOWN]]
        if len(best) > _SHOWN:
            lines.append(f"  and {len(best) - _SHOWN} more: see .tasks")
        if self.failures is not None:
            lines.append(str(self.failures).splitlines()[0])
        if self.interrupted:
            lines.append("interrupted: the same call goes on where it was")
        folder = repr(str(self.database))
        lines.append(f"use them: tvm_fusion.compile(model, target, database={folder}), or")
        lines.append(f"with tvm_fusion.TuningDatabase({folder}): around a pipeline")
        return "\n".join(lines)

    @property
    def done(self) -> str:
        """The trials of this session, of which functions, where there are several, and its end."""
        names = ", ".join(self.functions)
        names = names if len(names) <= _WIDEST else f"{len(self.functions)} functions"
        of = f" for {names}" if len(self.functions) > 1 else ""
        return f"{self.trials} trials in {self.seconds:.0f} s{of}; {self.ended}"

    @property
    def times(self) -> str:
        """The time of the plan's kernels, before and after."""
        if not self.untuned_us:
            return "no kernel was measured"
        missing = f", without {len(self.untimed)} not measured" if self.untimed else ""
        gain = self.untuned_us / self.best_us
        return f"kernels: {self.untuned_us:.1f} -> {self.best_us:.1f} us, {gain:.2f}x{missing}"

    @property
    def untimed(self) -> tuple[TunedTask, ...]:
        """The plan's kernels that were not measured."""
        return tuple(t for t in self.tasks if t.launches and not t.is_timed)

    @property
    def untuned_us(self) -> float:
        """Time of the plan's kernels untuned, without those that were not measured."""
        return sum(t.launches * t.untuned_us for t in self.tasks if t.is_timed)

    @property
    def best_us(self) -> float:
        """Time of the same kernels tuned."""
        return sum(t.launches * t.best_us for t in self.tasks if t.is_timed)


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


def failures_of(failed: Sequence[Trial]) -> Failures | None:
    """Sum up failed trials; causes that differ in numbers only are the same."""
    alike: dict[tuple[str, str], list[Trial]] = {}
    for trial in failed:
        alike.setdefault((trial.status, NUMBER.sub("#", trial.why)), []).append(trial)
    if not alike:
        return None
    most = max(alike.values(), key=len)
    return Failures(len(failed), len(most), most[0].status, most[0].why)
