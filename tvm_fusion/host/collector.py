"""Python's collector of cyclic garbage, paused while much is made and little of it is garbage.

    with uncollected():
        ...

Planning makes hundreds of thousands of objects that stay: the collector would look through all of
them, and all of torch and TVM, again and again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Pauses the collector within."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
