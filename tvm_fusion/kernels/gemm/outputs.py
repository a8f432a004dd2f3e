"""How the outputs of a launch of matrix products lie in memory, for predicting its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ...config import HardwareProfile
from ...ir.extents import assumed
from ...plan.group_view import GroupView, dtype_bytes
from ..program.expr import HALF_DTYPES

if TYPE_CHECKING:
    from .product import Product


@dataclass(frozen=True)
class GemmOutputs:
    """Outputs of products of a group; attributes as those of `launch.GemmGroup`."""

    group: GroupView
    parts: Sequence[Sequence[Product]]
    before: tuple[frozenset[int], frozenset[int]]
    hw: HardwareProfile

    @cached_property
    def written_along(self) -> dict[int, str]:
        """Outputs, and what lies side by side in them: "columns" or "rows" of their product, or
        "nothing" of either.
        """
        found: dict[int, list[frozenset[int]]] = {}  # axes of the product along each dimension
        products = [p for part in self.parts for p in part]
        owner: dict[int, Product] = {p.block.writes[0].tensor: p for p in products}
        for block in self.group.blocks:
            write = block.writes[0]
            if write.tensor in owner:
                found[write.tensor] = [index.axes for index in write.index]
                continue
            source = next((a for a in block.reads if a.tensor in found), None)
            if source is not None:
                own = zip(source.index, found[source.tensor], strict=True)
                moved = {i: axes for index, axes in own for i in index.axes}
                found[write.tensor] = [
                    frozenset().union(*(moved.get(i, frozenset()) for i in index.axes))
                    for index in write.index
                ]
                owner[write.tensor] = owner[source.tensor]
        return {
            t: _along(owner[t], found[t][-1] if found[t] else frozenset())
            for t in self.group.outputs
            if t in found
        }

    @property
    def scattered_bytes(self) -> float:
        """Bytes of sectors of outputs each element of which is stored by itself."""
        tensors, total = self.group.graph.tensors, 0.0
        for tensor, along in self.written_along.items():
            if along == "nothing":
                size = dtype_bytes(tensors[tensor].dtype)
                total += self.group.tensor_bytes(tensor) / size * self.hw.sector_bytes
        return total

    def _is_boxed(self, tensor: int) -> bool:
        """Whether a matrix behind the products can travel in boxes: halves."""
        return self.group.graph.tensors[tensor].dtype in HALF_DTYPES

    @property
    def is_boxed(self) -> bool:
        """Whether an output of each part can leave in boxes."""
        along = self.written_along.items()
        return sum(a == "columns" and self._is_boxed(t) for t, a in along) >= len(self.parts)

    @property
    def direct_bytes(self) -> float:
        """Bytes of matrices behind the products that do not travel in boxes: one output and one
        input of each part may.
        """
        least = min(part[0].batch * part[0].m * part[0].n for part in self.parts)
        before = self.before[0] | self.before[1]
        total = 0.0
        for tensors in (self.written_along, [t for t in self.group.inputs if t not in before]):
            direct, boxed = 0.0, []
            for t in tensors:
                size = self.group.tensor_bytes(t)
                if size // dtype_bytes(self.group.graph.tensors[t].dtype) < least:
                    continue
                if self._is_boxed(t):
                    boxed.append(size)
                else:  # stores of 4 bytes an element fill their sectors
                    direct += size / (4 if tensors is self.written_along else 1)
            boxed.sort(reverse=True)
            total += direct + sum(boxed[len(self.parts) :])
        return total


def _along(product: Product, axes: frozenset[int]) -> str:
    """What of a product lies along a dimension that such axes of its own move."""
    if not axes or axes & product.columns:
        return "columns"
    sizes = {i: assumed(product.block.axes[i].extent) for i in product.block.spatial}
    rows = [i for i in product.left.axes - product.right.axes if sizes.get(i, 1) > 1]
    return "rows" if rows and max(rows) in axes else "nothing"
