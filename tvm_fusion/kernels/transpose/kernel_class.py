"""Kernel class `transpose`: pointwise work whose inputs disagree on the contiguous axis.

    y[i, j] = relu(x[j, i] + z[i, j])       x is contiguous along i; y and z are along j

Read as it comes, x costs a sector of 32 bytes for each element. Through a tile in shared memory
every byte moves once, so the traffic is that of any pointwise kernel.
"""

from __future__ import annotations

from ...config import HardwareProfile, Policy
from ...cost.traffic import Resources, Traffic
from ...plan.group_view import GroupView
from ...plan.refusal import Refusal, RefusalCode
from ..base import Fit
from ..forms import Writer
from ..group.read_order import is_transposing
from ..group.traffic import cuda_resources, cuda_traffic
from ..pointwise.kernel_class import Pointwise
from ..traits import ROLLED, TRANSPOSES, Needs
from .planned import transpose_shape, transposed_streams


class Transpose(Pointwise):
    """See the module docstring.

    Accepts what `pointwise` accepts if a block reads along another axis than it writes. Where
    transposes cancel each other, what is written is the plain pointwise kernel.
    """

    name = "transpose"
    needs = Needs(TRANSPOSES, ROLLED)

    def accepts(self, group: GroupView, hw: HardwareProfile, policy: Policy) -> Fit | Refusal:
        if any(map(is_transposing, group.blocks)):
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
            transposed_streams(group, fit, hw),
        )

    def writer(self, hw: HardwareProfile) -> Writer:
        from .kernel import WRITER

        return WRITER
