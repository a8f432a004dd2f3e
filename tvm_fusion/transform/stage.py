"""The stages of `Fuse` by name: what instruments time, what `PassContext` switches off.

Within `Fuse` and `tvm_fusion.compile` a stage runs on one function at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import tvm

FUSE = "tvm_fusion.Fuse"
DECOMPOSE = "tvm_fusion.Decompose"
PLAN = "tvm_fusion.Plan"
MATERIALIZE = "tvm_fusion.Materialize"
WRITE_KERNELS = "tvm_fusion.WriteKernels"
PACK_CONSTANTS = "tvm_fusion.PackConstants"
PLAN_MEMORY = "tvm_fusion.PlanMemory"


def run_stage(
    name: str, mod: tvm.IRModule, change: Callable[[tvm.IRModule], tvm.IRModule]
) -> tvm.IRModule:
    """A module changed under the name of a pass; the module itself where that is disabled."""
    stage = tvm.transform.module_pass(lambda given, _: change(given), opt_level=0, name=name)
    return tvm.transform.Sequential([stage])(mod)


def is_enabled(name: str) -> bool:
    """Whether the current `PassContext` lets a stage run."""
    return name not in set(tvm.transform.PassContext.current().disabled_pass)
