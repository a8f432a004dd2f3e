"""Data that a convolution's kernel computes on its way to the tensor cores.

    relu(x * s + b) -> padding -> convolution      x channels last, s and b a number a channel

Which groups the Hopper form takes so, asked of access maps (see `gemm.hopper.prologue`). An element
is computed for each tap that meets it and for each tile of filters.
"""

from __future__ import annotations

from ...config import HardwareProfile
from ...ir.access import Access, Block
from ...plan.group_view import GroupView
from ..gemm.computed import reads_of
from ..gemm.hopper.cost import CYCLES_OF_INSTRUCTION, element_seconds
from ..gemm.launch import operation_seconds
from ..group.footprint import instructions_of, points
from ..program.expr import HALF_DTYPES
from .blocks import is_convolution
from .sizes import Sizes

TMA_CHANNELS, STEP_CHANNELS = 8, 64
"""Channels of halves that a box starts at multiples of, and those of a step."""
FILTERS_OF_TILE = 192
"""Filters of the widest tile that leaves registers for what data is computed of."""
ROWS, CONSUMERS = 64, 2
"""Positions of a warpgroup, and warpgroups that compute on a multiprocessor side by side."""


def front_of(group: GroupView, data: Access) -> list[Block]:
    """The blocks that compute data, the last one first; those of the convolution's own operator,
    which pads, and those that move elements only are none of them.
    """
    ops = [group.graph.ops[i] for i in group.ops]
    own = {id(b) for op in ops if any(map(is_convolution, op.blocks)) for b in op.blocks}
    found, waiting, known = [], [data.tensor], set()
    while waiting:
        tensor = waiting.pop(0)
        block = group.writer_of.get(tensor)
        if block is None or tensor in known:
            continue
        known.add(tensor)
        if id(block) not in own and not (block.moves and not _is_elementwise(block)):
            found.append(block)
        waiting += [read.tensor for read in block.reads]
    return found


def computes_data(
    group: GroupView, block: Block, data: Access, sizes: Sizes, hw: HardwareProfile
) -> bool:
    """Whether wgmma can take the data of a convolution's block as it is computed."""
    phases = sizes.expansion * sizes.repeats
    one = sizes.groups == phases == 1 and not sizes.parts
    plain = one and sizes.filters > 1 and sizes.dtype in HALF_DTYPES
    whole_boxes = sizes.channels_last and sizes.channels % TMA_CHANNELS == 0
    if hw.arch != "sm_90a" or not plain or not whole_boxes:
        return False
    if not all(map(_is_elementwise, front_of(group, data))):
        return False
    channels = data.index[-1].axes
    matrices = set()
    for tensor, axes in reads_of(group, data):
        moved = frozenset().union(*axes)
        if not moved <= channels:
            matrices.add(tensor)
            if not axes or axes[-1] != channels:
                return False
    dtypes = {group.graph.tensors[t].dtype for t, _ in reads_of(group, data)}
    same = all(group.graph.tensors[t].dtype == sizes.dtype for t in matrices)
    return len(matrices) == 1 and same and dtypes <= {sizes.dtype, "float32"}


def _is_elementwise(block: Block) -> bool:
    """Whether a block reads at its own points, or at some of their coordinates."""
    write = block.writes[0].index
    if block.reduction is not None or any(r.guarded or r.data_dependent for r in block.reads):
        return False
    return all(
        read.axes <= write[-1].axes
        or all(
            not index.axes or index == at
            for index, at in zip(read.index[::-1], write[::-1], strict=False)
        )
        for read in block.reads
    )


def computing_seconds(
    group: GroupView, data: Access, sizes: Sizes, hw: HardwareProfile
) -> tuple[float, float]:
    """Seconds of computing all data as often as it is read, beside a convolution's own sums, and of
    computing it once, without what comes with it.
    """
    once = elements = 0.0
    for block in front_of(group, data):
        count = float(points(block))
        elements = max(elements, count)
        once += count * operation_seconds(block.counts, hw)
        once += count * instructions_of(block.functions) * 2 / hw.fma_per_s_f32
    if not elements:
        return 0.0, 0.0
    each = once / elements + element_seconds(hw)
    steps = -(-sizes.channels // STEP_CHANNELS) * sizes.taps
    step = ROWS * STEP_CHANNELS * each * hw.num_sms * CYCLES_OF_INSTRUCTION
    parts = -(-sizes.positions // ROWS) * -(-sizes.filters // FILTERS_OF_TILE)
    waves = -(-parts // (CONSUMERS * hw.num_sms))
    return waves * steps * step, once
