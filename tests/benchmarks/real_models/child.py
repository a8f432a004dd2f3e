"""One case, in this process: `python -m tests.benchmarks.real_models.child WHAT`.

WHAT is the JSON of a `Work`. A line of JSON, the row without times, is printed when all compilers
are done; when a line comes on stdin, the times are taken and the row is printed once more. What it
begins with goes to stderr (`begins`), and at SIGUSR1 the frames of its first thread.
"""

import contextlib
import faulthandler
import fcntl
import json
import math
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tvm_fusion.bench.apart import reason
from tvm_fusion.bench.patience import within
from tvm_fusion.bench.peers import EAGER

from ..record import OURS, too_wrong
from ..rows.accuracy import CEILINGS, checked_error
from ..rows.prepare import time_candidates_alone
from ..rows.setup import exact_float32
from ..rows.small import batch_times
from ..rows.wall import calls_of_batch
from .models import CASES, Where, exact, make

GRAPHS, TUNED = "torch.reduce-overhead", "torch.max-autotune"
HOW: dict[str, dict[str, str]] = {  # arguments of `torch.compile`; what may be given up comes last
    OURS: {"backend": OURS, "mode": "reduce-overhead"},
    GRAPHS: {"mode": "reduce-overhead"},
    TUNED: {"mode": "max-autotune"},
}
LABELS = (OURS, EAGER, GRAPHS, TUNED)
WARM_CALLS = 4  # inductor warms up, records and then replays
AS_FAR = 3  # times the error of eager execution, where that is above the ceiling of the dtype
STAGE, FRAMES = "begins:", "Stack (most recent call first)"  # in what is told
LEAST_S = 5.0  # a compiler with less time than this is not begun

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Work:
    """What a process is to do.

    Attributes
    ----------
    name : str
        Of a case.
    device, dtype : str
    tiny : bool
    labels : tuple of str
        The compilers, of `LABELS`.
    repeats : int
        Batches of calls that are timed.
    patience_s : float or None
        For inductor's max-autotune.
    ready_s : float or None
        For all compilers together.
    lock : str or None
        A file; who holds it may time candidates on the device.
    """

    name: str
    device: str
    dtype: str
    tiny: bool
    labels: tuple[str, ...]
    repeats: int
    patience_s: float | None = None
    ready_s: float | None = None
    lock: str | None = None


def main(work: Work, say: Callable[[dict[str, Any]], None], wait: Callable[[], bool]) -> None:
    """Compile, say so, wait, and say the times.

    Parameters
    ----------
    work : Work
    say : callable
        Takes the row.
    wait : callable
        Returns whether to go on.
    """
    ends = math.inf if work.ready_s is None else time.monotonic() + work.ready_s
    exact_float32()
    if work.lock is not None:
        time_candidates_alone(DeviceLock(work.lock))
    with torch.no_grad():
        row, calls = compiled(work, ends)
        say(row)
        if calls and wait():
            # eager execution, ten times as long, leaves the others few calls: of three back to back
            # most is the first launch and the last kernel, which nothing overlaps
            numbers = {label: calls_of_batch({label: call}) for label, call in calls.items()}
            row["wall_us"] |= batch_times(calls, work.repeats, numbers)
            say(row)


def compiled(work: Work, ends: float) -> tuple[dict[str, Any], dict[str, Call]]:
    """The row of a case without times, and the calls that are right."""
    row: dict[str, Any] = {
        "name": work.name,
        "dtype": work.dtype,
        "ready_s": {},
        "wall_us": {},
        "errors": {},
        "notes": [],
        "failures": {},
    }
    begins("model")
    where = Where(work.device, getattr(torch, work.dtype), work.tiny)
    module, inputs = make(work.name, where)
    row["shape"] = ", ".join("x".join(map(str, x.shape)) or "scalar" for x in inputs)
    row["parameters"] = sum(x.numel() for x in module.parameters())
    wanted = _exact_results(module, inputs, work)
    allowed = CEILINGS[work.dtype]
    calls: dict[str, Call] = {}
    for label in sorted(work.labels, key=(EAGER, *HOW).index):
        left = ends - time.monotonic()
        if label == TUNED:
            left = min(left, work.patience_s or math.inf)
        began = time.monotonic()
        begins(label)
        try:
            call, error = _checked(label, module, inputs, wanted, left, row["notes"])
        except Exception as failure:  # a trial
            row["failures"][label] = reason(failure)
            continue
        row["ready_s"][label] = round(time.monotonic() - began, 1)
        row["errors"][label] = error if math.isfinite(error) else None
        if label == EAGER:
            allowed = max(allowed, AS_FAR * error)
        if why := too_wrong(error, allowed):
            row["failures"][label] = why
        else:
            calls[label] = call
    return row, calls


def _checked(
    label: str,
    module: torch.nn.Module,
    inputs: tuple[torch.Tensor, ...],
    wanted: list[torch.Tensor],
    left_s: float,
    notes: list[str],
) -> tuple[Call, float]:
    """A call by a compiler and its error; raises TimeoutError if it takes more than `left_s`."""
    if left_s < LEAST_S:
        raise TimeoutError("no time was left for it")
    if label == OURS:
        import tvm_fusion.torch_backend  # noqa: F401 - registers it
    with (
        within(None if math.isinf(left_s) else left_s),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        run = module if label == EAGER else torch.compile(module, dynamic=False, **HOW[label])

        def call() -> Any:
            return run(*inputs)

        for _ in range(WARM_CALLS):
            call()
        error = checked_error(call, inputs, wanted)
    if label == OURS:
        texts = (" ".join(str(one.message).split()) for one in told)
        notes += dict.fromkeys(text[:300] for text in texts if text.startswith(OURS))
    return call, error


def _exact_results(
    module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], work: Work
) -> list[torch.Tensor]:
    """What torch computes of the same numbers: in float32, for float32 in float64."""
    dtype = torch.float64 if work.dtype == "float32" else torch.float32
    given = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
    results = [exact(module, dtype, CASES[work.name].large)(*given)]
    if work.device == "cuda":
        torch.cuda.empty_cache()
    return results


class DeviceLock:
    """A lock of several processes, that one thread may take several times."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "w", encoding="ascii")  # noqa: SIM115 - as long as the process
        self._own, self._depth = threading.RLock(), 0

    def __enter__(self) -> None:
        self._own.acquire()
        if self._depth == 0:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._depth += 1

    def __exit__(self, *exception: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._own.release()


def tell_where() -> None:
    """Have SIGUSR1 tell where the first thread is; of all of them, faulthandler leaves out the
    first where there are more than a hundred.
    """
    faulthandler.register(signal.SIGUSR1, all_threads=False)


def begins(what: str) -> None:
    """Tell what is done from now on, and what the clock says."""
    print(STAGE, what, time.monotonic(), file=sys.stderr, flush=True)


def on_command_line(text: str, run: Callable[..., None] = main) -> None:
    """`main`, or one like it, as a process: rows go to stdout, and whatever libraries print does
    not.
    """
    given = json.loads(text)
    tell_where()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(row: dict[str, Any]) -> None:
        answers.write(json.dumps(row, allow_nan=False) + "\n")
        answers.flush()

    with contextlib.suppress(KeyboardInterrupt):
        run(
            Work(**given | {"labels": tuple(given["labels"])}),
            say,
            lambda: bool(sys.stdin.readline()),
        )


if __name__ == "__main__":
    on_command_line(sys.argv[1])
