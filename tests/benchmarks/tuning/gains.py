"""What tuning gains: the benchmark's workloads tuned, and timed beside their untuned builds.

    python -m tests.benchmarks.tuning.gains --suite models --minutes 9 --work-dir DIR --out FILE

The workloads are tuned one after another into one database; each may take an even share of the time
that is left. Then all are compiled untuned and from the database, checked against float64, and
timed interleaved (CUPTI, the L2 cleaned before each call). `--stage` runs only the first or the
second half; the second reads what the first wrote to FILE.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tvm_fusion.bench.apart import reason
from tvm_fusion.config import resolve_target
from tvm_fusion.errors import InputError, TargetError, TvmFusionError
from tvm_fusion.host.cores import available_cores
from tvm_fusion.tuning.command import to_json
from tvm_fusion.tuning.measure.building import make_builders
from tvm_fusion.tuning.measure.measuring import LocalMeter
from tvm_fusion.tuning.measure.processes import STARTING_S, Worker, ready, stop_all, wait_for
from tvm_fusion.tuning.session.result import TuneResult
from tvm_fusion.tuning.session.settings import load_settings
from tvm_fusion.tuning.session.tune import tune

from ..record import header, too_wrong, write
from ..rows.accuracy import CEILINGS, checked_error, reference
from ..rows.setup import Setup, exact_float32
from ..workloads import names_of
from .builds import TUNED, UNTUNED, Builds, build_ahead

log = logging.getLogger(__name__)

TUNE, TIME = "tune", "time"


def tune_rows(
    names: Sequence[str], setup: Setup, database: Path, minutes: float, settings: dict[str, Any]
) -> list[dict[str, Any]]:
    """Tunes workloads within a time for all of them.

    Parameters
    ----------
    names : sequence of str
        Workloads.
    setup : Setup
    database : Path
    minutes : float
        Of wall time, from the call on.
    settings : dict
        Changes of the default settings of tuning.

    Returns
    -------
    list of dict
        A row of each: what `tuning.command.to_json` says, the seconds, and what failed.
    """
    end = time.monotonic() + 60 * minutes
    loaded = load_settings(settings)
    builders, meters = make_builders(loaded), [LocalMeter()]
    rows = []
    try:
        _start([*builders, *(m.worker for m in meters)])
        for position, name in enumerate(names):
            began = time.monotonic()
            share = max(0.0, end - began) / (len(names) - position)
            row: dict[str, Any] = {"name": name, "tuning": None, "failures": {}}
            try:
                found = _tune(name, setup, database, share / 60, settings, builders, meters)
                if found.interrupted:
                    raise KeyboardInterrupt
                row["tuning"] = to_json(found)
            except TvmFusionError as error:  # a trial: recorded, and the next workload follows
                row["failures"][TUNE] = reason(error)
            row["tuning_s"] = round(time.monotonic() - began, 1)
            rows.append(row)
            log.info("%s", tuning_line(row))
    finally:
        stop_all([*builders, *(m.worker for m in meters)])
    return rows


def _start(workers: Sequence[Worker]) -> None:
    """Starts the processes and waits until they answer; those that fail start with a request."""
    for worker in workers:
        worker.send(ready, (), STARTING_S)
    busy = list(workers)
    while busy:
        wait_for(busy, 1.0)
        busy = [worker for worker in busy if worker.collect() is None]


def _tune(
    name: str,
    setup: Setup,
    database: Path,
    minutes: float,
    settings: dict[str, Any],
    builders: Sequence[Any],
    meters: Sequence[Any],
) -> TuneResult:
    instance = setup.instance(name)
    return tune(
        (instance.module, instance.inputs),
        setup.named,
        database=database,
        settings=settings,
        minutes=max(minutes, 1e-3),
        builders=builders,
        meters=meters,
    )


def time_rows(rows: Sequence[dict[str, Any]], setup: Setup, database: Path, workers: int) -> None:
    """Fills in the times of the tuned and the untuned builds."""
    names = [row["name"] for row in rows]
    with tempfile.TemporaryDirectory(prefix="tvm_fusion_bench_") as folder:
        builds = build_ahead(names, setup, database, Path(folder), workers)
        for row in rows:
            try:
                _time(row, setup, builds)
            except Exception as error:  # a trial: recorded, and the next workload follows
                row["failures"][TIME] = reason(error)
            log.info("%s", timing_line(row))


def _time(row: dict[str, Any], setup: Setup, builds: Builds) -> None:
    import torch

    from tvm_fusion.runtime.timing.timing import time_calls

    with torch.no_grad():
        instance = setup.instance(row["name"])
        row |= {"shape": instance.shape, "dtype": instance.dtype}
        wanted, _ = reference(instance)
        calls = {}
        for label in (UNTUNED, TUNED):
            module = builds.of(row["name"], label).module
            call = module.bind(*instance.inputs)
            error = checked_error(call, instance.inputs, wanted)
            row[f"{label}_error"] = error
            if why := too_wrong(error, CEILINGS[instance.dtype]):
                row["failures"][label] = why
            row[f"{label}_launches"] = module.launches
            calls[label] = call
        tuned = builds.of(row["name"], TUNED)
        row["same_kernels"] = tuned.same_as(builds.of(row["name"], UNTUNED))
        row["choices"] = list(tuned.choices)
        times = time_calls(calls, torch.device(setup.device), setup.repeats)
        for label, timing in times.items():
            row[f"{label}_us"] = timing.median_us
        row["gain"] = row["untuned_us"] / row["tuned_us"]


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Geometric mean of untuned over tuned time, the least and the median, and trials."""
    gains = {row["name"]: row["gain"] for row in rows if row.get("gain") and not row["failures"]}
    tuned = [row["tuning"] for row in rows if row["tuning"]]
    return {
        "rows": len(rows),
        "missing": [row["name"] for row in rows if row["name"] not in gains],
        "geomean_gain": statistics.geometric_mean(gains.values()) if gains else None,
        "median_gain": statistics.median(gains.values()) if gains else None,
        "least_gain": min(gains.values(), default=None),
        "changed": [row["name"] for row in rows if row.get("same_kernels") is False],
        "trials": sum(t["trials"] for t in tuned),
        "tuning_s": round(sum(row["tuning_s"] for row in rows), 1),
    }


def tuning_line(row: dict[str, Any]) -> str:
    """What tuning a row found, in one line."""
    found = row["tuning"]
    if found is None:
        return f"{row['name']}: {row['failures'][TUNE]}"
    failed = sum(task["failed"] for task in found["tasks"])
    return (
        f"{row['name']}: {found['trials']} trials ({failed} failed), kernels "
        f"{found['untuned_us']:.1f} -> {found['best_us']:.1f} us, {row['tuning_s']:.0f} s"
    )


def timing_line(row: dict[str, Any]) -> str:
    """The times of a row, in one line."""
    failed = "".join(f" | {stage}: {why}" for stage, why in row["failures"].items())
    if row.get("gain") is None:
        return row["name"] + failed
    same = ", the same kernels" if row["same_kernels"] else ""
    return (
        f"{row['name']}: untuned {row['untuned_us']:.1f} us, tuned {row['tuned_us']:.1f} us: "
        f"{row['gain']:.3f}{same}{failed}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for; the exit status is 1 where a row failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.tuning.gains", description=__doc__
    )
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--suite", default="models", help="a suite, or workloads by commas")
    parser.add_argument("--only", metavar="NAME,...", help="these workloads of the suite")
    parser.add_argument("--minutes", type=float, default=9.0, help="for tuning all of them")
    parser.add_argument("--trials", type=int, default=64, help="most trials of a kernel")
    parser.add_argument("--builders", type=int, default=0, help="processes; 0: a core each but one")
    parser.add_argument("--repeats", type=int, default=40, help="samples of each time")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the extents")
    parser.add_argument("--stage", choices=(TUNE, TIME), help="only this half")
    parser.add_argument("--work-dir", type=Path, required=True, metavar="DIR", help="database")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    log.setLevel(logging.INFO)
    result = run(args)
    found = result["summary"]
    print(", ".join(f"{key} {value}" for key, value in found.items()))
    return 1 if any(row["failures"] for row in result["rows"]) else 0


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The result of a command line, as it is written to its file."""
    names = names_of(args.suite, args.only)
    target, hw = resolve_target(args.target)
    import tvm

    if not tvm.runtime.device_from_target(target).exist:
        raise TargetError(f"this machine has no {target.kind.name} device to measure on")
    setup = Setup(args.target, target, hw, (), None, args.scale, args.repeats, 5.0)
    exact_float32()
    if args.stage == TIME:
        result = _read(args.out)
    else:
        result = header(hw.name, setup.device == "cuda", args.scale, args.repeats)
        settings = {"trials_per_task": args.trials, "builders": args.builders}
        result |= {"minutes": args.minutes, **settings, "cores": available_cores()}
        result["rows"] = tune_rows(names, setup, args.work_dir, args.minutes, settings)
        _save(result, args.out)
    if args.stage != TUNE:
        time_rows(result["rows"], setup, args.work_dir, args.builders)
        _save(result, args.out)
    return result


def _save(result: dict[str, Any], path: Path) -> None:
    result["summary"] = summary(result["rows"])
    write(result, path)


def _read(path: Path) -> dict[str, Any]:
    import json

    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"--stage {TIME} needs what --stage {TUNE} wrote: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
