"""Ctrl-C: a command ends with one line, whatever runs when it comes.

`KeyboardInterrupt` does not always arrive as itself. Raised while a module is imported it may leave
as an ImportError, and from a callback of TVM as a RuntimeError; where the failure of one candidate
is no failure of the compiler it is even taken for one. So a command notes that it was interrupted:
what ends it afterwards is the interrupt (`received`), and long work asks at each step (`check`).
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

INTERRUPTED = 130  # the exit status
BEGINNING = b"tvm_fusion: interrupted before it began; nothing was changed\n"

_received = False


def leave_at_once() -> None:
    """From now on an interrupt ends the process with one line: nothing has begun yet, and imports
    do not pass `KeyboardInterrupt` on.
    """
    _handle(_leave)


def note() -> None:
    """From now on an interrupt is noted and raises `KeyboardInterrupt`."""
    _handle(_note)


def ignore() -> None:
    """From now on interrupts are nothing: the process ends."""
    _handle(signal.SIG_IGN)


def received() -> bool:
    """Whether there was an interrupt."""
    return _received


def check() -> None:
    """Raises KeyboardInterrupt if there was an interrupt that did not end what was running."""
    if _received and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt


def handled() -> None:
    """What was interrupted goes on to put things in order; `check` is quiet until the next one."""
    global _received
    _received = False


def _handle(handler: Any) -> None:
    if threading.current_thread() is threading.main_thread():  # others may set none
        signal.signal(signal.SIGINT, handler)


def _leave(*_: Any) -> None:
    os.write(2, BEGINNING)
    os._exit(INTERRUPTED)


def _note(*_: Any) -> None:
    global _received
    _received = True
    raise KeyboardInterrupt
