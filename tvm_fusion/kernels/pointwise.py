"""Kernel class `pointwise`: any DAG of elementwise, broadcast and injective operators over one
index space, several outputs.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from ..config import HardwareProfile, Policy
from ..ir.extents import assumed, assumed_product, product_key
from .base import Fit, GroupView, Refusal, RefusalCode, Resources, Traffic, write_on_cpu
from .footprint import VECTOR_ELEMENTS, Evaluations, costly, evaluations
from .traffic import filled_by_threads, memory_traffic


class Pointwise:
    """See the module docstring.

    Does not handle: reductions; outputs of different sizes.
    """

    name = "pointwise"

    def accepts(self, group: GroupView, hw: HardwareProfile, policy: Policy) -> Fit | Refusal:
        for block in group.blocks:
            if block.reduction is not None:
                return group.refuse(RefusalCode.REDUCTION, f"{block.name} is a reduction")
        outputs = [group.writer_of[t] for t in group.outputs]
        if not outputs:
            return group.refuse(RefusalCode.SPACE_MISMATCH, "nothing of the group is read outside")
        if len({product_key(a.extent for a in b.axes) for b in outputs}) > 1:
            sizes = sorted(assumed_product(a.extent for a in b.axes) for b in outputs)
            return group.refuse(
                RefusalCode.SPACE_MISMATCH,
                "the outputs have different sizes, so they share no index space",
                smallest=sizes[0],
                largest=sizes[-1],
            )
        runs = evaluations(group)
        if refusal := refuse_recompute(group, runs, policy):
            return refusal
        extents = [assumed(a.extent) for a in outputs[0].axes]
        columns = extents[-1] if extents else 1
        return Fit(self.name, assumed_product(extents[:-1]), columns, runs.counts)

    def traffic(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Traffic:
        elements = fit.rows * fit.columns
        return memory_traffic(
            group, fit, hw, parallel=filled_by_threads(elements / VECTOR_ELEMENTS, hw)
        )

    def resources(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Resources:
        values = len(group.inputs) + len(group.outputs) + 2
        return Resources(24 + values * VECTOR_ELEMENTS, 0)

    def configs(self, func: tirx.PrimFunc, hw: HardwareProfile, policy: Policy) -> list[Any]:
        return [None]

    def write(
        self, func: tirx.PrimFunc, hw: HardwareProfile, policy: Policy, config: Any = None
    ) -> tirx.PrimFunc:
        if hw.kind == "llvm":
            return write_on_cpu(func, hw, policy)
        exact = policy.rounding == "exact"
        from .cuda.pointwise import emit_pointwise
        from .program import analyze

        return emit_pointwise(analyze(func, exact=exact), hw, config)


def refuse_recompute(group: GroupView, runs: Evaluations, policy: Policy) -> Refusal | None:
    """The refusal for a costly block that would run more often than the policy allows."""
    if (
        runs.worst_block is None
        or runs.worst <= policy.max_recompute
        or not costly(runs.worst_block)
    ):
        return None
    return group.refuse(
        RefusalCode.RECOMPUTE,
        f"{runs.worst_block.name} would be computed {runs.worst:.0f} times an element",
        factor=runs.worst,
        allowed=policy.max_recompute,
    )
