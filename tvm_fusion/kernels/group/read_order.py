"""In which order a block walks through what it reads."""

from __future__ import annotations

from ...ir.access import Access, Affine, Block, derived
from ...ir.extents import assumed

# Which blocks turn axes: read along one axis what they write along another.


@derived
def is_transposing(block: Block) -> bool:
    """Whether a read of the block steps through memory where its write is contiguous."""
    return any(map(_transposes(block), block.reads))


def _transposes(block: Block):
    """The test of one read of `block`."""
    written = _contiguous_axes(block, block.writes[0])

    def turns(read: Access) -> bool:
        along = _contiguous_axes(block, read)
        return bool(written and along) and not (written & along) and written <= read.axes

    return turns


def _contiguous_axes(block: Block, access: Access) -> frozenset[int]:
    """The axes of the last index that moves with an axis longer than 1; empty if not affine."""
    for index in reversed(access.index):
        if not isinstance(index, Affine):
            return frozenset()
        axes = frozenset(i for i in index.axes if assumed(block.axes[i].extent) > 1)
        if axes:
            return axes
    return frozenset()


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
    return _plain_axes(access, block)


@derived
def _plain_axes(access: Access, block: Block) -> list[int | None]:
    found: list[int | None] = []
    for index in access.index:
        live = [i for i in sorted(index.axes) if block.axes[i].extent != 1]
        if isinstance(index, Affine) and not live:
            continue
        alone = isinstance(index, Affine) and len(live) == 1 and index.single_axis == live[0]
        found.append(live[0] if alone else None)
    return found
