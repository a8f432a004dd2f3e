"""The kernels of a plan as tuning tasks: structurally equal ones once.

A task's workload is the fused PrimFunc before any schedule, named `main` and stamped with all that
decides what its kernel class may write: the class, the rounding, whether float32 may be rounded to
tfloat32; on a CPU also which parameters are constants of the module, since a kernel may take those
packed. Two launches with equal workloads can run the same kernel, whichever model they are from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import tvm
import tvm_ffi
from tvm import relax, tirx

from ...config import HardwareProfile, Policy
from ...ir.graph import FusionGraph
from ...kernels.cpu.contraction.panels import mark_constants, without_constants
from ...plan.plan import FREE, FusionPlan, PlannedGroup
from ...transform.apply.materialize import materialize
from ...transform.apply.pack_constants import packable_arguments
from ...transform.functions.functions import operator_name
from ..database.metaschedule import short_key, workload_key

CLASS, ROUNDING, TF32 = "tvm_fusion.class", "tvm_fusion.rounding", "tvm_fusion.tf32"
STAMPS = (CLASS, ROUNDING, TF32)


@dataclass(frozen=True)
class Task:
    """One kernel to tune.

    Attributes
    ----------
    workload : tirx.PrimFunc
        See the module docstring.
    kernel_class : str
    outputs : int
        How many of its last parameters it writes.
    count : int
        Launches of the plan with this workload.
    predicted_us : float
        Of one launch, by the cost model.
    groups : tuple of tuples of str
        The operators of each of its launches.
    """

    workload: tirx.PrimFunc
    kernel_class: str
    outputs: int
    count: int
    predicted_us: float
    groups: tuple[tuple[str, ...], ...]

    @property
    def key(self) -> str:
        """16 digits by which files and reports name the workload."""
        return key_of(self.workload)

    @property
    def name(self) -> str:
        """A short name for reports."""
        first, *others = self.groups[0]
        return f"{self.kernel_class}:{first}" + (f"+{len(others)}" if others else "")


def workload_of(func: tirx.PrimFunc, kernel_class: str, policy: Policy) -> tirx.PrimFunc:
    """The workload that a fused PrimFunc is, whatever its name."""
    stamps = {
        "global_symbol": "main",
        CLASS: kernel_class,
        ROUNDING: policy.rounding,
        TF32: int(policy.allow_tf32),
    }
    return func.with_attr(stamps)


def without_stamps(workload: tirx.PrimFunc) -> tirx.PrimFunc:
    """The PrimFunc as kernel classes take it."""
    for stamp in (*STAMPS, "global_symbol"):
        if stamp in workload.attrs:
            workload = workload.without_attr(stamp)
    return workload


def key_of(workload: tirx.PrimFunc) -> str:
    """The structural hash of a workload, as 16 hexadecimal digits."""
    return short_key(workload_key(workload))


def key_of_group(func: tirx.PrimFunc, kernel_class: str, policy: Policy) -> str:
    """`key_of` a fused PrimFunc, the same for a group by itself, whose operands are no constants of
    the module.
    """
    return key_of(workload_of(without_constants(func), kernel_class, policy))


def tasks_of(
    low: tvm.IRModule,
    graph: FusionGraph,
    plan: FusionPlan,
    policy: Policy,
    hw: HardwareProfile | None = None,
) -> list[Task]:
    """The tasks of a plan, in the order of its launches.

    Parameters
    ----------
    low : IRModule
        The lowered module.
    graph : FusionGraph
        Read from `low`.
    plan : FusionPlan
    policy : Policy
    hw : HardwareProfile, optional
        On a CPU the workloads say which of their parameters are constants of the module.
    """
    materialized = materialize(low, graph, plan)
    outputs = dict(_calls(materialized.mod[plan.function]))
    constants = packable_arguments(materialized.mod, hw) if hw is not None else {}
    found: list[Task] = []
    for group, name in _launches(plan, materialized.functions):
        func = materialized.mod[name]
        if not isinstance(func, tirx.PrimFunc) or name not in outputs:
            continue
        func = mark_constants(func, constants.get(name, ()))
        workload = workload_of(func, group.kernel_class, policy)
        for position, task in enumerate(found):
            if tvm_ffi.structural_equal(task.workload, workload):
                groups = (*task.groups, group.ops)
                found[position] = replace(task, count=task.count + 1, groups=groups)
                break
        else:
            kind, us = group.kernel_class, group.predicted_us
            found.append(Task(workload, kind, outputs[name], 1, us, (group.ops,)))
    return found


def _launches(
    plan: FusionPlan, functions: dict[tuple[str, ...], str]
) -> Iterator[tuple[PlannedGroup, str]]:
    for group in plan.groups:
        if group.kernel_class not in FREE and group.ops in functions:
            yield group, functions[group.ops]


def _calls(func: relax.Function) -> Iterator[tuple[str, int]]:
    """Names of the PrimFuncs that a function calls, and how many tensors each writes."""
    for block in func.body.blocks:
        for binding in block.bindings:
            call = getattr(binding, "value", None)
            if operator_name(call) == "relax.call_tir":
                several = isinstance(call.ty, relax.TupleType)
                yield call.args[0].name_hint, len(call.ty.fields) if several else 1
