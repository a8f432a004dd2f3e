"""Reads of what a product computes at places that a tensor names: a GPU's thread block has the
elements of its tile only, and stores each where it belongs.

    T = x @ w                     y[i, j] = T[places[i], j] + r[i, j]       (torch.roll, x[order])
"""

from __future__ import annotations

from collections.abc import Iterable

from ...plan.group_view import GroupView
from ...plan.refusal import Refusal, RefusalCode


def refuse_gathers(group: GroupView, computed: Iterable[int]) -> Refusal | None:
    """A refusal if a block reads such tensors, or what comes of them, at such places."""
    behind = set(computed)
    for block in group.blocks:
        reads = [access for access in block.reads if access.tensor in behind]
        if any(access.data_dependent for access in reads):
            return group.refuse(
                RefusalCode.SPACE_MISMATCH,
                f"{block.name} reads elements of other tiles, at places that a tensor names",
            )
        if reads:
            behind |= {access.tensor for access in block.writes}
    return None
