"""Predicted time of a convolution's launch on CUDA, as the planner sees it: sizes, no kernel.

    rows       positions of the results, of all images        columns    filters
    terms      taps of a filter times channels                batch      groups

Every form of the kernel that can compute it is asked; the fastest counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ...config import HardwareProfile, Policy
from ...ir.access import Access, Affine, Block
from ...ir.extents import assumed_product
from ...plan.group_view import GroupView
from ..base import Fit
from ..gemm.launch import operation_seconds
from ..group.footprint import footprint_bytes
from ..program.expr import HALF_DTYPES


@dataclass(frozen=True, slots=True)
class Sizes:
    """A convolution as plain numbers.

    Attributes
    ----------
    positions : of the results of one filter, of all images.
    filters : of all groups.
    channels : that a filter sums over.
    taps : of a filter.
    groups
    dtype : of the data, as it is multiplied.
    channels_last : whether the data is contiguous along channels.
    sliding : windows with taps.
    """

    positions: int
    filters: int
    channels: int
    taps: int
    groups: int
    dtype: str
    channels_last: bool
    sliding: int

    @property
    def multiply_adds(self) -> float:
        """Of all results."""
        return float(self.positions) * self.filters * self.channels * self.taps


def is_convolution(block: Block) -> bool:
    """Whether a block sums products of data that is read at windows with weights."""
    if not block.is_contraction or len(block.reads) != 2:
        return False
    return [_has_window(block, read) for read in block.reads].count(True) == 1


def data_and_weights(block: Block) -> tuple[Access, Access]:
    """The reads of a convolution's block: the one that has windows, and the other one."""
    first, second = block.reads
    return (first, second) if _has_window(block, first) else (second, first)


def _has_window(block: Block, read: Access) -> bool:
    spatial, reduced = set(block.spatial), set(block.reduced)
    return any(
        isinstance(i, Affine) and i.axes & spatial and len(i.axes & reduced) == 1
        for i in read.index
    )


def sizes_of(group: GroupView, block: Block) -> Sizes:
    """The sizes of a convolution's block."""
    data, weights = data_and_weights(block)
    spatial, reduced = set(block.spatial), set(block.reduced)
    shared = data.axes & weights.axes & spatial
    taps = {
        axis
        for i in data.index
        if i.axes & spatial and not i.axes & shared
        for axis in i.axes & reduced
    }
    channels = reduced - taps

    def size(axes) -> int:
        return assumed_product(block.axes[i].extent for i in axes)

    tensors = group.graph.tensors
    last = data.index[-1].axes
    filters = size(weights.axes & spatial)
    groups = 1
    if shared:
        held = next((n for n, i in enumerate(data.index) if i.axes & shared), len(data.index) - 1)
        shape = tensors[data.tensor].shape
        groups = max(1, assumed_product(shape[held : held + 1]) // max(1, size(channels)))
    return Sizes(
        size(spatial - weights.axes),
        filters,
        size(channels),
        size(taps),
        groups,
        tensors[data.tensor].dtype,
        bool(last) and not last & (taps | (spatial - weights.axes)),
        len(taps),
    )


START_SECONDS = 3e-6
"""Of a launch: its first loads, its last stores."""
TENSOR_SHARE, FMA_SHARE, WGMMA_SHARE = 0.45, 0.4, 0.8
"""Of the rates of tensor cores and of multipliers, those of forms that gather their operands, and
that of the form that the TMA serves (H100, 2026-11-26: 3 x 3 layers of ResNet-50, 32 images)."""
TMA_CHANNELS, STEP_CHANNELS = 8, 64
"""Channels of halves that a box starts at multiples of, and those of a step."""


def predict(
    group: GroupView, fit: Fit, sizes: Sizes, hw: HardwareProfile, policy: Policy
) -> tuple[float, dict[str, float]]:
    """Predicted seconds without the launch's own cost, and their terms."""
    moved = sum(footprint_bytes(group, t) for t in group.inputs)
    moved += sum(map(group.tensor_bytes, group.outputs))
    hbm = moved / hw.hbm_bytes_per_s
    counts = zip(group.blocks, fit.evaluations, strict=True)
    work = sum(
        count * operation_seconds(block.counts, hw)
        for block, count in counts
        if not block.is_contraction
    )
    best = min(_bodies(sizes, hw, policy), key=lambda found: found[1])
    name, body = best
    terms = {name: body, "hbm": hbm, "operations": work, "start": START_SECONDS}
    return START_SECONDS + max(body + work, hbm), terms


def _bodies(sizes: Sizes, hw: HardwareProfile, policy: Policy) -> Iterator[tuple[str, float]]:
    """What limits each form, and the seconds of its sums."""
    flops = 2.0 * sizes.multiply_adds
    yield "fma", flops / (hw.fma_per_s_f32 * FMA_SHARE)
    rate = "tfloat32" if sizes.dtype == "float32" else sizes.dtype
    allowed = sizes.dtype in HALF_DTYPES or (sizes.dtype == "float32" and policy.allow_tf32)
    if hw.arch >= "sm_80" and allowed and rate in hw.tensor_flop_per_s:
        few = sizes.filters // sizes.groups
        padded = math.ceil(few / 16) * 16 / few
        yield "tensor", flops * padded / (hw.tensor_flop_per_s[rate] * TENSOR_SHARE)
        if hw.arch == "sm_90a" and sizes.channels_last and sizes.channels % TMA_CHANNELS == 0:
            steps = math.ceil(sizes.channels / STEP_CHANNELS) * STEP_CHANNELS / sizes.channels
            yield "wgmma", flops * padded * steps / (hw.tensor_flop_per_s[rate] * WGMMA_SHARE)
