"""Relax passes: everything that changes IR.

AssignLayouts (for GPUs) -> Decompose -> (LegalizeOps) -> Plan -> Materialize -> WriteKernels ->
PackConstants, and PlanMemory when kernels are lowered to VM calls. `Fuse` is all of it but the last
as one pass; within it the stages bear the same names, for instruments and for `disabled_pass` of
`PassContext`.
"""

from ..compilation.fuse import Fuse, fusion_pipeline, register
from ..compilation.planning_stages import FusedFunction, Materialize, Plan, WriteKernels, plan
from .apply.pack_constants import PackConstants
from .decompose import Decompose
from .layouts import AssignLayouts
from .memory.plan_memory import PlanMemory

__all__ = [
    "AssignLayouts",
    "Decompose",
    "Fuse",
    "FusedFunction",
    "Materialize",
    "PackConstants",
    "Plan",
    "PlanMemory",
    "WriteKernels",
    "fusion_pipeline",
    "plan",
    "register",
]
