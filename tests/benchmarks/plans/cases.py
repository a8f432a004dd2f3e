"""Five decisions of the planner, measured: the plan it chooses beside those it rejects.

    python -m tests.benchmarks.plans.cases --target cuda --out FILE

The graphs are those of `case_graphs`. All plans of a graph are timed in one interleaved run
(see `check.plan_runner`); registers, spills and code are those of the kernel with most of each.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tvm_fusion.check.plan_runner import LaunchSpec, PlanRunner, specs_of
from tvm_fusion.config import HardwareProfile, Policy, load_policy, resolve_target
from tvm_fusion.errors import BuildError, InputError, TvmFusionError
from tvm_fusion.flow.planned import Planned
from tvm_fusion.plan.search.solution import total_us

from ..record import write
from .case_graphs import CASES, PlanCase
from .collect import header
from .forced import evaluator, forced, lenient

CHOSEN = "chosen"
POLICY = {"max_group_ops": 128}
"""So that the cost of a large kernel decides, and not the limit on its operators."""

COMPARED = 1 << 18  # elements of each result
TOLERANCE = 0.05  # rounded to halves in between or not, through chains of hundreds
COLUMNS = ("case", "plan", "launches", "predicted", "measured", "ratio", "regs", "spill", "code")


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One plan of one case.

    Attributes
    ----------
    case, plan : str
    shapes : of the inputs
    launches : int
    predicted_us : what the model says; infinite (None) where a launch is illegal
    measured_us : median time from the start of the first to the end of the last launch
    spread : interquartile range over median
    ratio : measured time over that of the chosen plan
    registers, spill_bytes, code_bytes : the largest of its kernels
    problem : why there is no time, or what is wrong with the numbers
    """

    case: str
    plan: str
    shapes: tuple[str, ...]
    launches: int
    predicted_us: float | None
    measured_us: float | None = None
    spread: float | None = None
    ratio: float | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    code_bytes: int | None = None
    problem: str | None = None


def measure_case(
    case: PlanCase,
    target: Any,
    hw: HardwareProfile,
    policy: Policy,
    scale: float = 1.0,
    repeats: int = 15,
) -> list[PlanRow]:
    """Times the chosen plan of a case and those to be rejected.

    Parameters
    ----------
    case : PlanCase
    target : tvm.target.Target
    hw : HardwareProfile
    policy : Policy
        What the plan is chosen under; plans by hand are beyond its limits.
    scale : float
        Factor on the case's extents.
    repeats : int
        Samples of each plan.
    """
    planned = Planned.of(case.build(scale), target, hw, policy)
    cost = evaluator(planned.graph, hw, policy)
    by_hand = {n: forced(planned.graph, p) for n, p in case.rejected(planned.graph).items()}
    predicted = {n: total_us(cost, solution) for n, solution in by_hand.items()}
    plans: dict[str, tuple[LaunchSpec, ...]] = {CHOSEN: specs_of(planned.plan, planned.graph)}
    predicted[CHOSEN] = planned.plan.predicted_us
    rows = {}
    shapes = tuple(f"{p.ty.dtype}{list(map(int, p.ty.shape))}" for p in planned.mod["main"].params)
    for name, solution in by_hand.items():
        try:
            plans[name] = specs_of(solution, planned.graph, cost)
        except TvmFusionError as error:
            rows[name] = PlanRow(case.name, name, shapes, len(solution), None, problem=str(error))
    runner = PlanRunner(planned.low, planned.graph, hw, lenient(policy), target)
    failed = runner.build(plans.values())
    runner.set_inputs([_values(p) for p in planned.mod["main"].params])
    ready = {n: p for n, p in plans.items() if runner.can_run(p)}
    wrong = _wrong(runner, ready)
    times = dict(zip(ready, runner.time(list(ready.values()), repeats), strict=True))
    base = times[CHOSEN].span_us if CHOSEN in times else None
    for name, specs in plans.items():
        finite = predicted[name] if np.isfinite(predicted[name]) else None
        why = next((failed[s] for s in specs if s in failed), wrong.get(name))
        found = times.get(name)
        rows[name] = PlanRow(
            case.name,
            name,
            shapes,
            len(specs),
            finite and round(finite, 3),
            found and round(found.span_us, 3),
            found and round(found.spread, 4),
            found and base and round(found.span_us / base, 4),
            **_resources(runner, specs),
            problem=why,
        )
    return [rows[name] for name in (CHOSEN, *by_hand)]


def _values(param: Any) -> np.ndarray:
    """Cheap values: a few thousand random ones again and again."""
    shape, dtype = tuple(map(int, param.ty.shape)), str(param.ty.dtype)
    draws = np.random.default_rng(0)
    few = draws.integers(-8, 8, 4099) if "int" in dtype else draws.standard_normal(4099)
    return np.resize(few.astype(dtype), shape)


def _wrong(runner: PlanRunner, plans: dict[str, tuple[LaunchSpec, ...]]) -> dict[str, str]:
    """Plans whose results are not those of the first."""
    first, found = None, {}
    for name, specs in plans.items():
        results = [r.ravel()[:COMPARED].astype("float32") for r in runner.run(specs)]
        if first is None:
            first = results
        elif not all(
            np.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
            for a, b in zip(results, first, strict=True)
        ):
            found[name] = "the results are not those of the chosen plan"
    return found


def _resources(runner: PlanRunner, specs: Sequence[LaunchSpec]) -> dict[str, int | None]:
    kernels = [runner.kernel(spec) for spec in specs]
    used = [r for kernel in kernels if kernel is not None for r in kernel.resources]
    names = ("registers", "spill_bytes", "code_bytes")
    return {n: max((getattr(r, n) for r in used), default=None) for n in names}


def table(rows: Sequence[PlanRow]) -> str:
    """The rows as text."""
    cells = [COLUMNS, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            c.ljust(w) if i < 2 else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    problems = [f"{r.case}, {r.plan}: {r.problem}" for r in rows if r.problem]
    return "\n".join([*lines, *problems])


def _cells(row: PlanRow) -> tuple[str, ...]:
    def us(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    numbers = (row.registers, row.spill_bytes, row.code_bytes)
    return (
        row.case,
        row.plan,
        str(row.launches),
        us(row.predicted_us),
        us(row.measured_us),
        "-" if row.ratio is None else f"{row.ratio:.2f}x",
        *("-" if n is None else str(n) for n in numbers),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.plans.cases", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--target", default="cuda", help="llvm, cuda, a device, or a profile")
    parser.add_argument("--cases", default=",".join(CASES), help="names, by commas")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on every extent")
    parser.add_argument("--repeats", type=int, default=15, help="samples of each plan")
    parser.add_argument("--out", type=Path, help="write a JSON file")
    given = parser.parse_args(arguments)
    try:
        rows = _measure_all(given)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(rows))
    if given.out is not None:
        write({**header(given.target), "rows": [asdict(row) for row in rows]}, given.out)
    return 1 if any(row.plan == CHOSEN and row.problem for row in rows) else 0


def _measure_all(given: argparse.Namespace) -> list[PlanRow]:
    target, hw = resolve_target(given.target)
    names = given.cases.split(",")
    if unknown := sorted(set(names) - set(CASES)):
        raise InputError(f"unknown cases {', '.join(unknown)}; there are {', '.join(CASES)}")
    rows: list[PlanRow] = []
    for name in names:
        start = time.perf_counter()
        try:
            policy = load_policy(POLICY)
            rows += measure_case(CASES[name], target, hw, policy, given.scale, given.repeats)
            outcome = "measured"
        except BuildError as error:
            rows.append(PlanRow(name, CHOSEN, (), 0, None, problem=str(error)))
            outcome = "failed"
        print(f"{name}: {outcome} in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
