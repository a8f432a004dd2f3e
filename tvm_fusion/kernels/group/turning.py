"""Which blocks turn axes: read along one axis what they write along another."""

from __future__ import annotations

from ...ir.access import Access, Affine, Block
from ...ir.extents import assumed


def is_turning(block: Block) -> bool:
    """Whether a read of the block steps through memory where its write is contiguous."""
    known = block.derived.get("turning")
    if known is None:
        known = block.derived["turning"] = any(map(_turner(block), block.reads))
    return known


def _turner(block: Block):
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
