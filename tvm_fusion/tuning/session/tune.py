"""tune(): from a model to a database of measured kernels and a plan that is settled by them."""

from __future__ import annotations

import json
import logging
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import tvm

from ...check.sequential import Budget
from ...errors import InputError, TargetError
from ...flow.functions import planned_functions
from ...flow.planned import Planned
from ...kernels.registry import added
from ...plan.decide.caution import measured_whole, unfused_times
from ...plan.decide.decide import caution_of
from ...plan.plan import FusionPlan
from ..database import Database, check_place, find_database
from ..measure.building import Place
from ..measure.measuring import LocalMeter, Meter
from ..measure.processes import Worker, stop_all
from ..measure.trial_record import LASTING
from ..measure.workshop import make_builders
from ..search.task_schedules import evolution_of
from .choices import DEFAULT, Choice, chosen, class_choices
from .contested import Contested, Weighed, contested, rivals_of, settled, weighed
from .joint import JointRuns, local_worker
from .lookup import TunedKernels, plan_key
from .result import TuneResult, failures_of, tuned_task
from .session import Session, TimeLimit
from .settings import Settings, load_settings
from .task_state import TaskState
from .tasks import CLASS, Task, tasks_of

logger = logging.getLogger(__name__)

JOINT_SHARE = 0.25  # of the minutes, at most, for joint runs
INTERRUPT = "interrupted"
FAVOURITES = 2  # of each kernel class, tried early
JOINT = "joint"  # beside the fields of a kept plan: the joint runs of its contested cuts


def tune(
    model: Any,
    target: Any = None,
    *,
    database: str | Path,
    settings: str | Path | Mapping[str, Any] | Settings | None = None,
    trials: int | None = None,
    minutes: float | None = None,
    policy: Any = None,
    example_inputs: Any = None,
    dynamic_shapes: Any = None,
    builders: Sequence[Worker] | None = None,
    meters: Sequence[Meter] | None = None,
    watch: Callable[[Session], None] | None = None,
) -> TuneResult:
    """See `tvm_fusion.tune`."""
    for name, workers in (("builders", builders), ("meters", meters)):
        if workers is not None and not workers:
            raise InputError(f"{name}: none are given; None makes those of this machine")
    settings = load_settings(settings, trials=trials, minutes=minutes)
    limit = TimeLimit(settings.minutes)
    check_place(Path(database))  # before minutes are spent on a plan
    planned = planned_functions(model, target, policy, None, example_inputs, dynamic_shapes)
    first = next(iter(planned.values()))
    if meters is None and not tvm.runtime.device_from_target(first.target).exist:
        raise TargetError(
            f"this machine has no {first.target.kind.name} device to tune on; "
            "tune on one that has it, or give --rpc HOST:PORT --key KEY"
        )
    keeper = find_database(database, first.hw, first.target)
    place = Place(target_text(target, first), first.policy, added())
    kernels = TunedKernels(keeper, settings.certain_gain)
    functions = {
        name: TunedFunction.of(one, keeper, place, kernels) for name, one in planned.items()
    }
    tasks = each_once([function.tasks for function in functions.values()])
    states = [_state(task, first, settings, keeper) for task in tasks]
    states = [s for s in states if s is not None]
    for function in functions.values():
        function.add_rivals(states)
    if not states:
        raise InputError("there is nothing to tune: the plan has no kernel with choices")
    own: list[Worker] = []  # processes that end with the session
    if builders is None:
        builders = make_builders(settings)
        own += builders
    if meters is None:
        meters = [LocalMeter()]
        own += [meter.worker for meter in meters]
    worker = local_worker(meters)
    joint_s = limit.share(JOINT_SHARE, settings.joint_s) if worker is not None else 0.0
    watch = watch or (lambda session: None)
    session = Session(states, keeper, place, settings, builders, meters, watch, limit, joint_s)
    ended, lost = "", None
    try:
        try:
            session.run()
            left = Budget(min(settings.joint_s, limit.left_s))
            for number, function in enumerate(functions.values()):
                function.run(worker, left.left_s / (len(functions) - number))
            ended = session.ended
        except KeyboardInterrupt:
            pass
        except TargetError as error:  # nothing is left to build or to measure on
            lost = error
        with held_interrupts() as came:
            stop_all(own)
            plans = {name: one.settle(settings) for name, one in functions.items()}
            tuned = tuple(tuned_task(state, kernels) for state in states)
    finally:
        stop_all(own)
    if lost is not None:
        raise lost
    interrupted = bool(came) or not ended
    return TuneResult(
        tuned,
        plans if len(plans) > 1 else plans["main"],
        session.trials,
        session.seconds,
        interrupted,
        ended or INTERRUPT,
        failures_of(session.failed),
        tuple(functions),
        database=Path(database),
    )


@dataclass(frozen=True, slots=True)
class TunedFunction:
    """What is tuned of one function of the model.

    Attributes
    ----------
    planned : Planned
    keeper : Database
    cuts : list of Contested
        Of its plan.
    tasks : list of lists of Task
        Of the plan, and of each cut's plan.
    key : str
        Of its plan in the database.
    runs : JointRuns
        Of the cuts.
    """

    planned: Planned
    keeper: Database
    cuts: list[Contested]
    tasks: list[list[Task]]
    key: str
    runs: JointRuns

    @classmethod
    def of(
        cls, planned: Planned, keeper: Database, place: Place, kernels: TunedKernels
    ) -> TunedFunction:
        """With what the database has of it."""
        graph, hw, policy = planned.graph, planned.hw, planned.policy
        cuts = contested(graph, planned.plan, planned.alone, hw, policy)
        plans = (planned.plan, *(cut.plan for cut in cuts))
        tasks = [tasks_of(planned.low, graph, plan, policy, hw) for plan in plans]
        key, runs = plan_key(planned.mod, hw, policy), JointRuns(planned, place, kernels)
        runs.restore((keeper.plan(key) or {}).get(JOINT))
        return cls(planned, keeper, cuts, tasks, key, runs)

    def add_rivals(self, states: Sequence[TaskState]) -> None:
        """Tell the states of its kernels which cuts they are for."""
        for rival in rivals_of(self.cuts, self.tasks, states, self.planned.hw.queued_launch_us):
            for state in rival.other:
                state.rivals.append(rival)

    def run(self, worker: Worker | None, seconds: float) -> None:
        """Run the cuts both ways with their tuned kernels."""
        self.runs.run(self._weighed(), worker, seconds)

    def settle(self, settings: Settings) -> FusionPlan:
        """Keep, and return, the plan as measurements settle it."""
        measured = self._weighed()
        plan = settled_plan(self.planned, measured, self.runs, settings)
        self.keeper.save_plan(self.key, plan.to_dict() | {JOINT: self.runs.to_dict(measured)})
        return plan

    def _weighed(self) -> list[Weighed]:
        return weighed_cuts(self.planned, self.cuts, self.tasks, self.runs.kernels)


def each_once(functions: Iterable[Sequence[Sequence[Task]]]) -> list[Task]:
    """The tasks of the plans of functions (the first of each), equal ones with the launches of all;
    then those of other ways to cut them, with 0 launches each.
    """
    found: dict[str, Task] = {}
    plans, others = [], []
    for first, *rest in functions:
        plans += first
        others += chain.from_iterable(rest)
    for task in plans:
        if (known := found.get(task.key)) is not None:
            groups = (*known.groups, *task.groups)
            task = replace(task, count=known.count + task.count, groups=groups)
        found[task.key] = task
    for task in others:
        found.setdefault(task.key, replace(task, count=0))
    return list(found.values())


def _state(task: Task, planned: Planned, settings: Settings, keeper: Database) -> TaskState | None:
    """The state of a task with what the database has; None where it cannot be written."""
    try:
        choices = [c for c, _ in class_choices(task.workload, planned.hw, planned.policy)]
    except Exception as why:  # of one kernel: compile falls back, too
        logger.warning("%s is not tuned: %s", task.name, why)
        return None
    known = [
        trial
        for trial in keeper.trials(task.workload)
        if trial.text != DEFAULT or trial.status in (*LASTING, "build")
    ]
    evolution = evolution_of(task, planned.hw, settings, known)
    state = TaskState(task, choices, settings, evolution, favourites(task, keeper, choices))
    state.restore(trial for trial in known if trial.checked)
    return state


def weighed_cuts(
    planned: Planned,
    cuts: Sequence[Contested],
    tasks: Sequence[Sequence[Task]],
    kernels: TunedKernels,
) -> list[Weighed]:
    """The contested cuts with the times of their tuned kernels; `tasks` are those of the plan and
    of each cut's.
    """

    def us_of(task: Task) -> float | None:
        trial = kernels.trial(task.workload)
        return trial.us if trial is not None else None

    return weighed(cuts, tasks, us_of, planned.hw.queued_launch_us)


def settled_plan(
    planned: Planned, cuts: Sequence[Weighed], runs: JointRuns, settings: Settings
) -> FusionPlan:
    """The plan with its contested cuts decided by joint runs, or by the times of tuned kernels."""
    found = [(one, runs.found(one)) for one in cuts]
    plan = settled(planned.graph, planned.plan, found, settings.certain_gain)
    if plan.groups == planned.plan.groups or plan.evidence is None:
        return plan
    caution = caution_of(planned.hw, planned.policy)
    return measured_whole(planned.graph, plan, unfused_times(planned.alone), caution)


def target_text(target: Any, planned: Planned) -> str:
    """A target as a text that another process resolves to the same."""
    if isinstance(target, str | Path):
        return str(target)
    if target is None:
        return "cuda" if planned.hw.kind == "cuda" else "llvm"
    return json.dumps(json.loads(str(target)))


def favourites(task: Task, keeper: Database, choices: Sequence[Choice]) -> tuple[str, ...]:
    """The choices that won most often for other workloads of the same kernel class, of those that
    are offered here.
    """
    offered = {choice.text for choice in choices}
    won: Counter[str] = Counter()
    for workload in keeper.workloads():
        if str(workload.attrs.get(CLASS, "")) != task.kernel_class:
            continue
        trial = chosen(keeper.trials(workload), 0.0)
        if trial is not None and trial.text != DEFAULT and trial.text in offered:
            won[trial.text] += 1
    return tuple(text for text, _ in sorted(won.items(), key=lambda x: (-x[1], x[0]))[:FAVOURITES])


@contextmanager
def held_interrupts() -> Iterator[list[int]]:
    """Within the block, SIGINT adds to the list that is yielded and does nothing else. Of a thread
    that is not the main one signals are none of its business: nothing is held.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)
