"""Kernel class `join`: a concatenation by itself, whose parts the kernels before it have written
where they belong (`transform.lower.joins`). It launches nothing.

Where memory is planned by others it is a kernel after all, which copies.
"""

from __future__ import annotations

from ...config import HardwareProfile, Policy
from ...cost.traffic import Resources, Traffic
from ...plan.group_view import GroupView
from ...plan.plan import JOIN
from ...plan.refusal import Refusal, RefusalCode
from ..base import REDUCES, Family, Fit, Needs
from ..forms import Writer


class JoinClass(Family):
    """See the module docstring."""

    name = JOIN
    needs = Needs(absent=REDUCES)

    def accepts(self, group: GroupView, hw: HardwareProfile, policy: Policy) -> Fit | Refusal:
        if len(group.ops) > 1 or not group.graph.ops[group.ops[0]].is_join:
            return group.refuse(RefusalCode.OPAQUE, "the group is no concatenation alone")
        return Fit(self.name, 1, 1, (0.0,))

    def traffic(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Traffic:
        return Traffic(hbm_bytes=0.0, l2_bytes=0.0, seconds=0.0, launches=False)

    def resources(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Resources:
        return Resources(0, 0)

    def writer(self, hw: HardwareProfile) -> Writer:
        from ..pointwise.kernel import WRITER

        return WRITER
