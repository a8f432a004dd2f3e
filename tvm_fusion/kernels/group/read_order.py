"""In which order a block walks through what it reads."""

from __future__ import annotations

from ...ir.access import Access, Affine, Block


def read_order(block: Block, picks: bool = False) -> tuple[int, ...] | None:
    """The axes of the block in the order of a read that has each of them once.

    With `picks` the read may have other indices beside (``x[i, j, label[i]]``).
    """
    live = {i for i, axis in enumerate(block.axes) if axis.extent != 1}
    for access in block.reads:
        axes = [i for i in plain_axes(block, access) if not (picks and i is None)]
        if len(axes) == len(live) and set(axes) == live:
            return tuple(axes)
    return None


def plain_axes(block: Block, access: Access) -> list[int | None]:
    """The axis that each index of an access is; None for an index that is no single axis."""
    if "plain_axes" not in access.derived:
        access.derived["plain_axes"] = _plain_axes(block, access)
    return access.derived["plain_axes"]


def _plain_axes(block: Block, access: Access) -> list[int | None]:
    found: list[int | None] = []
    for index in access.index:
        live = [i for i in sorted(index.axes) if block.axes[i].extent != 1]
        if isinstance(index, Affine) and not live:
            continue
        alone = isinstance(index, Affine) and len(live) == 1 and index.single_axis == live[0]
        found.append(live[0] if alone else None)
    return found
