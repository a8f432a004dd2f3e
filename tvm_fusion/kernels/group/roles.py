"""What tensors and blocks are to a space of rows and columns that a group of reductions shares, and
the refusals of those that are nothing to it.

    m = max(x, axis=1)      x: full, m: row         exp(x - m): full
    y = e * (gamma + 1)     gamma + 1: small        sum(y, axis=0): sum (of a mixed kernel)
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

from ...ir.access import Block, Extent, Reduction
from ...ir.extents import non_unit
from ...plan.group_view import GroupView, dtype_bytes
from ...plan.refusal import Refusal, RefusalCode

KEY_BYTES = 4
"""Of a number whose place is exchanged with it, at most (`row.exchange`)."""


class Role(Enum):
    """FULL: a value for each row and column. PART: as many for each row as some of its columns.
    ROW: one for each row. SMALL: made of inputs only, so that any reader computes what it needs of
    it. SUM: summed over rows, one for each column.
    """

    FULL = "full"
    PART = "part"
    ROW = "row"
    SMALL = "small"
    SUM = "sum"


def refuse_other_row(group: GroupView, block: Block, tensor: int) -> Refusal:
    """A block reads what its own row does not have."""
    return group.refuse(
        RefusalCode.OFF_ROW,
        f"{block.name} reads a value of another row (or of no row) of "
        f"{group.graph.tensors[tensor].name}",
    )


def refuse_wide_places(group: GroupView, block: Block) -> Refusal | None:
    """An argmax or argmin of numbers that are too wide to be exchanged with their places."""
    if block.reduction not in (Reduction.ARGMAX, Reduction.ARGMIN):
        return None
    sizes = (dtype_bytes(group.graph.tensors[read.tensor].dtype) for read in block.reads)
    widest = max(sizes, default=0)
    if widest <= KEY_BYTES:
        return None
    return group.refuse(RefusalCode.REDUCTION, f"{block.name} orders numbers of {widest} bytes")


def refuse_other_shape(
    group: GroupView, shapes: Collection[tuple[Extent, ...]], what: str
) -> Refusal | None:
    """An output that has none of the shapes of `what`, axes of one element aside."""
    for t in group.outputs:
        writer = group.writer_of[t]
        if non_unit(writer.extents(writer.spatial)) not in shapes:
            return group.refuse(
                RefusalCode.SPACE_MISMATCH,
                f"output {group.graph.tensors[t].name} has another shape than the {what}",
            )
    return None


def refuse_small_output(group: GroupView, tensor: int) -> Refusal:
    """An output that no row computes."""
    return group.refuse(
        RefusalCode.SPACE_MISMATCH,
        f"output {group.graph.tensors[tensor].name} is neither full nor one value a row",
    )
