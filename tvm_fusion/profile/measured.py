"""profile(): a model is compiled as `compile` does, and its calls are recorded beside those of the
unfused module.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import tvm

from ..check.checked_sizes import assumed_inputs
from ..compilation.one_function import Wishes, finished, has_inputs, settled
from ..compilation.tuned_parts import TunedParts
from ..config import HardwareProfile, load_policy, resolve_target
from ..errors import InputError, TargetError
from ..flow.functions import Plans, planned_functions
from ..flow.planned import BuiltPlan, Planned
from ..host.stages import stage
from ..host.threads import thread_count
from ..ir.extents import ASSUMED_SYMBOLIC_EXTENT
from ..report.assemble import built_report
from ..report.facts import GroupReport
from ..runtime.build.version_names import launches_of
from ..runtime.calls.compiled_module import CompiledModule
from ..runtime.graphs.driver import CudaDriver
from ..runtime.timing.spans import Recorded, called, names_called, recorded_calls
from ..runtime.timing.timing import FUSED, UNFUSED, TimeReport, time_modules
from .facts import KernelProfile, ModuleProfile, Profile, of_calls, report_of
from .ranges import Ranges

BEFORE_AND_AFTER = (UNFUSED, FUSED)


def profile(
    model: Any,
    target: Any = None,
    *,
    policy: Any = None,
    plan: Plans = None,
    example_inputs: Any = None,
    dynamic_shapes: Any = None,
    database: Any = None,
    calls: int = 20,
) -> dict[str, Profile]:
    """Profiles each function of a model before and after fusion.

    Parameters
    ----------
    model, target, policy, plan, example_inputs, dynamic_shapes, database
        As for `tvm_fusion.compile`.
    calls : int
        How many calls are recorded of each module, and timed of each.

    Returns
    -------
    dict of str to Profile
        By function.

    Raises
    ------
    TargetError
        This machine lacks the device.
    InputError
        No inputs can be drawn for a function, or `calls` is below 1.
    """
    if calls < 1:
        raise InputError(f"calls={calls}: at least one call has to be recorded")
    functions = _functions(model, target, policy, plan, example_inputs, dynamic_shapes, database)
    return {name: _profiled(name, planned, calls) for name, planned in functions.items()}


@dataclass(frozen=True, slots=True)
class Called:
    """A launch of a call: what it computes, the kernels of a GPU, and the bytes of the ledger."""

    label: str
    kernels: tuple[str, ...]
    bytes: int | None


def call_once(model: Any, target: Any = None, **options: Any) -> list[Called]:
    """Calls the fused functions of a model once each, for a profiler that waits for it: between
    `cuProfilerStart` and `cuProfilerStop`, each launch in an NVTX range named by its group.

    Returns
    -------
    list of Called
        The launches, in order; options as of `profile`.
    """
    found = []
    for planned in _functions(model, target, **options).values():
        one = Ready.of(_fused(planned), planned.hw)
        inputs, _ = assumed_inputs(planned.mod, ASSUMED_SYMBOLIC_EXTENT)
        names = names_called(one.module, inputs)  # and kernels are loaded
        with _captured(one.module), ranges(one.module, one.groups):
            one.module.run(one.module.arguments(inputs))
        for name, (index, label) in zip(names, labelled(names, one.groups), strict=True):
            size = None if index is None else one.groups[index].bytes_fused
            found.append(Called(label, tuple(one.made.built.kernels.get(name, ())), size))
    return found


def _functions(
    model: Any,
    target: Any,
    policy: Any = None,
    plan: Plans = None,
    example_inputs: Any = None,
    dynamic_shapes: Any = None,
    database: Any = None,
) -> dict[str, Planned]:
    found = resolve_target(target)[0]
    if not tvm.runtime.device_from_target(found).exist:
        raise TargetError(
            f"this machine has no {found.kind.name} device to profile on: run it where there is "
            "one, or with --target llvm"
        )
    tuned = TunedParts(database).of
    functions = planned_functions(
        model, target, policy, plan, example_inputs, dynamic_shapes, tuned
    )
    for name, planned in functions.items():
        if not has_inputs(planned):
            raise InputError(
                f"function {name}: no inputs can be drawn for it, as it takes or gives objects: "
                "profile it in a program of your own, with tvm_fusion.profile.measured.ranges"
            )
    return dict(functions)


@dataclass(frozen=True, slots=True)
class Ready:
    """A built plan that can be called, and what the report says of its groups."""

    made: BuiltPlan
    module: CompiledModule
    groups: tuple[GroupReport, ...]
    limits_us: tuple[float | None, ...]

    @classmethod
    def of(cls, made: BuiltPlan, hw: HardwareProfile) -> Ready:
        """What is needed of a build."""
        groups = built_report(made).groups
        return cls(made, CompiledModule.of(made.built), groups, tuple(map(_limit_us, groups)))


def _fused(planned: Planned) -> BuiltPlan:
    """What `compile` builds: settled and checked as the policy wishes."""
    one = settled(planned, Wishes(load_policy(planned.policy).verify))
    with stage("building the kernels"):
        made = one.planned.build()
    return finished(made, one).made


def _profiled(name: str, planned: Planned, calls: int) -> Profile:
    made = {FUSED: _fused(planned)}
    with stage("building the unfused module"):
        made[UNFUSED] = replace(planned.as_it_is(), fuses_beside=False).build()
    ready = {which: Ready.of(made[which], planned.hw) for which in BEFORE_AND_AFTER}
    inputs, sizes = assumed_inputs(planned.mod, ASSUMED_SYMBOLIC_EXTENT)
    modules = {which: one.module for which, one in ready.items()}
    times = {n: TimeReport.of(t) for n, t in time_modules(modules, inputs, calls).items()}
    counted = all(size == ASSUMED_SYMBOLIC_EXTENT for size in sizes.values())
    found = {
        which: _recorded(one, inputs, calls, times[which], counted) for which, one in ready.items()
    }
    on_cpu = planned.hw.kind == "llvm"
    return Profile(
        function=name,
        target=planned.hw.name,
        **found,
        sizes=sizes,
        threads=thread_count() if on_cpu else None,
        memory_bytes_per_s=planned.hw.hbm_bytes_per_s,
    )


def _recorded(
    one: Ready, inputs: Sequence[Any], calls: int, call: TimeReport, counted: bool
) -> ModuleProfile:
    """A module with its calls recorded; `counted`: the ledger is of the sizes of the inputs."""
    built, module = one.made.built, one.module
    with stage("recording calls"):
        recorded = recorded_calls(module, inputs, built.kernels, calls)
    span, busy, gaps, example = of_calls(recorded)
    kernels = _kernels(one, recorded, counted)
    sizes = [kernel.bytes for kernel in kernels if kernel.bytes is not None]
    on_gpu = module.device.type == "cuda"
    return ModuleProfile(
        launches=sum(launches_of(built.kernels.get(span.name, ("",))) for span in example),
        call=call,
        span=span,
        busy=busy,
        gaps=gaps,
        kernels=kernels,
        bytes=sum(sizes) if sizes else None,
        memory_bytes=module.peak_memory_bytes,
        measured_memory_bytes=module.measure_peak_memory(*inputs) if on_gpu else None,
        example=example,
    )


def _kernels(one: Ready, recorded: Recorded, counted: bool) -> tuple[KernelProfile, ...]:
    calls, names = recorded.calls, [span.name for span in recorded.calls[0]]
    found = []
    for position, (index, label) in enumerate(labelled(names, one.groups)):
        time = report_of([call[position].busy_us for call in calls], recorded.clock)
        kernel = KernelProfile(names[position], label, None, time)
        if index is not None:
            group = one.groups[index]
            kernel = replace(
                kernel, kernel_class="unfused" if group.fallback else group.kernel_class
            )
            if counted:
                limit = one.limits_us[index]
                kernel = replace(kernel, bytes=group.bytes_fused, limit_us=limit)
        found.append(kernel)
    return tuple(found)


def labelled(names: Sequence[str], groups: Sequence[GroupReport]) -> list[tuple[int | None, str]]:
    """For each function that a call runs the index of its group, and a label.

    Groups that share a function run in the order of the plan; where it is called another number of
    times (in a loop, a branch) it stands for the first of them.
    """
    places: dict[str, list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        places[group.name].append(index)
    counts = {name: names.count(name) for name in places}
    seen: dict[str, int] = defaultdict(int)
    found: list[tuple[int | None, str]] = []
    for name in names:
        own = places.get(name)
        if not own:
            found.append((None, name))
            continue
        index = own[seen[name]] if counts[name] == len(own) else own[0]
        seen[name] += 1
        found.append((index, label_of(groups[index])))
    return found


def label_of(group: GroupReport) -> str:
    """What a group computes."""
    return group.label or ", ".join(group.composites or group.ops)


@contextmanager
def ranges(module: CompiledModule, groups: Sequence[GroupReport]) -> Iterator[None]:
    """Within, each launch of calls of a module stands in an NVTX range with the group's label, for
    Nsight Systems and Nsight Compute (`ranges.Ranges` says what that needs).

    Parameters
    ----------
    module : CompiledModule
        Calls of a CUDA graph are not seen: their launches are no calls of functions.
    groups : sequence of GroupReport
        Those of its report.
    """
    nvtx = Ranges()
    # groups that share a function take turns
    labels = {group.name: [] for group in groups}
    for group in groups:
        labels[group.name].append(label_of(group))
    turns = {name: itertools.cycle(found) for name, found in labels.items()}

    def note(name: str, before: bool) -> None:
        if before:
            nvtx.push(next(turns[name]) if name in turns else name)
        else:
            nvtx.pop()

    with called(module, note):
        yield


@contextmanager
def _captured(module: CompiledModule) -> Iterator[None]:
    """What a profiler that waits for `cuProfilerStart` sees; all of it on a CPU."""
    if module.device.type != "cuda":
        yield
        return
    driver = CudaDriver(module.device.index)
    with driver.current():
        driver.synchronize()
        driver.call("cuProfilerStart")
        try:
            yield
            driver.synchronize()
        finally:
            driver.call("cuProfilerStop")


def _limit_us(group: GroupReport) -> float | None:
    """The time of the resource that is needed longest; a launch alone is no limit of the device."""
    return max((us for name, us in group.terms.items() if name != "launch"), default=None)
