"""Which blocks are convolutions, asked of access maps."""

from __future__ import annotations

from ...ir.access import Access, Affine, Block


def is_convolution(block: Block) -> bool:
    """Whether a block sums products of data that is read at windows with weights."""
    if not block.is_contraction or len(block.reads) != 2:
        return False
    return [_has_window(block, read) for read in block.reads].count(True) == 1


def data_and_weights(block: Block) -> tuple[Access, Access]:
    """The reads of a convolution's block: the one that has windows, and the other one."""
    first, second = block.reads
    return (first, second) if _has_window(block, first) else (second, first)


def _has_window(block: Block, read: Access) -> bool:
    spatial, reduced = set(block.spatial), set(block.reduced)
    return any(
        isinstance(i, Affine) and i.axes & spatial and len(i.axes & reduced) == 1
        for i in read.index
    )
