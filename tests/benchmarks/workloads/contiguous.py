"""Convolutions, and ResNet-50, on contiguous inputs (channels first), as `conv` and `vision` have
them on channels last: ours and the peers change layouts at the borders, inside of what is timed.
"""

from __future__ import annotations

from dataclasses import replace

from .conv import CONV
from .instance import Made, Sizes, Workload
from .vision import VISION

SINGLE = (
    *("resnet_b32_stem", "resnet_b32_56_1x1_64_256", "resnet_b32_56_3x3_64_64"),
    *("resnet_b32_28_3x3_128_128", "up_56_4_128_64", "up_32_3_128_64", "resnet_b1_stem"),
    *("depthwise_112_3x3_64", "depthwise_56_3x3_128", "depthwise_56_5x5s2_144"),
    *("depthwise_14_5x5_672", "depthwise_28_7x7_192", "grouped_56_3_128_128_g32"),
)
NETWORKS = ("resnet50_b1", "resnet50_b32")


def contiguous(workload: Workload) -> Workload:
    """The workload with contiguous inputs and parameters."""

    def made(sizes: Sizes) -> Made:
        module, inputs, *unread = workload.make(sizes)
        for parameter in module.parameters():
            parameter.data = parameter.data.contiguous()
        return module, tuple(x.contiguous() for x in inputs), *unread

    return replace(workload, make=made)


CONTIGUOUS: dict[str, Workload] = {
    f"{name}_contiguous": contiguous(workload)
    for name, workload in (CONV | VISION).items()
    if name in (*SINGLE, *NETWORKS)
}
