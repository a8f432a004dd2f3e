"""Kernels of a large model for a GPU are written in processes beside this one.

    this process:   planning: the best plan so far ... the last | writes what nobody has begun
    each of these:  starts, imports TVM | writes and lowers one kernel after another
    nvcc:                                 | compiles what is written

Python's lock lets one thread of a process write at a time. A process is sent what a kernel computes
and answers with its code, host functions and CUDA sources, as it stands in the kernel cache. What
it cannot write is written here, which says why.

They start when a model turns out to be planned anew (`begin`, within `writers_beside`), and end
when its kernels are written. Most kernels of the best plan so far are those of the last one, by the
same names: they are begun while rewrites are still tried, those of the first plan before it is
improved (43 of GoogLeNet's 49, 35 of ResNet-101's 37 and all of EfficientNet-B0's are those of the
last plan; `kernels_ahead.begin_kernels`). Of a module of several functions those of the one that is
planned are waited for; others are dropped.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import tvm
from tvm import relax, tirx
from tvm_ffi.serialization import from_json_graph_str, to_json_graph_str

from ..config import HardwareProfile, Policy
from ..errors import Unsupported
from ..host.cores import available_cores, on_all_cores, use_all_cores
from ..host.no_torch import module_command
from ..kernels.registry import families
from ..runtime.build.cubin_cache import Compiling
from ..runtime.build.cuda_compiler import cuda_arch
from ..runtime.build.kernel_code import KernelCode, code_of, code_text, kernel_code
from ..runtime.build.lowering import is_tirx
from ..transform.apply.write_kernels import KernelWriter, named
from .kernel_cache import KernelCache, keep_text

VARIABLE = "TVM_FUSION_WRITERS"
"""How many processes, in place of what `_count` takes for right."""
MOST, CORES_EACH, BINDINGS_EACH = 4, 4, 32
"""Processes: not more than so many, one for so many cores (nvcc takes those that are left), and one
for so many bindings of a model: to start takes it as long as to write ten kernels. 47 kernels of
GoogLeNet were written in 12.6 s, beside six processes in 4.0, while planning took 9.3 s for 8.4; 18
of ViT-B were built in 3.1 s, with four processes 1.0 s after planning, which took 5.6 s for 5.0
(H200, 16 cores, 2026-11-28)."""
LONGEST_S = 60.0
"""That a kernel is waited for; a process that does not answer by then is stopped."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, slots=True)
class Job:
    """A kernel to be written; its answer can be cancelled until a process begins with it.

    Attributes
    ----------
    name, func, class_name
        What it is called, what it computes, and who writes it.
    path : Path
        Where it is kept.
    begun : callable
        Takes its code as soon as it is there.
    answer : Future
        Its code; None where a process could not write it.
    """

    name: str
    func: tirx.PrimFunc
    class_name: str
    path: Path
    begun: Callable[[KernelCode], KernelCode]
    answer: Future[KernelCode | None] = field(default_factory=Future)


class _Process:
    """A process that writes kernels."""

    def __init__(self, hw: HardwareProfile) -> None:
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
            "PYTHONSAFEPATH": "1",  # else modules of the working folder come before all others
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        with theirs, on_all_cores():
            self._process = subprocess.Popen(
                [*module_command(__name__, torch=False), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
        self._connection, self._lock = Connection(ours.detach()), threading.Lock()
        self._is_ready = False
        self._connection.send(hw)

    def serve(self, next_job: Callable[[], tuple[Job, tuple] | None]) -> None:
        """Answers jobs until there are none; those that come to nothing are answered with None."""
        use_all_cores()
        try:
            with self._lock:
                if not self._is_ready:
                    self._is_ready = self._connection.recv()
                while (job := next_job()) is not None:
                    self._answer(*job)
        except Exception as error:  # it ended, say: what waits is written elsewhere
            logger.info("a process writes no more kernels: %r", error)

    def _answer(self, job: Job, how: tuple) -> None:
        code = None
        try:
            text = to_json_graph_str(job.func)
            self._connection.send((job.name, text, job.class_name, str(job.path), *how))
            if not self._connection.poll(LONGEST_S):
                self._process.kill()
                raise TimeoutError(f"{job.name} took longer than {LONGEST_S:g} s")
            said = self._connection.recv()
            code = None if said is None else job.begun(code_of(said))
        finally:
            job.answer.set_result(code)

    def kill(self) -> subprocess.Popen:
        """Ends it, whatever it does."""
        self._process.kill()
        return self._process


class KernelWriters:
    """Processes that write kernels, until they are stopped.

    Attributes
    ----------
    compiling : Compiling
        For what they write before there is a last plan.
    """

    def __init__(self, count: int, target: tvm.target.Target, hw: HardwareProfile) -> None:
        logger.info("%d processes write kernels", count)
        self._processes = [_Process(hw) for _ in range(count)]
        self._jobs: dict[Path, Job] = {}
        self._waiting: deque[tuple[Job, tuple]] = deque()  # and how each is written
        self._lock = threading.Lock()
        self.compiling = Compiling(cuda_arch(target))

    def job(self, job: Job) -> Job:
        """The job, or an equal one that was given before."""
        known = self._jobs.get(job.path)
        if known is None or known.answer.cancelled():
            known = self._jobs[job.path] = job
        return known

    def begin(
        self,
        jobs: Sequence[Job],
        target: tvm.target.Target,
        hw: HardwareProfile,
        policy: Policy,
    ) -> None:
        """Has jobs done, the first ones first; others that nobody has begun are dropped."""
        how = to_json_graph_str(target), hw, policy, tvm.transform.PassContext.current().opt_level
        with self._lock:
            for job, _ in self._waiting:
                if job not in jobs:
                    job.answer.cancel()
            waits = [job for job in jobs if not (job.answer.running() or job.answer.done())]
            self._waiting = deque((job, how) for job in waits)
        for process in self._processes:
            threading.Thread(target=process.serve, args=(self._next,), daemon=True).start()

    def _next(self) -> tuple[Job, tuple] | None:
        """A job that nobody has begun, for who asks, and how it is written; None where there is
        none.
        """
        with self._lock:
            while self._waiting:
                job, how = self._waiting.popleft()
                if job.answer.set_running_or_notify_cancel():
                    return job, how
        return None

    def stop(self) -> None:
        """Ends the processes."""
        for ended in [process.kill() for process in self._processes]:
            ended.wait()
        self._processes = []
        self.compiling.__exit__()


@dataclass(eq=False, slots=True)
class _Beside:
    """The processes of what is compiled, once they are there."""

    writers: KernelWriters | None = None


_beside: ContextVar[_Beside | None] = ContextVar("beside", default=None)


@contextmanager
def writers_beside() -> Iterator[None]:
    """Lets a model that is compiled within have its kernels written in other processes."""
    own = _Beside()
    token = _beside.set(own)
    try:
        yield
    finally:
        _beside.reset(token)
        if own.writers is not None:
            own.writers.stop()


def begin(
    mod: tvm.IRModule, target: tvm.target.Target, hw: HardwareProfile, policy: Policy
) -> None:
    """Starts as many processes as the kernels of a model for a GPU are worth."""
    own = _beside.get()
    if own is None or own.writers is not None or target.kind.name != "cuda":
        return
    count = _count(mod) if has_plain_passes() else 0
    if count and KernelCache.of(target, hw, policy):
        try:
            own.writers = KernelWriters(count, target, hw)
        except OSError as error:  # no memory for them, say
            logger.info("kernels are written here alone: %s", error)


def current_writers() -> KernelWriters | None:
    """The processes that `begin` started."""
    own = _beside.get()
    return None if own is None else own.writers


def _count(mod: tvm.IRModule) -> int:
    if os.name != "posix":  # a process is given its socket as it starts
        return 0
    if not sys.executable or getattr(sys, "frozen", False):  # no Python that runs modules
        return 0
    asked = os.environ.get(VARIABLE, "")
    if asked.isdecimal():
        return int(asked)
    blocks = mod["main"].body.blocks if isinstance(mod["main"].body, relax.SeqExpr) else ()
    bindings = sum(len(block.bindings) for block in blocks)
    return min(MOST, available_cores() // CORES_EACH, bindings // BINDINGS_EACH)


def has_plain_passes() -> bool:
    """Whether passes have no options that other processes would have to be told."""
    context = tvm.transform.PassContext.current()
    return not (context.instruments or context.disabled_pass or context.required_pass) and not dict(
        context.config
    )


# ---- the process itself: `python -m tvm_fusion.flow.kernel_writers FD`


def main(descriptor: int) -> None:
    """Writes the kernels that come through a socket, until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks decides what it means
    with Connection(descriptor) as connection, suppress(EOFError, OSError):
        hw = connection.recv()
        for one in families(hw):  # what writes their kernels is imported when it is asked for
            with suppress(Unsupported):
                one.writer(hw)
        connection.send(True)
        while True:
            connection.send(_written(*connection.recv()))


def _written(
    name: str,
    text: str,
    class_name: str,
    path: str,
    target: str,
    hw: HardwareProfile,
    policy: Policy,
    level: int,
) -> str | None:
    """The code of a kernel, kept in the cache; None where it is for another process to say why it
    cannot be written, or not lowered by itself.
    """
    try:
        func, device = from_json_graph_str(text), from_json_graph_str(target)
        with device, tvm.transform.PassContext(opt_level=level):
            kernel = named(KernelWriter(hw, policy).kernel(func, class_name), func)
            if not is_tirx(kernel):
                return None
            code = code_text(kernel_code(name, kernel, device, early=True))
    except Exception:  # the process that asks writes it again, and says what is wrong
        return None
    keep_text(Path(path), code)
    return code


if __name__ == "__main__":
    main(int(sys.argv[1]))
