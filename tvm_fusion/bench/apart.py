"""Callables in processes of their own: the same cores for each, and one of them at work at a time.

The worker threads of TVM, OpenMP and others spin on after a call and would take the cores from
whoever is called next, and two pools in one process disturb each other even longer (on 16 cores
torch's operators took 8,000 to 40,000 us in place of 60 to 400). A process that is not asked waits
for its pipe, and the next one is asked once its threads sleep: a worker of TVM spins for 100 ms and
more.
"""

import contextlib
import gc
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import InputError
from ..host.cores import HAS_AFFINITY, physical_cores, usable_cores
from ..runtime.timing.timing import Timing

Call = Callable[[], Any]
Maker = Callable[..., tuple[Call, Any]]  # to a call, and what is to be known of it

PAUSE_S = 0.05  # pools of threads of all libraries sleep after that
WARM_CALLS = 2  # the threads are awake, and the caches hold what they can
SAMPLE_S = 0.002  # calls that take less are repeated within a sample
REST_S, MOST_REST_S = 0.01, 2.0  # a process rests that computed next to nothing for so long
SLOW_S, SLOW_REPEATS = 0.05, 5  # slower calls are measured a few times
ENDING_S = 2.0
# A pool of processes that compile would go on in the background
SURROUNDINGS = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
# What keeps libraries, torch's own kernels and inductor's from wider vectors than a set of
# instructions has, and the processor that our kernels are written for then
INSTRUCTIONS = {
    "avx2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
    }
}
PROCESSORS = {"avx2": "haswell"}
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TVM_NUM_THREADS")


class Failed(Exception):
    """What a process said of its failure, or how it ended."""


def reason(error: Exception) -> str:
    """Return type and first lines of an error, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2]) or 'no message'}"[:500]


class Process:
    """A process that makes calls and times them.

    Parameters
    ----------
    make : Callable
        Of a module, so that it can be sent; it makes the call that is timed from then on.
    threads : int
        Threads of the call, each with a core of its own.
    quiet : bool
        Whether what the process prints goes nowhere.
    instructions : str, optional
        The set of instructions that the libraries keep to, of `INSTRUCTIONS`.
    """

    def __init__(
        self, make: Maker, threads: int, quiet: bool = False, instructions: str | None = None
    ) -> None:
        self._make, self._threads, self._quiet = make, threads, quiet
        self._limits = INSTRUCTIONS.get(instructions, {})
        self._process: Any = None
        self._pipe: Any = None

    def __enter__(self) -> "Process":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def begin(self, *arguments: Any) -> None:
        """Have it make a call; `finish` waits for that."""
        if self._process is None:
            self._start()
        self._send("make", arguments)

    def finish(self, limit_s: float | None = None) -> Any:
        """Return what the maker told of the call; raises Failed, also after `limit_s` seconds."""
        return self._answer(limit_s)

    def make(self, *arguments: Any, limit_s: float | None = None) -> Any:
        """`begin` and `finish`."""
        self.begin(*arguments)
        return self.finish(limit_s)

    def time(self, number: int = 1, limit_s: float | None = None) -> float:
        """Return the seconds of one of `number` calls, after a pause and calls that warm up."""
        self._send("time", number)
        seconds = self._answer(limit_s)
        self._rest()
        return seconds

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._pipe.close()  # which ends it, unless it is at work
            self._process.join(ENDING_S)
            self._process.kill()
            self._process.join()
            self._process = None

    def _rest(self) -> None:
        """Wait until the threads of the process sleep."""
        end = time.monotonic() + MOST_REST_S
        before, _ = _work_of(self._process.pid)
        while time.monotonic() < end:
            time.sleep(REST_S)
            now, wanting = _work_of(self._process.pid)
            if now - before < REST_S / 10 and not wanting:
                return
            before = now

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would share the pools of threads
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, self._make, self._quiet), daemon=True
        )
        with _given(self._threads, self._limits):
            self._process.start()
        theirs.close()

    def _send(self, kind: str, value: Any) -> None:
        with contextlib.suppress(OSError):  # it ended; the answer says so
            self._pipe.send((kind, value))

    def _answer(self, limit_s: float | None) -> Any:
        if self._process is None:
            raise Failed("its process has ended")
        try:
            answered = self._pipe.poll(limit_s)
            done, answer = self._pipe.recv() if answered else (False, None)
        except (EOFError, OSError) as error:
            self._process.join(ENDING_S)
            status = self._process.exitcode
            self.close()
            raise Failed(f"its process ended with status {status}") from error
        if not answered:
            self.close()
            raise Failed(f"no answer within {limit_s:g} s")
        if not done:
            raise Failed(answer)
        return answer


def in_rounds(
    processes: Mapping[str, Process], repeats: int = 20, limit_s: float | None = None
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Time what processes have made, in turns.

    Parameters
    ----------
    processes : mapping of str to Process
        Each has made its call.
    repeats : int
        Samples of each, but `SLOW_REPEATS` of calls that take longer than `SLOW_S`.
    limit_s : float, optional
        The most time that one sample may take.

    Returns
    -------
    tuple
        The times, and by name why the others have none.
    """
    failures: dict[str, str] = {}
    samples_us: dict[str, list[float]] = {name: [] for name in processes}

    def sample(name: str, number: int) -> float:
        try:
            return processes[name].time(number, limit_s)
        except Failed as failure:
            failures.setdefault(name, str(failure))
            return math.nan

    once = {name: min(sample(name, 1), sample(name, 1)) for name in processes}
    rounds = {
        name: repeats if s < SLOW_S else min(repeats, SLOW_REPEATS) for name, s in once.items()
    }
    for turn in range(repeats):
        for name in processes:
            if name not in failures and turn < rounds[name]:
                number = max(1, math.ceil(SAMPLE_S / max(once[name], 1e-7)))
                samples_us[name].append(sample(name, number) * 1e6)
    times = {n: Timing.of(us, "wall") for n, us in samples_us.items() if n not in failures}
    return times, failures


def cores_for(threads: int) -> list[int]:
    """Return the cores of a run: one thread of each physical core before a second one of any.

    Raises
    ------
    InputError
        If this process may not use as many.
    """
    usable = sorted(usable_cores())
    if not 1 <= threads <= len(usable):
        raise InputError(f"--threads: expected 1 to {len(usable)} on this machine, got {threads}")
    first = sorted(map(min, physical_cores(usable)))
    return [*first, *(core for core in usable if core not in first)][:threads]


@contextlib.contextmanager
def _given(threads: int, limits: Mapping[str, str]) -> Iterator[None]:
    """What is started within has these threads, cores and variables: libraries read them when they
    load.
    """
    environment = dict.fromkeys(THREADS, str(threads)) | SURROUNDINGS | limits
    before = {name: os.environ.get(name) for name in environment}
    cores = os.sched_getaffinity(0) if HAS_AFFINITY else None
    os.environ.update(environment)
    if cores is not None:
        os.sched_setaffinity(0, cores_for(threads))
    try:
        yield
    finally:
        if cores is not None:
            os.sched_setaffinity(0, cores)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _work_of(pid: int) -> tuple[float, bool]:
    """Seconds that the threads of a process have computed, and whether one has or waits for a core;
    0 and False where the system does not tell.
    """
    total, wanting = 0, False
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it ended
                total += int((task / "schedstat").read_text().split()[0])
                state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                wanting |= state == "R"
    return total * 1e-9, wanting


def _serve(pipe: Any, make: Maker, quiet: bool) -> None:
    """Answer requests until the other end is closed."""
    if quiet:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one who asks ends this process
    call: Call | None = None
    while True:
        try:
            kind, value = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            if kind == "make":
                call = None
                gc.collect()
                call, answer = make(*value)
            else:
                answer = _seconds(call, value)
        except Exception as error:  # a trial
            pipe.send((False, reason(error)))
        else:
            pipe.send((True, answer))


def _seconds(call: Call, number: int) -> float:
    time.sleep(PAUSE_S)
    for _ in range(WARM_CALLS):
        call()
    start = time.perf_counter()
    for _ in range(number):
        call()
    return (time.perf_counter() - start) / number
