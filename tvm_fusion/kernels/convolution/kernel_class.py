"""Kernel class `convolution`: a convolution with pointwise work behind it, on its elements, of data
that is padded, enlarged or put together of parts on its way (see `blocks`); on Hopper also with
pointwise work in front of it, on the data (see `computed`).

One, two or three dimensions and any number of others; any stride, padding, dilation and number of
groups, transposed ones too; any layout of data, weights and results. Which blocks are one is asked
of access maps: data that is read at a window, where an axis of the sum is a filter's tap. On Hopper
results may be reduced over blocks of 16 positions, too (see `gemm.partials`), or over windows that
lie beside each other (see `pooling`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ...config import HardwareProfile, Policy
from ...cost.traffic import Resources, Traffic
from ...ir.access import Affine, Block
from ...ir.graph import FusionGraph, Op
from ...plan.group_view import GroupView
from ...plan.refusal import Refusal, RefusalCode
from ..base import FIXED_SIZES, Fit
from ..cpu.nest_class import Nest
from ..forms import Writer
from ..gemm.partials import RowRuns, writes_partials
from ..group.footprint import points
from ..group.gathers import refuse_gathers
from ..group.traffic import filled_by_threads, memory_traffic
from .blocks import (
    data_and_weights,
    enlarged_cores,
    is_convolution,
    moved_before,
    sums_known_sizes,
)
from .computed import computes_data, front_of, views_before
from .launch import RIM_FILTERS, predict, sizes_of, takes_repeats
from .pooling import pools, refuse_windows, windows_of
from .transform import LEAST_CHANNELS, LEAST_FILTERS, RATE, TAPS

SHARE_OF_FEW_FILTERS = 0.4
"""Of the rate of other convolutions, that of depthwise ones: each element of the data is loaded for
one or few filters."""


def has_few_filters(block: Block) -> bool:
    """Whether data and weights share an axis of the results: groups of filters."""
    data, weights = block.reads
    return bool(data.axes & weights.axes & set(block.spatial))


def _columns(block: Block) -> dict[int, frozenset[int]]:
    """The axes of filters of a convolution, as `gemm.partials` asks for them."""
    _, weights = data_and_weights(block)
    return {id(block): weights.axes & set(block.spatial)}


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
    slow_to_compile = True

    def cores(self, graph: FusionGraph) -> Iterator[tuple[int, ...]]:
        """Convolutions of a join with an enlarged part (see `plan.search.search`), not of so few
        filters that boxes with rims, which enlarged data has none of, are better.
        """
        return enlarged_cores(graph, RIM_FILTERS + 1)

    def accepts(self, group: GroupView, hw: HardwareProfile, policy: Policy) -> Fit | Refusal:
        block = next(filter(is_convolution, group.blocks), None)
        if block is None:
            return group.refuse(RefusalCode.REDUCTION, "the group holds no convolution")
        further = self.reduced_further(group, hw)
        if hw.kind == "cuda" and (refusal := refuse_windows(group, block, hw, further)):
            return refusal
        fit = super().accepts(group, hw, policy)
        if isinstance(fit, Refusal) or hw.kind != "cuda":
            return fit
        if refusal := refuse_gathers(group, (write.tensor for write in block.writes)):
            return refusal
        if not sums_known_sizes(block):
            return group.refuse(
                RefusalCode.REDUCTION,
                "a convolution of a symbolic number of filters, channels or taps",
                FIXED_SIZES,
            )
        found = predict(group, fit, sizes_of(group, block), hw, policy, list(further.values()))
        if found is None:
            return group.refuse(
                RefusalCode.EPILOGUE, "no kernel of the convolution reduces its results"
            )
        seconds, terms = found
        return replace(fit, seconds=seconds, terms=tuple(sorted(terms.items())))

    def taken_in(self, group: GroupView, anchor: Op, hw: HardwareProfile) -> frozenset[int]:
        block = next(filter(is_convolution, anchor.blocks), None)
        if block is None:
            return frozenset()
        sizes, (data, _) = sizes_of(group, block), data_and_weights(block)
        found = moved_before(group, anchor, lambda channels: takes_repeats(sizes, hw, channels))
        front = front_of(group, data) if hw.kind == "cuda" else []
        if front and computes_data(group, block, data, sizes, hw):
            before = [*front, *views_before(group, data)]
            found |= frozenset(w.tensor for b in before for w in b.writes) - set(group.outputs)
        return found

    def reduced_further(self, group: GroupView, hw: HardwareProfile) -> Mapping[int, RowRuns]:
        """Reductions over blocks of positions of each filter, for a kernel that finishes them, or
        over windows, with what is pointwise in those.
        """
        found = [b for b in group.blocks if is_convolution(b)]
        if not pools(hw) or len(found) != 1:
            return {}
        (block,) = found
        shape = group.graph.tensors[block.writes[0].tensor].shape
        others = [b for b in group.blocks if b.reduction is not None and b is not block]
        runs = windows_of(group, _columns(block), others)
        if not writes_partials(hw):
            runs = {key: run for key, run in runs.items() if run.whole}
        return {key: run for key, run in runs.items() if run.shape == tuple(shape)}

    def traffic(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Traffic:
        found = [b for b in group.blocks if is_convolution(b)]
        flops = sum(2.0 * points(b) for b in found)
        if hw.kind == "cuda":
            return memory_traffic(
                group, fit, hw, tensor_flops=flops, seconds=fit.seconds, terms=dict(fit.terms)
            )
        share = SHARE_OF_FEW_FILTERS if any(map(has_few_filters, found)) else 1.0
        if all(is_transformed(group, b) for b in found):
            share = RATE
        return memory_traffic(
            group,
            fit,
            hw,
            parallel=filled_by_threads(fit.rows, hw),
            tensor_flops=flops,
            tensor_efficiency=share,
        )

    def resources(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Resources:
        if hw.kind != "cuda":
            return super().resources(group, fit, hw)
        return Resources(168, hw.smem_per_block_bytes)

    def writer(self, hw: HardwareProfile) -> Writer:
        from .forms import CPU_WRITER, CUDA_WRITER

        return CUDA_WRITER if hw.kind == "cuda" else CPU_WRITER
