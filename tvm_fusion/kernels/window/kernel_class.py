"""Kernel class `window`: one reduction over windows that slide (pooling in any number of
dimensions), with pointwise work before and behind.

    y[h, w] = tanh(max over a < 3, b < 3 of relu(x[2 * h + a, 2 * w + b]))

What stands before is computed once for each place that the results of a thread look at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...config import HardwareProfile, Policy
from ...cost.analytic import estimate
from ...cost.traffic import Resources, Traffic
from ...ir.access import Access, Affine, Block
from ...ir.extents import assumed, assumed_product, non_unit
from ...plan.group_view import GroupView, dtype_bytes
from ...plan.refusal import Refusal, RefusalCode
from ..base import MULTIPLIES, REDUCES, Family, Fit, Needs
from ..forms import Writer
from ..group.footprint import UNKNOWN_SLOTS, evaluations, refuse_recompute
from ..group.roles import refuse_other_row, refuse_other_shape
from ..group.traffic import memory_traffic
from ..program.window import LARGEST_WINDOW
from ..row.kernel_class import Row
from .config import Operations, WindowConfig, Work, ranked, resources_of, traffic_of
from .sliding import MOST_TAPS, Sliding, window_of
from .versions import WRITER

MOST_SHARE = 0.25
"""Of the places: an input with fewer elements is broadcast, and read from the L1."""


class WindowClass(Family):
    """See the module docstring.

    Does not handle: several windows behind each other, windows of symbolic size, results that other
    points read, outputs of another shape than the windows'. Large windows that share little are
    left to rows, where many threads reduce one.
    """

    name = "window"
    needs = Needs(REDUCES, MULTIPLIES)

    def accepts(self, group: GroupView, hw: HardwareProfile, policy: Policy) -> Fit | Refusal:
        reductions = [block for block in group.blocks if block.reduction is not None]
        axes = window_of(reductions[0]) if len(reductions) == 1 else None
        if axes is None:
            return group.refuse(RefusalCode.REDUCTION, "not one reduction over sliding windows")
        window = reductions[0]
        taps = math.prod(axis.taps for axis in axes)
        if taps > MOST_TAPS:
            return group.refuse(RefusalCode.REDUCTION, f"{window.name} has windows of {taps}")
        behind = {write.tensor for write in window.writes}
        space = window.extents(window.spatial)
        for block in group.blocks:
            read = [access for access in block.reads if access.tensor in behind]
            if block is window or not read:
                continue
            if other := next((a for a in read if not _is_own(group, block, a)), None):
                return refuse_other_row(group, block, other.tensor)
            behind.update(write.tensor for write in block.writes)
        if refusal := refuse_other_shape(group, [non_unit(space)], "windows"):
            return refusal
        runs = evaluations(group)
        if refusal := refuse_recompute(group, runs, policy):
            return refusal
        fit = Fit(self.name, assumed_product(space[:-1]), assumed(space[-1]), runs.counts)
        if _choice(group, fit, hw) is None:
            return group.refuse(RefusalCode.REDUCTION, f"{window.name} needs too many registers")
        if taps > LARGEST_WINDOW and self._slower_than_rows(group, fit, hw, policy):
            return group.refuse(
                RefusalCode.SLOWER, f"{window.name} is predicted to be faster as rows"
            )
        return fit

    def traffic(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Traffic:
        work, config = _choice(group, fit, hw)
        return traffic_of(work, config, hw)

    def resources(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Resources:
        work, config = _choice(group, fit, hw)
        return resources_of(work, config, hw)

    def writer(self, hw: HardwareProfile) -> Writer:
        return WRITER

    def _slower_than_rows(
        self, group: GroupView, fit: Fit, hw: HardwareProfile, policy: Policy
    ) -> bool:
        """Whether rows of one window each are predicted to take less."""
        rows = Row()
        other = rows.accepts(group, hw, policy)
        if isinstance(other, Refusal):
            return False
        times = [
            estimate(family.traffic(group, of, hw), family.resources(group, of, hw), hw).body_us
            for family, of in ((self, fit), (rows, other))
        ]
        return times[1] < times[0]


def _is_own(group: GroupView, block: Block, access: Access) -> bool:
    """Whether a block reads, at each point, the element that it writes, but for axes of one
    element.
    """
    sides = []
    for side in (access, block.writes[0]):
        shape = group.graph.tensors[side.tensor].shape
        sides.append([i for i, n in zip(side.index, shape, strict=False) if n != 1])
    return sides[0] == sides[1]


def _choice(group: GroupView, fit: Fit, hw: HardwareProfile) -> tuple[Work, WindowConfig] | None:
    """What a group takes, and how it is cut; None where no way suits."""
    return group.once("windows", lambda: _choose(group, fit, hw))


def _choose(group: GroupView, fit: Fit, hw: HardwareProfile) -> tuple[Work, WindowConfig] | None:
    work = _work(group, fit, hw)
    found = ranked(work, hw)
    return (work, found[0][1]) if found else None


def _work(group: GroupView, fit: Fit, hw: HardwareProfile) -> Work:
    window = next(block for block in group.blocks if block.reduction is not None)
    axes = window_of(window)
    behind, after = {write.tensor for write in window.writes}, []
    for block in group.blocks:
        if any(access.tensor in behind for access in block.reads):
            behind.update(write.tensor for write in block.writes)
            after.append(block)
    # what leads to both sides is computed on both
    before = [block for block in group.blocks if block not in after and block is not window]
    moved = memory_traffic(group, fit, hw)
    loads, pitch, first = _loads(group, [*before, window], axes)
    beside = _beside(group, after, math.prod(axis.extent for axis in axes))
    stores = [dtype_bytes(group.graph.tensors[t].dtype) for t in group.outputs]
    last = group.graph.tensors[window.writes[0].tensor].shape[-1]
    return Work(
        axes,
        axes[-1].extent if isinstance(last, int) else 1,
        loads,
        tuple(stores),
        beside,
        pitch,
        first,
        _operations(before, hw),
        _operations(after, hw),
        moved.hbm_bytes,
        moved.l2_bytes,
        moved.assumed_l2,
    )


def _loads(
    group: GroupView, blocks: Sequence[Block], axes: Sequence[Sliding]
) -> tuple[tuple[int, ...], int, int]:
    """Bytes of an element of each input that is read place by place, and how rows lie in memory."""
    places = math.prod(axis.run(axis.extent) for axis in axes)
    made = {write.tensor for block in group.blocks for write in block.writes}
    sizes, pitch, first = [], 0, 0
    for block in blocks:
        for access in block.reads:
            tensor = group.graph.tensors[access.tensor]
            if access.tensor in made or assumed_product(tensor.shape) < MOST_SHARE * places:
                continue
            sizes.append(dtype_bytes(tensor.dtype))
            last = access.index[-1]
            pitch = math.gcd(pitch, tensor.shape[-1] if isinstance(tensor.shape[-1], int) else 1)
            first = last.constant if isinstance(last, Affine) else 0
    return tuple(sizes), pitch, first


def _beside(group: GroupView, blocks: Sequence[Block], results: int) -> float:
    """Bytes that a result reads of inputs that have an element for each."""
    made = {write.tensor for block in group.blocks for write in block.writes}
    found = {access.tensor for block in blocks for access in block.reads} - made
    tensors = [group.graph.tensors[t] for t in found]
    return float(sum(dtype_bytes(t.dtype) for t in tensors if assumed_product(t.shape) >= results))


def _operations(blocks: Sequence[Block], hw: HardwareProfile) -> Operations:
    """Instructions of all blocks at a point."""
    total = {"arithmetic": 0.0, "special": 0.0, "division": 0.0, "conversion": 0.0}
    for block in blocks:
        for pipe, number in block.counts:
            if pipe.value in total:
                total[pipe.value] += number
        for name, number in block.functions:
            total["special"] += (hw.special_slots.get(name, UNKNOWN_SLOTS) - 1) * number
        total["conversion"] += block.conversions
    return Operations(**total)
