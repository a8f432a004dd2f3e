"""All cases: processes that compile at once, and are timed one at a time."""

import contextlib
import json
import os
import queue
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tvm_fusion.bench.peers import EAGER
from tvm_fusion.errors import InputError
from tvm_fusion.host.cores import available_cores

from ..record import OURS, beside, header, write
from ..rows.setup import is_gpu, usual_dtype
from .child import FRAMES, GRAPHS, LABELS, STAGE, TUNED, Work
from .models import CASES

NAME = "real_models"
READY_S, PATIENCE_S, TIMING_S = 300.0, 60.0, 90.0
TOLD_S = 5.0  # in which a process writes down where it is, on cores that have much to do
FRAME = re.compile(r'File "(.*)", line (\d+) in (\S+)')
MOST_FRAMES = 8
CHILD = (sys.executable, "-m", f"{__package__}.child")
Said = Callable[..., None]


def listing() -> str:
    """Return the suite with its cases."""
    return "\n".join([f"{NAME} ({len(CASES)})", *(f"    {name}" for name in CASES)])


def names_of(only: str | None, part: tuple[int, int] = (1, 1)) -> tuple[str, ...]:
    """Cases by commas, or all; of these every Nth one.

    Raises
    ------
    InputError
        There is no such case.
    """
    chosen = tuple(CASES) if only is None else tuple(filter(None, map(str.strip, only.split(","))))
    for name in chosen:
        if name not in CASES:
            raise InputError(f"--only: {name!r} is no model; there are {', '.join(CASES)}")
    return chosen[part[0] - 1 :: part[1]]


def measure(
    names: Sequence[str],
    device: str,
    out: str | Path | None,
    say: Said,
    *,
    dtype: str | None = None,
    tiny: bool = False,
    labels: Sequence[str] = LABELS,
    repeats: int = 20,
    workers: int = 0,
    patience_s: float | None = None,
    ready_s: float | None = None,
) -> dict[str, Any]:
    """Compile and time cases.

    Parameters
    ----------
    names : sequence of str
        Of `CASES`.
    device : str
        torch's name of a device.
    out : path, optional
        A JSON file, written again after every case. Rows of other cases that it has stay.
    say : callable
        Takes a format and its values.
    dtype : str, optional
        By default float16, on a CPU float32.
    tiny : bool
        Small models of the same architectures, for trying.
    labels : sequence of str
        Compilers, of `child.LABELS`.
    repeats : int
        Batches of calls of each compiler.
    workers : int
        Processes that compile at once; by default as many as there are cores.
    patience_s : float, optional
        For inductor's max-autotune.
    ready_s : float, optional
        After so long, what is not compiled is given up, and the rest is timed.

    Returns
    -------
    dict
        What is written to `out`.

    Raises
    ------
    TargetError
        torch has no such device here.
    InputError
        `out` has rows of another device, or of other versions.
    """
    on_gpu = is_gpu(device, "measure on")
    ready_s = READY_S if ready_s is None else ready_s
    result = header("", on_gpu, 0.0 if tiny else 1.0, repeats)
    result["suite"] = NAME
    result["method"] = (
        "wall time of calls back to back, in batches of 30 ms each, interleaved in a process for "
        "each model; ours and inductor's with CUDA graphs"
    )
    if not on_gpu:
        result["method"] += " where there is a GPU"
    if out is not None:
        result = beside(Path(out), result, names)
    with tempfile.TemporaryDirectory(prefix="tvm_fusion_models_") as folder:
        work = Work(
            "",
            device,
            dtype or usual_dtype(on_gpu),
            tiny,
            tuple(labels),
            repeats,
            PATIENCE_S if patience_s is None else patience_s,
            ready_s,
            f"{folder}/device" if on_gpu else None,
        )
        works = {name: replace(work, name=name) for name in names}
        with Crew(works, folder, workers or available_cores(), CHILD, TIMING_S) as crew:
            for row in crew.rows(ready_s):
                result["rows"].append(row | {"date": result["date"]})
                compare(result["rows"][-1])
                say("%s", line(result["rows"][-1]))
                if out is not None:
                    write(result, Path(out))
    return result


class Crew:
    """The processes of a run, each a `child`, which takes one of `works` as JSON. What it measures
    is in its row by the name of `times`.
    """

    def __init__(
        self,
        works: Mapping[str, Any],
        folder: str,
        workers: int,
        child: Sequence[str],
        timing_s: float,
        times: str = "wall_us",
    ) -> None:
        self._works, self._folder, self._workers = works, Path(folder), workers
        self._child, self._timing_s, self._times = child, timing_s, times
        self._processes: dict[str, subprocess.Popen] = {}
        self._said: queue.Queue[tuple[str, str | None]] = queue.Queue()

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *exception: object) -> None:
        for name in list(self._processes):
            self._end(name)

    def rows(self, ready_s: float) -> Iterator[dict[str, Any]]:
        """The row of each of the works as it is known, by its name there: first what failed, then
        what is timed.
        """
        ends, waiting = time.monotonic() + ready_s, list(self._works)
        at_work: dict[str, float] = {}
        ready: dict[str, dict[str, Any]] = {}
        while (waiting or at_work) and (left := ends - time.monotonic()) > 0:
            while waiting and len(at_work) < self._workers:
                name = waiting.pop(0)
                self._begin(name, left)
                at_work[name] = left
            name, text = self._next(left)
            if name is None:
                continue
            del at_work[name]
            row = self._read(name, text)
            if not row["failures"].keys() >= set(self._works[name].labels) and text is not None:
                ready[name] = row
            else:
                self._end(name)
                yield row
        for name in (*at_work, *waiting):
            why = f"not compiled after {ready_s:.0f} s{self._place(name)}"
            self._end(name)
            yield self._failed(name, why)
        for name in self._works:
            if name in ready:
                yield self._timed(name, ready[name])

    def _begin(self, name: str, left_s: float) -> None:
        threads = max(1, 2 * available_cores() // self._workers)
        work = asdict(self._works[name]) | {"ready_s": left_s - 10}
        with open(self._folder / f"{name}.txt", "w", encoding="utf-8") as told:
            process = subprocess.Popen(
                [*self._child, json.dumps(work)],
                env={"TORCHINDUCTOR_COMPILE_THREADS": str(threads), **os.environ},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=told,
                text=True,
                start_new_session=True,
            )
        self._processes[name] = process
        threading.Thread(target=self._listen, args=(name, process), daemon=True).start()

    def _listen(self, name: str, process: subprocess.Popen) -> None:
        for text in process.stdout:
            self._said.put((name, text))
        self._said.put((name, None))

    def _next(self, left_s: float) -> tuple[str | None, str | None]:
        """Who says something, and what; None for what where that process ended."""
        while True:
            try:
                name, text = self._said.get(timeout=left_s)
            except queue.Empty:
                return None, None
            if name in self._processes:
                return name, text

    def _timed(self, name: str, row: dict[str, Any]) -> dict[str, Any]:
        process = self._processes[name]
        with contextlib.suppress(OSError):
            process.stdin.write("go\n")
            process.stdin.flush()
        ends = time.monotonic() + self._timing_s
        while (left := ends - time.monotonic()) > 0:
            who, text = self._next(left)
            if who == name:
                row = self._read(name, text) if text is not None else row
                if row.pop("is_last", True) or text is None:
                    break
        if not row[self._times]:
            late = f"not done after {self._timing_s:.0f} s"
            row["failures"]["timing"] = self._why(name) or late + self._place(name)
        self._end(name)
        return row

    def _read(self, name: str, text: str | None) -> dict[str, Any]:
        if text is None:
            return self._failed(name, self._why(name))
        return json.loads(text) | {"name": name}

    def _failed(self, name: str, why: str) -> dict[str, Any]:
        return {
            "name": name,
            "dtype": self._works[name].dtype,
            "shape": "",
            "ready_s": {},
            self._times: {},
            "errors": {},
            "notes": [],
            "failures": {"case": why},
        }

    def _why(self, name: str) -> str:
        """The last lines of what a process that ended told."""
        process = self._processes[name]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
        told = self._told(name)
        lines = [text.strip() for text in told.splitlines() if text.strip()]
        if process.returncode is None:
            return ""
        return f"it ended with {process.returncode}: {' '.join(lines[-2:])}"[-500:]

    def _told(self, name: str) -> str:
        return (self._folder / f"{name}.txt").read_text(encoding="utf-8", errors="replace")

    def _place(self, name: str) -> str:
        """With what a process is busy that takes too long, since when, and where in its code it is,
        innermost first, as far as it says so (see `child`).
        """
        process = self._processes.get(name)
        if process is None:
            return ", it was not begun"
        asked = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGUSR1)
        while FRAMES not in self._told(name) and time.monotonic() < asked + TOLD_S:
            time.sleep(0.1)
        time.sleep(0.1)  # all frames
        before, _, after = self._told(name).partition(FRAMES)
        stages = [text.split() for text in before.splitlines() if text.startswith(STAGE)]
        busy = [f", at {what} for {asked - float(at):.0f} s" for _, what, at in stages]
        places = [f"{Path(path).name}:{at} {what}" for path, at, what in FRAME.findall(after)]
        where = f", in {' < '.join(places[:MOST_FRAMES])}" if places else ""
        return (busy[-1] if busy else ", it was starting") + where

    def _end(self, name: str) -> None:
        process = self._processes.pop(name, None)
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()


def compare(row: dict[str, Any]) -> None:
    """Fill in the best of inductor's times and of eager execution, over ours."""
    times = {who: us for who, us in row["wall_us"].items() if not who.startswith(OURS)}
    ours = row["wall_us"].get(OURS)
    row["best_peer"] = row["best_peer_ratio"] = None
    if ours and times:
        row["best_peer"] = min(times, key=times.__getitem__)
        row["best_peer_ratio"] = times[row["best_peer"]] / ours


def line(row: dict[str, Any]) -> str:
    """A case in one line of text."""
    heads = {OURS: "ours", EAGER: "eager", GRAPHS: "reduce-overhead", TUNED: "max-autotune"}
    parts = [f"{row['name']:18} {row['shape']:22}"]
    for label, head in heads.items():
        us = row["wall_us"].get(label)
        parts.append(f"{head} {'      -' if us is None else f'{us:7.0f}'} us")
    ratio = row["best_peer_ratio"]
    parts.append("    -" if ratio is None else f"{ratio:.2f}x")
    said = [f"{who}: {why}" for who, why in row["failures"].items()]
    return "  ".join([*parts, *row["notes"], *said])


def text(result: dict[str, Any]) -> str:
    """All cases as lines, and the means of the best peer's time over ours."""
    lines = [f"{result['device']}, {result['date']}: {result['method']}"]
    lines += map(line, result["rows"])
    ratios = {r["name"]: r["best_peer_ratio"] for r in result["rows"] if r["best_peer_ratio"]}
    for what, names in {
        "all": list(ratios),
        "without the convolutional ones": [n for n in ratios if not CASES[n].convolutional],
    }.items():
        if names:
            mean = statistics.geometric_mean([ratios[name] for name in names])
            least = min(names, key=ratios.__getitem__)
            lines.append(
                f"best peer / ours, {what} ({len(names)}): geometric mean {mean:.2f}x, "
                f"least {ratios[least]:.2f}x ({least})"
            )
    return "\n".join(lines)
