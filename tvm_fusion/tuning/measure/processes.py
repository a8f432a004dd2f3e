"""Processes of a session: each trial's crash, hang or hunger costs that trial only.

    session -- request --> Worker (subprocess) -- Answer --> session

A worker that does not answer in time is killed with all that it started (a compiler), and the next
request gets a new one. The time of a request begins when the process is ready for it: the setup of
a new process and what is called `before` the request have limits of their own. Where the session is
killed, its workers end, and what they started. A process has a folder of its own for temporary
files (`scratch_folder`).
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ...errors import TargetError
from ...host.cores import on_all_cores
from ...host.no_torch import module_command
from ...host.threads import kernel_threads

try:
    import fcntl
except ImportError:  # Windows; `check_system` says so
    fcntl = None

PREFIX = "tvm_fusion_tune_"


def check_system() -> None:
    """Raises TargetError where processes cannot be ended with all that they started, or limited."""
    missing = [name for name in ("fcntl", "resource") if not _has_module(name)]
    missing += [f"os.{name}" for name in ("killpg", "getpgid") if not hasattr(os, name)]
    try:
        ctypes.CDLL(None).prctl  # noqa: B018 (looked up)
    except (AttributeError, OSError, TypeError):
        missing.append("prctl")
    if missing:
        raise TargetError(
            f"trials run in processes of their own, which need {', '.join(missing)}; "
            f"{sys.platform} has none. Tune and fuzz on Linux: a database that was tuned there is "
            "taken anywhere, and models compile without one"
        )


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # it is there in name only
        return False


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for as long as the context lasts; those of processes that were killed are removed.

    Its owner holds a lock on it, which the system gives back when the process dies.

    Raises
    ------
    TargetError
        On a system that has not what processes need.
    """
    check_system()
    remove_abandoned()
    folder, lock = _make()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_abandoned() -> None:
    """Removes the folders of this user that no process holds the lock of."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            lock = _open(folder)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _make() -> tuple[Path, int]:
    """A new folder and its lock; another one where a session took the first for abandoned."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        with suppress(FileNotFoundError):
            lock = _open(folder)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


STARTING_S = 120.0  # that a new process may take to import TVM and torch
PREPARING_S = 120.0  # that what a request needs may take, such as a float64 reference
STARTING, PREPARING, ASKED = " to start", " to prepare", ""  # phases, as messages name them
ENDING_S = 10.0
TAIL = 400  # characters of what a process said before it died
LOST, BROKEN = "lost", "broken"


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a request.

    Attributes
    ----------
    status : "ok", "error" (it raised), "crash" (the process died), "timeout", "memory", `LOST` (the
        machine or the server cannot do it: `TargetError`), or `BROKEN` (the server that did it, or
        the connection with it, is gone)
    value : what the function returned, where "ok"
    why : what went wrong
    seconds : from the request, or from when its process had started, to the answer
    """

    status: str
    value: Any = None
    why: str = ""
    seconds: float = 0.0


class Worker:
    """A subprocess for one request at a time, started when it is first needed.

    The process ends with the thread that started it: workers that are to outlive a session have to
    be used from a thread that lives as long.

    Parameters
    ----------
    name : str
        For messages.
    setup : (function, arguments), optional
        Called first in every new process, which has `STARTING_S` for it.
    environment : mapping, optional
        Variables of the process beside those of this one.
    torch : bool
        Whether the process may import torch; one that need not starts in a third of the time.
    """

    def __init__(
        self,
        name: str,
        setup: tuple[Callable, tuple] | None = None,
        environment: dict[str, str] | None = None,
        torch: bool = True,
    ) -> None:
        self.name = name
        self._command = module_command(__name__, torch)
        self._setup, self._environment = setup or (ready, ()), environment or {}
        self._process: subprocess.Popen | None = None
        self._connection: Connection | None = None
        self._said: Any = None
        self._held = ExitStack()  # the folder of temporary files of the process
        self._begun = self._since = 0.0  # the request, and the phase that it is in
        self._phases: deque[tuple[str, float]] = deque()  # that are left, with their limits
        self.busy = False

    def send(
        self,
        function: Callable,
        arguments: tuple,
        limit_s: float,
        before: tuple[Callable, tuple] | None = None,
    ) -> None:
        """Asks for `function(*arguments)`, a function of a module, within a time.

        What it needs is called `before` it, in a time of its own (`PREPARING_S`); where that fails,
        its answer is the answer.
        """
        if self.busy:
            raise RuntimeError(f"{self.name} has not answered yet")
        calls = [(before, PREPARING, PREPARING_S)] if before else []
        calls.append(((function, arguments), ASKED, limit_s))
        try:
            self._ask(calls)
        except OSError:  # it died between requests
            self.stop()
            self._ask(calls)

    def collect(self) -> Answer | None:
        """The answer, if there is one or never will be; does not wait."""
        if not self.busy:
            return None
        try:
            while self._connection.poll():
                status, value = self._connection.recv()
                phase, _ = self._phases[0]
                if phase == ASKED or status != "ok":
                    return self._ended(status, value)
                self._phases.popleft()
                self._since = time.monotonic()
                if phase == STARTING:
                    self._begun = self._since
        except (EOFError, OSError):
            return self._died()
        if self.left_s == 0:
            phase, limit_s = self._phases[0]
            answer = self._answer("timeout", why=f"no answer within {limit_s:g} s{phase}")
            self.stop()
            return answer
        return None

    def wait(self) -> Answer:
        """Waits for the answer; an interrupt ends the process."""
        try:
            while (answer := self.collect()) is None:
                wait_for([self], 1.0)
        except KeyboardInterrupt:
            self.stop()
            raise
        return answer

    @property
    def connection(self) -> Connection | None:
        """What becomes readable when there is something to collect."""
        return self._connection if self.busy else None

    @property
    def left_s(self) -> float:
        """Time to the limit of the phase that is under way."""
        return max(0.0, self._phases[0][1] - (time.monotonic() - self._since))

    def stop(self) -> None:
        """Ends the process and all that it started."""
        if self._process is not None:
            self._kill()
            self._connection.close()
            self._said.close()
            self._held.close()
        self._process, self.busy = None, False

    def _ended(self, status: str, value: Any) -> Answer:
        if status == "ok":
            return self._answer("ok", value)
        answer = self._answer(status, why=str(value))
        if status == "memory" or self._phases[0][0] != ASKED:
            self.stop()  # its memory is in pieces, or it did not get ready
        return answer

    def _died(self) -> Answer:
        code = self._ended_with()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        self._said.seek(0)
        said = " ".join(self._said.read().decode(errors="replace").split())[-TAIL:]
        status = "memory" if code == -signal.SIGKILL or "bad_alloc" in said else "crash"
        answer = self._answer(
            status, why=f"the process died ({how})" + (f": {said}" if said else "")
        )
        self.stop()
        return answer

    def _ended_with(self) -> int:
        """The exit status of a process whose end of the connection is closed."""
        try:
            return self._process.wait(ENDING_S)
        except subprocess.TimeoutExpired:  # it hangs on its way out
            return self._kill()

    def _kill(self) -> int:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def _answer(self, status: str, value: Any = None, why: str = "") -> Answer:
        self.busy = False
        return Answer(status, value, why, time.monotonic() - self._begun)

    def _ask(self, calls: Sequence[tuple[tuple[Callable, tuple], str, float]]) -> None:
        """Sends calls with their phases and limits, after the setup where the process is new."""
        if self._process is None:
            self._start()
            calls = [(self._setup, STARTING, STARTING_S), *calls]
        self._begun = self._since = time.monotonic()
        self._phases = deque((phase, limit_s) for _, phase, limit_s in calls)
        self._connection.send([call for call, *_ in calls])  # at once: it may be busy with one
        self.busy = True

    def _start(self) -> None:
        temporary = self._held.enter_context(scratch_folder())
        ours, theirs = socket.socketpair()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `stop`)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "TMPDIR": str(temporary),
            "TVM_NUM_THREADS": str(kernel_threads()),  # kernels run as they would here
            **self._environment,
        }
        with on_all_cores():
            self._process = subprocess.Popen(
                [*self._command, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                start_new_session=True,
                env=environment,
            )
        theirs.close()
        self._connection = Connection(ours.detach())


def ready() -> None:
    """What a process without a setup is asked first."""


def stop_all(workers: Sequence[Worker]) -> None:
    """Ends all processes."""
    for worker in workers:
        worker.stop()


def wait_for(workers: Sequence[Worker], seconds: float) -> None:
    """Waits until a worker has something to collect, at most so long."""
    connections = [w.connection for w in workers if w.connection is not None]
    limit = min([seconds, *(w.left_s + 0.01 for w in workers if w.busy)])
    if connections:
        wait(connections, limit)
    elif limit > 0:
        time.sleep(limit)


# ---- the process itself: `python -m tvm_fusion.tuning.measure.processes FD PARENT`

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
EXCERPT = 600  # characters of an error's text
LIMIT = "the process reached its memory limit"
LEASH = "read _; kill -9 0"  # `read` returns when the worker's end of the pipe is closed


def main(descriptor: int, parent: int) -> None:
    """Answers what comes through a socket, lists of calls of functions of modules, until its other
    end is closed: each with ("ok", value) or ("error" | "memory" | "lost", text), up to the first
    of a list that fails.
    """
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the session decides what an interrupt means
    sys.stdout = sys.stderr
    with Connection(descriptor) as connection:
        while True:
            try:
                calls = connection.recv()
            except EOFError:
                return
            for function, arguments in calls:
                status, value = answer(function, arguments)
                connection.send((status, value))
                if status != "ok":
                    break


def end_with(parent: int) -> None:
    """Makes this process end with its parent, and its process group with this process.

    The signal of the kernel reaches this process only; a shell in the group, which reads from a
    pipe that nobody writes to, ends the compilers that are left.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)
    if os.getpgid(0) == os.getpid():
        reading, _ = os.pipe()  # the other end stays open as long as this process lives
        subprocess.Popen(["sh", "-c", LEASH], stdin=reading)
        os.close(reading)


def answer(function, arguments: tuple) -> tuple[str, object]:
    """The value of a call, or what went wrong."""
    try:
        return "ok", function(*arguments)
    except TargetError as error:  # of the machine, whatever was asked for
        return "lost", str(error)
    except MemoryError:
        return "memory", LIMIT
    except Exception as error:  # of one trial: it must not end the process
        text = " ".join(str(error).split())
        if "std::bad_alloc" in text:
            return "memory", LIMIT
        status = "memory" if "out of memory" in text else "error"  # of a GPU
        return status, f"{type(error).__name__}: {text[-EXCERPT:]}"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(int(sys.argv[1]), int(sys.argv[2]))
