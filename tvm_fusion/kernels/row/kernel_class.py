"""Kernel class `row`: reductions over contiguous axes with pointwise work before, between and
after, each row read once.

The space is rows x columns: every reduction runs over the same columns of the same rows; a block of
the group is full (rows and columns), per row, or smaller than a row (a row vector such as gamma +
1, computed where it is used).

On a GPU an element may be read at another place of its row:

    y[i, j] = x[i, j] * scale(row i)
    z[i, j] = y[i, (j + 3) % N]        flips, rolls, shuffles, gathers: y is computed once more
    z[i, j] = y[i, j] * y[i, j + W]    halves, thirds and quarters of a row: a thread has them all
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ...config import HardwareProfile, Policy
from ...cost.traffic import Resources, Traffic
from ...ir.access import Access, Affine, Block, Extent, Reduction, derived
from ...ir.extents import assumed_product, non_unit, product_key
from ...plan.group_view import GroupView
from ...plan.refusal import Refusal, RefusalCode
from ..base import REDUCES, Family, Fit, Needs
from ..forms import Writer
from ..group.footprint import Evaluations, evaluations, index_of, refuse_recompute
from ..group.read_order import plain_axes
from ..group.roles import Role, refuse_other_row, refuse_small_output, refuse_wide_places
from ..group.traffic import cuda_resources, cuda_traffic, filled_by_threads, memory_traffic, slowed
from .planned import MOST_PIECES, row_shape, row_streams

# Elements of a row one thread holds; threads of one block (sweep on an H200: 128 threads
# x 32 elements for 4096 columns).
ELEMENTS_PER_THREAD = 32

CPU_SLOWNESS = 1.3
"""On a CPU, reductions of rows take this times what copies of as many bytes do (2 cores of a Zen 4,
2026-11-24: sums of 4096 x 4096 in 2.4 ms, a copy 1.9; others 1.1 to 1.5)."""


MOST_ORDERS = 4
"""In which a kernel computes the elements of a row: two pieces that change places are three."""

FULL, PART, ROW, SMALL = Role.FULL, Role.PART, Role.ROW, Role.SMALL
Space = tuple[tuple[Extent, ...], tuple[Extent, ...]]
"""Extents of the rows, and of the columns."""


class Row(Family):
    """See the module docstring.

    Does not handle: reductions whose contiguous axis is a kept one; reductions of different rows
    in one group; argmax on a CPU (class `nest`).
    """

    name = "row"
    needs = Needs(REDUCES)

    def accepts(self, group: GroupView, hw: HardwareProfile, policy: Policy) -> Fit | Refusal:
        reductions = [b for b in group.blocks if b.reduction is not None]
        if not reductions:
            return group.refuse(RefusalCode.REDUCTION, "the group holds no reduction")
        anchor = reductions[0]
        rows = non_unit(anchor.extents(anchor.spatial))
        columns = non_unit(anchor.extents(anchor.reduced))
        space = (rows, columns)
        roles: dict[int, Role] = {}
        reshaped: set[tuple[Extent, ...]] = set()
        turned: set[int] = set()
        for block in group.blocks:
            role = _check_block(group, block, space, roles, reshaped, turned, hw)
            if isinstance(role, Refusal):
                return role
            for w in block.writes:
                roles[w.tensor] = role
        unit = _piece(group, space, roles) if turned else 0
        for t in group.outputs:
            small = roles[t] is SMALL and _place(group.writer_of[t], space).role is SMALL
            if small or (roles[t] is PART and not unit):
                return refuse_small_output(group, t)
        once = frozenset([t for t, role in roles.items() if role is not SMALL])
        runs = evaluations(group, once)
        if turned:
            runs = _in_orders(group, space, roles, unit, runs)
            if isinstance(runs, Refusal):
                return runs
        if refusal := refuse_recompute(group, runs, policy):
            return refusal
        return Fit(self.name, assumed_product(rows), assumed_product(columns), runs.counts)

    def traffic(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Traffic:
        if hw.kind != "llvm":
            return cuda_traffic(group, fit, hw, row_shape(group, fit, hw), row_streams(group, fit))
        traffic = memory_traffic(group, fit, hw, parallel=_filled(fit, hw))
        return slowed(traffic, CPU_SLOWNESS, traffic.l2_bytes)

    def resources(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Resources:
        if hw.kind != "llvm":
            return cuda_resources(group, fit, row_shape(group, fit, hw))
        held = min(ELEMENTS_PER_THREAD, fit.columns)
        words = sum(
            max(1, group.tensor_bytes(t) // max(1, fit.rows * fit.columns)) for t in group.inputs
        )
        return Resources(40 + min(200, held * words // 4), 1024)

    def writer(self, hw: HardwareProfile) -> Writer:
        if hw.kind == "llvm":
            return super().writer(hw)
        from .forms import WRITER

        return WRITER


def _filled(fit: Fit, hw: HardwareProfile) -> float:
    """Share of a CPU's cores that a launch can use: of few rows each is cut into parts."""
    from ..cpu.stages.partial_sums import FEW_RESULTS

    return 1.0 if fit.rows < FEW_RESULTS else filled_by_threads(fit.rows, hw)


class _Own(NamedTuple):
    """A read of a block in a rows x columns space: whether it is at the reader's own point (all
    axes), at its own row and nothing else, at its own row and anything else. `distance`: how many
    columns behind its own, where that is one number and the columns are one axis.
    """

    tensor: int
    point: bool
    row: bool
    in_row: bool
    distance: int | None


class _Place(NamedTuple):
    """A block in a rows x columns space, whatever else is in the group; `of_rows`: what it is where
    it reads elements of the rows in another order (None: its first axes are not the rows).
    """

    role: Role
    of_rows: Role | None
    reads: tuple[_Own, ...]


def _place(block: Block, space: Space) -> _Place:
    known = _places(block)
    found = known.get(space)
    if found is None:
        found = known[space] = _find_place(block, *space)
    return found


@derived
def _places(block: Block) -> dict[Space, _Place]:
    """Those that were asked for."""
    return {}


def _find_place(block: Block, rows: tuple[Extent, ...], columns: tuple[Extent, ...]) -> _Place:
    live = [i for i, axis in enumerate(block.axes) if axis.extent != 1]
    extents = block.extents(tuple(live))
    role = ROW if extents == rows else SMALL
    if extents == rows + columns:
        role = FULL if columns else ROW
    outer, of_rows = _row_axes(extents, rows), None
    # of symbolic rows, places are found where no axis is merged or split
    found = all(isinstance(extent, int) for extent in rows) or extents[:-1] == rows
    if outer is not None and block.reduction is None and found:
        whole = product_key(extents[outer:]) == product_key(columns)
        of_rows = FULL if whole else PART
    if outer is None:
        outer = len(rows)
    row, reads = live[:outer], []
    for access in block.reads:
        got = plain_axes(block, access)
        in_row = got[:outer] == row
        distance = _distance(access, live[-1]) if in_row and len(live) == outer + 1 else None
        reads.append(_Own(access.tensor, got == live, got == row, in_row, distance))
    return _Place(role, of_rows, tuple(reads))


def _distance(access: Access, axis: int) -> int | None:
    """What is added to the axis in the one index that has it."""
    moved = [index for index in access.index if axis in index.axes]
    if len(moved) != 1 or not isinstance(moved[0], Affine):
        return None
    alone = moved[0].axes == {axis} and moved[0].coefficients[axis] == 1
    return moved[0].constant if alone else None


def _row_axes(extents: tuple[Extent, ...], rows: tuple[Extent, ...]) -> int | None:
    """How many of the first axes are the rows, merged or split; None where these are no rows."""
    count = product_key(rows)
    return next((n for n in range(len(extents) + 1) if product_key(extents[:n]) == count), None)


def _check_block(
    group: GroupView,
    block: Block,
    space: Space,
    roles: dict[int, Role],
    reshaped: set[tuple[Extent, ...]],
    turned: set[int],
    hw: HardwareProfile,
) -> Role | Refusal:
    """The block's role in the rows x columns space, or why it has none.

    A per-row value is read at the reader's own row; a full one too, at its own column or at any
    (the label's probability in a cross-entropy), since it can be computed again for that element.
    `reshaped` are the shapes under which reshapes show full values: what is computed at their
    elements is full, too (a GPU's kernels address memory, not axes). `turned` are tensors of which
    elements of the rows are read at other places.
    """
    role, of_rows, reads = _place(block, space)
    shape = non_unit(axis.extent for axis in block.axes)
    turns = hw.kind != "llvm" and of_rows is not None
    if id(block) in group.reshapes and hw.kind != "llvm":
        if roles.get(reads[0].tensor) is FULL:
            reshaped.add(shape)
            return FULL
        if roles.get(reads[0].tensor) is PART and turns:
            return PART
    elif shape in reshaped:
        role = FULL
    if block.reduction is not None:
        why = _refuse_reduction(block, space, hw)
        if why is not None:
            return group.refuse(*why)
        if refusal := refuse_wide_places(group, block):
            return refusal
        role = ROW
    elif role is ROW and not any([roles.get(own.tensor, SMALL) is not SMALL for own in reads]):
        # made of inputs only: in a square space a row vector looks like one value a row
        role = SMALL
    elif role is SMALL and turns and any([roles.get(r.tensor, SMALL) is not SMALL for r in reads]):
        role = of_rows
    for tensor, point, row, in_row, _ in reads:
        produced = roles.get(tensor, SMALL)
        if produced is SMALL:
            continue
        if produced is ROW:
            own = row
        elif role is FULL and produced is FULL:
            own = point or (turns and in_row)
        else:
            own = in_row
        if role is SMALL or not own:
            return refuse_other_row(group, block, tensor)
        if role is PART or (role is FULL and produced is not ROW and not point):
            turned.add(tensor)
    return role


def _piece(group: GroupView, space: Space, roles: dict[int, Role]) -> int:
    """Columns of the pieces in which the rows are worked on side by side (`pieces`): those at whose
    distances elements are read, and of which parts of rows are written. 0 where there are none.
    """
    rows, columns = space
    length, width = assumed_product(columns), 0
    if not all(isinstance(extent, int) for extent in columns):
        return 0
    if any(b.reduction in (Reduction.ARGMAX, Reduction.ARGMIN) for b in group.blocks):
        return 0
    for t in group.outputs:
        if roles[t] is PART:
            block = group.writer_of[t]
            extents = non_unit(block.extents(block.spatial))
            own = extents[_row_axes(extents, rows) :]
            if not all(isinstance(extent, int) for extent in own):
                return 0
            if length % assumed_product(own):
                return 0
            width = math.gcd(width, assumed_product(own))
    for block in group.blocks:
        if block.reduction is None and roles[block.writes[0].tensor] in (FULL, PART):
            for read in _place(block, space).reads:
                if roles.get(read.tensor) in (FULL, PART) and read.distance:
                    width = math.gcd(width, read.distance)
    width = math.gcd(length, width) if width else 0
    return width if width and length // width <= MOST_PIECES else 0


def _in_orders(
    group: GroupView, space: Space, roles: dict[int, Role], unit: int, runs: Evaluations
) -> Evaluations | Refusal:
    """`runs` where elements of the rows are read in other orders than their own: what they are
    computed from is computed once for each of these. A thread has what is a multiple of `unit` away
    (unless that is 0).
    """
    index, reshapes = index_of(group), group.reshapes
    facts, made = index.facts, index.made
    wanted: dict[int, dict[tuple[int, ...], float]] = {}
    counts = list(runs.counts)
    worst, worst_block = runs.worst, runs.worst_block
    outputs = frozenset(group.outputs)
    for k in range(len(facts) - 1, -1, -1):
        own, block = facts[k], group.blocks[k]
        orders: dict[tuple[int, ...], float] = {}
        if own.reduces or not outputs.isdisjoint(own.tensors):
            orders[()] = own.points
        for t in own.tensors if not own.reduces else ():
            for order, points in wanted.get(t, {}).items():
                orders[order] = max(points, orders.get(order, 0.0))
        if len(orders) > MOST_ORDERS:
            return group.refuse(
                RefusalCode.RECOMPUTE,
                f"{block.name} would be computed in {len(orders)} orders of a row",
                orders=len(orders),
                allowed=MOST_ORDERS,
            )
        count = sum(orders.values())
        if orders.keys() - {()} and count > counts[k]:
            counts[k] = count
            if own.works and count / own.points > worst:
                worst, worst_block = count / own.points, block
        same = roles[own.tensors[0]] is ROW or id(block) in reshapes
        for access, read in zip(block.reads, _place(block, space).reads, strict=True):
            if roles.get(read.tensor) not in (FULL, PART):
                continue
            into = wanted.setdefault(read.tensor, {})
            for order, points in orders.items():
                key = order if same or _is_near(read, unit) else (*order, access)
                asked = min(points, made[read.tensor]) if access.guarded else points
                into[key] = max(asked, into.get(key, 0.0))
    return Evaluations(tuple(counts), worst, worst_block)


def _is_near(read: _Own, unit: int) -> bool:
    """Whether a thread has the element that it reads: its own, or one multiples of `unit` away."""
    return read.point or (unit > 0 and read.distance is not None and read.distance % unit == 0)


Why = tuple[RefusalCode, str]


def _refuse_reduction(block: Block, space: Space, hw: HardwareProfile) -> Why | None:
    """Why a reduction does not fit into the space."""
    known, key = _refused_reductions(block), (space, hw.kind)
    if key not in known:
        known[key] = _why_not(block, *space, hw)
    return known[key]


@derived
def _refused_reductions(block: Block) -> dict[tuple[Space, str], Why | None]:
    """Those that were asked for."""
    return {}


def _why_not(
    block: Block, rows: tuple[Extent, ...], columns: tuple[Extent, ...], hw: HardwareProfile
) -> Why | None:
    arg = block.reduction in (Reduction.ARGMAX, Reduction.ARGMIN)
    if block.reduction is Reduction.OTHER or (arg and hw.kind == "llvm"):
        return RefusalCode.REDUCTION, f"{block.name} combines in a way no row kernel knows"
    if block.is_matrix_product:
        return RefusalCode.REDUCTION, f"{block.name} is a matrix product"
    own_rows = non_unit(block.extents(block.spatial))
    own_columns = non_unit(block.extents(block.reduced))
    if own_rows != rows or product_key(own_columns) != product_key(columns):
        return RefusalCode.SPACE_MISMATCH, (
            f"{block.name} reduces {own_columns} in rows of {own_rows}, "
            f"the group {columns} in rows of {rows}"
        )
    if not _reduces_contiguous_axes(block):
        return RefusalCode.NOT_TRAILING, (
            f"{block.name} does not reduce the contiguous axes of what it reads"
        )
    return None


def _reduces_contiguous_axes(block: Block) -> bool:
    """Whether the contiguous axis of everything the block reduces is a reduced one.

    What else is read of it, transposed or gathered or with kept axes between, does not matter.
    """
    reduced = {i for i in block.reduced if block.axes[i].extent != 1}
    live = {i for i, axis in enumerate(block.axes) if axis.extent != 1}
    for access in block.reads:
        used = [index.axes & live for index in access.index if index.axes & live]
        if access.axes & reduced and not used[-1] & reduced:
            return False
    return True
