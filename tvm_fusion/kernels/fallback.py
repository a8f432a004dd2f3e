"""Kernel class `fallback`: any one operator, by TVM's own schedules (DLight on CUDA) or this
package's CPU loops. `Stock` is what is left where a class fails on an operator: TVM's own code.
"""

from __future__ import annotations

from dataclasses import replace
from types import NoneType

from tvm import tirx

from ..config import HardwareProfile, Policy
from ..cost.traffic import Resources, Traffic
from ..errors import Unsupported
from ..ir.access import Access
from ..plan.group_view import GroupView
from ..plan.refusal import Refusal, RefusalCode
from .base import Family, Fit, Needs, OnCPU, unranked, write_on_cpu
from .forms import Form, Writer
from .group.footprint import points
from .group.traffic import memory_traffic


class Fallback(Family):
    """See the module docstring."""

    name = "fallback"
    needs = Needs(scans=True)

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

    def writer(self, hw: HardwareProfile) -> Writer:
        return _LOOPS if hw.kind == "llvm" else _STOCK


def _read(func: tirx.PrimFunc, exact: bool) -> tirx.PrimFunc:
    return func


def _unwritten(func: tirx.PrimFunc, hw: HardwareProfile, config: None) -> tirx.PrimFunc:
    return func  # the build gives what has no schedule DLight's default one


def _loops(problem: OnCPU, hw: HardwareProfile, config: None) -> tirx.PrimFunc:
    try:
        return write_on_cpu(problem, hw)
    except Unsupported:
        return problem.func.with_attr("tirx.is_scheduled", True)


_STOCK = Writer("an operator", _read, (Form("stock", NoneType, unranked, _unwritten),))
_LOOPS = Writer("an operator", OnCPU, (Form("loops", NoneType, unranked, _loops),))


class Stock(Family):
    """An operator as LegalizeOps made it. Nothing is asked of what it computes."""

    name = "stock"
    needs = Needs(scans=True)

    def accepts(self, group: GroupView, hw: HardwareProfile, policy: Policy) -> Fit | Refusal:
        return Fit(self.name, 1, 1, ())

    def traffic(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Traffic:
        moved = float(sum(map(group.tensor_bytes, (*group.inputs, *group.outputs))))
        return Traffic(hbm_bytes=moved, l2_bytes=moved)

    def resources(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Resources:
        return Resources(32, 0)
