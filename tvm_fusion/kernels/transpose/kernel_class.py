"""Kernel class `transpose`: pointwise work whose inputs disagree on the contiguous axis.

    y[i, j] = relu(x[j, i] + z[i, j])       x is contiguous along i; y and z are along j

Read as it comes, x costs a sector of 32 bytes for each element. Through a tile in shared memory
every byte moves once, so the traffic is that of any pointwise kernel.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from ...config import HardwareProfile, Policy
from ...cost.traffic import Resources, Traffic
from ...plan.group_view import GroupView
from ...plan.refusal import Refusal, RefusalCode
from ..base import Fit
from ..group.traffic import cuda_resources, cuda_traffic
from ..group.turning import is_turning
from ..pointwise.kernel_class import Pointwise
from .planned import transpose_shape, turned_streams


class Transpose(Pointwise):
    """See the module docstring.

    Accepts what `pointwise` accepts if a block reads along another axis than it writes. Where
    transposes cancel each other, what is written is the plain pointwise kernel.
    """

    name = "transpose"

    def accepts(self, group: GroupView, hw: HardwareProfile, policy: Policy) -> Fit | Refusal:
        if any(map(is_turning, group.blocks)):
            return super().accepts(group, hw, policy)
        for block in group.blocks:
            if block.reduction is not None:
                return group.refuse(RefusalCode.REDUCTION, f"{block.name} is a reduction")
        return group.refuse(
            RefusalCode.NOT_PROFITABLE,
            "all reads run along the last axis of what is written, so a tile gains nothing",
        )

    def resources(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Resources:
        return cuda_resources(group, fit, transpose_shape(group, fit, hw))

    def traffic(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Traffic:
        return cuda_traffic(
            group,
            fit,
            hw,
            transpose_shape(group, fit, hw),
            turned_streams(group, fit, hw),
        )

    def configs(self, func: tirx.PrimFunc, hw: HardwareProfile, policy: Policy) -> list[Any]:
        from ..program.analysis import analyze
        from .kernel import transpose_choices

        return transpose_choices(analyze(func, exact=policy.rounding == "exact"), hw)

    def ranked(
        self, func: tirx.PrimFunc, hw: HardwareProfile, policy: Policy
    ) -> list[tuple[float | None, Any]]:
        """The configurations, none with a time: nothing predicts tiles apart."""
        return [(None, config) for config in self.configs(func, hw, policy)]

    def write(
        self, func: tirx.PrimFunc, hw: HardwareProfile, policy: Policy, config: Any = None
    ) -> tirx.PrimFunc:
        from ..program.analysis import analyze
        from .kernel import emit_transpose

        return emit_transpose(analyze(func, exact=policy.rounding == "exact"), hw, config)
