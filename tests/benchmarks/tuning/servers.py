"""What a second server saves: workloads tuned through TVM's RPC tracker, with 1 and with 2 servers.

    python -m tests.benchmarks.tuning.servers --target cuda --servers 1,2 --trials 200 --out FILE

All servers are on this machine, one for each GPU. Each run is a process of its own with an empty
database and an empty cache of compiled kernels; its model holds all workloads, so that there is one
session, without finals. Times are from the first to the last trial, and what the processes that
build and measure were busy in between.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.tune_servers import SERVE, servers
from tvm_fusion.config import resolve_target
from tvm_fusion.errors import InputError
from tvm_fusion.host.cache_folder import CACHE_VARIABLE
from tvm_fusion.host.cores import available_cores
from tvm_fusion.tuning.measure.building import make_builders
from tvm_fusion.tuning.measure.processes import Worker, stop_all
from tvm_fusion.tuning.remote.client import meters_of
from tvm_fusion.tuning.session.session import Session
from tvm_fusion.tuning.session.settings import load_settings
from tvm_fusion.tuning.session.tune import tune

from ..record import header, write
from ..workloads import dtype_of, make, require

log = logging.getLogger(__name__)

KEY = "bench"
WORKLOADS = "softmax,layernorm,rmsnorm,bias_gelu,cross_entropy,linear_bias_gelu"


class Together(nn.Module):
    """Several modules as one; it takes the inputs of all, and returns their outputs."""

    def __init__(self, modules: Sequence[nn.Module], counts: Sequence[int]) -> None:
        super().__init__()
        self.parts, self.counts = nn.ModuleList(modules), tuple(counts)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call each with its own inputs."""
        results: list[torch.Tensor] = []
        begin = 0
        for part, count in zip(self.parts, self.counts, strict=True):
            result = part(*inputs[begin : begin + count])
            results += result if isinstance(result, tuple) else (result,)
            begin += count
        return tuple(results)


@dataclass(frozen=True, slots=True)
class Run:
    """One session.

    Attributes
    ----------
    servers : int
    names : tuple of str
        Workloads.
    target : str
    scale : float
        Factor on their extents.
    settings : dict
        Of the session.
    """

    servers: int
    names: tuple[str, ...]
    target: str
    scale: float
    settings: dict[str, Any]


@dataclass
class Clock:
    """When a session began, and when the result of each trial was there; a watcher of `tune`."""

    begun_s: float = 0.0
    told_s: list[float] = field(default_factory=list)

    def __call__(self, session: Session) -> None:
        self.begun_s = session.started
        self.told_s.append(time.monotonic())


@dataclass
class Busy:
    """When some workers were busy, as (start, end)."""

    workers: Sequence[Worker]
    spans: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for worker in self.workers:
            self._watch(worker)

    def _watch(self, worker: Worker) -> None:
        collect = worker.collect

        def collected() -> Any:
            answer = collect()
            if answer is not None:
                now = time.monotonic()
                self.spans.append((now - answer.seconds, now))
            return answer

        worker.collect = collected

    def seconds(self, begin: float, end: float) -> float:
        """Of all workers together between two times."""
        return sum(max(0.0, min(end, b) - max(begin, a)) for a, b in self.spans)

    def share(self, begin: float, end: float) -> float:
        """Of the time of the workers between two times."""
        return self.seconds(begin, end) / (len(self.workers) * max(1e-9, end - begin))


def model_of(names: Sequence[str], scale: float) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """All workloads as one module, and its inputs."""
    made = [make(name, "cpu", dtype_of(name, "float16"), scale) for name in names]
    module = Together([one.module for one in made], [len(one.inputs) for one in made])
    return module, tuple(x for one in made for x in one.inputs)


def run_session(run: Run, folder: str) -> dict[str, Any]:
    """Tunes in this process, with a cache and a database in a folder, and says what it took."""
    os.environ[CACHE_VARIABLE] = str(Path(folder, "cache"))
    on_gpu = resolve_target(run.target)[0].kind.name == "cuda"
    settings, clock = load_settings(run.settings), Clock()
    server = (SERVE, "--key", KEY)
    wanted = [(*server, "--gpu", str(i)) if on_gpu else server for i in range(run.servers)]
    with servers(wanted) as address:
        meters = meters_of(address, KEY)
        building = Busy(make_builders(settings))
        measuring = Busy([m.worker for m in meters])
        try:
            result = tune(
                model_of(run.names, run.scale),
                run.target,
                database=Path(folder, "database"),
                settings=settings,
                builders=building.workers,
                meters=meters,
                watch=clock,
            )
        finally:
            stop_all([*building.workers, *measuring.workers])
    if result.interrupted:
        raise KeyboardInterrupt
    found = figures(clock, result.trials, building, measuring)
    failed = sum(task.failed for task in result.tasks)
    return {"servers": run.servers, "tasks": len(result.tasks), "failed": failed} | found


def figures(clock: Clock, trials: int, building: Busy, measuring: Busy) -> dict[str, Any]:
    """What a session took from its first to its last trial.

    Raises
    ------
    InputError
        There are fewer than two trials.
    """
    if trials < 2 or len(clock.told_s) < trials:
        raise InputError(f"{trials} trials tell nothing of the time of one")
    begin, end = clock.told_s[0], clock.told_s[trials - 1]
    return {
        "trials": trials,
        "first_to_last_s": round(end - begin, 2),
        "session_to_last_s": round(end - clock.begun_s, 2),
        "trials_per_s": round((trials - 1) / max(1e-9, end - begin), 4),
        "builders": len(building.workers),
        "building_s": round(building.seconds(begin, end), 1),
        "building_share": round(building.share(begin, end), 3),
        "measuring_s": round(measuring.seconds(begin, end), 1),
        "measuring_share": round(measuring.share(begin, end), 3),
    }


def speed_ups(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Trials per second over those of the first run, by number of servers."""
    first = runs[0]["trials_per_s"]
    return {str(run["servers"]): round(run["trials_per_s"] / first, 3) for run in runs[1:]}


def line(run: dict[str, Any]) -> str:
    """A run in one line."""
    return (
        f"{run['servers']} servers, {run['builders']} builders: {run['trials']} trials "
        f"({run['failed']} failed) of {run['tasks']} kernels in {run['first_to_last_s']:.1f} s, "
        f"{run['trials_per_s']:.2f} a second; building {100 * run['building_share']:.0f} %, "
        f"measuring {100 * run['measuring_share']:.0f} % of the time"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.tuning.servers", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--servers", default="1,2", help="of each run, by commas")
    parser.add_argument("--workloads", default=WORKLOADS, help="by commas")
    parser.add_argument("--trials", type=int, default=200, help="of each run")
    parser.add_argument("--minutes", type=float, default=1.4, help="most of each run's session")
    parser.add_argument("--builders", type=int, default=0, help="processes; 0: a core each but one")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the extents")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    log.setLevel(logging.INFO)
    names = tuple(args.workloads.split(","))
    require(names)
    repeats = load_settings().repeats
    settings = {
        "repeats": repeats,
        "final_repeats": repeats,  # trials have as many: there are no finals
        "trials": args.trials,
        "trials_per_task": -(-args.trials // len(names)),
        "minutes": args.minutes,
        "builders": args.builders,
        "least_gain": 0.0,  # both runs make all trials
    }
    _, hw = resolve_target(args.target)
    result = header(hw.name, hw.kind == "cuda", args.scale, repeats)
    del result["rows"]
    result |= {"workloads": names, "cores": available_cores(), "minutes": args.minutes, "runs": []}
    context = multiprocessing.get_context("spawn")
    for count in map(int, args.servers.split(",")):
        run = Run(count, names, args.target, args.scale, settings)
        with (
            tempfile.TemporaryDirectory(prefix="tvm_fusion_servers_") as folder,
            ProcessPoolExecutor(1, context) as pool,
        ):
            result["runs"].append(pool.submit(run_session, run, folder).result())
        log.info("%s", line(result["runs"][-1]))
        result["speed_up"] = speed_ups(result["runs"])
        write(result, args.out)
    print(", ".join(f"{n} servers: {gain} times as fast" for n, gain in result["speed_up"].items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
