"""A process that answers requests: `python -m tvm_fusion.tuning.measure.worker FD PARENT`.

What comes through the socket FD is a list of calls, each a module-level function and its arguments;
what goes back for each, up to the first that fails, is ("ok", value) or ("error" | "memory" |
"lost", text). The process ends with PARENT, the process that started it, and what it started itself
(a compiler) ends with it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection

from ...errors import TargetError

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
EXCERPT = 600  # characters of an error's text
LEASH = "read _; kill -9 0"  # `read` returns when the worker's end of the pipe is closed


def main(descriptor: int, parent: int) -> None:
    """Answers until the other end is closed."""
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
        return "memory", "the process reached its memory limit"
    except Exception as error:  # of one trial: it must not end the process
        text = " ".join(str(error).split())
        if "std::bad_alloc" in text:
            return "memory", "the process reached its memory limit"
        return "error", f"{type(error).__name__}: {text[-EXCERPT:]}"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(int(sys.argv[1]), int(sys.argv[2]))
