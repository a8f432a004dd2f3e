"""The matrix products of a group as plain numbers, for predicting the time of their launch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ...config import HardwareProfile
from ...ir.access import Access, Block, Pipe
from ...ir.extents import assumed
from ...plan.group_view import GroupView, dtype_bytes
from ..group.footprint import footprint_bytes, instructions_of
from ..group.traffic import resident_share
from ..program.expr import FLOAT8_DTYPES, HALF_DTYPES
from .computed import computes_left, matrix_of

if TYPE_CHECKING:
    from .product import Product

# How the outputs of a launch of matrix products lie in memory, for predicting its time.


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


ROWS_OF_PARTS = 64  # rows of the smallest tile, to whose multiples the rows of parts are counted

SMALL_PLANE = 16  # rows and columns of matrices of a batch of which each is one block's


@dataclass(frozen=True)
class GemmGroup:
    """Products of a group as plain numbers.

    Attributes
    ----------
    group : GroupView
    parts : products that meet in outputs, by part.
    siblings : all products share their left operand.
    counts : points of each block, one evaluation for each element of an operand.
    before : tensors upstream of left operands, and of right ones.
    pairs : widths of runs and distances of the pairs of columns that outputs are made of.
    paired : elements that are made of such pairs.
    images : batches that a product's rows are taken as, which share their right operands.
    window : columns of the windows that all outputs are reductions over; 0 where they are not.
    """

    group: GroupView
    parts: Sequence[Sequence[Product]]
    siblings: bool
    counts: tuple[float, ...]
    before: tuple[frozenset[int], frozenset[int]]
    hw: HardwareProfile
    pairs: frozenset[tuple[int, int]] = frozenset()
    paired: float = 0.0
    images: int = 1
    window: int = 0

    @cached_property
    def products(self) -> list[Product]:
        return [p for part in self.parts for p in part]

    @cached_property
    def dtypes(self) -> set[str]:
        """Dtypes of the operands as the products read them. Operands that are widened from eight
        bits, all of them, are multiplied as they are stored.
        """
        tensors = self.group.graph.tensors
        operands = [a for p in self.products for a in (p.left, p.right)]
        stored = {tensors[self._stored(a)[0]].dtype for a in operands}
        if stored <= set(FLOAT8_DTYPES):
            return {min(stored)}
        return {tensors[a.tensor].dtype for a in operands}

    def pitches(self, product: Product) -> tuple[int, int]:
        """Bytes from row to row of A and of B as stored: before transpositions and slices."""
        found = []
        for side, access in enumerate((product.left, product.right)):
            tensor, _ = self._stored(access)
            if side == 0 and self.computes_left:
                tensor, _ = matrix_of(self.group, product)
            stored = self.group.graph.tensors[tensor]
            found.append(assumed(stored.shape[-1]) * dtype_bytes(stored.dtype))
        return found[0], found[1]

    def along_terms(self, product: Product, sides: Collection[int] = (0, 1)) -> bool:
        """Whether neighbouring terms of both operands lie side by side in memory."""
        operands = product.left, product.right
        ends = (self._stored(operands[side])[1] for side in sides)
        return all(end <= set(product.block.reduced) for end in ends)

    @cached_property
    def _origins(self) -> dict[int, tuple[int, frozenset[int]]]:
        """What `_stored` has found, by the `id` of the access."""
        return {}

    def _stored(self, access: Access) -> tuple[int, frozenset[int]]:
        """The tensor that an operand is moved from, and the product's axes along its last one."""
        if id(access) not in self._origins:
            self._origins[id(access)] = self._moved_from(access)
        return self._origins[id(access)]

    def _moved_from(self, access: Access) -> tuple[int, frozenset[int]]:
        tensor, axes = access.tensor, [index.axes for index in access.index]
        while (block := self.group.writer_of.get(tensor)) is not None and _only_moves(block):
            (write,), (read,) = block.writes, block.reads
            own = {i: axes[d] for d, index in enumerate(write.index) for i in index.axes}
            axes = [
                frozenset().union(*(own.get(i, frozenset()) for i in index.axes))
                for index in read.index
            ]
            tensor = read.tensor
        return tensor, axes[-1] if axes else frozenset()

    @property
    def has_partials(self) -> bool:
        """Whether runs of a product's columns are reduced, too."""
        own = {id(p.block) for p in self.products}
        return any(b.reduction is not None and id(b) not in own for b in self.group.blocks)

    @property
    def swaps_halves(self) -> bool:
        """Whether all columns of all pairs' runs have a partner, or none is read."""
        return all(width == 2 * distance for width, distance in self.pairs)

    @property
    def is_turned(self) -> bool:
        """Whether left operands are what the kernel calls B: its first output lies along rows."""
        return next(iter(self.outputs.written_along.values()), "columns") == "rows"

    @cached_property
    def computes_left(self) -> bool:
        """Whether the left operand is computed, and wgmma can take it on its way."""
        if self.is_turned or not self.computed(0):
            return False
        return computes_left(self.group, self.products, self.hw)

    @property
    def left_s(self) -> float:
        """Time that the device needs to compute one element of a left operand."""
        elements = sum(p.batch * p.m * p.k for p in self.products)
        blocks = zip(self.group.blocks, self.counts, strict=True)
        more = sum(
            count * instructions_of(block.functions)
            for block, count in blocks
            if not block.is_contraction and self._side(block) == 0
        )
        return (self.operation_s[0] + more * 2 / self.hw.fma_per_s_f32) / elements

    def holds_pairs(self, columns: int) -> bool:
        """Whether a thread of a warpgroup holds both columns of each pair, in a tile of so many."""
        return all(
            columns % width == 0 and (width == 2 or width % 8 == distance % 8 == 0)
            for width, distance in self.pairs
        )

    def computed(self, side: int) -> bool:
        """Whether left (0) or right (1) operands are computed, or stored in another dtype than that
        in which they are multiplied: no copy brings them in.
        """
        return self._computed[side]

    @cached_property
    def _computed(self) -> tuple[bool, bool]:
        return self._is_computed(0), self._is_computed(1)

    def _is_computed(self, side: int) -> bool:
        blocks = (self.group.writer_of.get(t) for t in self.before[side])
        if any(b is not None and (b.operations() or narrows(self.group, b)) for b in blocks):
            return True
        tensors = self.group.graph.tensors
        stored = {tensors[self._stored(access)[0]].dtype for access in self._operands(side)}
        eights = set(FLOAT8_DTYPES)
        return not stored <= (eights if self.dtypes <= eights else self.dtypes)

    @cached_property
    def alike(self) -> bool:
        """Whether all left operands lie in memory in one order, and all right ones."""
        for side in (0, 1):
            pairs = zip(self.products, self._operands(side), strict=True)
            if len({self._stored(access)[1] <= set(p.block.reduced) for p, access in pairs}) > 1:
                return False
        return True

    def _operands(self, side: int) -> list[Access]:
        return [(p.left, p.right)[side] for p in self.products]

    @cached_property
    def outputs(self) -> GemmOutputs:
        """How the outputs lie in memory."""
        return GemmOutputs(self.group, self.parts, self.before, self.hw)

    @cached_property
    def moved(self) -> tuple[float, float, float, float]:
        """Bytes of the inputs that operands are made of, of other inputs, of outputs, and of inputs
        that the L2 still holds.
        """
        group, operand, other, resident = self.group, 0.0, 0.0, 0.0
        for t in group.inputs:
            size = footprint_bytes(group, t)
            resident += size * resident_share(group, t, size, self.hw)
            if t in self.before[0] or t in self.before[1]:
                operand += size
            else:
                other += size
        return operand, other, sum(map(group.tensor_bytes, group.outputs)), resident

    @cached_property
    def sizes(self) -> tuple[int, int, tuple[int, ...], int, int]:
        """Batch, M, columns of each part, K, and products of a part. Of products that share no
        operand: all rows under each other, in whole tiles, and the mean of columns and terms.
        """
        first, together = self.products[0], len(self.parts[0])
        if self.siblings:
            columns = tuple(part[0].n for part in self.parts)
            return first.batch, first.m, columns, first.k, together
        rows = [p[0].batch * -(-p[0].m // ROWS_OF_PARTS) * ROWS_OF_PARTS for p in self.parts]
        cells = sum(m * p[0].n for m, p in zip(rows, self.parts, strict=True))
        terms = sum(m * p[0].n * p[0].k for m, p in zip(rows, self.parts, strict=True))
        return 1, sum(rows), (-(-cells // sum(rows)),), -(-terms // cells), together

    @cached_property
    def more_b_bytes(self) -> float:
        """Bytes of right operands beyond those that `sizes` tell of; less than 0 where batches
        share them.
        """
        batch, _, columns, k, together = self.sizes
        told = batch * sum(columns) * k * together
        size = max(dtype_bytes(dtype) for dtype in self.dtypes)
        known = sum(p.batch * p.n * p.k for p in self.products)
        return (max(told, known) / self.images - told) * size

    @property
    def equal_sizes(self) -> bool:
        """Whether all products have the same batch, rows and terms."""
        return len({(p.batch, p.m, p.k) for p in self.products}) == 1

    @cached_property
    def segments(self) -> list[tuple[int, int, int, tuple[int, ...]]]:
        """Batch, M, columns and the K of each product, of each part."""
        return [(p[0].batch, p[0].m, p[0].n, tuple(q.k for q in p)) for p in self.parts]

    def tiles(self, block_m: int, block_n: int) -> int:
        """Tiles of one accumulator that cover all parts."""
        return sum(b * -(-m // block_m) * -(-n // block_n) for b, m, n, _ in self.segments)

    def runs(self, block_m: int, block_n: int) -> tuple[int, int]:
        """How often each element of A and of B is brought in, with such tiles."""
        a = sum(-(-n // block_n) for _, _, n, _ in self.segments) if self.siblings else 1
        return a, max(-(-m // block_m) for _, m, *_ in self.segments)

    @cached_property
    def operation_s(self) -> tuple[float, float, float]:
        """Time that the device needs for the operations on left operands, once for each element, on
        right ones, and for all others.
        """
        found = [0.0, 0.0, 0.0]
        for block, count in zip(self.group.blocks, self.counts, strict=True):
            if not block.is_contraction:
                found[self._side(block)] += count * operation_seconds(block.counts, self.hw)
        return found[0], found[1], found[2]

    @cached_property
    def cells(self) -> int:
        """Elements of one output of each part."""
        return sum(b * m * n for b, m, n, _ in self.segments)

    @property
    def plane_terms(self) -> float:
        """Multiplications of a batch of planes of few rows and columns; 0 where there is none."""
        small = (b > 1 and m <= SMALL_PLANE and n <= SMALL_PLANE for b, m, n, _ in self.segments)
        if not all(small) or len(self.products) > 1:
            return 0.0
        return float(sum(b * m * n * sum(depths) for b, m, n, depths in self.segments))

    @property
    def epilogue_s(self) -> float:
        """The same for the operations behind the products, on one element of an output."""
        return self.operation_s[2] / self.cells

    def _side(self, block: Block) -> int:
        tensors = {w.tensor for w in block.writes}
        return 0 if tensors & self.before[0] else 1 if tensors & self.before[1] else 2

    def run_counts(self, a_times: float, b_times: float) -> tuple[float, ...]:
        """How often blocks run where each element of A is computed `a_times`, of B `b_times`."""
        times = (a_times, b_times, 1.0)
        return tuple(
            count * times[self._side(block)]
            for block, count in zip(self.group.blocks, self.counts, strict=True)
        )


def operation_seconds(counts: Iterable[tuple[Pipe, float]], hw: HardwareProfile) -> float:
    """Time that the whole device needs for operations, by what executes them."""
    cost = {
        Pipe.ARITHMETIC: 2 / hw.fma_per_s_f32,
        Pipe.SPECIAL: 1 / hw.special_per_s,
        Pipe.DIVISION: 1 / hw.special_per_s,
        Pipe.INTEGER: 1 / hw.int_div_per_s,
    }
    return sum(number * cost[pipe] for pipe, number in counts)


def narrows(group: GroupView, block: Block) -> bool:
    """Whether a block converts to a narrower dtype: no copy brings an operand in like that."""
    if not block.conversions:
        return False
    tensors = group.graph.tensors
    written = dtype_bytes(tensors[block.writes[0].tensor].dtype)
    return any(dtype_bytes(tensors[a.tensor].dtype) > written for a in block.reads)


def _only_moves(block: Block) -> bool:
    return not block.operations() and block.reduction is None and len(block.reads) == 1
