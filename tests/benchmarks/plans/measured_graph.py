"""One graph on the device: its launches checked, its plans timed, the samples as lines."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tvm_fusion.check.plan_runner import PlanRunner
from tvm_fusion.runtime.timing.launch_kernels import LaunchSpec
from tvm_fusion.runtime.timing.plan_timing import PlanTimes

from .graph_launches import MeasuredPlan, PreparedGraph, opened, queued_policy
from .launch_check import check_launches, fill_inputs, names_of


@dataclass
class Measured:
    """What was found out about a graph: lines of the sample file, and what went wrong."""

    key: str
    lines: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    plans: list[MeasuredPlan] = field(default_factory=list)
    times: list[PlanTimes] = field(default_factory=list)


def open_runner(prepared: PreparedGraph, target: str) -> PlanRunner:
    """A runner with the prepared kernels and random inputs."""
    low, graph, hw, tvm_target = opened(prepared.key, target)
    runner = PlanRunner(low, graph, hw, queued_policy(), tvm_target)
    if prepared.path is not None:
        runner.load(prepared.path, prepared.kernels, prepared.failures)
    fill_inputs(runner, prepared.key)
    return runner


def measure_graph(
    prepared: PreparedGraph,
    target: str,
    repeats: int = 9,
    say: Callable[[str], None] = lambda text: None,
) -> Measured:
    """Checks and times what was prepared.

    Parameters
    ----------
    prepared : PreparedGraph
    target : str
    repeats : int
        Samples of each plan and of each launch alone.
    say : callable
        Told what is being done, so that a hanging kernel can be named.
    """
    found = Measured(prepared.key)
    graph = opened(prepared.key, target)[1]
    names = {spec: names_of(graph, spec) for p in prepared.plans for spec in p.specs}
    for spec, why in prepared.failures.items():
        found.problems.append(f"not built: {names.get(spec)} {spec.kernel_class}: {why[:400]}")
    runner = open_runner(prepared, target)
    wrong = check_launches(runner, prepared, say)
    for spec, why in wrong.items():
        found.problems.append(f"WRONG NUMBERS: {names[spec]} {spec.kernel_class}: {why}")
    found.plans = [
        p for p in prepared.plans if runner.can_run(p.specs) and wrong.keys().isdisjoint(p.specs)
    ]
    if not found.plans:
        found.problems.append("no plan can run")
        return found
    say("timing")
    alone = list(dict.fromkeys(spec for p in found.plans for spec in p.specs))
    times = runner.time([*(p.specs for p in found.plans), *((spec,) for spec in alone)], repeats)
    found.times = times[: len(found.plans)]
    cold = {spec: t.span_us for spec, t in zip(alone, times[len(found.plans) :], strict=True)}
    found.lines = [
        *launch_lines(runner, found, cold),
        *(
            plan_line(runner, found.key, p, t)
            for p, t in zip(found.plans, found.times, strict=True)
        ),
    ]
    return found


def launch_lines(
    runner: PlanRunner, found: Measured, cold: dict[LaunchSpec, float]
) -> list[dict[str, Any]]:
    """A line for each distinct kernel and context: the median over the plans that hold it."""
    graph = runner.graph
    seen: dict[tuple[LaunchSpec, int], list[tuple[float, float, tuple[str, ...]]]] = {}
    for plan, times in zip(found.plans, found.times, strict=True):
        before: set[int] = set()
        for k, spec in enumerate(plan.specs):
            kernel = runner.kernel(spec)
            own = {graph.tensors[t].name for i in spec.ops for t in graph.ops[i].outputs}
            just_written = {graph.tensors[t].name for t in before}
            read = {runner.buffers.source(a) for a in kernel.arguments if a not in own}
            context = len(read & just_written)
            measured = (times.launches_us[k], times.launch_spread[k], plan.recomputed[k])
            seen.setdefault((spec, context), []).append(measured)
            before = set(spec.stores)
    symbols: dict[str, LaunchSpec] = {}
    lines = []
    for (spec, context), values in seen.items():
        kernel = runner.kernel(spec)
        if symbols.setdefault(kernel.symbol, spec) != spec:
            continue  # the same kernel in another place of the graph
        line = {
            "graph": found.key,
            **names_of(runner.graph, spec),
            "recomputed": list(values[0][2]),
            "class": spec.kernel_class,
            "us": _short(statistics.median(v[0] for v in values)),
            "cold_us": _short(cold[spec]),
            "spread": round(statistics.median(v[1] for v in values), 3),
            "context": context,
        }
        if kernel.resources:
            used = kernel.resources
            line |= {
                "registers": max(r.registers for r in used),
                "spill_bytes": max(r.spill_bytes for r in used),
                "smem_bytes": max(r.smem_bytes for r in used),
                "code_bytes": sum(r.code_bytes for r in used),
            }
        lines.append({k: v for k, v in line.items() if v != []})
    return lines


def plan_line(runner: PlanRunner, key: str, plan: MeasuredPlan, times: PlanTimes) -> dict[str, Any]:
    """The line of a plan."""
    ops = runner.graph.ops
    line = {
        "graph": key,
        "groups": [[ops[i].name for i in spec.ops] for spec in plan.specs],
        "span_us": _short(times.span_us),
        "sum_us": _short(times.sum_us),
    }
    if any(plan.recomputed):
        line["recomputed"] = [list(names) for names in plan.recomputed]
    return line


def _short(us: float) -> float:
    """Four digits."""
    return float(f"{us:.4g}")
