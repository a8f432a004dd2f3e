"""A function of an executable, ready to be called from any thread."""

from collections.abc import Callable
from typing import Any

import tvm
from tvm import relax

from .._threads import kernel_threads


def entry_of(executable: Any, device: tvm.runtime.Device, name: str = "main") -> Callable[..., Any]:
    """Make a virtual machine and return one of its functions; see `on_our_threads`."""
    return on_our_threads(relax.VirtualMachine(executable, device)[name], device)


def on_our_threads(function: Callable[..., Any], device: tvm.runtime.Device) -> Callable[..., Any]:
    """Return a function whose kernels run on `kernel_threads()` in every thread that calls it."""
    if device.type != "cpu":
        return function

    def call(*arguments: Any) -> Any:
        kernel_threads()
        return function(*arguments)

    return call
