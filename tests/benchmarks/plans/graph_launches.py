"""Which launches and plans of a graph are measured, and their kernels, built in any process."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path

import tvm

from tvm_fusion.check.plan_runner import specs_of
from tvm_fusion.config import HardwareProfile, Policy, load_policy, resolve_target
from tvm_fusion.ir.graph import FusionGraph
from tvm_fusion.plan.decide.decide import decide
from tvm_fusion.plan.search.search import search
from tvm_fusion.plan.search.solution import Solution, copies, is_kernel, members_of
from tvm_fusion.runtime.timing.launch_kernels import (
    Kernel,
    LaunchSpec,
    LaunchWriter,
    build_launches,
)

from .random_graphs import graph_of
from .space import PlanSpace

ENOUGH = 1000  # random plans of a graph that has too many to list


@dataclass(frozen=True, slots=True)
class Choice:
    """How much of a graph is measured.

    Attributes
    ----------
    target : name of the target
    launches, plans : most launches and plans of a graph
    everything : all plans that the kernels allow, those that the model likes first
    """

    target: str
    launches: int = 18
    plans: int = 24
    everything: bool = False


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """A plan to be measured: its launches, and what each of them recomputes (names)."""

    specs: tuple[LaunchSpec, ...]
    recomputed: tuple[tuple[str, ...], ...]


@dataclass
class PreparedGraph:
    """Plans of one graph with their kernels in a library.

    Attributes
    ----------
    plans : the unfused plan, those of the planner (unless they are that), then others
    chosen : which is that of the least predicted time
    careful : which is that of the fusions that surely gain
    complete : whether these are all plans of the graph
    predicted_us : model time of each plan
    path : of the library; None where no kernel could be built
    error : why nothing could be prepared
    """

    key: str
    plans: list[MeasuredPlan] = field(default_factory=list)
    predicted_us: list[float] = field(default_factory=list)
    chosen: int = 0
    careful: int = 0
    complete: bool = False
    path: Path | None = None
    kernels: list[Kernel] = field(default_factory=list)
    failures: dict[LaunchSpec, str] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""


def queued_policy() -> Policy:
    """The default policy for launches that queue up, as they are measured."""
    return dataclasses.replace(load_policy(None), launch="graph")


@lru_cache(maxsize=2)
def opened(
    key: str, target: str
) -> tuple[tvm.IRModule, FusionGraph, HardwareProfile, tvm.target.Target]:
    """A key's lowered module and graph, with the device."""
    tvm_target, hw = resolve_target(target)
    return *graph_of(key, hw), hw, tvm_target


def prepare_graph(key: str, choice: Choice, folder: Path) -> PreparedGraph:
    """Chooses plans of a graph, builds their kernels, and writes them to a library in `folder`."""
    start = time.monotonic()
    low, graph, hw, target = opened(key, choice.target)
    policy = queued_policy()
    space = PlanSpace(graph, hw, policy)
    found = PreparedGraph(key)
    planned = space.of_plan(search(graph, hw, policy))
    careful = space.of_plan(decide(graph, hw, policy))
    solutions, found.complete = chosen_plans(space, [planned, careful], choice)
    found.chosen, found.careful = solutions.index(planned), solutions.index(careful)
    for solution in solutions:
        found.plans.append(measured_plan(space, solution))
        found.predicted_us.append(space.predicted_us(solution))
    specs = dict.fromkeys(chain.from_iterable(p.specs for p in found.plans))
    built = build_launches(LaunchWriter(low, graph, hw, policy), specs, target)
    found.kernels, found.failures = built.kernels, built.failures
    if built.kernels:
        found.path = folder / f"{_file_name(key)}.so"
        built.save(found.path)
    found.seconds = time.monotonic() - start
    return found


def chosen_plans(
    space: PlanSpace, planned: Sequence[Solution], choice: Choice
) -> tuple[list[Solution], bool]:
    """The unfused plan, the planner's, neighbours of its first, and others, within the limits;
    whether these are all plans there are.
    """
    first = list(dict.fromkeys([space.unfused(), *planned]))
    near = [p for p in space.neighbours(planned[0]) if p not in first]
    every = space.every_plan() if choice.everything else None
    others = every or space.random_plans(ENOUGH if choice.everything else 4 * choice.plans)
    if choice.everything:
        others = sorted(others, key=space.predicted_us)
        some = others[:: max(1, len(others) // choice.plans)]
        ordered = [*first, *near, *_spread(others, some)]
    else:
        ordered = [*first, *_spread(near, others)]
    found = list(_within(space, dict.fromkeys(ordered), len(first), choice))
    return found, every is not None and len(found) >= len({*every, *first})


def _spread(near: Sequence[Solution], others: Sequence[Solution]) -> Iterator[Solution]:
    """One of the one, one of the other."""
    for k in range(max(len(near), len(others))):
        yield from near[k : k + 1]
        yield from others[k : k + 1]


def _within(
    space: PlanSpace, plans: Iterable[Solution], always: int, choice: Choice
) -> Iterator[Solution]:
    """Plans as long as their launches are within the limit; the first ones whatever it is."""
    known: set[tuple[int, tuple[int, ...]]] = set()
    passed_over = []
    taken = 0
    for number, plan in enumerate(plans):
        own = _kernels(space, plan)
        if number < always or (len(known | own) <= choice.launches and taken < choice.plans):
            known |= own
            taken += 1
            yield plan
        else:
            passed_over.append(plan)
    for plan in passed_over:  # those that need no other kernels than the plans taken
        if taken < choice.plans and _kernels(space, plan) <= known:
            taken += 1
            yield plan


def _kernels(space: PlanSpace, plan: Solution) -> set[tuple[int, tuple[int, ...]]]:
    return {(x.members, x.stores) for x in plan if is_kernel(space.graph, x)}


def measured_plan(space: PlanSpace, solution: Solution) -> MeasuredPlan:
    """A solution as launches with kernel classes."""
    graph = space.graph
    pairs = zip(solution, copies(graph, solution), strict=True)
    recomputed = tuple(
        tuple(graph.ops[i].name for i in members_of(copied))
        for launch, copied in pairs
        if is_kernel(graph, launch)
    )
    return MeasuredPlan(specs_of(solution, graph, space.evaluator), recomputed)


def _file_name(key: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in key)
