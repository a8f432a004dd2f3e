"""Calls that recurse deeper than Python's default allows: chains of hundreds of operators."""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable
from typing import Any

_STACK_BYTES = 512 << 20  # reserved, not used: a chain of 400 operators takes about 20 MB
_FRAMES = 100_000


def call_deep(function: Callable, *args: Any) -> Any:
    """Return `function(*args)`, run on a stack of its own; what it raises is raised here."""
    outcome: list[Any] = []
    context = contextvars.copy_context()

    def run() -> None:
        try:
            outcome.extend((True, context.run(function, *args)))
        except BaseException as error:
            outcome.extend((False, error))

    limit, size = sys.getrecursionlimit(), threading.stack_size(_STACK_BYTES)
    try:
        sys.setrecursionlimit(max(limit, _FRAMES))
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(size)
        sys.setrecursionlimit(limit)
    succeeded, result = outcome
    if succeeded:
        return result
    raise result
