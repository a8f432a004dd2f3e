"""Kernel class `fallback`: any one operator, by TVM's own schedules (DLight on CUDA) or this
package's CPU loops. `Stock` is what is left where a class fails on an operator: TVM's own code.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tvm import tirx

from ..config import HardwareProfile, Policy
from ..cost.traffic import Resources, Traffic
from ..errors import Unsupported
from ..ir.access import Access
from ..plan.group_view import GroupView
from ..plan.refusal import Refusal, RefusalCode
from .base import Fit, write_on_cpu
from .group.footprint import points
from .group.traffic import memory_traffic


class Fallback:
    """See the module docstring."""

    name = "fallback"

    def accepts(self, group: GroupView, hw: HardwareProfile, policy: Policy) -> Fit | Refusal:
        if len(group.ops) > 1:
            return group.refuse(
                RefusalCode.OPAQUE, "no kernel class computes this group in one launch"
            )
        runs = tuple(float(points(b)) for b in group.blocks)
        return Fit(self.name, 1, 1, runs)

    def traffic(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Traffic:
        flops = sum(2.0 * points(b) for b in group.blocks if b.is_contraction)
        traffic = memory_traffic(group, fit, hw, tensor_flops=flops)
        inner = sum(
            2 * group.tensor_bytes(w.tensor)
            for b in group.blocks
            for w in b.writes
            if self._is_inner(group, w)
        )
        return replace(
            traffic, hbm_bytes=traffic.hbm_bytes + inner, l2_bytes=traffic.l2_bytes + inner
        )

    def _is_inner(self, group: GroupView, write: Access) -> bool:
        """A buffer between the operator's own loop nests: written out and read back."""
        return group.graph.tensors[write.tensor].is_inner

    def resources(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Resources:
        return Resources(32, 0)

    def configs(self, func: tirx.PrimFunc, hw: HardwareProfile, policy: Policy) -> list[Any]:
        return [None]

    def write(
        self, func: tirx.PrimFunc, hw: HardwareProfile, policy: Policy, config: Any = None
    ) -> tirx.PrimFunc:
        if hw.kind == "llvm":
            try:
                return write_on_cpu(func, hw, policy)
            except Unsupported:
                return func.with_attr("tirx.is_scheduled", True)
        return func  # the build gives what has no schedule DLight's default one


class Stock:
    """An operator as LegalizeOps made it. Nothing is asked of what it computes."""

    name = "stock"

    def accepts(self, group: GroupView, hw: HardwareProfile, policy: Policy) -> Fit | Refusal:
        return Fit(self.name, 1, 1, ())

    def traffic(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Traffic:
        moved = float(sum(map(group.tensor_bytes, (*group.inputs, *group.outputs))))
        return Traffic(hbm_bytes=moved, l2_bytes=moved)

    def resources(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Resources:
        return Resources(32, 0)
