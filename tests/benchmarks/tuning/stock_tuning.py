"""Tuning of this package beside stock MetaSchedule: as many trials each, on memory-bound rows.

    python -m tests.benchmarks.tuning.stock_tuning --target cuda --trials 64 --out FILE
    python -m tests.benchmarks.tuning.stock_tuning --merge FILE FILE --out FILE

Stock MetaSchedule (`metaschedule`) tunes a row first. Where it is cut short by the minutes of the
row (it ends with the batch of trials that runs then), this package gets as many trials as stock
made, and its time; where it ends because its space has no other schedule ("exhausted"), this
package gets the trials that both were allowed. What both built, this package untuned, and TVM's
default schedules are timed in one run, interleaved, and checked against float64.

A history has, for each trial in the order of measurement, the time of a call with the best kernels
so far, by the clock of its tuner: that of this package is the CUPTI time with a cleaned L2 that
`time_calls` measures, too; stock's is `time_evaluator`'s, back to back with a warm L2. To say after
how many trials this package is ahead, each history is multiplied by `clock_ratio`: the time that
the final run measures over that of the tuner for the same build. `ahead_after` is the first trial
whose best beats what stock has at its end; `ahead_from` the one from which on this package is ahead
of stock at equal trials; `equal_trials_ratio` is stock's time over that of this package after as
many trials as stock made.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import tvm

import tvm_fusion
from tvm_fusion._arguments import TARGET_HELP
from tvm_fusion.bench.apart import reason
from tvm_fusion.config import resolve_target
from tvm_fusion.errors import InputError, TargetError, TvmFusionError
from tvm_fusion.frontends import load
from tvm_fusion.runtime.calls.signature import entry_of
from tvm_fusion.runtime.calls.tensors import to_tvm
from tvm_fusion.runtime.timing.timing import device_works, time_calls

from ..peers.registry import tvm_default
from ..record import OURS, header, too_wrong, write
from ..rows.accuracy import CEILINGS, checked_error, reference
from ..rows.setup import Setup
from ..workloads import names_of
from ..workloads.instance import Instance
from ..workloads.unwritten import UNWRITTEN_CPU, UNWRITTEN_GPU
from . import metaschedule
from .stock_compare import DEFAULT, FORMAT, STOCK, UNTUNED, compare, merge, table

ROWS = ("softmax", "layernorm", "rmsnorm", "bias_gelu", "transpose_add", "chain4")
BATCH = 16  # of stock's trials; its cost model learns after each

Points = list[tuple[int, float | None]]


class History:
    """A watcher of `tvm_fusion.tune`: the time of a call after each trial, with the best kernels
    so far; None while a kernel has no time.
    """

    def __init__(self) -> None:
        self.points: Points = []

    def __call__(self, session: Any) -> None:
        """Takes a new trial; the final measurements at the end of a session are of old ones."""
        trials = sum(len(s.trials) for s in session.states)
        if trials > len(self.points):
            timed = all(s.best_us is not None for s in session.states if s.task.count)
            self.points.append((trials, session.total_us if timed else None))


def measure(name: str, setup: Setup, trials: int, minutes: float) -> dict[str, Any]:
    """The row of one workload."""
    row: dict[str, Any] = {"name": name, "shape": None, "dtype": None}
    row |= {"trials": {}, "failed_trials": {}, "tuning_s": {}, "tuned_functions": {}}
    row |= {"history": {}, "clock_ratio": {}, "cut_short": None, "exhausted": None}
    row |= {"us": {}, "launches": {}}
    row |= {"errors": {}, "failures": {}, "ahead_after": None, "ahead_from": None}
    row |= {"ratio": None, "equal_trials_ratio": None}
    began = time.monotonic()
    try:
        instance = setup.instance(name)
        row |= {"shape": instance.shape, "dtype": instance.dtype}
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            _fill(row, instance, setup, Path(folder), trials, minutes)
    except Exception as error:  # a trial: recorded, and the next row follows
        row["failures"]["row"] = reason(error)
    row["spent_s"] = round(time.monotonic() - began, 1)
    return row


def _fill(
    row: dict[str, Any],
    instance: Instance,
    setup: Setup,
    folder: Path,
    trials: int,
    minutes: float,
) -> None:
    made: dict[str, Callable[[], Any]] = {}
    tuned_us: dict[str, float | None] = {}
    try:
        made[STOCK], tuned_us[STOCK] = _stock(row, instance, setup, folder, trials, minutes)
    except Exception as error:  # a trial
        row["failures"][STOCK] = reason(error)
    if row["cut_short"]:
        trials = row["trials"][STOCK]
        minutes = max(minutes, row["tuning_s"][STOCK] / 60)
    try:
        made[OURS], tuned_us[OURS] = _ours(row, instance, setup, folder, trials, minutes)
    except Exception as error:  # a trial
        row["failures"][OURS] = reason(error)
    model = (instance.module, instance.inputs)

    def untuned() -> Callable[[], Any]:
        return tvm_fusion.compile(model, setup.named, verify=False).bind(*instance.inputs)

    made[UNTUNED] = untuned
    made[DEFAULT] = lambda: tvm_default(instance, setup.target)
    calls = _checked(row, instance, made)
    if not calls:
        return
    for label, timing in time_calls(calls, torch.device(setup.device), setup.repeats).items():
        row["us"][label], row["launches"][label] = timing.median_us, timing.kernels
    for label, us in tuned_us.items():
        if us and label in row["us"]:
            row["clock_ratio"][label] = row["us"][label] / us
    compare(row)


def _stock(
    row: dict[str, Any],
    instance: Instance,
    setup: Setup,
    folder: Path,
    trials: int,
    minutes: float,
) -> tuple[Callable[[], Any], float | None]:
    mod = load((instance.module, tuple(instance.inputs)))
    work = folder / STOCK
    work.mkdir()
    tuning = metaschedule.tune(mod, setup.target, work, trials, BATCH, minutes * 60)
    if not tuning.trials:
        raise InputError(f"no trial within {minutes:g} minutes")
    _note(row, STOCK, tuning.history, tuning.trials, tuning.failed.total(), tuning.seconds)
    row["cut_short"] = tuning.cut_short
    row["exhausted"] = tuning.trials < trials and not tuning.cut_short
    row["stock_failures"] = dict(tuning.failed.most_common(metaschedule.REASONS))
    found, functions = metaschedule.tuned_functions(mod, setup.target, tuning)
    row["tuned_functions"][STOCK] = f"{found} of {functions}"
    executable = metaschedule.build(mod, setup.target, tuning)
    return lambda: _bound(executable, instance, setup.target), tuning.best_us


def _ours(
    row: dict[str, Any],
    instance: Instance,
    setup: Setup,
    folder: Path,
    trials: int,
    minutes: float,
) -> tuple[Callable[[], Any], float | None]:
    model, database, history = (instance.module, instance.inputs), folder / "ours", History()
    settings = {"trials_per_task": trials, "least_gain": 0.0}
    result = tvm_fusion.tune(
        model,
        setup.named,
        database=database,
        settings=settings,
        trials=trials,
        minutes=minutes,
        watch=history,
    )
    if result.interrupted:
        raise KeyboardInterrupt
    failed = sum(t.failed for t in result.tasks)
    _note(row, OURS, history.points, result.trials, failed, result.seconds)
    tuned = sum(t.best_us is not None for t in result.tasks)
    row["tuned_functions"][OURS] = f"{tuned} of {len(result.tasks)}"
    row["choices"] = {t.name: t.choice for t in result.tasks}
    compiled = tvm_fusion.compile(model, setup.named, database=database, verify=False)
    return lambda: compiled.bind(*instance.inputs), result.best_us


def _note(
    row: dict[str, Any], label: str, history: Points, trials: int, failed: int, seconds: float
) -> None:
    row["trials"][label], row["failed_trials"][label] = trials, failed
    row["tuning_s"][label] = round(seconds, 1)
    row["history"][label] = history


def _bound(executable: Any, instance: Instance, target: tvm.target.Target) -> Callable[[], Any]:
    device = tvm.runtime.device_from_target(target)
    main = entry_of(executable, device)
    inputs = [to_tvm(x, device, "input") for x in instance.inputs]
    return lambda: main(*inputs)


def _checked(
    row: dict[str, Any], instance: Instance, made: dict[str, Callable[[], Any]]
) -> dict[str, Callable[[], Any]]:
    """The calls that run, each compared with float64; wrong ones are timed, and noted as failed."""
    wanted, _ = reference(instance)
    calls = {}
    for label, make in made.items():
        try:
            call = make()
            error = checked_error(call, instance.inputs, wanted)
        except Exception as failure:  # a trial
            row["failures"][label] = reason(failure)
            continue
        calls[label] = call
        row["errors"][label] = error if math.isfinite(error) else None
        if why := too_wrong(error, CEILINGS[instance.dtype]):
            row["failures"][label] = why
    return calls


def run(
    names: Sequence[str],
    target: Any,
    out: Path,
    trials: int,
    minutes: float,
    scale: float = 1.0,
    repeats: int = 20,
) -> dict[str, Any]:
    """Measures the rows; the result is written after each.

    Raises
    ------
    TargetError
        This machine lacks the device, or a kernel made it unusable; rows up to then are in `out`.
    """
    resolved, hw = resolve_target(target)
    if not tvm.runtime.device_from_target(resolved).exist:
        raise TargetError(f"this machine has no {resolved.kind.name} device to tune on")
    setup = Setup(target, resolved, hw, (), None, scale, repeats, 5.0)
    metaschedule.warm_up()
    result = header(hw.name, setup.device == "cuda", scale, repeats)
    result |= {"format": FORMAT, "trials": trials, "minutes_per_row": minutes, "about": __doc__}
    for name in names:
        result["rows"].append(measure(name, setup, trials, minutes))
        write(result, out)
        print(table(result["rows"][-1:]), flush=True)
        if setup.device == "cuda" and not device_works():
            raise TargetError(f"the GPU is lost to this process after {name}")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.tuning.stock_tuning", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--target", help=TARGET_HELP)
    parser.add_argument("--trials", type=int, default=64, help="most of each tuner in a row")
    parser.add_argument("--minutes-per-row", type=float, default=1.5, help="most of each tuner")
    known = {"gpu": UNWRITTEN_GPU, "cpu": UNWRITTEN_CPU}
    parser.add_argument("--only", metavar="ROW,...", help=f"default: {','.join(ROWS)}")
    parser.add_argument("--unwritten", choices=known, help="what no class of ours wrote there")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the extents")
    parser.add_argument("--repeats", type=int, default=20, help="samples of each final time")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="join results")
    given = parser.parse_args(arguments)
    if given.trials < 1 or given.minutes_per_row <= 0 or given.repeats < 1:
        parser.error("--trials, --minutes-per-row and --repeats are above 0")
    try:
        if given.merge:
            result = merge(given.merge)
            write(result, given.out)
        else:
            result = run(
                names_of(given.only or ",".join(known.get(given.unwritten, ROWS)), None),
                given.target,
                given.out,
                given.trials,
                given.minutes_per_row,
                given.scale,
                given.repeats,
            )
    except TvmFusionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(result["rows"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
