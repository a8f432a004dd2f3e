"""Kernel class `column`: reductions over leading or middle axes with pointwise work before,
between and after.

    S[n] = sum over m of x[m, n]        softmax over axis 0        statistics over n, h, w of NHWC

Every reduction runs over the same columns of the same rows, and all of them read their elements in
one order, in which the columns are not the last axes. A block of the group is full (rows and
columns, in that order or as a reshape of it), per row, or smaller than a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...config import HardwareProfile, Policy
from ...cost.traffic import Resources, Traffic
from ...ir.access import Access, Block, Extent, Reduction
from ...ir.extents import assumed, assumed_product, non_unit, product_key
from ...plan.group_view import GroupView
from ...plan.refusal import Refusal, RefusalCode
from ..base import FIXED_SIZES, REDUCES, Family, Fit, Needs
from ..forms import Writer
from ..group.footprint import VECTOR_ELEMENTS, evaluations, points, refuse_recompute
from ..group.read_order import plain_axes, read_order
from ..group.roles import Role, refuse_other_row, refuse_small_output, refuse_wide_places
from ..group.traffic import cuda_resources, filled_by_threads, memory_traffic, slowed
from .estimate import ColumnEstimate
from .planned import column_kernel, column_shape, column_traffic

CPU_SLOWNESS = 1.8
"""On a CPU, reductions over leading axes take this times what copies of as many bytes do (2 cores
of a Zen 4, 2026-11-24: 4096 x 4096 in 3.6 ms, a copy 1.9; others 1.7 to 2.4)."""
COLUMNS_A_THREAD = 16
"""Columns that a thread walks over, at least, where there are many."""


@dataclass(frozen=True, slots=True)
class _Space:
    """Axes of the space in the order in which they are read: extents, and which are rows."""

    extents: tuple[Extent, ...]
    is_row: tuple[bool, ...]

    @property
    def rows(self) -> tuple[Extent, ...]:
        return tuple(e for e, row in zip(self.extents, self.is_row, strict=True) if row)

    @property
    def columns(self) -> tuple[Extent, ...]:
        return tuple(e for e, row in zip(self.extents, self.is_row, strict=True) if not row)

    @property
    def inner(self) -> int:
        """Columns that are neighbours in memory."""
        axes = zip(reversed(self.extents), reversed(self.is_row), strict=True)
        inner = 1
        for extent, row in axes:
            if row:
                break
            inner *= assumed(extent)
        return inner


@dataclass(slots=True)
class _Roles:
    """What the tensors of a group are, as far as its blocks have been read.

    `reshaped` holds the shapes under which views show full tensors, `reduced` what depends on a
    reduction: an element of anything else can be computed wherever it is read.
    """

    space: _Space
    of: dict[int, Role] = field(default_factory=dict)
    reshaped: set[tuple[Extent, ...]] = field(default_factory=set)
    reduced: set[int] = field(default_factory=set)

    def role(self, block: Block) -> Role:
        extents = non_unit(a.extent for a in block.axes)
        if extents == self.space.extents or extents in self.reshaped:
            return Role.FULL
        return Role.ROW if extents == self.space.rows else Role.SMALL


class Column(Family):
    """See the module docstring.

    Does not handle: argmax on a CPU (class `nest`); symbolic columns on a CPU, or those that are
    neighbours in memory; reductions of different rows in one group; reductions over the contiguous
    axes (`row` does).
    """

    name = "column"
    needs = Needs(REDUCES)
    joins_independent = True  # equal spaces are one: the partial sums of dgamma and dbeta

    def accepts(self, group: GroupView, hw: HardwareProfile, policy: Policy) -> Fit | Refusal:
        space = group.once("columns", lambda: _space(group))
        if isinstance(space, Refusal):
            return space
        known = all(isinstance(extent, int) for extent in space.columns)
        if not known and (hw.kind == "llvm" or not space.is_row[-1]):
            return group.refuse(RefusalCode.REDUCTION, "a symbolic extent is reduced", FIXED_SIZES)
        roles = _Roles(space)
        for block in group.blocks:
            refusal = _check_block(group, block, roles, id(block) in group.views, hw)
            if refusal is not None:
                return refusal
        for t in group.outputs:
            if roles.of[t] is Role.SMALL and _is_small(group, t, roles):
                return refuse_small_output(group, t)
        # what depends on the row alone is computed once a row, whatever it is made of
        once = frozenset(
            t
            for t, role in roles.of.items()
            if role is not Role.SMALL or roles.role(group.writer_of[t]) is Role.ROW
        )
        runs = evaluations(group, once)
        if refusal := refuse_recompute(group, runs, policy):
            return refusal
        rows, columns = assumed_product(space.rows), assumed_product(space.columns)
        return Fit(self.name, rows, columns, _kept_by_lanes(group, roles, runs.counts))

    def traffic(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Traffic:
        """Columns that a thread block cannot hold are read again, out of the L2 where they fit."""
        if hw.kind == "llvm":
            filled = filled_by_threads(fit.rows * fit.columns / VECTOR_ELEMENTS, hw)
            traffic = memory_traffic(group, fit, hw, parallel=filled)
            return slowed(traffic, CPU_SLOWNESS, traffic.l2_bytes)
        return column_traffic(group, fit, _kernel(group, fit, hw))

    def resources(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Resources:
        if hw.kind == "llvm":
            return Resources(16, 0)
        return cuda_resources(group, fit, column_shape(fit, _kernel(group, fit, hw)))

    def writer(self, hw: HardwareProfile) -> Writer:
        if hw.kind == "llvm":
            return super().writer(hw)
        from .versions import WRITER

        return WRITER


def _is_small(group: GroupView, tensor: int, roles: _Roles) -> bool:
    """Whether no row writes a tensor. What calls share a function with name their sizes alike."""
    shape = non_unit(group.graph.tensors[tensor].shape)
    known = all(isinstance(extent, int) for extent in shape)
    other = not known and shape not in (roles.space.rows, roles.space.extents)
    return other or roles.role(group.writer_of[tensor]) is Role.SMALL


def _kept_by_lanes(group: GroupView, roles: _Roles, counts: tuple[float, ...]) -> tuple[float, ...]:
    """How often blocks run: what varies along the lanes only, a thread computes once for all
    columns that it walks over.
    """
    space = roles.space
    if not space.is_row[-1]:
        return counts
    found = []
    for block, count in zip(group.blocks, counts, strict=True):
        own = points(block)
        small = roles.of[block.writes[0].tensor] is Role.SMALL and count > own > 1
        lanes = small and block.axes[-1].extent == space.rows[-1]
        found.append(max(own, count / COLUMNS_A_THREAD) if lanes else count)
    return tuple(found)


def _kernel(group: GroupView, fit: Fit, hw: HardwareProfile) -> ColumnEstimate:
    space = group.once("columns", lambda: _space(group))
    return column_kernel(group, fit, hw, tuple(map(assumed, space.rows)), space.inner)


def _space(group: GroupView) -> _Space | Refusal:
    """The order in which the first reduction reads its elements."""
    anchor = next((b for b in group.blocks if b.reduction is not None), None)
    if anchor is None:
        return group.refuse(RefusalCode.REDUCTION, "the group holds no reduction")
    found = read_order(anchor, picks=True)
    if found is None:
        return group.refuse(
            RefusalCode.REDUCTION, f"{anchor.name} reads no element for each row and column"
        )
    live = [i for i in found if anchor.axes[i].extent != 1]
    space = _Space(
        tuple(anchor.axes[i].extent for i in live), tuple(i in anchor.spatial for i in live)
    )
    if not space.rows or list(space.is_row) == sorted(space.is_row, reverse=True):
        return group.refuse(
            RefusalCode.REDUCTION, f"{anchor.name} reduces the last axes: whole rows"
        )
    return space


def _check_block(
    group: GroupView, block: Block, roles: _Roles, is_view: bool, hw: HardwareProfile
) -> Refusal | None:
    """Finds the role of a block; why it has none."""
    if block.reduction is not None:
        refusal = _check_reduction(group, block, roles.space, hw)
        if refusal is not None:
            return refusal
        role = Role.ROW
    elif is_view:
        role = _role_of_view(block, roles)
    else:
        role = roles.role(block)
        known = [roles.of.get(a.tensor, Role.SMALL) for a in block.reads]
        if role is Role.ROW and Role.ROW not in known:
            role = Role.SMALL  # made of inputs only: a vector as long as the rows
    for access in block.reads:
        produced = roles.of.get(access.tensor, Role.SMALL)
        if produced is Role.SMALL or is_view:
            continue
        few = role is not Role.FULL and block.reduction is None
        if few and access.tensor not in roles.reduced:
            continue
        if not _reads_own(block, access, roles.space, produced, role):
            return refuse_other_row(group, block, access.tensor)
    known = any(a.tensor in roles.reduced for a in block.reads)
    for w in block.writes:
        roles.of[w.tensor] = role
        if known or block.reduction is not None:
            roles.reduced.add(w.tensor)
    return None


def _role_of_view(block: Block, roles: _Roles) -> Role:
    """A reshape keeps the role of what it shows, and its shape is one of the space from then on."""
    shape = non_unit(a.extent for a in block.axes)
    produced = [roles.of.get(a.tensor) for a in block.reads]
    full = product_key(shape) == product_key(roles.space.extents)
    if full and produced and produced[0] in (None, Role.FULL):
        roles.reshaped.add(shape)
        return Role.FULL
    if produced and produced[0] is Role.ROW and shape == roles.space.rows:
        return Role.ROW
    return roles.role(block) if produced and produced[0] is None else Role.SMALL


def _check_reduction(
    group: GroupView, block: Block, space: _Space, hw: HardwareProfile
) -> Refusal | None:
    arg = block.reduction in (Reduction.ARGMAX, Reduction.ARGMIN)
    unknown = block.reduction is Reduction.OTHER or (arg and hw.kind == "llvm")
    if unknown or block.is_matrix_product:
        return group.refuse(
            RefusalCode.REDUCTION, f"{block.name} combines in a way no column kernel knows"
        )
    if refusal := refuse_wide_places(group, block):
        return refusal
    order = read_order(block, picks=True)
    live = [i for i in order or () if block.axes[i].extent != 1]
    extents = tuple(block.axes[i].extent for i in live)
    is_row = tuple(i in block.spatial for i in live)
    if (extents, is_row) != (space.extents, space.is_row):
        return group.refuse(
            RefusalCode.SPACE_MISMATCH,
            f"{block.name} does not reduce the columns {list(space.columns)} of rows "
            f"{list(space.rows)} in the order of the others",
        )
    return None


def _reads_own(block: Block, access: Access, space: _Space, produced: Role, role: Role) -> bool:
    """Whether a value of the group is read at the reader's own row (and column)."""
    got = plain_axes(block, access)
    if block.reduction is not None:
        return produced is Role.ROW or got == list(read_order(block, picks=True) or ())
    live = [i for i, axis in enumerate(block.axes) if axis.extent != 1]
    if produced is Role.FULL:
        return role is Role.FULL and got == live
    if role is Role.ROW:
        return got == live
    if role is not Role.FULL or len(live) != len(space.is_row):
        return False
    return got == [i for i, row in zip(live, space.is_row, strict=True) if row]
