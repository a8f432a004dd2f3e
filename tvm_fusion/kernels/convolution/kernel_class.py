"""Kernel class `convolution`: a convolution with pointwise work behind it, on its elements.

One, two or three dimensions and any number of others; any stride, padding, dilation and number of
groups, transposed ones too; any layout of data, weights and results. Which blocks are one is asked
of access maps: data that is read at a window, where an axis of the sum is a filter's tap.
"""

from __future__ import annotations

import math

from ...config import HardwareProfile, Policy
from ...cost.traffic import Traffic
from ...ir.access import Affine, Block
from ...plan.group_view import GroupView
from ...plan.refusal import Refusal, RefusalCode
from ..base import Fit
from ..cpu.nest_class import Nest
from ..forms import Writer
from ..group.footprint import points
from ..group.traffic import filled_by_threads, memory_traffic
from .transform import LEAST_CHANNELS, LEAST_FILTERS, RATE, TAPS

SHARE_OF_FEW_FILTERS = 0.4
"""Of the rate of other convolutions, that of depthwise ones: each element of the data is loaded for
one or few filters."""


def is_convolution(block: Block) -> bool:
    """Whether a block sums products of data that is read at windows with weights."""
    if not block.is_contraction or len(block.reads) != 2:
        return False
    spatial, reduced = set(block.spatial), set(block.reduced)
    windows = [
        any(
            isinstance(i, Affine) and i.axes & spatial and len(i.axes & reduced) == 1
            for i in read.index
        )
        for read in block.reads
    ]
    return windows.count(True) == 1


def has_few_filters(block: Block) -> bool:
    """Whether data and weights share an axis of the results: groups of filters."""
    data, weights = block.reads
    return bool(data.axes & weights.axes & set(block.spatial))


def is_transformed(group: GroupView, block: Block) -> bool:
    """Whether constant weights of 3 x 3 neighbours meet many channels: Winograd's transform."""
    spatial, reduced = set(block.spatial), set(block.reduced)
    data, weights = sorted(block.reads, key=lambda read: len(read.axes & spatial), reverse=True)
    windows = [
        i for i in data.index if isinstance(i, Affine) and i.axes & spatial and i.axes & reduced
    ]
    taps = [block.axes[axis].extent for i in windows for axis in i.axes & reduced]
    steps = {c for i in windows for c in i.coefficients if c}
    sizes = [block.extents(tuple(axes)) for axes in (reduced, weights.axes & spatial)]
    if not all(isinstance(n, int) for size in sizes for n in size):
        return False
    terms, filters = map(math.prod, sizes)
    constant = group.graph.tensors[weights.tensor].is_constant
    enough = terms >= TAPS**2 * LEAST_CHANNELS and filters >= LEAST_FILTERS
    return taps == [TAPS, TAPS] and steps == {1} and constant and enough


class ConvolutionClass(Nest):
    """See the module docstring."""

    name = "convolution"

    def accepts(self, group: GroupView, hw: HardwareProfile, policy: Policy) -> Fit | Refusal:
        if not any(is_convolution(b) for b in group.blocks):
            return group.refuse(RefusalCode.REDUCTION, "the group holds no convolution")
        return super().accepts(group, hw, policy)

    def traffic(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Traffic:
        found = [b for b in group.blocks if is_convolution(b)]
        share = SHARE_OF_FEW_FILTERS if any(map(has_few_filters, found)) else 1.0
        if all(is_transformed(group, b) for b in found):
            share = RATE
        return memory_traffic(
            group,
            fit,
            hw,
            parallel=filled_by_threads(fit.rows, hw),
            tensor_flops=sum(2.0 * points(b) for b in found),
            tensor_efficiency=share,
        )

    def writer(self, hw: HardwareProfile) -> Writer:
        from .forms import CPU_WRITER

        return CPU_WRITER
