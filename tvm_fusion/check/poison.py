"""Fresh memory full of numbers that are nobody's result: where a kernel leaves an element
unwritten, memory that was used before may hold what it should have written.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
from collections.abc import Iterator

import numpy as np
import tvm

logger = logging.getLogger(__name__)

# GNU libc fills what it allocates with the complement of this byte (mallopt(3)): with 0x7f, which
# is 3.4e38 in float32 and bfloat16, 1.4e306 in float64, nan in float16, 127 in int8.
_M_PERTURB = -6
_BYTE = 0x80

_CHUNK = 64 << 20  # bytes filled at once on a GPU


@contextlib.contextmanager
def poisoned(device: tvm.runtime.Device, needed: int) -> Iterator[None]:
    """What is allocated inside holds no result of anybody.

    Parameters
    ----------
    device : tvm.runtime.Device
        On a GPU, the memory that is free next is filled. On a CPU every allocation of this process
        is, where its C library is GNU's; with others memory stays as it is.
    needed : int
        Bytes that will be allocated, about.
    """
    tvm.get_global_func("vm.builtin.memory_manager.clear")()  # the pools keep what was freed
    if device.type != "cpu":
        _fill(device, needed)
        yield
        return
    perturb = _mallopt()
    if perturb is None:
        yield
        return
    perturb(_M_PERTURB, _BYTE)
    try:
        yield
    finally:
        perturb(_M_PERTURB, 0)


@functools.cache
def _mallopt() -> object | None:
    """The C library's function, where it is GNU's."""
    try:
        library = ctypes.CDLL(None)
        return library.mallopt if library.gnu_get_libc_version else None
    except (AttributeError, OSError):
        return None


def _fill(device: tvm.runtime.Device, needed: int) -> None:
    """Fill memory of a GPU and give it back: what is allocated next gets these pages."""
    count = 2 + 2 * needed // _CHUNK
    held = []
    try:
        held.append(tvm.runtime.tensor(np.full(_CHUNK // 4, np.nan, "float32"), device))
        for _ in range(count):
            held.append(tvm.runtime.empty((_CHUNK // 4,), "float32", device).copyfrom(held[0]))
    except Exception as error:  # out of memory, as the module itself may be
        logger.info("memory is poisoned in part: %s", error)
    device.sync()
