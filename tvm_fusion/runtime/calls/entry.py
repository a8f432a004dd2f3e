"""Functions of built modules, ready to be called from any thread: on a CPU their parallel loops run
on the threads that `_threads` and `_team` say.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tvm
from tvm import relax

from ...host import threads as _threads
from ...host.team import install


def entry_of(executable: Any, device: tvm.runtime.Device, name: str = "main") -> Callable[..., Any]:
    """Make a virtual machine and return one of its functions."""
    return function_of(virtual_machine(executable, device), name, device)


def virtual_machine(executable: Any, device: tvm.runtime.Device) -> relax.VirtualMachine:
    """Make a virtual machine."""
    install()
    return relax.VirtualMachine(executable, device)


def load_library(path: str | Path) -> tvm.runtime.Module:
    """Load a shared library of kernels, or of an executable."""
    install()
    return tvm.runtime.load_module(str(path))


def function_of(owner: Any, name: str, device: tvm.runtime.Device) -> Callable[..., Any]:
    """Return a function of a virtual machine or a library. On a CPU, every thread that calls it has
    its `kernel_threads()`.
    """
    install()
    function = owner[name]
    if device.type != "cpu":
        return function

    def call(*arguments: Any) -> Any:
        if not _threads.settled:
            _threads.kernel_threads()
        return function(*arguments)

    return call
