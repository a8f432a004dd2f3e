"""The stages of `Fuse` by name: what instruments time, what `PassContext` switches off.

Within `Fuse` and `tvm_fusion.compile` a stage runs on one function at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import tvm

FUSE = "tvm_fusion.Fuse"
DECOMPOSE = "tvm_fusion.Decompose"
PLAN = "tvm_fusion.Plan"
MATERIALIZE = "tvm_fusion.Materialize"
WRITE_KERNELS = "tvm_fusion.WriteKernels"
PACK_CONSTANTS = "tvm_fusion.PackConstants"
PLAN_MEMORY = "tvm_fusion.PlanMemory"

Result = TypeVar("Result")


def result_of(
    name: str,
    mod: tvm.IRModule,
    work: Callable[[tvm.IRModule], Result],
    changed: Callable[[Result], tvm.IRModule],
) -> Result | None:
    """What `work` makes of a module as the pass of a name, for which the module is then what
    `changed` says; None where the pass is disabled.
    """
    found: list[Result] = []

    def run(given: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        found.append(work(given))
        return changed(found[0])

    tvm.transform.Sequential([tvm.transform.module_pass(run, opt_level=0, name=name)])(mod)
    return found[0] if found else None


def is_enabled(name: str) -> bool:
    """Whether the current `PassContext` lets a stage run."""
    return name not in set(tvm.transform.PassContext.current().disabled_pass)
