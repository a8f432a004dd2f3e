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
    """Raise TimeoutError once the body has taken longer.

    Code outside Python is only interrupted where it comes back. Without a limit, outside the main
    thread of a process, and on Windows, which has no such clock, the body takes the time it takes.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if seconds is None or not is_main or not hasattr(signal, "SIGALRM"):
        yield
        return

    def stop(*_: object) -> None:
        raise _Stop

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        yield
    except _Stop:
        raise TimeoutError(f"it was not ready within {seconds:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
