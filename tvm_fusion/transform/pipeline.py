"""`Fuse` for a user's own pass pipeline, and the Relax pipeline registered as "tvm_fusion".

seq = tvm.transform.Sequential([..., tvm_fusion.transform.Fuse("h200"), ...])

tvm.compile(mod, target, relax_pipeline=relax.get_pipeline("tvm_fusion", target=target),
tir_pipeline="tvm_fusion")
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from ..config import load_policy, resolve_target


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.Fuse")
class Fuse:
    """Lowers, plans, fuses and writes kernels: the module afterwards holds one PrimFunc a launch.

    The kernels are marked, so that no later pass fuses or schedules them again; a module with TIRx
    kernels (CUDA) has to be built with `tir_pipeline="tvm_fusion"`. Running it on its own output
    changes nothing, since written kernels are opaque.

    Parameters
    ----------
    target : str, Path, tvm.target.Target or None
        See `tvm_fusion.compile`.
    policy, plan : optional
        See `tvm_fusion.compile`.
    """

    def __init__(self, target: Any = None, *, policy: Any = None, plan: Any = None) -> None:
        self.target, self.hw = resolve_target(target)
        self.policy = load_policy(policy)
        self.plan = plan

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        from ..compiler import Job

        return Job.from_module(mod, self.target, self.hw, self.policy, self.plan).fuse()


def fusion_pipeline(
    target: Any = None, *, policy: Any = None, plan: Any = None
) -> tvm.transform.Pass:
    """The Relax pipeline "tvm_fusion": Fuse, then the lowering to VM calls."""
    from ..runtime.pipeline import lowering_pipeline

    fuse = Fuse(target, policy=policy, plan=plan)
    passes = [fuse, lowering_pipeline(fuse.target)]
    return tvm.transform.Sequential(passes, name="tvm_fusion")


def register() -> None:
    """Registers the Relax pipeline (once a process)."""
    if "tvm_fusion" not in relax.pipeline.PIPELINE_MAP:
        relax.register_pipeline("tvm_fusion")(fusion_pipeline)
