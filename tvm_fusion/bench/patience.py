"""A limit on the time that one compiler may take."""

import contextlib
import signal
import threading
from collections.abc import Iterator

AGAIN_S = 1.0  # between two interrupts, in case a compiler swallows the first


class _Stop(BaseException):
    """Raised by the clock, and not caught where every Exception is."""


@contextlib.contextmanager
def within(seconds: float | None) -> Iterator[None]:
    """Raise TimeoutError once the body has taken longer, however it ends then: what stops a pass of
    TVM leaves that as a RuntimeError, which whoever compiles may take for its own failure.

    Code outside Python is only interrupted where it comes back. Without a limit, outside the main
    thread of a process, and on Windows, which has no such clock, the body takes the time it takes.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if seconds is None or not is_main or not hasattr(signal, "SIGALRM"):
        yield
        return

    is_over = False

    def stop(*_: object) -> None:
        nonlocal is_over
        is_over = True
        raise _Stop

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        yield
    except (_Stop, Exception):
        if not is_over:
            raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if is_over:
        raise TimeoutError(f"it was not ready within {seconds:g} s")
