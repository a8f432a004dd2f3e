"""Python's collector of cyclic garbage, where much is made and little of it is garbage.

    with uncollected():             it is paused within
    with others_set_aside():        it looks only at what is made within

Planning makes hundreds of thousands of objects that stay: the collector would look through all of
them, and all of torch and TVM, again and again. Of these alone it takes a quarter of a second.
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


@contextmanager
def others_set_aside() -> Iterator[None]:
    """Within, the collector does not look at what there was before, unless a program has set
    objects aside by itself (`gc.freeze`): these would come back with ours.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
