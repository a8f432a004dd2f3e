"""Choices as libraries: written and compiled in a worker process."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

import tvm
from tvm import tirx

from ...config import HardwareProfile, Policy, resolve_target
from ...kernels import registry
from ...kernels.cpu.contraction.panels import PANELS_ATTR, Panels, wanted_panels, without_constants
from ...runtime.build import cubin_cache
from ...runtime.build.build import build_functions
from ...runtime.calls.launch_count import launched_kernels
from ...runtime.timing.launch_kernels import symbol_of
from ...transform.apply.write_kernels import write_kernel
from ..search.replay import scheduled
from ..session.choices import TRACE_CHOICE, config_of
from ..session.tasks import CLASS, without_stamps


@dataclass(frozen=True, slots=True)
class Place:
    """What kernels are written for, in a form that goes to another process.

    Attributes
    ----------
    target : str
        The name or path of a device, or the JSON of a `tvm.target.Target`.
    policy : Policy
    classes : tuple
        Kernel classes that were registered beside this package's own (`registry.added`).
    """

    target: str
    policy: Policy
    classes: tuple = ()

    def resolved(self) -> tuple[tvm.target.Target, HardwareProfile]:
        """The target and its profile; registers the classes where they are not known."""
        for cls, kinds in self.classes:
            if cls.name not in registry.names():
                registry.register(cls, kinds)
        if self.target.startswith("{"):
            import json

            return resolve_target(tvm.target.Target(json.loads(self.target)))
        return resolve_target(self.target)


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """A choice to build.

    Attributes
    ----------
    workload : str
        JSON of the PrimFunc (`tvm.ir.save_json`).
    kind, text : of the choice
    place : Place
    path : Path
        Where the library goes.
    """

    workload: str
    kind: str
    text: str
    place: Place
    path: Path


@dataclass(frozen=True, slots=True)
class BuiltChoice:
    """A library with one function.

    Attributes
    ----------
    path : Path
    symbol : str
    kernels : int
        That one call launches; 0 on a CPU.
    spill_bytes, registers : of its kernels, at most; None where not known
    panels : of the parameters that it takes packed, with their positions
    """

    path: Path
    symbol: str
    kernels: int
    spill_bytes: int | None = None
    registers: int | None = None
    panels: tuple[tuple[int, Panels], ...] = ()


def enter(memory_bytes: int) -> None:
    """Sets a builder up: it compiles one kernel at a time and gives way to measurements."""
    cubin_cache.available_cores = lambda: 1
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))


def build_choice(request: BuildRequest) -> BuiltChoice:
    """Writes and compiles a choice.

    Raises
    ------
    Unsupported
        The choice does not fit the workload.
    BuildError
        The kernel does not compile.
    """
    target, hw = request.place.resolved()
    workload = tvm.ir.load_json(request.workload)
    with target:
        kernel = written(workload, request.kind, request.text, hw, request.place.policy)
    panels = wanted_panels(kernel)
    kernel = kernel.without_attr(PANELS_ATTR) if panels else kernel
    symbol = symbol_of(kernel)
    mod = tvm.IRModule({symbol: kernel.with_attr("global_symbol", symbol)})
    library, resources = build_functions(mod, target)
    launched = launched_kernels(library).get(symbol, ())
    library.export_library(str(request.path))
    return BuiltChoice(
        request.path,
        symbol,
        len(launched),
        max((r.spill_bytes for r in resources), default=None),
        max((r.registers for r in resources), default=None),
        tuple(panels.items()),
    )


def written(
    workload: tirx.PrimFunc, kind: str, text: str, hw: HardwareProfile, policy: Policy
) -> tirx.PrimFunc:
    """The kernel of a choice, without a name.

    Raises
    ------
    Unsupported
        The choice does not fit the workload.
    """
    if kind == TRACE_CHOICE:
        return scheduled(without_constants(without_stamps(workload)), text)
    name = str(workload.attrs[CLASS])
    if name == "stock":
        return without_constants(without_stamps(workload))
    config = config_of(workload, text, hw, policy)
    return write_kernel(without_stamps(workload), name, hw, policy, config)
