"""TVM's tensor intrinsics, which traces for tensor cores name, registered in a few seconds.

Each of their functions asks for the whole stack of calls when it is decorated, with the source
lines of every frame. Inside of nested imports finding these takes a second for each function. No
class is decorated there, so that the frames alone are enough.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PACKAGE = "tvm.s_tir.tensor_intrin"


def register_tensor_intrinsics() -> None:
    """Imports all tensor intrinsics of TVM, if that is not done."""
    if PACKAGE in sys.modules:
        return
    with _plain_stacks():
        import tvm.s_tir.tensor_intrin  # noqa: F401


class _PlainStacks:
    """The module `inspect`, but for stacks of calls without source lines."""

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)

    def stack(self) -> list[inspect.FrameInfo]:
        """The callers, innermost first."""
        found, frame = [], sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            found.append(
                inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None)
            )
            frame = frame.f_back
        return found


@contextmanager
def _plain_stacks() -> Iterator[None]:
    """Has TVM's parser look at plain stacks."""
    from tvm.tirx.script.parser import entry

    before = entry.inspect
    entry.inspect = _PlainStacks()
    try:
        yield
    finally:
        entry.inspect = before
