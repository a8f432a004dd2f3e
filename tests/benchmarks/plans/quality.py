"""How near the planner's choice is to the best of all plans, measured.

    python -m tests.benchmarks.plans.quality --target cuda --graphs 30 --workers 15 --out FILE

Random graphs of 4 to 8 operators (`random_graphs`); of each all plans are measured, or a sample
where there are too many (the row says which). A plan's time is its span: from the start of its
first launch to the end of its last one, the launches queued up behind a cleaned L2. The planner
plans for launches that queue up, too (`launch="graph"`). *Chosen* is the plan of the least
predicted time, *careful* that of the fusions that surely gain, which is what `compile` takes.

The smallest of many noisy times is too small. So the plans are timed twice: the first round, of few
samples, only names the candidates (the fastest few, the chosen and the unfused plan), and the
second one, of many samples taken in turn, says how long they take. All ratios are of the second
round. The best of the candidates is still the smallest of several numbers; the row gives the
standard error of the chosen plan's ratio to it, from the ratios sample by sample.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tvm_fusion.check.plan_runner import PlanRunner
from tvm_fusion.config import resolve_target
from tvm_fusion.errors import TvmFusionError, Unsupported
from tvm_fusion.ir.graph import OpKind
from tvm_fusion.runtime.timing.plan_timing import PlanTimes

from .collect import _enter, _prepare, header
from .graph_launches import Choice, MeasuredPlan, PreparedGraph, queued_policy
from .launch_check import check_launches
from .measured_graph import open_runner
from .random_graphs import MAX_OPS, MIN_OPS, graph_of
from .space import PlanSpace

FORMAT = 1
CANDIDATES = 6
FIRST_SAMPLES, SECOND_SAMPLES = 5, 41
NEAR, SLOWER = 1.03, 1.02  # the figures: within 3 % of the best, not beyond 2 % of unfused


def keys_for(count: int, target: str, small: bool = False, first: int = 1000) -> Iterator[str]:
    """The first `count` random graphs, from seed `first` on, of 4 to 8 operators after lowering and
    with more than one plan.
    """
    _, hw = resolve_target(target)
    seed, found = first, 0
    while found < count:
        key = f"{'random-small' if small else 'random'}:{seed}"
        seed += 1
        _, graph = graph_of(key, hw)
        kernels = sum(op.kind is OpKind.CALL_TIR for op in graph.ops)
        if MIN_OPS <= kernels <= MAX_OPS and _has_choice(key, target):
            found += 1
            yield key


def _has_choice(key: str, target: str) -> bool:
    _, hw = resolve_target(target)
    space = PlanSpace(graph_of(key, hw)[1], hw, queued_policy())
    try:
        return len(space.random_plans(2)) > 1
    except Unsupported:
        return False


def measure_quality(
    prepared: PreparedGraph, target: str, samples: tuple[int, int] = (FIRST_SAMPLES, SECOND_SAMPLES)
) -> dict[str, Any]:
    """The row of one graph; its kernels were prepared with `Choice(everything=True)`."""
    row: dict[str, Any] = {"graph": prepared.key, "failures": []}
    if prepared.error:
        return row | {"failures": [prepared.error]}
    runner = open_runner(prepared, target)
    wrong = check_launches(runner, prepared, lambda text: None)
    row["failures"] = [
        *(f"not built: {why[:300]}" for why in prepared.failures.values()),
        *(f"wrong numbers: {runner.graph.ops[s.ops[0]].name}...: {w}" for s, w in wrong.items()),
    ]
    usable = [
        k
        for k, p in enumerate(prepared.plans)
        if runner.can_run(p.specs) and wrong.keys().isdisjoint(p.specs)
    ]
    if not {0, prepared.chosen, prepared.careful} <= set(usable):
        return row | {"failures": [*row["failures"], "the chosen or the unfused plan cannot run"]}
    return row | _row(runner, prepared, usable, samples)


def _row(
    runner: PlanRunner, prepared: PreparedGraph, usable: Sequence[int], samples: tuple[int, int]
) -> dict[str, Any]:
    plans, chosen, careful = prepared.plans, prepared.chosen, prepared.careful
    first = runner.time([plans[k].specs for k in usable], samples[0])
    spans = dict(zip(usable, (t.span_us for t in first), strict=True))
    fastest = sorted(usable, key=spans.__getitem__)[:CANDIDATES]
    candidates = list(dict.fromkeys([0, chosen, careful, *fastest]))
    second = runner.time([plans[k].specs for k in candidates], samples[1])
    times = dict(zip(candidates, second, strict=True))
    best = min(candidates, key=lambda k: times[k].span_us)
    by_model = min(usable, key=lambda k: prepared.predicted_us[k])
    return {
        "operators": sum(op.kind is OpKind.CALL_TIR for op in runner.graph.ops),
        "shapes": _shapes(runner),
        "plans": len(usable),
        "all_plans": prepared.complete and len(usable) == len(plans),
        "unfused_us": _digits(times[0].span_us),
        "chosen_us": _digits(times[chosen].span_us),
        "careful_us": _digits(times[careful].span_us),
        "best_us": _digits(times[best].span_us),
        "chosen_over_best": _digits(times[chosen].span_us / times[best].span_us),
        "chosen_over_unfused": _digits(times[chosen].span_us / times[0].span_us),
        "careful_over_best": _digits(times[careful].span_us / times[best].span_us),
        "careful_over_unfused": _digits(times[careful].span_us / times[0].span_us),
        "standard_error": _digits(_standard_error(times[chosen], times[best])),
        "rank": 1 + sum(spans[k] < spans[chosen] for k in usable),
        "predicted_us": {
            name: _digits(prepared.predicted_us[k])
            for name, k in (
                ("unfused", 0),
                ("chosen", chosen),
                ("careful", careful),
                ("best", best),
                ("least", by_model),
            )
        },
        "launches": {
            name: _launches(runner, plans[k], times[k])
            for name, k in (("chosen", chosen), ("careful", careful), ("best", best))
        },
    }


def _standard_error(chosen: PlanTimes, best: PlanTimes) -> float:
    """Of the mean of chosen / best, taken sample by sample."""
    ratios = [a / b for a, b in zip(chosen.spans_us, best.spans_us, strict=True)]
    if len(ratios) < 2:
        return math.nan
    return statistics.stdev(ratios) / len(ratios) ** 0.5


def _launches(runner: PlanRunner, plan: MeasuredPlan, times: PlanTimes) -> list[dict[str, Any]]:
    ops = runner.graph.ops
    return [
        {
            "ops": [ops[i].func for i in spec.ops],
            "class": spec.kernel_class,
            "us": _digits(us),
        }
        for spec, us in zip(plan.specs, times.launches_us, strict=True)
    ]


def _shapes(runner: PlanRunner) -> str:
    found = []
    for name in runner.buffers.params:
        shape, dtype = runner.buffers.type_of(name)
        found.append(f"{'x'.join(map(str, shape)) or 'scalar'} {dtype}")
    return ", ".join(found)


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def run(
    keys: Sequence[str],
    choice: Choice,
    workers: int,
    budget_s: float,
    samples: tuple[int, int] = (FIRST_SAMPLES, SECOND_SAMPLES),
    keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """Builds all plans of all graphs, then measures them with nothing beside; a row each. `keep` is
    given the rows so far.
    """
    end = time.monotonic() + budget_s
    rows = []
    with tempfile.TemporaryDirectory(prefix="tvm_fusion_quality_") as folder:
        ready = list(_prepared(keys, choice, workers, Path(folder), end))
        for prepared in sorted(ready, key=lambda p: keys.index(p.key)):
            if time.monotonic() > end:
                rows.append({"graph": prepared.key, "failures": ["out of time"]})
                continue
            try:
                row = measure_quality(prepared, choice.target, samples)
            except Exception as error:  # one graph of many
                row = {
                    "graph": prepared.key,
                    "failures": [f"{type(error).__name__}: {error}"[:400]],
                }
            rows.append(row)
            print(line(row), flush=True)
            keep(rows)
    missing = [key for key in keys if key not in {row["graph"] for row in rows}]
    return rows + [{"graph": key, "failures": ["not built in time"]} for key in missing]


def _prepared(
    keys: Sequence[str], choice: Choice, workers: int, folder: Path, end: float
) -> Iterator[PreparedGraph]:
    if workers == 0:
        for key in keys:
            yield _prepare(key, choice, folder)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _enter)
    jobs = [pool.submit(_prepare, key, choice, folder) for key in keys]
    try:
        for job in as_completed(jobs, timeout=max(1.0, 0.8 * (end - time.monotonic()))):
            yield job.result()
    except TimeoutError:
        print("building takes too long: graphs are left out", flush=True)
    finally:
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()


def line(row: dict[str, Any]) -> str:
    """A row in one line."""
    why = f" | {row['failures'][0][:200]}" if row["failures"] else ""
    if "chosen_us" not in row:
        return f"{row['graph']}: nothing measured{why}"
    every = "all" if row["all_plans"] else "sampled"
    return (
        f"{row['graph']:14s} {row['operators']} ops, {row['plans']:4d} plans ({every}): unfused "
        f"{row['unfused_us']:8.1f}  chosen {row['chosen_us']:8.1f}  best {row['best_us']:8.1f}  "
        f"chosen/best {row['chosen_over_best']:.3f} +- {row['standard_error']:.3f}  "
        f"chosen/unfused {row['chosen_over_unfused']:.3f}  rank {row['rank']}  careful/best "
        f"{row['careful_over_best']:.3f}  careful/unfused {row['careful_over_unfused']:.3f}{why}"
    )


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures over all rows that were measured."""
    found = [row for row in rows if "chosen_us" in row]

    def of(which: str) -> dict[str, Any]:
        best = [row[f"{which}_over_best"] for row in found]
        unfused = {row["graph"]: row[f"{which}_over_unfused"] for row in found}
        return {
            "within_3_percent": sum(ratio <= NEAR for ratio in best),
            "slower_than_unfused": [g for g, ratio in unfused.items() if ratio > SLOWER],
            "largest_over_best": max(best, default=None),
            "geomean_over_unfused": _digits(statistics.geometric_mean(unfused.values()))
            if found
            else None,
        }

    return {
        "graphs": len(rows),
        "measured": len(found),
        "plans": sum(row["plans"] for row in found),
        "with_all_plans": sum(row["all_plans"] for row in found),
        "chosen": of("chosen"),
        "careful": of("careful"),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.plans.quality", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--graphs", type=int, default=30)
    parser.add_argument("--first", type=int, default=1000, help="first seed")
    parser.add_argument("--small", action="store_true", help="graphs on a few elements")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--plans", type=int, default=1500, help="most of a graph")
    parser.add_argument("--launches", type=int, default=200, help="most kernels of a graph")
    parser.add_argument("--samples", type=int, default=SECOND_SAMPLES)
    parser.add_argument("--budget", type=float, default=500.0, help="seconds")
    given = parser.parse_args(arguments)
    try:
        keys = list(keys_for(given.graphs, given.target, given.small, given.first))
        choice = Choice(given.target, given.launches, given.plans, everything=True)
        samples = (FIRST_SAMPLES, given.samples)
        head = header(given.target) | {"format": FORMAT}
        given.out.parent.mkdir(parents=True, exist_ok=True)

        def keep(rows: list[dict[str, Any]]) -> None:
            result = head | {"summary": summary(rows), "rows": rows}
            given.out.write_text(json.dumps(result, indent=1) + "\n")

        rows = run(keys, choice, given.workers, given.budget, samples, keep)
        keep(rows)
    except TvmFusionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(summary(rows)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
