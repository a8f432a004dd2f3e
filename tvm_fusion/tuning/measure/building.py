"""Choices as libraries: written and compiled in processes, which a session gives its choices to."""

from __future__ import annotations

import itertools
import logging
import os
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle
import tvm
from tvm import s_tir, tirx

from ...config import (
    HardwareProfile,
    Policy,
    add_profile,
    added_profiles,
    load_policy,
    resolve_target,
)
from ...host.cores import available_cores
from ...kernels import registry
from ...kernels.cpu.contraction.panels import PANELS_ATTR, Panels, wanted_panels, without_constants
from ...runtime.build import cubin_cache
from ...runtime.build.build import build_functions
from ...runtime.build.lowering import APART_ATTR, SCHEDULED_ATTR
from ...runtime.build.version_names import launches_of
from ...runtime.calls.launch_count import launched_kernels
from ...runtime.timing.launch_kernels import symbol_of
from ...transform.apply.write_kernels import write_kernel
from ..database.replay import scheduled
from ..search.space import CONFIGURATION, TEXT
from ..search.task_search import TaskState
from ..session.choices import CLASS_CHOICE, TRACE_CHOICE, Choice, config_of
from ..session.settings import Settings
from ..session.tasks import CLASS, ROUNDING, TF32, without_stamps
from .processes import Answer, Worker, wait_for

logger = logging.getLogger(__name__)

POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Place:
    """What kernels are written for, in a form that goes to another process.

    Attributes
    ----------
    target : str
        The name or path of a device, or the JSON of a `tvm.target.Target`.
    classes : tuple
        Kernel classes that were registered beside this package's own (`registry.added`).
    profiles : tuple of HardwareProfile
        Devices that were registered (`config.added_profiles`).
    """

    target: str
    policy: Policy
    classes: tuple = ()
    profiles: tuple[HardwareProfile, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Classes go by value if they are those of a notebook or a script: no other process can
        import them from there.
        """
        return _received, (self.target, self.policy, cloudpickle.dumps(self.classes), self.profiles)

    def resolved(self) -> tuple[tvm.target.Target, HardwareProfile]:
        """The target and its profile; registers classes and profiles where they are not known."""
        for cls, kinds in self.classes:
            if cls.name not in registry.names():
                registry.register(cls, kinds)
        for profile in reversed(self.profiles):
            if profile not in added_profiles():
                add_profile(profile)
        if self.target.startswith("{"):
            import json

            return resolve_target(tvm.target.Target(json.loads(self.target)))
        return resolve_target(self.target)


def _received(target: str, policy: Policy, classes: bytes, profiles: tuple) -> Place:
    return Place(target, policy, cloudpickle.loads(classes), profiles)


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """A choice to build.

    Attributes
    ----------
    workload : str
        JSON of the PrimFunc (`tvm.ir.save_json`).
    kind, text : of the choice
    path : Path
        Where the library goes.
    symbol : str
        The name of its function; by default one that no other has.
    """

    workload: str
    kind: str
    text: str
    place: Place
    path: Path
    symbol: str = ""


@dataclass(frozen=True, slots=True)
class BuiltChoice:
    """A library with one function.

    Attributes
    ----------
    kernels : int
        That one call launches; 0 on a CPU.
    spill_bytes, registers : of its kernels, at most; None where not known
    panels : of the parameters that it takes packed, with their positions
    """

    path: Path
    symbol: str
    kernels: int
    spill_bytes: int | None = None
    registers: int | None = None
    panels: tuple[tuple[int, Panels], ...] = ()


def enter(memory_bytes: int) -> None:
    """Sets a builder up: it compiles one kernel at a time and gives way to measurements."""
    import resource  # of Unix only

    cubin_cache.compile_by(1)
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))


def build_choice(request: BuildRequest) -> BuiltChoice:
    """Writes and compiles a choice.

    Raises
    ------
    Unsupported
        The choice does not fit the workload.
    BuildError
        The kernel does not compile.
    """
    target, hw = request.place.resolved()
    workload = tvm.ir.load_json(request.workload)
    with target:
        kernel = written(workload, request.kind, request.text, hw, request.place.policy)
    panels = wanted_panels(kernel)
    kernel = kernel.without_attr(PANELS_ATTR) if panels else kernel
    symbol = request.symbol or symbol_of(kernel)
    mod = tvm.IRModule({symbol: kernel.with_attr("global_symbol", symbol)})
    library, resources = build_functions(mod, target)
    launched = launched_kernels(library).get(symbol, ())
    library.export_library(str(request.path))
    return BuiltChoice(
        request.path,
        symbol,
        launches_of(launched),
        max((r.spill_bytes for r in resources), default=None),
        max((r.registers for r in resources), default=None),
        tuple(panels.items()),
    )


def written(
    workload: tirx.PrimFunc, kind: str, text: str, hw: HardwareProfile, policy: Policy
) -> tirx.PrimFunc:
    """The kernel of a choice, without a name.

    Raises
    ------
    Unsupported
        The choice does not fit the workload.
    """
    if kind == TRACE_CHOICE:
        return scheduled(without_constants(without_stamps(workload)), text)
    name = str(workload.attrs[CLASS])
    if name == "stock":
        return without_constants(without_stamps(workload))
    config = config_of(workload, text, hw, policy)
    return write_kernel(without_stamps(workload), name, hw, policy, config)


def build_candidate(
    mod: tvm.IRModule, target: tvm.target.Target, params: Any = None
) -> tvm.runtime.Module:
    """What `LocalBuilder(f_build=...)` of MetaSchedule needs to build candidates of a session: a
    library with a function `main`, of a configuration that the root block names, or of a schedule.

    Raises
    ------
    Unsupported
        The class does not write that configuration.
    """
    hw, func = resolve_target(target)[1], mod["main"]
    if TEXT not in func.body.block.annotations:
        kernel = func.with_attr({SCHEDULED_ATTR: True, APART_ATTR: True})
    else:
        text = str(func.body.block.annotations[TEXT])
        sch = s_tir.Schedule(mod)
        for name in (TEXT, CONFIGURATION):
            sch.unannotate(sch.get_sblock(func.body.block.name_hint), name)
        workload = sch.mod["main"]
        stamps = workload.attrs
        policy = replace(
            load_policy(), rounding=str(stamps[ROUNDING]), allow_tf32=bool(stamps[TF32])
        )
        with target:
            kernel = written(workload, CLASS_CHOICE, text, hw, policy)
    kernel = kernel.with_attr("global_symbol", "main")
    return build_functions(tvm.IRModule({"main": kernel}), target)[0]


# ---- the builders of a session


def make_builders(settings: Settings) -> list[Worker]:
    """Processes that write and compile kernels, started when they are first needed."""
    count = settings.builders or max(1, available_cores() - 1)
    setup = (enter, (settings.build_memory_bytes,))
    return [Worker(f"builder {i}", setup, torch=False) for i in range(count)]


@dataclass(eq=False)
class Job:
    """One choice of a task on its way through a session.

    Attributes
    ----------
    path : Path
        Of its library.
    trial : bool
        Whether it is to be measured; else its library alone is wanted.
    result : tvm.s_tir.meta_schedule.runner.RunnerResult or None
        What came of it; None on the way.
    """

    state: TaskState
    choice: Choice
    path: Path
    trial: bool = True
    built: BuiltChoice | None = None
    result: Any = None


class Workshop:
    """Builds choices, in the order in which it is asked, and keeps the libraries.

    Parameters
    ----------
    folder : Path
        Where libraries are written.
    symbol : str
        The name of each library's function; by default one that no other has.
    """

    def __init__(
        self,
        builders: Sequence[Worker],
        place: Place,
        settings: Settings,
        folder: Path,
        symbol: str = "",
    ) -> None:
        self.builders, self.place, self.folder, self._symbol = builders, place, folder, symbol
        self._limit_s = settings.build_timeout_s
        self._queue: deque[Job] = deque()
        self._building: dict[Worker, Job] = {}
        self._took_s: list[float] = []
        self._libraries: dict[tuple[str, str], BuiltChoice] = {}
        self._texts: dict[str, str] = {}
        self._numbers = itertools.count()

    @property
    def busy(self) -> list[Worker]:
        """The builders that have something to do."""
        return list(self._building)

    @property
    def usual_s(self) -> float:
        """What building a choice takes, by those so far; 0 where there was none."""
        return statistics.median(self._took_s) if self._took_s else 0.0

    def job(self, state: TaskState, choice: Choice, trial: bool = True) -> Job:
        """A choice on its way."""
        return Job(state, choice, self.folder / f"{next(self._numbers)}.so", trial)

    def begin(self, job: Job) -> None:
        """Asks for the library of a choice."""
        self._queue.append(job)
        self._go_on()

    def is_asked(self, state: TaskState, text: str) -> bool:
        """Whether the library of a choice is on its way."""
        jobs = (*self._queue, *self._building.values())
        return any(job.state is state and job.choice.text == text for job in jobs)

    def have(self, wanted: Iterable[tuple[TaskState, Choice]]) -> None:
        """Builds the libraries that are not there; those that cannot be built are logged."""
        for state, choice in wanted:
            if self.library(state, choice.text) is None:
                self.begin(self.job(state, choice, trial=False))
        while self.busy:
            wait_for(self.busy, POLL_S)
            for job, answer in self.collect():
                if job.built is not None:
                    self.keep(job)
                else:
                    logger.warning("%s %s: %s", job.state.task.name, job.choice.text, answer.why)

    def collect(self) -> list[tuple[Job, Answer]]:
        """What was built since the last call, and what was not and why."""
        found = []
        for builder, job in list(self._building.items()):
            if (answer := builder.collect()) is not None:
                del self._building[builder]
                if answer.status == "ok":
                    job.built = answer.value
                    self._took_s.append(answer.seconds)
                found.append((job, answer))
        self._go_on()
        return found

    def drop(self, is_dropped: Callable[[Job], bool] = lambda job: True) -> list[Job]:
        """Ends what is being built and forgets what is to be; the jobs that are lost."""
        lost = [job for job in (*self._queue, *self._building.values()) if is_dropped(job)]
        self._queue = deque(job for job in self._queue if job not in lost)
        for builder, job in list(self._building.items()):
            if job in lost:
                builder.stop()
                del self._building[builder]
        return lost

    def keep(self, job: Job) -> None:
        """Keeps the library of a job: it is right."""
        self._libraries[job.state.task.key, job.choice.text] = job.built

    def library(self, state: TaskState, text: str) -> BuiltChoice | None:
        """The library of a choice, if it was built in this session."""
        return self._libraries.get((state.task.key, text))

    def text(self, state: TaskState) -> str:
        """The workload of a task as JSON."""
        key = state.task.key
        if key not in self._texts:
            self._texts[key] = tvm.ir.save_json(state.task.workload)
        return self._texts[key]

    def _go_on(self) -> None:
        for builder in self.builders:
            if not self._queue:
                return
            if builder not in self._building:
                job = self._building[builder] = self._queue.popleft()
                kind, text = job.choice.kind, job.choice.text
                request = BuildRequest(
                    self.text(job.state), kind, text, self.place, job.path, self._symbol
                )
                builder.send(build_choice, (request,), self._limit_s)
