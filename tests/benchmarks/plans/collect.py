"""Measures the launches and plans of many graphs, for the learned cost model.

    python -m tests.benchmarks.plans.collect --keys random:0-99,suite:memory --out FILE

    worker processes: plans, kernels, a library each graph -->  measuring process: numbers, times
                                                                      | lines
                                                                   FILE, FILE.problems

Lines are written graph by graph, so that a killed run keeps what it has; `--resume` goes on behind
it. A kernel that hangs or takes the device down costs the measuring process, which is started
again, and its own graph.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tvm_fusion.config import resolve_target
from tvm_fusion.errors import InputError, TvmFusionError
from tvm_fusion.runtime.build import cubin_cache

from .graph_launches import Choice, PreparedGraph, prepare_graph
from .measured_graph import Measured, measure_graph
from .random_graphs import keys_of

VERSION = 1
HANGING_S = 90.0  # a graph takes seconds


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be measured.

    Attributes
    ----------
    keys : graphs, in the order in which they are measured
    choice : how much of each
    workers : processes that write and compile kernels; 0 does everything in this one
    repeats : samples of each plan
    budget_s : when to stop, in seconds from the start
    """

    keys: tuple[str, ...]
    choice: Choice
    workers: int = 0
    repeats: int = 9
    budget_s: float = 480.0


@dataclass
class Output:
    """The sample file and, beside it, what went wrong."""

    file: Path
    lines: int = 0
    launches: int = 0
    classes: Counter[str] = field(default_factory=Counter)

    @property
    def problem_file(self) -> Path:
        return self.file.with_name(self.file.name + ".problems")

    def begin(self, header: dict[str, Any], resume: bool) -> set[str]:
        """Starts the file, or goes on with it; the graphs that are done.

        Raises
        ------
        InputError
            The file to go on with is of another device or version.
        """
        if not (resume and self.file.exists()):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps(header) + "\n")
            self.problem_file.write_text("")
            return set()
        text = self.file.read_text()
        whole = text[: text.rfind("\n") + 1]  # a killed run may leave half a line
        old, *lines = [json.loads(line) for line in whole.splitlines()] or [{}]
        for key in ("version", "device"):
            if old.get(key) != header[key]:
                raise InputError(f"{self.file} is of {key} {old.get(key)!r}, not {header[key]!r}")
        self.file.write_text(whole)
        problems = self.problem_file.read_text() if self.problem_file.exists() else ""
        failed = {line.partition("\t")[0] for line in problems.splitlines()}
        return {line["graph"] for line in lines} | failed

    def add(self, measured: Measured) -> None:
        """Appends what was found out about a graph, in one write."""
        text = "".join(json.dumps(x, separators=(",", ":")) + "\n" for x in measured.lines)
        with self.file.open("a") as file:
            file.write(text)
        with self.problem_file.open("a") as file:
            for problem in measured.problems:
                file.write(f"{measured.key}\t{' '.join(problem.split())}\n")
        self.lines += len(measured.lines)
        own = [line for line in measured.lines if "us" in line]
        self.launches += len(own)
        self.classes.update(line["class"] for line in own)


def collect(request: Request, output: Output) -> None:
    """Measures graphs until all are done or the time is up; prints a line for each."""
    with tempfile.TemporaryDirectory(prefix="tvm_fusion_collect_") as folder:
        if request.workers == 0:
            _collect_here(request, output, Path(folder))
        else:
            _collect_beside(request, output, Path(folder))


def _collect_here(request: Request, output: Output, folder: Path) -> None:
    end = time.monotonic() + request.budget_s
    for key in request.keys:
        if time.monotonic() > end:
            break
        prepared = _prepare(key, request.choice, folder)
        _note(output, _measure(prepared, request.choice.target, request.repeats), prepared)


def _collect_beside(request: Request, output: Output, folder: Path) -> None:
    end = time.monotonic() + request.budget_s
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    prober = _Prober(context, request)
    pool = ProcessPoolExecutor(request.workers, context, _enter)
    pending: set[Future] = set()
    keys = iter(request.keys)
    try:
        while time.monotonic() < end:
            for key in _next(keys, 2 * request.workers - len(pending)):
                pending.add(pool.submit(_prepare, key, request.choice, folder))
            if not pending:
                break
            ready, pending = wait(pending, 1.0, FIRST_COMPLETED)
            for done in ready:
                if time.monotonic() < end:
                    prepared = done.result()
                    limit = min(HANGING_S, max(5.0, end - time.monotonic()))
                    _note(output, prober.measure(prepared, limit), prepared)
                    if prepared.path is not None:
                        prepared.path.unlink(missing_ok=True)
    finally:
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()
        prober.stop()


def _next(keys: Iterator[str], count: int) -> Iterator[str]:
    for _ in range(count):
        key = next(keys, None)
        if key is None:
            return
        yield key


def _note(output: Output, measured: Measured, prepared: PreparedGraph) -> None:
    output.add(measured)
    count = sum("us" in line for line in measured.lines)
    plans = len(measured.lines) - count
    print(
        f"{measured.key}: {count} launches, {plans} plans, built in {prepared.seconds:.0f} s; "
        f"{output.launches} launches so far",
        flush=True,
    )
    for problem in measured.problems:
        print(f"  {problem[:300]}", flush=True)


# ---- processes
def _enter() -> None:
    """A worker compiles one kernel at a time, and gives way to the measuring process."""
    cubin_cache.compile_by(1)
    os.nice(10)


def _prepare(key: str, choice: Choice, folder: Path) -> PreparedGraph:
    try:
        return prepare_graph(key, choice, folder)
    except Exception as error:  # one graph of many
        return PreparedGraph(key, error=_reason(error))


def _measure(prepared: PreparedGraph, target: str, repeats: int, say: Any = None) -> Measured:
    if prepared.error:
        return Measured(prepared.key, problems=[f"not prepared: {prepared.error}"])
    try:
        return measure_graph(prepared, target, repeats, say or (lambda text: None))
    except Exception as error:  # one graph of many
        if "CUDA" in str(error) and "out of memory" not in str(error).lower():
            raise  # the device is lost for this process
        return Measured(prepared.key, problems=[f"not measured: {_reason(error)}"])


def _reason(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:400]
    return f"{type(error).__name__}: {text} ({Path(where.filename).name}:{where.lineno})"


class _Prober:
    """The process that uses the device, started again when it is lost."""

    def __init__(self, context: Any, request: Request) -> None:
        self._context, self._request = context, request
        self._process: Any = None
        self._pipe: Any = None

    def measure(self, prepared: PreparedGraph, limit_s: float) -> Measured:
        """What the process says of a graph, or that it died or hung, and at what."""
        if self._process is None:
            self._pipe, theirs = self._context.Pipe()
            arguments = (theirs, self._request.choice.target, self._request.repeats)
            self._process = self._context.Process(target=_probe, args=arguments, daemon=True)
            self._process.start()
            theirs.close()
        doing, end = "starting", time.monotonic() + limit_s
        try:
            self._pipe.send(prepared)
            while time.monotonic() < end:
                if not self._pipe.poll(1.0):
                    continue
                answer = self._pipe.recv()
                if isinstance(answer, Measured):
                    return answer
                doing = answer
            why = f"no answer within {limit_s:.0f} s"
        except (EOFError, OSError):
            why = "the measuring process died"
        self.stop()
        return Measured(prepared.key, problems=[f"{why} at: {doing}"])

    def stop(self) -> None:
        """Ends the process; the next graph gets a new one."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None


def _probe(pipe: Any, target: str, repeats: int) -> None:
    import gc

    while True:
        try:
            prepared = pipe.recv()
        except EOFError:
            return
        pipe.send(_measure(prepared, target, repeats, pipe.send))
        del prepared
        gc.collect()


# ---- command line
def header(target: str) -> dict[str, Any]:
    """The first line of a sample file."""
    import tvm

    _, hw = resolve_target(target)
    driver, cuda, device = "", "", hw.name
    if hw.kind == "cuda":
        import torch

        cuda, device = str(torch.version.cuda), hw.name
        query = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
        try:
            driver = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
        except OSError:
            driver = "unknown"
    return {
        "version": VERSION,
        "device": device,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "driver": driver,
        "cuda": cuda,
        "tvm": tvm.__version__,
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.plans.collect", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--target", default="cuda")
    parser.add_argument(
        "--keys", required=True, help="random:0-59,suite:memory,suite:small:float32"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--launches", type=int, default=18, help="most of a graph")
    parser.add_argument("--plans", type=int, default=24, help="most of a graph")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--budget", type=float, default=480.0, help="seconds")
    parser.add_argument("--resume", action="store_true", help="go on with the file")
    given = parser.parse_args(arguments)
    try:
        output = Output(given.out)
        done = output.begin(header(given.target), given.resume)
        keys = tuple(key for key in keys_of(given.keys) if key not in done)
        choice = Choice(given.target, given.launches, given.plans)
        collect(Request(keys, choice, given.workers, given.repeats, given.budget), output)
    except TvmFusionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{output.launches} launches in {given.out}: {dict(output.classes.most_common())}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
