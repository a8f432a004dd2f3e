"""Kernel class `scan`: running sums, products, maxima and minima along one axis, with pointwise
work before, between and behind; each element is read once.

    y[i, j] = exp(sum over k <= j of x[i, k] * w[k]) + z[i, j]

The space is rows x columns, the columns lying along the scanned axis, wherever that is. Blocks
behind a scan read it at their own point, also by way of reshapes, or, all of them, at that from
the other end of the row (``x.flip(1).cumsum(1).flip(1)``); what stands before it may be any
pointwise work.
"""

from __future__ import annotations

import math

from ...config import HardwareProfile, Policy
from ...cost.liveness import live_values
from ...cost.traffic import Resources, Traffic
from ...ir.access import Access, Affine, Block, Extent
from ...ir.extents import ASSUMED_SYMBOLIC_EXTENT, assumed, assumed_product, non_unit
from ...plan.group_view import GroupView
from ...plan.refusal import Refusal, RefusalCode
from ..base import REDUCES, SCANS, Family, Fit, Needs
from ..forms import Writer
from ..group.footprint import evaluations, is_identity, refuse_recompute
from ..group.roles import refuse_other_row, refuse_other_shape
from ..group.streams import bytes_a_point, element_sizes
from ..group.traffic import Shape, cuda_resources, cuda_traffic, group_streams
from .config import Shape as ScanShape
from .config import best_config
from .kernel import WRITER

BASE_REGISTERS = 24
"""For places, pointers and the exchange (ptxas: 28 to 40 in scans of one input and output)."""

GRID_BARRIER = 16
"""Exchanges of a block that one of all blocks takes as long as (recurrences that all
multiprocessors of an H200 share: 2 us a step, with its products)."""


class ScanClass(Family):
    """See the module docstring.

    Does not handle: reductions in the same launch, scans along several axes, outputs of
    another number of elements than the scans; reshapes, and what reads from the other end, behind
    a symbolic size.
    """

    name = "scan"
    needs = Needs(SCANS, REDUCES, scans=True)

    def accepts(self, group: GroupView, hw: HardwareProfile, policy: Policy) -> Fit | Refusal:
        anchor = next((b for b in group.blocks if b.scanned is not None), None)
        if anchor is None:
            return group.refuse(RefusalCode.REDUCTION, "the group holds no scan")
        space = anchor.extents(anchor.spatial)
        behind: dict[int, bool] = {}
        shapes = {non_unit(space)}
        for block in group.blocks:
            if refusal := _refuse_block(group, block, anchor, behind, shapes):
                return refusal
        if refusal := refuse_other_shape(group, shapes, "scans"):
            return refusal
        runs = evaluations(group)
        if refusal := refuse_recompute(group, runs, policy):
            return refusal
        columns = assumed(anchor.axes[anchor.scanned].extent)
        rows = assumed_product(space) // max(1, columns)
        return Fit(self.name, rows, columns, runs.counts)

    def traffic(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Traffic:
        return cuda_traffic(group, fit, hw, _shape(group, fit, hw))

    def resources(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Resources:
        return cuda_resources(group, fit, _shape(group, fit, hw))

    def writer(self, hw: HardwareProfile) -> Writer:
        return WRITER


def _refuse_block(
    group: GroupView,
    block: Block,
    anchor: Block,
    behind: dict[int, bool],
    shapes: set[tuple[Extent, ...]],
) -> Refusal | None:
    """Why a block does not fit; `behind` collects the tensors that a scan is needed for, and
    whether their rows run backwards, `shapes` those in which reshapes show them.
    """
    if block.reduction is not None:
        return group.refuse(RefusalCode.REDUCTION, f"{block.name} is a reduction")
    read = [access for access in block.reads if access.tensor in behind]
    if block.scanned is None and not read:
        return None
    axis, own_space = anchor.scanned, block.extents(block.spatial)
    if id(block) in group.reshapes and all(isinstance(n, int) for n in own_space):
        shapes.add(non_unit(own_space))
        behind.update((w.tensor, behind[read[0].tensor]) for w in block.writes)
        return None
    space = anchor.extents(anchor.spatial)
    misplaced = block.scanned is not None and (own_space != space or block.scanned != axis)
    if misplaced or non_unit(own_space) not in shapes:
        return group.refuse(
            RefusalCode.SPACE_MISMATCH,
            f"{block.name} is computed over another shape, or along another axis, than the scan",
        )
    turned = False
    for number, access in enumerate(read):
        own = behind[access.tensor]
        if not is_identity(block, access):
            if own_space != space or not _is_flipped(block, access, axis):
                return refuse_other_row(group, block, access.tensor)
            own = not own
        if number and own != turned:
            return refuse_other_row(group, block, access.tensor)
        turned = own
    if turned and block.scanned is not None:
        return refuse_other_row(group, block, read[0].tensor)
    behind.update((w.tensor, turned) for w in block.writes)
    return None


def _is_flipped(block: Block, access: Access, axis: int) -> bool:
    """Whether a block reads, at each point, what stands as far from the other end of an axis."""
    for own, index in zip(block.writes[0].index, access.index, strict=False):
        if own == index:
            continue
        alone = isinstance(own, Affine) and own.single_axis == axis
        if not alone or not isinstance(index, Affine) or index.axes != {axis}:
            return False
        extent = block.axes[axis].extent
        last = extent - 1 if isinstance(extent, int) else None
        if (index.coefficients[axis], index.constant) != (-1, last):
            return False
    return len(access.index) == len(block.writes[0].index)


def _shape(group: GroupView, fit: Fit, hw: HardwareProfile) -> Shape:
    return group.once("scan shape", lambda: _find_shape(group, fit, hw))


def _find_shape(group: GroupView, fit: Fit, hw: HardwareProfile) -> Shape:
    found, elements = group_streams(group, fit), float(fit.rows * fit.columns)
    sizes, read = element_sizes(found, elements), bytes_a_point(found, elements)
    inner, beside = _neighbours(group)
    point, narrow = max(1, round(read)), min(sizes, default=2)
    anchor = next(b for b in group.blocks if b.scanned is not None)
    known = all(isinstance(n, int) for n in anchor.extents(anchor.spatial))
    config = best_config(ScanShape(fit.rows, fit.columns, inner, beside, narrow, point, known), hw)
    scans = sum(b.scanned is not None for b in group.blocks)
    turns, cells = math.ceil(fit.columns / config.turn), config.width * config.lines
    waits = turns * scans * (1 if config.blocks == 1 else GRID_BARRIER)
    vectors = config.along and not config.staged and fit.columns % config.width == 0
    registers = BASE_REGISTERS + live_values(group) + cells * (scans + read / 4)
    return Shape(
        blocks=float(math.ceil(fit.rows / (config.rows * config.vector)) * config.blocks),
        threads=config.block,
        width=config.width if vectors else config.vector,
        points=float(cells),
        registers=min(int(registers), hw.registers_per_sm // config.block),
        smem_bytes=(scans * config.partials * 2 + config.staging) * 4,
        flight_bytes=float(cells * read),
        rounds=float(turns),
        exchanges=float(waits),
        shuffles=turns * scans * config.lines * math.log2(config.in_warp),
    )


def _neighbours(group: GroupView) -> tuple[int, int]:
    """Elements from a column to the next, and rows known to be neighbours in memory."""
    anchor = next(b for b in group.blocks if b.scanned is not None)
    behind = [anchor.axes[i].extent for i in anchor.spatial if i > anchor.scanned]
    inner = assumed_product(behind)
    fixed = [n for n in behind if n != 1]
    if all(isinstance(n, int) for n in fixed):
        return inner, math.prod(fixed)
    return max(inner, ASSUMED_SYMBOLIC_EXTENT), 1
