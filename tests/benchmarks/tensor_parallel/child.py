"""One case, in this process and those that it begins: `python -m ...tensor_parallel.child WHAT`.

WHAT is the JSON of a `Work`. The first process says and hears what `real_models.child` does. All
compile the same in the same order; what fails in one of them is a failure of all.
"""

import contextlib
import copy
import json
import logging
import math
import os
import socket
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

import tvm_fusion.torch_backend  # noqa: F401 - registers it
from tvm_fusion.bench.apart import reason
from tvm_fusion.bench.peers import EAGER

from ..peers.registry import outputs_of
from ..real_models.child import AS_FAR, GRAPHS, HOW, TUNED, begins, tell_where
from ..real_models.models import Where
from ..record import OURS, too_wrong
from ..rows.accuracy import CEILINGS, checked_error
from ..rows.setup import exact_float32
from ..rows.wall import BATCH_S, MOST_CALLS
from .models import CASES, cut, make

PLAIN = f"{OURS}.plain"  # ours of the model before it is cut, where there is one process
LABELS = (OURS, EAGER, GRAPHS, TUNED, PLAIN)
IN_TURN = (EAGER, OURS, PLAIN, GRAPHS, TUNED)
WAIT_S = 60.0  # for other processes, in a collective
WARM_CALLS = 4  # ours and inductor warm up, record and then replay
LEAST_CALLS = 3
PROFILED_CALLS = 5
COLLECTIVE = "nccl"  # in the names of its kernels
ANNOTATION = "nccl:"  # names of spans, which hold kernels
BACKENDS = {"cuda": "nccl", "cpu": "gloo"}

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Work:
    """What processes are to do.

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
    ranks : int
        Processes, each with a device of its own.
    is_simulated : bool
        Only the first of them is there: collectives move nothing.
    ready_s : float or None
        For all compilers together; who waits ends all processes then.
    """

    name: str
    device: str
    dtype: str
    tiny: bool
    labels: tuple[str, ...]
    repeats: int
    ranks: int
    is_simulated: bool = False
    ready_s: float | None = None


class Rank:
    """A process of several.

    Attributes
    ----------
    number : int
    device : str
    """

    def __init__(self, work: Work, number: int, port: int) -> None:
        self.number, self._work = number, work
        self.device = f"cuda:{number}" if work.device == "cuda" else work.device
        if work.device == "cuda":
            torch.cuda.set_device(number)
        how = {"rank": number, "world_size": work.ranks}
        if work.is_simulated:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            distributed.init_process_group("fake", store=FakeStore(), **how)
            self._control = None
            return
        store = distributed.TCPStore("127.0.0.1", port, work.ranks, number == 0)
        how |= {"store": store, "timeout": timedelta(seconds=WAIT_S)}
        if work.device == "cuda":
            how["device_id"] = torch.device(self.device)
        distributed.init_process_group(BACKENDS[work.device], **how)
        self._control = distributed.new_group(backend="gloo", timeout=timedelta(minutes=10))

    def all(self, value: Any) -> list[Any]:
        """What all processes say."""
        if self._control is None:
            return [value]
        found = [None] * self._work.ranks
        distributed.all_gather_object(found, value, self._control)
        return found


def main(
    work: Work, rank: Rank, say: Callable[[dict[str, Any]], None], wait: Callable[[], bool]
) -> None:
    """Compile, say so, wait, and say the times; `say` and `wait` are those of the first process."""
    exact_float32()
    with torch.no_grad():
        row, calls = compiled(work, rank)
        say(row)
        if calls and rank.all(wait() if rank.number == 0 else None)[0]:
            row["wall_us"] |= wall_us(calls, work.repeats, rank)
            if work.device == "cuda":
                say(row | {"is_last": False})
                for label, call in calls.items():
                    profiled(label, call, row)
            say(row)


def compiled(work: Work, rank: Rank) -> tuple[dict[str, Any], dict[str, Call]]:
    """The row of a case without times, and the calls that are right."""
    row: dict[str, Any] = {
        "name": work.name,
        "ranks": work.ranks,
        "is_simulated": work.is_simulated,
        "dtype": work.dtype,
        "ready_s": {},
        "wall_us": {},
        "kernel_us": {},
        "collective_us": {},
        "outside_share": {},
        "launches": {},
        "errors": {},
        "notes": [],
        "failures": {},
    }
    if rank.number == 0:
        begins("model")
    where = Where(rank.device, getattr(torch, work.dtype), work.tiny)
    module, inputs = make(work.name, where, rank.number)
    row["shape"] = "x".join(map(str, inputs[0].shape))
    row["parameters"] = sum(x.numel() for x in module.parameters())
    wanted = None if work.is_simulated else [module.exact(*inputs)]  # of one device
    plain = copy.deepcopy(module) if PLAIN in work.labels else None
    module = cut(work.name, module, rank.device, rank.number, work.ranks)
    if work.device == "cuda":
        torch.cuda.empty_cache()
    allowed = CEILINGS[work.dtype]
    calls: dict[str, Call] = {}
    for label in sorted(work.labels, key=IN_TURN.index):
        began = time.monotonic()
        if rank.number == 0:
            begins(label)
        failure, error, call = None, None, None
        try:
            of = plain if label == PLAIN else module
            call, error = _checked(label, of, inputs, wanted, row)
        except Exception as problem:  # a trial
            failure = reason(problem)
        found = rank.all((failure, error))
        if failure := next((why for why, _ in found if why is not None), None):
            row["failures"][label] = failure
            continue
        row["ready_s"][label] = round(time.monotonic() - began, 1)
        error = max(error for _, error in found)
        row["errors"][label] = error if math.isfinite(error) else None
        if label == EAGER:
            allowed = max(allowed, AS_FAR * error)
        if why := too_wrong(error, allowed):
            row["failures"][label] = why
        else:
            calls[label] = call
    if {OURS, PLAIN} <= calls.keys():
        # each writes where its outputs were, so these are copies
        ours, other = ([x.clone() for x in outputs_of(calls[label]())] for label in (OURS, PLAIN))
        row["is_as_plain"] = all(map(torch.equal, ours, other))
    return row, calls


def _checked(
    label: str,
    module: torch.nn.Module,
    inputs: tuple[torch.Tensor, ...],
    wanted: Sequence[torch.Tensor] | None,
    row: dict[str, Any],
) -> tuple[Call, float]:
    """A call by a compiler, and its error."""
    told: list[Any] = []
    how: dict[str, Any] = dict(HOW.get(label, {}))
    if label in (OURS, PLAIN):
        graphs = inputs[0].device.type == "cuda"
        options = {"verify": False, "cuda_graph": graphs, "report": told.append}
        how = {"backend": OURS, "options": options}
    elif CASES[row["name"]].is_sharded:  # weights are gathered for a call, and lie anywhere
        how.pop("mode", None)
    with warnings.catch_warnings(record=True) as said, _logged() as lines:
        warnings.simplefilter("always")
        run = module if label == EAGER else torch.compile(module, dynamic=False, **how)

        def call() -> Any:
            return run(*inputs)

        for _ in range(WARM_CALLS):
            call()
        error = 0.0 if wanted is None else checked_error(call, inputs, wanted)
    if label == OURS:
        texts = (" ".join(str(one.message).split()) for one in said)
        lines += [text for text in texts if text.startswith(OURS)]
        row["notes"] += [text[:300] for text in dict.fromkeys(lines)]
        _note_parts(row, told)
    return call, error


@contextlib.contextmanager
def _logged() -> Iterator[list[str]]:
    """The warnings that this package logs."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger(OURS)
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)


def _note_parts(row: dict[str, Any], told: Sequence[Any]) -> None:
    """What runs outside of our parts, what collectives take, and what the parts should take."""
    last = {(one.graph, one.part): one for one in told}
    row["parts"] = len(last)
    row["outside"] = {name: n for one in last.values() for name, n in one.outside.items()}
    row["predicted_us"] = sum(one.plan.predicted_us for one in last.values())
    row["collectives"] = next((one.to_json()["collectives"] for one in last.values()), [])


# ---- times


def wall_us(calls: Mapping[str, Call], batches: int, rank: Rank) -> dict[str, float]:
    """Median wall time of a call, of batches that all processes begin together, interleaved."""
    numbers: dict[str, int] = {}
    samples: dict[str, list[float]] = {label: [] for label in calls}
    for label, call in calls.items():
        took_us = _batch(call, LEAST_CALLS, rank)
        fits = int(BATCH_S / (took_us * 1e-6))
        numbers[label] = rank.all(max(LEAST_CALLS, min(MOST_CALLS, fits)))[0]
    for _ in range(batches):
        for label, call in calls.items():
            samples[label].append(_batch(call, numbers[label], rank))
    return {label: statistics.median(times) for label, times in samples.items()}


def _batch(call: Call, number: int, rank: Rank) -> float:
    _synchronize()
    rank.all(None)
    began = time.perf_counter()
    for _ in range(number):
        call()
    _synchronize()
    return (time.perf_counter() - began) / number * 1e6


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def profiled(label: str, call: Call, row: dict[str, Any]) -> None:
    """Note what the kernels of a call take, those of collectives apart, and the share of its wall
    time in which none runs.
    """
    from torch.profiler import ProfilerActivity, profile

    call()
    _synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(PROFILED_CALLS):
            call()
        _synchronize()
    events = [
        (e.name(), e.start_ns(), e.start_ns() + e.duration_ns())
        for e in found.profiler.kineto_results.events()
        if "CUDA" in str(e.device_type()) and not e.name().startswith(ANNOTATION)
    ]
    spans = [(begin, end) for _, begin, end in events]
    total = {True: 0, False: 0}
    for name, begin, end in events:
        total[COLLECTIVE in name.lower()] += end - begin
    row["kernel_us"][label] = total[False] / 1e3 / PROFILED_CALLS
    row["collective_us"][label] = total[True] / 1e3 / PROFILED_CALLS
    row["launches"][label] = len(events) / PROFILED_CALLS
    busy_us = covered(spans) / 1e3 / PROFILED_CALLS
    row["outside_share"][label] = max(0.0, 1 - busy_us / row["wall_us"][label])


def covered(spans: Sequence[tuple[int, int]]) -> int:
    """How much of a line spans cover together."""
    total, reached = 0, None
    for begin, end in sorted(spans):
        begin = begin if reached is None else max(begin, reached)
        total += max(0, end - begin)
        reached = end if reached is None else max(reached, end)
    return total


# ---- processes


def _on_command_line(text: str, number: str = "0", port: str = "") -> None:
    """Rows of the first process go to stdout, and whatever libraries print does not."""
    given = json.loads(text)
    work = Work(**given | {"labels": tuple(given["labels"])})
    tell_where()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    is_first = number == "0"
    if is_first and not work.is_simulated:
        port = str(free_port())
        for other in range(1, work.ranks):
            command = [sys.executable, "-m", __spec__.name, text, str(other), port]
            subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def say(row: dict[str, Any]) -> None:
        if is_first:
            answers.write(json.dumps(row, allow_nan=False) + "\n")
            answers.flush()

    if is_first:
        begins("processes")
    rank = Rank(work, int(number), int(port or 0))
    main(work, rank, say, lambda: bool(sys.stdin.readline()))
    rank.all(None)
    os._exit(0)  # graphs hold on to what NCCL would wait for


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


if __name__ == "__main__":
    _on_command_line(*sys.argv[1:])
