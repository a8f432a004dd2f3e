"""A tuning session that tells what it does: `kills` runs it and kills it.

    python -m tests.benchmarks.tuning.session WORKLOAD --target T --database D --settings JSON

Each line of its standard output is a JSON object:

    {"phase": ...}            start-up, planning, building, measuring, adding, finals,
                              whole plans or saving begins
    {"kept": [KEY, TRIAL]}    a trial is in the database
    {"finished": {...}}       `tune` is done
    {"compiled": {...}}       with --compile: `compile` with the database
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import tvm_fusion
from tvm_fusion.tuning.database import Database
from tvm_fusion.tuning.measure.building import BuildRequest
from tvm_fusion.tuning.measure.measuring import MeasureRequest
from tvm_fusion.tuning.measure.processes import Worker
from tvm_fusion.tuning.session.settings import load_settings


def say(**what: Any) -> None:
    """Write one line."""
    print(json.dumps(what), flush=True)


def kept(session: Any) -> None:
    """A watcher of `tune`: tells the trial that was added last."""
    *_, (key, trial) = session.keeper.content().entries
    say(kept=[key, trial.as_dict()])


def run(
    model: Any,
    target: str,
    database: Path,
    settings: Any,
    policy: Any = None,
    compiled: bool = False,
) -> None:
    """Tune a model, and compile it with what was found if `compiled`."""
    settings = load_settings(settings)
    say(phase="planning")
    with told(settings.final_repeats):
        result = tvm_fusion.tune(
            model, target, database=database, settings=settings, policy=policy, watch=kept
        )
    say(finished={"trials": result.trials, "plan": result.plan.to_dict()})
    if compiled:
        found = tvm_fusion.compile(model, target, policy=policy, database=database, verify="groups")
        say(
            compiled={
                "passed": found.report.verify.passed,
                "same_plan": found.plan.groups == result.plan.groups,
            }
        )


@contextmanager
def told(final_repeats: int) -> Iterator[None]:
    """Tells when requests are sent and when the database is written."""

    def request(worker: Worker, function: Callable, arguments: tuple, limit_s: float) -> None:
        say(phase=phase_of(arguments[0], final_repeats))

    changed = [
        (Worker, "send", request),
        (Database, "add", lambda *_: say(phase="adding")),
        (Database, "save_plan", lambda *_: say(phase="saving")),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changed]
    for owner, name, tell in changed:
        setattr(owner, name, _after(tell, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def phase_of(request: Any, final_repeats: int) -> str:
    """What a worker is asked for."""
    if isinstance(request, BuildRequest):
        return "building"
    if isinstance(request, MeasureRequest):
        return "finals" if request.repeats == final_repeats else "measuring"
    return "whole plans"


def _after(tell: Callable, function: Callable) -> Callable:
    @wraps(function)
    def both(*arguments: Any, **options: Any) -> Any:
        tell(*arguments)
        return function(*arguments, **options)

    return both


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module docstring."""
    from ..workloads import dtype_of, make

    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.tuning.session")
    parser.add_argument("workload")
    parser.add_argument("--target", required=True)
    parser.add_argument("--database", type=Path, required=True)
    parser.add_argument("--settings", type=json.loads, default={})
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args(arguments)
    dtype = dtype_of(given.workload, "float16" if given.target != "llvm" else "float32")
    made = make(given.workload, "cpu", dtype, given.scale)
    model = made.module, tuple(made.inputs)
    run(model, given.target, given.database, given.settings, compiled=given.compile)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
