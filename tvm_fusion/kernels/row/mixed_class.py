"""Kernel class `mixed`: reductions over trailing axes together with sums over the rows of the same
points, each row read once.

    dx[i, :]  = f(x[i, :], dy[i, :], sums over row i)        rows [S * R] x columns N
    a[s, :]   = sum over the R rows of group s of g(x, dy)   (`SplitReductions` makes these)

Layer-norm and RMS-norm backward: dx with the partial sums of dgamma and dbeta. What adds the
partial sums up is another kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ...config import HardwareProfile, Policy
from ...cost.traffic import Resources, Traffic
from ...ir.access import Access, Block, Reduction
from ...ir.extents import assumed_product, non_unit
from ...plan.group_view import GroupView, dtype_bytes
from ...plan.refusal import Refusal, RefusalCode
from ..base import FIXED_SIZES, SUMS_COLUMNS, SUMS_ROWS, Family, Fit, Needs
from ..forms import Writer
from ..group.footprint import evaluations, refuse_recompute
from ..group.read_order import plain_axes, read_order
from ..group.roles import Role, refuse_other_row, refuse_small_output
from ..group.streams import loads_and_stores
from ..group.traffic import Shape, cuda_resources, cuda_traffic, group_streams
from .mixed_config import ring_stages, thread_choices

VECTOR_BYTES = 16
PARTIAL_BYTES = 128
REGISTERS_BESIDE = 24
"""Registers a thread for addresses and temporaries."""
MAX_COLUMNS = 65536
"""Sums that the registers of the blocks of a cluster hold."""
LEAST_COLUMNS = 128
"""Below, a warp has several rows."""


@dataclass(slots=True)
class _Space:
    """Rows and columns of a group; `groups` of rows are summed apart."""

    rows: tuple[int, ...]
    columns: int
    groups: int = 0
    roles: dict[int, Role] = field(default_factory=dict)

    @property
    def row_count(self) -> int:
        return math.prod(self.rows)

    @property
    def points(self) -> int:
        return self.row_count * self.columns


class Mixed(Family):
    """See the module docstring.

    Does not handle: symbolic shapes; argmax; rows shorter than a warp's vectors; anything that
    reads the sums over rows (another kernel finishes them).
    """

    name = "mixed"
    needs = Needs(SUMS_ROWS | SUMS_COLUMNS)
    slow_to_compile = True

    def accepts(self, group: GroupView, hw: HardwareProfile, policy: Policy) -> Fit | Refusal:
        space = group.once("mixed", lambda: _read_space(group))
        if isinstance(space, Refusal):
            return space
        if not _choices(group, space, hw)[2]:
            return group.refuse(
                RefusalCode.SPACE_MISMATCH,
                "no thread block holds the sums over rows of this length",
                columns=space.columns,
            )
        once = frozenset(t for t, role in space.roles.items() if role is not Role.SMALL)
        runs = evaluations(group, once)
        if refusal := refuse_recompute(group, runs, policy):
            return refusal
        return Fit(self.name, space.row_count, space.columns, runs.counts)

    def traffic(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Traffic:
        """One block for each group of rows; what several operators read is loaded once."""
        found = loads_and_stores(group_streams(group, fit))
        return cuda_traffic(group, fit, hw, _shape(group, fit, hw), found)

    def resources(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Resources:
        return cuda_resources(group, fit, _shape(group, fit, hw))

    def writer(self, hw: HardwareProfile) -> Writer:
        from .mixed import WRITER

        return WRITER


def _shape(group: GroupView, fit: Fit, hw: HardwareProfile) -> Shape:
    return group.once(("shape", fit.kernel_class), lambda: _find_shape(group, fit, hw))


def _find_shape(group: GroupView, fit: Fit, hw: HardwareProfile) -> Shape:
    """Blocks that walk over the rows of a group, holding the sums of their columns; the coming rows
    wait in a ring in shared memory where they can be copied in bulk.
    """
    space = group.once("mixed", lambda: _read_space(group))
    width, sizes, choices = _choices(group, space, hw)
    threads, cluster = choices[0]
    full = fit.rows * fit.columns
    tensors = group.graph.tensors
    moving = [
        dtype_bytes(tensors[t].dtype)
        for t in group.inputs
        if assumed_product(tensors[t].shape) >= full
    ]
    read = sum(moving)
    sums = sum(_is_sum(b) for b in group.blocks)
    reductions = sum(b.reduction is not None for b in group.blocks) - sums
    rows = max(1, fit.rows // max(1, space.groups))
    own = -(-fit.columns // (width * cluster * threads)) * width
    aligned = width * min(sizes, default=2) == VECTOR_BYTES
    row = read * fit.columns // cluster
    stages = ring_stages(rows, row, threads, hw) if aligned and hw.architecture.has_tma else 0
    ring = row * stages
    steps = math.log2(hw.warp_size) + 3 * (threads > hw.warp_size)
    return Shape(
        blocks=float(space.groups * cluster),
        threads=threads,
        width=width,
        points=float(own),
        registers=REGISTERS_BESIDE + own * (sums + read // 4 * (not stages)),
        smem_bytes=ring + PARTIAL_BYTES,
        flight_bytes=(stages - 1) * row / threads if stages else float(own * read),
        rounds=rows / max(1, stages),
        exchanges=float(rows),
        shuffles=rows * steps * max(1, reductions),
        staged_bytes=2.0 * full * read if stages else 0.0,
    )


def _choices(
    group: GroupView, space: _Space, hw: HardwareProfile
) -> tuple[int, list[int], list[tuple[int, int]]]:
    """Columns of a vector, bytes of what is read of each column, and the threads and blocks that
    hold a row with the sums of its columns.
    """
    tensors = group.graph.tensors
    sizes = [
        dtype_bytes(tensors[t].dtype)
        for t in group.inputs
        if space.columns <= assumed_product(tensors[t].shape)
    ]
    sums = sum(_is_sum(b) for b in group.blocks)
    width = math.gcd(space.columns, VECTOR_BYTES // min(sizes, default=2))
    held = sum(sizes) + 4 * sums + 4
    return max(1, width), sizes, thread_choices(space.columns, max(1, width), held, hw)


def _read_space(group: GroupView) -> _Space | Refusal:
    """The space of a group and the role of each tensor in it, or why there is none."""
    reductions = [b for b in group.blocks if b.reduction is not None]
    rows = [b for b in reductions if not _is_sum(b)]
    if not rows or len(rows) == len(reductions):
        return group.refuse(
            RefusalCode.REDUCTION, "the group does not reduce over both rows and columns"
        )
    if any(not isinstance(axis.extent, int) for b in group.blocks for axis in b.axes):
        return group.refuse(RefusalCode.REDUCTION, "the group has symbolic extents", FIXED_SIZES)
    anchor = rows[0]
    columns = math.prod(anchor.extents(anchor.reduced))
    space = _Space(non_unit(anchor.extents(anchor.spatial)), columns)
    if not LEAST_COLUMNS <= columns <= MAX_COLUMNS:
        return group.refuse(
            RefusalCode.SPACE_MISMATCH,
            "rows too short or too long to sum over",
            columns=columns,
            least=LEAST_COLUMNS,
            most=MAX_COLUMNS,
        )
    for block in group.blocks:
        role = _role(group, space, block, id(block) in group.views)
        if isinstance(role, Refusal):
            return role
        for w in block.writes:
            space.roles[w.tensor] = role
    for t in group.outputs:
        if space.roles[t] is Role.SMALL:
            return refuse_small_output(group, t)
    return space


def _role(group: GroupView, space: _Space, block: Block, is_view: bool) -> Role | Refusal:
    """The block's role in the space, or why it has none."""
    produced = [space.roles[a.tensor] for a in block.reads if a.tensor in space.roles]
    if Role.SUM in produced:
        return group.refuse(
            RefusalCode.SPACE_MISMATCH, f"{block.name} reads sums that are not finished"
        )
    if block.reduction is not None:
        return _role_of_reduction(group, space, block)
    extents = non_unit(a.extent for a in block.axes)
    if math.prod(extents) == space.points:
        role = Role.FULL
    elif extents == space.rows and Role.ROW in produced:
        role = Role.ROW
    else:
        role = Role.SMALL
    for access in block.reads if not is_view else ():
        source = space.roles.get(access.tensor, Role.SMALL)
        if source is not Role.SMALL and not _reads_own(block, access, space, source, role):
            return refuse_other_row(group, block, access.tensor)
    return role


def _role_of_reduction(group: GroupView, space: _Space, block: Block) -> Role | Refusal:
    if block.reduction is Reduction.OTHER:
        return group.refuse(
            RefusalCode.REDUCTION, f"{block.name} combines in a way no mixed kernel knows"
        )
    spatial, reduced = (math.prod(block.extents(a)) for a in (block.spatial, block.reduced))
    order = read_order(block)
    mismatch = group.refuse(
        RefusalCode.SPACE_MISMATCH,
        f"{block.name} does not reduce {space.row_count} rows of {space.columns} columns",
    )
    if order is None or spatial * reduced != space.points:
        return mismatch
    is_row = [axis in block.spatial for axis in order]
    if not _is_sum(block):
        trailing = is_row == sorted(is_row, reverse=True)
        return Role.ROW if trailing and reduced == space.columns else mismatch
    if all(is_row):  # a sum of one element each
        return mismatch
    # s, r, n: groups of rows, the rows of a group, columns
    inner = len(is_row) - next(i for i, kept in enumerate(reversed(is_row)) if not kept)
    columns = math.prod(block.axes[axis].extent for axis in order[inner:])
    outer = is_row[:inner]
    if columns != space.columns or outer != sorted(outer, reverse=True):
        return mismatch
    groups = spatial // columns
    if space.groups not in (0, groups):
        return mismatch
    space.groups = groups
    return Role.SUM


def _is_sum(block: Block) -> bool:
    """A reduction that keeps the contiguous axis of what it reads."""
    order = read_order(block) if block.reduction is not None else None
    return bool(order) and order[-1] in block.spatial


def _reads_own(block: Block, access: Access, space: _Space, source: Role, role: Role) -> bool:
    """A per-row value is read at the reader's own row, a full one at its own point."""
    live = [i for i, axis in enumerate(block.axes) if axis.extent != 1]
    got = plain_axes(block, access)
    if role is Role.SMALL:
        return False
    if source is Role.FULL:
        return role is Role.FULL and got == live
    extents = tuple(block.axes[i].extent for i in live[: len(space.rows)])
    return got == live[: len(space.rows)] and extents == space.rows
