"""Kernel class `nest` (llvm): one operator with reductions of any kind, and pointwise work behind
it on the same elements.

Convolutions, pooling, reductions over leading axes: the loops of the last reduction, then the
epilogue on the values in registers.
"""

from __future__ import annotations

from collections.abc import Collection

from ...config import HardwareProfile, Policy
from ...cost.traffic import Resources, Traffic
from ...ir.extents import assumed_product, product_key
from ...ir.graph import Op
from ...plan.group_view import GroupView
from ...plan.refusal import Refusal, RefusalCode
from ..base import REDUCES, Family, Fit, Needs
from ..group.footprint import evaluations, points, refuse_recompute
from ..group.traffic import filled_by_threads, memory_traffic


class Nest(Family):
    """See the module docstring."""

    name = "nest"
    needs = Needs(REDUCES)

    def accepts(self, group: GroupView, hw: HardwareProfile, policy: Policy) -> Fit | Refusal:
        further = self.reduced_further(group, hw)
        blocks = {i: [b for b in group.graph.ops[i].blocks if b.reduction] for i in group.ops}
        reducing = [i for i in group.ops if any(id(b) not in further for b in blocks[i])]
        if len(reducing) != 1:
            return group.refuse(
                RefusalCode.REDUCTION,
                "a loop nest holds exactly one reducing operator",
                reducing=len(reducing),
            )
        anchor = group.graph.ops[reducing[0]]
        if len(anchor.outputs) != 1:
            return group.refuse(RefusalCode.SPACE_MISMATCH, f"{anchor.name} has several outputs")
        root = group.writer_of[anchor.outputs[0]]
        space = product_key(root.extents(root.spatial))
        after, before = {anchor.outputs[0]}, self.taken_in(group, anchor, hw)
        for block in group.blocks:
            known = block in anchor.blocks or id(block) in further
            if known or block.writes[0].tensor in before:
                continue
            if not any(a.tensor in after for a in block.reads):
                return group.refuse(
                    RefusalCode.PROLOGUE, f"{block.name} comes before the reduction"
                )
            if product_key(a.extent for a in block.axes) != space:
                return group.refuse(
                    RefusalCode.SPACE_MISMATCH,
                    f"{block.name} does not run over the reduction's elements",
                )
            after |= {w.tensor for w in block.writes}
        inner = before.union(w.tensor for b in anchor.blocks for w in b.writes)
        runs = evaluations(group, inner)
        if refusal := refuse_recompute(group, runs, policy):
            return refusal
        return Fit(self.name, assumed_product(root.extents(root.spatial)), 1, runs.counts)

    def taken_in(self, group: GroupView, anchor: Op, hw: HardwareProfile) -> frozenset[int]:
        """Tensors in front of the reduction that its kernel reads where they lie, or computes on
        their way.
        """
        return frozenset()

    def reduced_further(self, group: GroupView, hw: HardwareProfile) -> Collection[int]:
        """Blocks of the group, by `id`, that reduce its results once more: none, in a loop nest."""
        return ()

    def traffic(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Traffic:
        flops = sum(2.0 * points(b) for b in group.blocks if b.is_contraction)
        return memory_traffic(
            group, fit, hw, parallel=filled_by_threads(fit.rows, hw), tensor_flops=flops
        )

    def resources(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Resources:
        return Resources(16, 0)
