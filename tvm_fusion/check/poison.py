"""Fresh memory full of numbers that are nobody's result: where a kernel leaves an element
unwritten, memory that was used before may hold what it should have written.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, tirx

logger = logging.getLogger(__name__)

# GNU libc fills what it allocates with the complement of this byte (mallopt(3)): with 0x7f, which
# is 3.4e38 in float32 and bfloat16, 1.4e306 in float64, nan in float16, 127 in int8.
_M_PERTURB = -6
_BYTE = 0x80

_EVERYWHERE = 0xFF  # a byte on a GPU: nan in floats, -1 in integers


@contextlib.contextmanager
def poisoned(device: tvm.runtime.Device, sizes: Iterable[int] = ()) -> Iterator[None]:
    """What is allocated inside holds no result of anybody.

    Parameters
    ----------
    device : tvm.runtime.Device
        On a GPU, the pool of the virtual machine is filled. On a CPU every allocation of this
        process is, where its C library is GNU's; with others memory stays as it is.
    sizes : iterable of int
        Bytes of the storages that will be allocated on a GPU, those that live at once each: a
        pool gives out what has the size that is asked for.
    """
    tvm.get_global_func("vm.builtin.memory_manager.clear")()  # the pools keep what was freed
    if device.type != "cpu":
        fill_pool(device, sizes)
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


def fill_pool(device: tvm.runtime.Device, sizes: Iterable[int]) -> None:
    """Fill storages of the virtual machine's pool and give them back: those of the same sizes that
    are allocated next are these.
    """
    allocate = _allocator(device)
    held = []
    try:
        for size in sizes:
            storage = allocate(tvm_ffi.Shape([size]))
            held.append(storage.copyfrom(np.full(size, _EVERYWHERE, "uint8")))
    except Exception as error:  # out of memory, as the module itself may be
        logger.info("memory is poisoned in part: %s", error)
    device.sync()


@functools.cache
def _allocator(device: tvm.runtime.Device) -> Callable[[tvm_ffi.Shape], tvm.runtime.Tensor]:
    """A function that allocates bytes as a compiled module does."""
    size = tirx.Var("size", "int64")
    shape = relax.Var("shape", relax.ShapeType([size]))
    builder = relax.BlockBuilder()
    with builder.function("main", [shape]):
        call = relax.op.builtin.alloc_tensor(relax.ShapeExpr([size]), "uint8", 0)
        builder.emit_func_output(builder.emit(call))
    executable = tvm.compile(builder.get(), tvm.target.Target("llvm"))
    return relax.VirtualMachine(executable, device)["main"]
