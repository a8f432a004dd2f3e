"""A process that answers requests one by one: `python -m tvm_fusion.tuning.worker FD`.

What comes through the socket FD is a module-level function and its arguments; what goes back is
("ok", value) or ("error" | "memory", text). The process ends with its parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from multiprocessing.connection import Connection

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
EXCERPT = 600  # characters of an error's text


def main(descriptor: int) -> None:
    """Answers until the other end is closed."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the session decides what an interrupt means
    sys.stdout = sys.stderr
    with Connection(descriptor) as connection:
        while True:
            try:
                function, arguments = connection.recv()
            except EOFError:
                return
            connection.send(answer(function, arguments))


def answer(function, arguments: tuple) -> tuple[str, object]:
    """The value of a call, or what went wrong."""
    try:
        return "ok", function(*arguments)
    except MemoryError:
        return "memory", "the process reached its memory limit"
    except Exception as error:  # of one trial: it must not end the process
        text = " ".join(str(error).split())
        if "std::bad_alloc" in text:
            return "memory", "the process reached its memory limit"
        return "error", f"{type(error).__name__}: {text[-EXCERPT:]}"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(int(sys.argv[1]))
