"""Kernel class `row`: reductions over contiguous axes with pointwise work before, between and
after, each row read once.

The space is rows x columns: every reduction runs over the same columns of the same rows; a block of
the group is full (rows and columns), per row, or smaller than a row (a row vector such as gamma +
1, computed where it is used).
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from tvm import tirx

from ..config import HardwareProfile, Policy
from ..ir.access import Access, Affine, Block, Extent, Reduction
from ..ir.extents import assumed_product, non_unit, product_key
from .base import Fit, GroupView, Refusal, RefusalCode, Resources, Traffic, write_on_cpu
from .footprint import evaluations
from .pointwise import refuse_recompute
from .row_shape import row_shape, row_streams
from .traffic import cuda_resources, cuda_traffic, filled_by_threads, memory_traffic

# Elements of a row one thread holds; threads of one block (sweep on an H200: 128 threads
# x 32 elements for 4096 columns).
ELEMENTS_PER_THREAD = 32


class _Role(Enum):
    FULL = "full"
    ROW = "row"
    SMALL = "small"


class Row:
    """See the module docstring.

    Does not handle: reductions whose contiguous axis is a kept one; reductions of different rows
    in one group; argmax on a CPU (class `nest`).
    """

    name = "row"

    def accepts(self, group: GroupView, hw: HardwareProfile, policy: Policy) -> Fit | Refusal:
        reductions = [b for b in group.blocks if b.reduction is not None]
        if not reductions:
            return group.refuse(RefusalCode.REDUCTION, "the group holds no reduction")
        anchor = reductions[0]
        rows = non_unit(anchor.extents(anchor.spatial))
        columns = non_unit(anchor.extents(anchor.reduced))
        roles: dict[int, _Role] = {}
        for block in group.blocks:
            role = _check_block(group, block, rows, columns, roles, hw)
            if isinstance(role, Refusal):
                return role
            for w in block.writes:
                roles[w.tensor] = role
        for t in group.outputs:
            if roles[t] is _Role.SMALL and _role(group.writer_of[t], rows, columns) is _Role.SMALL:
                return group.refuse(
                    RefusalCode.SPACE_MISMATCH,
                    f"output {group.graph.tensors[t].name} is neither full nor one value a row",
                )
        once = frozenset(t for t, role in roles.items() if role is not _Role.SMALL)
        runs = evaluations(group, once)
        if refusal := refuse_recompute(group, runs, policy):
            return refusal
        return Fit(self.name, assumed_product(rows), assumed_product(columns), runs.counts)

    def traffic(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Traffic:
        if hw.kind != "llvm":
            return cuda_traffic(group, fit, hw, row_shape(group, fit, hw), row_streams(group, fit))
        return memory_traffic(group, fit, hw, parallel=filled_by_threads(fit.rows, hw))

    def resources(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Resources:
        if hw.kind != "llvm":
            return cuda_resources(group, fit, row_shape(group, fit, hw))
        held = min(ELEMENTS_PER_THREAD, fit.columns)
        words = sum(
            max(1, group.tensor_bytes(t) // max(1, fit.rows * fit.columns)) for t in group.inputs
        )
        return Resources(40 + min(200, held * words // 4), 1024)

    def configs(self, func: tirx.PrimFunc, hw: HardwareProfile, policy: Policy) -> list[Any]:
        if hw.kind == "llvm":
            return [None]
        from .cuda.row import row_configs
        from .program import analyze

        return row_configs(analyze(func, exact=policy.rounding == "exact"), hw)

    def write(
        self, func: tirx.PrimFunc, hw: HardwareProfile, policy: Policy, config: Any = None
    ) -> tirx.PrimFunc:
        if hw.kind == "llvm":
            return write_on_cpu(func, hw, policy)
        exact = policy.rounding == "exact"
        from .cuda.row import emit_row, row_configs
        from .program import analyze

        program = analyze(func, exact=exact)
        return emit_row(program, config or row_configs(program, hw)[0], hw)


def _check_block(
    group: GroupView, block: Block, rows, columns, roles, hw: HardwareProfile
) -> _Role | Refusal:
    """The block's role in the rows x columns space, or why it has none."""
    if block.reduction is not None:
        refusal = _check_reduction(group, block, rows, columns, hw)
        if refusal is not None:
            return refusal
        role = _Role.ROW
    else:
        role = _role(block, rows, columns)
        if role is _Role.ROW and not any(
            a.tensor in roles and roles[a.tensor] is not _Role.SMALL for a in block.reads
        ):
            role = (
                _Role.SMALL
            )  # made of inputs only: in a square space a row vector looks like one value a row
    for access in block.reads:
        if roles.get(access.tensor) is None:
            continue
        if not _reads_own_row(block, access, rows, columns, roles[access.tensor], role):
            return group.refuse(
                RefusalCode.OFF_ROW,
                f"{block.name} reads a value of another row (or of no row) of "
                f"{group.graph.tensors[access.tensor].name}",
            )
    return role


def _role(block: Block, rows, columns) -> _Role:
    extents = live_extents(block)
    if extents == rows + columns:
        return _Role.FULL if columns else _Role.ROW
    return _Role.ROW if extents == rows else _Role.SMALL


def live_axes(block: Block) -> list[int]:
    """The axes of a block that are longer than 1."""
    known = block.derived.get("live")
    if known is None:
        known = [i for i, axis in enumerate(block.axes) if axis.extent != 1]
        block.derived["live"] = known
    return known


def live_extents(block: Block) -> tuple[Extent, ...]:
    """Their extents."""
    known = block.derived.get("extents")
    if known is None:
        known = block.derived["extents"] = block.extents(tuple(live_axes(block)))
    return known


def _plain_axes(block: Block, access: Access) -> list[int | None]:
    """The axis that each index of an access equals, None where it is no single one; indices that
    do not move are left out.
    """
    known = access.derived.get("row axes")
    if known is None:
        known = []
        for index in access.index:
            used = [i for i in sorted(index.axes) if block.axes[i].extent != 1]
            affine = isinstance(index, Affine)
            if used or not affine:
                plain = affine and index.single_axis == used[0] and len(used) == 1
                known.append(used[0] if plain else None)
        access.derived["row axes"] = known
    return known


def _check_reduction(
    group: GroupView, block: Block, rows, columns, hw: HardwareProfile
) -> Refusal | None:
    arg = block.reduction in (Reduction.ARGMAX, Reduction.ARGMIN)
    if block.reduction is Reduction.OTHER or (arg and hw.kind == "llvm"):
        return group.refuse(
            RefusalCode.REDUCTION, f"{block.name} combines in a way no row kernel knows"
        )
    if block.is_matrix_product:
        return group.refuse(RefusalCode.REDUCTION, f"{block.name} is a matrix product")
    own_rows = non_unit(block.extents(block.spatial))
    own_columns = non_unit(block.extents(block.reduced))
    if own_rows != rows or product_key(own_columns) != product_key(columns):
        return group.refuse(
            RefusalCode.SPACE_MISMATCH,
            f"{block.name} reduces {own_columns} in rows of {own_rows}, "
            f"the group {columns} in rows of {rows}",
        )
    if not _reduces_contiguous_axes(block):
        return group.refuse(
            RefusalCode.NOT_TRAILING,
            f"{block.name} does not reduce the contiguous axes of what it reads",
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


def _reads_own_row(block: Block, access, rows, columns, produced: _Role, role: _Role) -> bool:
    """A per-row value is read at the reader's own row; a full one too, at its own column or at any
    (the label's probability in a cross-entropy), since it can be computed again for that element.
    """
    if produced is _Role.SMALL:
        return True
    if role is _Role.SMALL:
        return False
    live, got = live_axes(block), _plain_axes(block, access)
    own_row = got[: len(rows)] == live[: len(rows)]
    if produced is _Role.ROW or role is _Role.FULL:
        return own_row and got == (live if produced is _Role.FULL else live[: len(rows)])
    return own_row
