"""A block of a graph as a matrix product."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.access import Access, Affine, Block, derived
from ...ir.extents import assumed_product


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix product: extents of its batch, M, N and K axes and the reads of its operands."""

    block: Block
    batch: int
    m: int
    n: int
    k: int
    left: Access
    right: Access

    @property
    def columns(self) -> frozenset[int]:
        """The axes of the block that only the right operand has."""
        return (self.right.axes - self.left.axes) & set(self.block.spatial)


@derived
def match_product(block: Block) -> Product | None:
    """The block as a matrix product, or None: a sum over axes that both operands share, every index
    a single axis.
    """
    if not block.is_contraction or len(block.reads) != 2:
        return None
    left, right = block.reads
    for access in (left, right):
        if access.guarded or not all(_plain(i) for i in access.index):
            return None
    reduced, spatial = set(block.reduced), set(block.spatial)
    if not (reduced <= left.axes and reduced <= right.axes):
        return None
    shared = left.axes & right.axes & spatial
    rows, columns = (left.axes - right.axes) & spatial, (right.axes - left.axes) & spatial
    if (rows and columns and min(columns) < min(rows)) or not columns:
        return None

    def size(axes) -> int:
        return assumed_product(block.axes[i].extent for i in axes)

    return Product(block, size(shared), size(rows), size(columns), size(reduced), left, right)


def _plain(index) -> bool:
    return isinstance(index, Affine) and (index.single_axis is not None or not index.axes)
