"""What TVM holds once for a process, for each thread by itself: models may be compiled at once.

The tag that operators are written under (`tvm.te.tag_scope`): two threads that legalize at once
raise "nested op_tag is not allowed", or give each other's tensors their tags. The block builders
that are in a function (`relax.BlockBuilder.current`): two threads that build at once raise
"BlockBuilder.current() must be self", or emit into each other's functions.
"""

from __future__ import annotations

import threading
from typing import Any

from tvm import relax
from tvm.te import tag

_held = threading.local()


class _OfThread(type):
    @property
    def _current(cls) -> Any:
        return getattr(_held, "scope", None)

    @_current.setter
    def _current(cls, scope: Any) -> None:
        _held.scope = scope


class _StackOfThread(threading.local):
    """The part of a list that `relax.BlockBuilder` needs."""

    def __init__(self) -> None:
        self._builders: list[relax.BlockBuilder] = []

    def append(self, builder: relax.BlockBuilder) -> None:
        """Puts a builder on top."""
        self._builders.append(builder)

    def pop(self) -> relax.BlockBuilder:
        """Takes the one on top away."""
        return self._builders.pop()

    def __getitem__(self, place: int) -> relax.BlockBuilder:
        return self._builders[place]

    def __len__(self) -> int:
        return len(self._builders)


def hold_state_by_thread() -> None:
    """Puts the scope and the builders of each thread in the place of those of the process, once.

    The methods of scopes that were made before look their class up by its name.
    """
    if not isinstance(tag.TagScope, _OfThread):
        tag.TagScope = _OfThread("TagScope", (tag.TagScope,), {})
    stack = relax.BlockBuilder._stack
    if not isinstance(stack, _StackOfThread) and not stack:  # nobody is in a function
        relax.BlockBuilder._stack = _StackOfThread()
