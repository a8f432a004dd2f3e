"""Predicted time of a convolution's launch on CUDA, as the planner sees it: sizes, no kernel.

    rows       positions of the results, of all images        columns    filters
    terms      taps of a filter times channels                batch      groups

Every form of the kernel that can compute it is asked; the fastest counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ...config import HardwareProfile, Policy
from ...errors import Unsupported
from ...ir.access import Block, Irregular
from ...ir.extents import assumed, assumed_product
from ...plan.group_view import GroupView, dtype_bytes
from ..base import Fit
from ..gemm.hopper.model import STEP_BYTES
from ..gemm.launch import operation_seconds
from ..gemm.partials import RowRuns
from ..gemm.runs.problem import MOST_TERMS
from ..gemm.runs.time import sums_seconds as runs_seconds
from ..group.footprint import footprint_bytes
from ..group.read_order import is_transposing
from ..program.expr import HALF_DTYPES
from .blocks import data_and_weights, is_convolution, parts_of, source_of
from .boxes import boxes_of
from .computed import STEP_CHANNELS, TMA_CHANNELS, Way, ways_to_compute
from .depthwise.problem import MOST_CHANNELS
from .depthwise.time import sums_seconds
from .product_time import cuda_core_seconds, mma_seconds
from .runs import MOST_CHANNELS as FEW_CHANNELS
from .sizes import Sizes


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

    tensors, parts = group.graph.tensors, parts_of(group, block)
    expansion = _expansion(group, data.tensor)
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
        -(-size(taps) // expansion),
        groups,
        tensors[data.tensor].dtype,
        bool(last) and not last & (taps | (spatial - weights.axes)),
        expansion,
        max((part.repeats for part in parts), default=source_of(group, data.tensor)[1]),
        tuple(part.channels for part in parts),
    )


def takes_repeats(sizes: Sizes, hw: HardwareProfile, channels: int | None = None) -> bool:
    """Whether data that is enlarged, or a part of it of so many channels, is as fast to read as if
    it lay in memory: on CUDA channels come in by vectors. Of one tap results are repeated too,
    which is better done behind it (16 to 32 filters of twice 56 x 56 take a core of a Zen 4 398 us,
    in two kernels 183).
    """
    if hw.kind != "cuda" or sizes.taps == 1:
        return sizes.taps > 1
    channels = channels or sizes.channels
    whole = channels * dtype_bytes(sizes.dtype) % VECTOR_BYTES == 0
    return sizes.channels_last and channels > FEW_CHANNELS and whole


def _expansion(group: GroupView, tensor: int) -> int:
    """How many positions of data of a transposed convolution hold one element, the others zeros:
    x[i // 2, j // 2] where both are even.
    """
    found = 1
    while (block := group.writer_of.get(tensor)) is not None and len(block.reads) == 1:
        (read,) = block.reads
        shape = group.graph.tensors[read.tensor].shape
        for index, size in zip(read.index, shape, strict=True):
            if isinstance(index, Irregular) and read.guarded and len(index.axes) == 1:
                (extent,) = map(assumed, block.extents(tuple(index.axes)))
                if (size := assumed(size)) > 1:
                    found *= max(1, (extent - 1) // (size - 1))
        tensor = read.tensor
    return found


VECTOR_BYTES = 16
"""That a thread copies at once."""
START_SECONDS = 3e-6
"""Of a launch: its first loads, its last stores."""
WGMMA_SHARE = 0.8
"""Of the rate of tensor cores, that of the form that the TMA serves (H100, 2026-11-26: 3 x 3
convolutions of ResNet-50, 32 images)."""
APART_SHARE, SECTOR_BYTES = 0.67, 32
"""Of the time of as many parts of a line (H200, 2026-11-26: 128 to 64 channels, twice 56 x 56,
45 us; where results lie channels last 22)."""
WITHOUT_RIMS, RIM_FILTERS = 1.5, 64
"""How much longer few filters of several taps take where boxes of data cannot come with their rims:
that of computed or enlarged data (by prediction, 56 x 56 of 32 images, 64 to 64 channels: 24 us
beside 17)."""
PART_SECONDS = 3e-7
"""Of each part of a concatenation that a kernel reads beside the first: not measured, so that of
ways that cost the same otherwise parts lie in one piece of memory."""
SUMMED = (*HALF_DTYPES, "float32")
"""Types whose sums are reduced."""
FILLED_LINES = 1.2
"""Terms of a filter's lines that are filled up to multiples of 8, of those that there are."""


def predict(
    group: GroupView,
    fit: Fit,
    sizes: Sizes,
    hw: HardwareProfile,
    policy: Policy,
    runs: Sequence[RowRuns] = (),
) -> tuple[float, dict[str, float]] | None:
    """Predicted seconds without the launch's own cost, and their terms; None where results are to
    be reduced over `runs` and no form can.
    """
    moved = sum(footprint_bytes(group, t) for t in group.inputs)
    moved += sum(map(group.tensor_bytes, group.outputs))
    hbm = moved / hw.hbm_bytes_per_s
    counts = zip(group.blocks, fit.evaluations, strict=True)
    work = sum(
        count * operation_seconds(block.counts, hw)
        for block, count in counts
        if not block.is_contraction
    )
    convolution = next(filter(is_convolution, group.blocks))
    data, _ = data_and_weights(convolution)
    ways, once = ways_to_compute(group, convolution, data, sizes, hw)
    few = sizes.taps > 1 and sizes.filters <= RIM_FILTERS
    more = _more_boxes(runs, sizes) if runs else 1.0
    taken = ("wgmma", "tensor") if _by_windows(group, runs, sizes) else ("wgmma",)
    work -= once
    found = []
    for name, body in _bodies(sizes, hw, policy):
        if (ways and name != "wgmma") or (runs and name not in taken):
            continue
        if runs and name == "wgmma":
            if not more or not hw.architecture.has_wgmma:
                continue
            body *= more
        stores = _apart_seconds(group, sizes, name, hw)
        for way in ways or [Way()]:
            sums = body
            if name == "wgmma":
                without_rims = few and (sizes.repeats > 1 or (bool(ways) and not way.rims))
                sums *= way.longer * (WITHOUT_RIMS if without_rims else 1.0)
                sums = max(sums, way.least)
            total = max(sums + way.seconds + work, hbm) + stores
            found.append((total, name, sums, stores, way.seconds))
    if not found:
        return None
    seconds, name, body, stores, computing = min(found)
    terms = {name: body, "hbm": hbm, "operations": work, "stores": stores, "start": START_SECONDS}
    if computing:
        terms["computed"] = computing
    if sizes.parts:
        terms["parts"] = PART_SECONDS * (len(sizes.parts) - 1)
        seconds += terms["parts"]
    return START_SECONDS + seconds, terms


def _by_windows(group: GroupView, runs: Sequence[RowRuns], sizes: Sizes) -> bool:
    """Whether rows of a product can be positions window by window, all of which are pooled or in
    one window: of no phases, and where others are stored, too, all of them.
    """
    if not runs or sizes.expansion * sizes.repeats > 1 or not all(run.whole for run in runs):
        return False
    shape, heights = runs[0].shape, runs[0].heights
    if any(run.heights != heights for run in runs) or sizes.dtype not in SUMMED:
        return False
    stored = any(math.prod(group.graph.tensors[t].shape) == math.prod(shape) for t in group.outputs)
    return not stored or all(n % height == 0 for n, height in zip(shape, heights, strict=True))


def _more_boxes(runs: Sequence[RowRuns], sizes: Sizes) -> float:
    """How many times as many boxes hold the positions, where a box holds whole runs; 0 where none
    holds those of all reductions, or positions are taken in phases.
    """
    shape, heights = runs[0].shape[:-1], runs[0].heights[:-1]
    steps = (1,) * len(shape)
    try:
        if sizes.expansion * sizes.repeats > 1 or any(run.heights[:-1] != heights for run in runs):
            return 0.0
        return boxes_of(shape, steps, heights) / boxes_of(shape, steps)
    except Unsupported:
        return 0.0


def _apart_seconds(group: GroupView, sizes: Sizes, form: str, hw: HardwareProfile) -> float:
    """Of results that are stored one by one: a phase of a transposed convolution, or of one of
    enlarged data, has every other one of a row, and channels that it has side by side are apart.
    """
    turned = any(is_transposing(b) for b in group.blocks if not b.is_contraction)
    phases = sizes.expansion * (sizes.repeats if form == "wgmma" else 1)
    if phases == 1 or not (turned and sizes.channels_last):
        return 0.0
    results = float(sizes.positions) * sizes.filters
    return APART_SHARE * results * SECTOR_BYTES / hw.l2_bytes_per_s


def _bodies(sizes: Sizes, hw: HardwareProfile, policy: Policy) -> Iterator[tuple[str, float]]:
    """What limits each form, and the seconds of its sums."""
    yield "fma", cuda_core_seconds(sizes, hw)
    if sizes.channels <= MOST_CHANNELS and sizes.repeats == 1 and not sizes.parts:
        results, terms = float(sizes.positions) * sizes.filters, sizes.channels * sizes.taps
        yield "direct", sums_seconds(results, terms, hw)
    seconds = mma_seconds(sizes, hw, policy)
    if seconds is not None:
        yield "tensor", seconds
    few = sizes.groups == sizes.repeats == 1 < sizes.filters and sizes.channels <= FEW_CHANNELS
    if few and not sizes.parts and sizes.dtype in HALF_DTYPES and hw.architecture.has_mma:
        terms = math.ceil(sizes.channels * sizes.taps * FILLED_LINES)
        if terms <= MOST_TERMS:
            yield "runs", runs_seconds(sizes.positions, sizes.filters, terms, sizes.dtype, hw)
    rate = "tfloat32" if sizes.dtype == "float32" else sizes.dtype
    *first, last = sizes.sources
    step = STEP_BYTES // dtype_bytes(sizes.dtype)
    whole = last % TMA_CHANNELS == 0 and all(channels % step == 0 for channels in first)
    boxes = sizes.channels_last and whole
    taken = seconds is not None and sizes.dtype in (*HALF_DTYPES, "float32")
    if taken and boxes and hw.architecture.has_wgmma:
        few = sizes.filters // sizes.groups
        padded = math.ceil(few / 16) * 16 / few
        steps = math.ceil(sizes.channels / STEP_CHANNELS) * STEP_CHANNELS / sizes.channels
        flops = 2.0 * sizes.multiply_adds * padded * steps
        yield "wgmma", flops / (hw.tensor_flop_per_s[rate] * WGMMA_SHARE)
