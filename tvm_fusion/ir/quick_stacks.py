"""The callers of TVMScript's parsers and builder, found quickly; TVM's tensor intrinsics, which
traces for tensor cores name, are registered in a few seconds by that. TVM 0.27 needs it.

What TVM asks for, for each function that is decorated and each pool of shared memory, is the whole
stack of calls with the source lines of every frame, for which `inspect` looks through all modules:
65 ms for a function in a test, a second inside of nested imports. The same stack with lines of
`linecache` takes less than 1 ms.
"""

from __future__ import annotations

import inspect
import linecache
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

PACKAGE = "tvm.s_tir.tensor_intrin"


def register_tensor_intrinsics() -> None:
    """Imports all tensor intrinsics of TVM, if that is not done."""
    if PACKAGE in sys.modules:
        return
    from tvm.tirx.script.parser import entry

    with quick_stacks(entry):
        import tvm.s_tir.tensor_intrin  # noqa: F401


class _QuickStacks:
    """The module `inspect`, but for the way to the source lines of callers."""

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)

    def stack(self, context: int = 1) -> list[inspect.FrameInfo]:
        """The callers, innermost first, each with the line that runs."""
        found, frame = [], sys._getframe(1)
        while frame is not None:
            name, number = frame.f_code.co_filename, frame.f_lineno
            line = linecache.getline(name, number)
            lines, index = ([line], 0) if line else (None, None)
            found.append(inspect.FrameInfo(frame, name, number, frame.f_code.co_name, lines, index))
            frame = frame.f_back
        return found


@contextmanager
def quick_stacks(*modules: ModuleType) -> Iterator[None]:
    """Has modules of TVMScript find their callers quickly; threads may do so at once."""
    with _LOCK:
        for module in modules:
            _USERS[module] += 1
            module.inspect = _QUICK
    try:
        yield
    finally:
        with _LOCK:
            for module in modules:
                _USERS[module] -= 1
                if not _USERS[module]:
                    module.inspect = inspect


_QUICK = _QuickStacks()
_LOCK = threading.Lock()
_USERS: Counter[ModuleType] = Counter()
