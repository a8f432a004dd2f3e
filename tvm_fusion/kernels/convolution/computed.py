"""Data that a convolution's kernel computes on its way to the tensor cores.

    relu(x * s + b) -> padding -> convolution      x channels last, s and b a number a channel,
                                                   or a channel of an image

Which groups Hopper's forms take so, asked of access maps (see `gemm.hopper.prologue`). In registers
an element is computed for each tap that meets it and for each tile of filters; in shared memory, of
boxes that hold what all taps read, for each box it lies in and each tile of filters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...config import HardwareProfile
from ...errors import Unsupported
from ...ir.access import Access, Affine, Block
from ...ir.extents import assumed
from ...plan.group_view import GroupView
from ..gemm.computed import Read, reads_behind
from ..gemm.hopper.cost import CYCLES_OF_INSTRUCTION, element_seconds
from ..gemm.launch import operation_seconds
from ..group.footprint import instructions_of, points
from ..program.expr import HALF_DTYPES
from .blocks import is_convolution
from .boxes import box_shape
from .sizes import Sizes

TMA_CHANNELS, STEP_CHANNELS = 8, 64
"""Channels of halves that a box starts at multiples of, and those of a step."""
FILTERS_OF_TILE = 192
"""Filters of the widest tile that leaves registers for what data is computed of."""


@dataclass(frozen=True, slots=True)
class Way:
    """How data is computed: `seconds` of all of it, beside sums that take `longer` times as long as
    those of data that is read, and `least` at any rate. With `rims` boxes of it come with what all
    taps read; blocks do not share their terms then.
    """

    seconds: float = 0.0
    longer: float = 1.0
    least: float = 0.0
    rims: bool = False


SHOWN, SHOWN_ONCE = 1.25, 2.5
"""Of the predicted seconds of computing boxes, what is charged beside the sums, where blocks have
several tiles and where they have one: 0 to 1.4 and 0.7 to 2.4 showed (H200, 2026-11-27)."""
TAP_SECONDS = 4e-7
"""The least of a tap whose weights have a stage of their own: 0.38 and 0.45 us in tiles of 80
filters (2 x 32 x 32 positions of 320 and of 640 channels, H200, 2026-11-27)."""
ROWS, CONSUMERS = 64, 2
"""Positions of a warpgroup, and warpgroups that compute on a multiprocessor side by side."""


def front_of(group: GroupView, data: Access) -> list[Block]:
    """The blocks that compute data, the last one first; those of the convolution's own operator,
    which pads, and those that move elements only are none of them.
    """
    ops = [group.graph.ops[i] for i in group.ops]
    own = {id(b) for op in ops if any(map(is_convolution, op.blocks)) for b in op.blocks}
    found, waiting, known = [], [data.tensor], set[int]()
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


def views_before(group: GroupView, data: Access) -> list[Block]:
    """The reshapes that data is read through on its way from what it is computed of."""
    found, waiting, known = [], [data.tensor], set[int]()
    while waiting:
        tensor = waiting.pop(0)
        block = group.writer_of.get(tensor)
        if block is not None and tensor not in known:
            known.add(tensor)
            found += [block] if id(block) in group.views else []
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
    if not hw.architecture.has_wgmma or not plain or not whole_boxes:
        return False
    if not all(map(_is_elementwise, front_of(group, data))):
        return False
    channels, sliding = data.index[-1].axes, _sliding(block, data)
    found = [(tensor, axes, _moved(axes)) for tensor, axes in _tensors_of(group, data)]
    if _reads_images(group, block, data):
        # Their numbers are read where they are known: computed here they were for each element.
        computed = [moved for tensor, _, moved in found if tensor in group.writer_of]
        known = all(moved & sliding or moved <= channels for moved in computed)
        if not (known and _shares_boxes(block, data)):
            return False
    read = [each for each in found if each[0] not in group.writer_of]
    matrices = {tensor: axes[-1] for tensor, axes, moved in read if moved & sliding}
    if len(matrices) != 1:
        return False
    ((matrix, inner),) = matrices.items()
    dtypes = {group.graph.tensors[tensor].dtype for tensor, *_ in read}
    same = group.graph.tensors[matrix].dtype == sizes.dtype
    return bool(inner) and inner <= channels and same and dtypes <= {sizes.dtype, "float32"}


def _moved(axes: Sequence[frozenset[int]]) -> frozenset[int]:
    return frozenset().union(*axes)


def _reads_images(group: GroupView, block: Block, data: Access) -> bool:
    """Whether data is computed of numbers that differ between images, not between positions."""
    channels, sliding = data.index[-1].axes, _sliding(block, data)
    found = (_moved(axes) for _, axes in _tensors_of(group, data))
    return any(not moved & sliding and not moved <= channels for moved in found)


def _sliding(block: Block, data: Access) -> frozenset[int]:
    """The axes of a convolution along which its windows slide, taps among them."""
    reduced = set(block.reduced)
    dims = [i.axes for i in data.index[:-1] if i.axes & reduced]
    return frozenset().union(*dims)


def _shares_boxes(block: Block, data: Access) -> bool:
    """Whether all taps read the elements of one box: windows slide by one element."""
    spatial = set(block.spatial)
    slides = [i for i in data.index[:-1] if i.axes & set(block.reduced)]
    return bool(slides) and all(
        isinstance(i, Affine) and all(i.coefficients[a] == 1 for a in i.axes & spatial)
        for i in slides
    )


def _tensors_of(group: GroupView, data: Access) -> Iterator[Read]:
    """What the group reads and computes on the way to data, and the convolution's axes along each
    dimension; of a reshape those of the dimensions in front that stay as they are, and of all
    others together.
    """
    waiting: list[Read] = [(data.tensor, [index.axes for index in data.index])]
    known = set()
    while waiting:
        tensor, axes = waiting.pop()
        if (tensor, *axes) in known:
            continue
        known.add((tensor, *axes))
        yield tensor, axes
        block = group.writer_of.get(tensor)
        if block is None:
            continue
        if id(block) in group.views:
            (read,) = block.reads
            waiting.append((read.tensor, _through_view(group, read.tensor, tensor, axes)))
            continue
        waiting += reads_behind(block, axes)


def _through_view(
    group: GroupView, source: int, target: int, axes: list[frozenset[int]]
) -> list[frozenset[int]]:
    """The axes along the dimensions of what a reshape reads, of those along its result's."""
    before, after = (group.graph.tensors[t].shape for t in (source, target))
    same = 0
    while same < min(len(before), len(after)) and before[same] == after[same]:
        same += 1
    others = frozenset().union(*axes[same:])
    return [*axes[:same], *[others] * (len(before) - same)]


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


def ways_to_compute(
    group: GroupView, block: Block, data: Access, sizes: Sizes, hw: HardwareProfile
) -> tuple[list[Way], float]:
    """How all data can be computed as often as it is read, beside a convolution's own sums; and the
    seconds of computing it once, without what comes with it. No way where nothing is computed.
    """
    once = elements = 0.0
    for front in front_of(group, data):
        count = float(points(front))
        elements = max(elements, count)
        once += count * operation_seconds(front.counts, hw)
        once += count * instructions_of(front.functions) * 2 / hw.fma_per_s_f32
    if not elements:
        return [], 0.0
    each = once / elements + element_seconds(hw)
    row = STEP_CHANNELS * each * hw.num_sms * CYCLES_OF_INSTRUCTION
    row *= -(-sizes.channels // STEP_CHANNELS)

    def waves(boxes: int) -> int:
        parts = boxes * -(-sizes.filters // FILTERS_OF_TILE)
        return -(-parts // (CONSUMERS * hw.num_sms))

    found = []
    by_image = _reads_images(group, block, data)
    if not by_image:
        found.append(Way(waves(-(-sizes.positions // ROWS)) * ROWS * sizes.taps * row))
    if _shares_boxes(block, data) and (shared := _box_with_rim(block, data, by_image)) is not None:
        boxes, rows = shared
        shown = SHOWN if waves(boxes) > 1 else SHOWN_ONCE
        longer = max(1.0, boxes * ROWS / sizes.positions)
        steps = -(-sizes.channels // STEP_CHANNELS) * sizes.taps
        found.append(Way(shown * waves(boxes) * rows * row, longer, steps * TAP_SECONDS, True))
    return found, once


def _box_with_rim(block: Block, data: Access, by_image: bool) -> tuple[int, int] | None:
    """The number of boxes of 64 positions, and the elements of each with its rim; None where there
    are no such boxes.
    """
    reduced, spatial = set(block.reduced), set(block.spatial)
    sizes, reach, images = [], [], []
    for number, index in enumerate(data.index[:-1]):
        own, taps = index.axes & spatial, index.axes & reduced
        sizes.append(math.prod(assumed(block.axes[a].extent) for a in own))
        reach.append(
            sum(abs(index.coefficients[a]) * (int(block.axes[a].extent) - 1) for a in taps)
        )
        if by_image and not taps:
            images.append(number)
    try:
        shape = box_shape(sizes, [1] * len(sizes), reach, rims=True, alone=images)
    except Unsupported:
        return None
    boxes = math.prod(-(-n // size) for n, size in zip(sizes, shape, strict=True))
    return boxes, math.prod(n + more for n, more in zip(shape, reach, strict=True))
