"""tune(): from a model to a database of measured kernels and a plan that is settled by them."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import tvm
from tvm.s_tir.meta_schedule.builder import Builder
from tvm.s_tir.meta_schedule.cost_model import CostModel
from tvm.s_tir.meta_schedule.database import Database as Records
from tvm.s_tir.meta_schedule.runner import Runner

from ...check.sequential import Budget
from ...config import HardwareProfile, added_profiles
from ...errors import InputError, TargetError
from ...flow.functions import planned_functions
from ...flow.planned import Planned
from ...host import interrupts
from ...kernels.registry import added
from ..database import Database, check_place, find_database
from ..database.replay import module_of
from ..database.trial import LASTING
from ..measure.building import Place, make_builders
from ..measure.measuring import LocalMeter, Meter
from ..measure.processes import Worker, stop_all
from ..search.task_search import TaskState
from .choices import DEFAULT, TRACE_CHOICE, Choice, chosen, class_choices
from .contested import TunedFunction, local_worker
from .lookup import TunedKernels
from .result import TuneResult, failures_of, tuned_task
from .session import BATCH, Session, held_interrupts
from .settings import Settings, TimeLimit, load_settings
from .tasks import CLASS, Task

logger = logging.getLogger(__name__)

JOINT_SHARE = 0.25  # of the minutes, at most, for joint runs
INTERRUPT = "interrupted"
LEFT_TO_TVM = ("fallback", "stock")  # classes whose kernels are TVM's own schedules on a GPU
FAVOURITES = 2  # of each kernel class, tried early


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
    builder: Builder | None = None,
    runner: Runner | None = None,
    cost_model: CostModel | None = None,
    records: Records | None = None,
) -> TuneResult:
    """Measures choices for the kernels of a model's plan and keeps them in a database.

    Of a module of several public functions the kernels of all are tuned, equal ones once, and the
    plan of each is settled.

    `tvm_fusion.compile(model, target, database=database)` uses them, and so do pipelines: see
    `tvm_fusion.TuningDatabase` and `tvm_fusion.transform.Fuse`. A session that was interrupted or
    killed goes on where it was with the same call.

    Parameters
    ----------
    model, target, policy, example_inputs, dynamic_shapes
        As for `tvm_fusion.compile`.
    database : str or Path
        A database, an empty folder, or a path where none is yet: a new database is made there. It
        holds a folder for each device and version.
    settings : str, Path, mapping, Settings or None
        A file like `configs/tune_default.toml`, or values by name
        (`tuning.session.settings.Settings` has them all); what is not named is as in that file.
    trials : int, optional
        Most trials of this call, in place of the settings'.
    minutes : float, optional
        Most minutes of this call, in place of the settings'; planning and final measurements are
        included, and 0 is no limit.
    builders : sequence of Worker, optional
        What compiles kernels (`tuning.measure.building.make_builders`); by default processes on
        this machine that end with the session. What is given stays, for the next session.
    meters : sequence of Meter, optional
        What measures them (`tuning.remote.client.meters_of`: devices of other machines); by
        default a process on this machine that ends with the session.
    watch : callable, optional
        Called with the `Session` after each trial.
    builder, runner : Builder and Runner of MetaSchedule, optional
        In place of this package's; a builder needs a runner, and
        `LocalBuilder(f_build=tvm_fusion.tuning.build_candidate)` knows this package's candidates.
        What another runner measures is compared with nothing: its trials are kept as unchecked
        ones, and nothing is chosen by them until `tune` measures them itself.
    cost_model : CostModel of MetaSchedule, optional
        Ranks schedules; by default an `XGBModel` with `PerStoreFeature`. Configurations of kernel
        classes are ranked by this package's own.
    records : Database of MetaSchedule, optional
        Takes a record of each candidate as well.

    Returns
    -------
    TuneResult
        `print` shows what was tuned, the time before and after, and the folder; `.tasks` are the
        kernels, `.plan` is the plan as measurements settle it, or those of several functions by
        name.

    Raises
    ------
    ConfigError
        A setting is unknown or has no sense.
    InputError
        The model cannot be used, or has no kernel that could be tuned; the path of the database
        cannot be written, or holds something else.
    TargetError
        This machine cannot run what is tuned, and no `meters` are given.

    Examples
    --------
    >>> result = tvm_fusion.tune(model, "llvm", database="tuned", minutes=2)   # doctest: +SKIP
    >>> print(result)                                                          # doctest: +SKIP
    """
    for name, workers in (("builders", builders), ("meters", meters)):
        if workers is not None and not workers:
            raise InputError(
                f"{name}: none are given; None makes those of this machine; give some, or None"
            )
    if builder is not None and runner is None:
        raise InputError(
            "builder: what another builder made can only be measured by a runner that knows it: "
            "give one, such as ms.runner.LocalRunner()"
        )
    settings = load_settings(settings, trials=trials, minutes=minutes)
    limit = TimeLimit(settings.minutes)
    check_place(Path(database))  # before minutes are spent on a plan
    planned = planned_functions(model, target, policy, None, example_inputs, dynamic_shapes)
    first = next(iter(planned.values()))
    if meters is None and runner is None and not tvm.runtime.device_from_target(first.target).exist:
        raise TargetError(
            f"this machine has no {first.target.kind.name} device to tune on; "
            "tune on one that has it, or give --rpc HOST:PORT --key KEY"
        )
    keeper = find_database(database, first.hw, first.target)
    place = Place(target_text(target, first), first.policy, added(), added_profiles())
    kernels = TunedKernels(keeper, settings.certain_gain)
    functions = {name: TunedFunction(one, keeper, place, kernels) for name, one in planned.items()}
    tasks = each_once([function.tasks for function in functions.values()])
    states = [_state(task, first, settings, keeper) for task in tasks]
    states = [s for s in states if s is not None]
    for function in functions.values():
        function.add_rivals(states)
    if not states:
        raise InputError(
            "there is nothing to tune: the plan has no kernel with choices; compile it as it is"
        )
    own: list[Worker] = []  # processes that end with the session
    if builders is None:
        builders = make_builders(settings)
        own += builders
    if runner is not None:
        meters = []
    elif meters is None:
        meters = [LocalMeter()]
        own += [meter.worker for meter in meters]
    worker = local_worker(meters)
    joint_s = limit.share(JOINT_SHARE, settings.joint_s) if worker is not None else 0.0
    watch = watch or (lambda session: None)
    session = Session(
        states,
        keeper,
        place,
        settings,
        builders,
        meters,
        watch,
        limit,
        joint_s,
        builder,
        runner,
        cost_model,
        records,
    )
    ended, lost = "", None
    try:
        try:
            session.run()
            left = Budget(min(settings.joint_s, limit.left_s))
            for number, function in enumerate(functions.values()):
                function.run(worker, left.left_s / (len(functions) - number))
            ended = session.ended
        except KeyboardInterrupt:
            interrupts.handled()  # what was measured is settled, which takes stages of its own
        except TargetError as error:  # nothing is left to build or to measure on
            lost = error
        with held_interrupts() as came:
            stop_all(own)
            plans = {name: one.settle(settings.certain_gain) for name, one in functions.items()}
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
        module_of(task.workload)  # MetaSchedule wants a root block
        choices = [c for c, _ in class_choices(task.workload, planned.hw, planned.policy)]
    except Exception as why:  # of one kernel: compile falls back, too
        logger.warning("%s is not tuned: %s", task.name, why)
        return None
    known = [
        trial
        for trial in keeper.trials(task.workload)
        if trial.text != DEFAULT or trial.status in (*LASTING, "build")
    ]
    unchecked = [(t.text, t.us) for t in known if t.kind == TRACE_CHOICE and not t.checked]
    state = TaskState(
        task,
        choices,
        settings,
        is_evolved(task, planned.hw, settings),
        favourites(task, keeper, choices),
        seeds=tuple(sorted(unchecked, key=lambda one: one[1])[:BATCH]),
    )
    state.restore(trial for trial in known if trial.checked)
    return state


def is_evolved(task: Task, hw: HardwareProfile, settings: Settings) -> bool:
    """Whether schedules of TVM's space compete with a task's kernel: on a GPU where no class of
    this package writes it, on a CPU always.
    """
    on_gpu = hw.kind == "cuda"
    return "stock" in settings.spaces and (not on_gpu or task.kernel_class in LEFT_TO_TVM)


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
