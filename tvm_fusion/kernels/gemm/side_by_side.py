"""Which matrix products may share a launch: siblings of one left operand, and independent ones.

    siblings        x @ q, x @ k, x @ v              one A, columns side by side
    side by side    x0 @ w0, x1 @ w1, x2 @ w2        nothing in common: tiles after tiles

Independent products gain where each alone leaves multiprocessors idle, or is so short that starting
it is what it costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from tvm.ir import Expr
from tvm.script import tirx as T

from ...config import HardwareProfile
from ...plan.group_view import GroupView
from ...plan.refusal import Refusal, RefusalCode
from ..contraction.reader import Contraction, Segment, equal_sizes
from ..gpu.product_frame import Grid, Tile
from ..program.expr import constant, convert
from ..program.program import Extent

if TYPE_CHECKING:
    from .product import Product

# Tiles of segments with sizes of their own: which segment a block works on, and where in it.
#
# segments of 3, 8 and 2 tiles:    tile number  0 1 2 | 3 4 5 6 7 8 9 10 | 11 12

# Places in the registers of a tile.
BATCH, ROW, COLUMN, SEGMENT = range(4)


class SegmentGrid:
    """All tiles of a contraction, those of one segment after those of another.

    It stands in for `Grid` where segments differ in batch or rows. Segments are taken in the order
    of the terms of their sums: what takes longest starts first.
    """

    def __init__(
        self,
        dtype: str,
        segments: Sequence[Segment],
        block_m: int,
        block_n: int,
        group_m: int = 8,
    ):
        self.dtype = dtype
        self.grids = [Grid(dtype, s.B, s.M, [s.N], block_m, block_n, group_m) for s in segments]
        self.order = sorted(range(len(segments)), key=lambda i: (-_terms(segments[i]), i))
        *self.ends, self.tiles = accumulate(self.grids[i].tiles for i in self.order)

    def tile(self, number: Expr) -> Tile:
        """The tile with this number: its segment, and its place there."""
        number = T.Bind(convert(number, self.dtype))
        place = T.alloc_local((4,), self.dtype)
        self._locate(number, place, 0)
        batch, m, n, segment = (T.Bind(place[i]) for i in (BATCH, ROW, COLUMN, SEGMENT))
        return Tile(batch, m, n, segment)

    def _locate(self, number: Expr, place: Expr, position: int) -> None:
        if position == len(self.ends):
            self._place(number, place, position)
            return
        with T.If(number < self._size(self.ends[position])):
            with T.Then():
                self._place(number, place, position)
            with T.Else():
                self._locate(number, place, position + 1)

    def _place(self, number: Expr, place: Expr, position: int) -> None:
        segment = self.order[position]
        start = self._size(self.ends[position - 1]) if position else 0
        own = self.grids[segment].tile(number - start)
        found = (own.batch, own.m, own.n, constant(segment, self.dtype))
        for i, value in enumerate(found):
            T.buffer_store(place, value, [i])

    def _size(self, extent: Extent) -> Expr | int:
        return extent if isinstance(extent, int) else convert(extent, self.dtype)

    def each_segment(self, tile: Tile) -> Iterator[tuple[int, Tile]]:
        """Number and own tile of each segment; what is emitted runs where the tile is its own."""
        yield from self._branch(tile, 0)

    def _branch(self, tile: Tile, number: int) -> Iterator[tuple[int, Tile]]:
        if number == len(self.grids) - 1:
            yield number, tile
            return
        with T.If(tile.segment == constant(number, self.dtype)):
            with T.Then():
                yield number, tile
            with T.Else():
                yield from self._branch(tile, number + 1)


def grid_of(dtype: str, contraction: Contraction, block_m: int, block_n: int) -> Grid | SegmentGrid:
    """The tiles of a contraction."""
    segments = contraction.segments
    batch, rows = contraction.batch, contraction.M
    if all(equal_sizes(s.B, batch) and equal_sizes(s.M, rows) for s in segments):
        return Grid(dtype, batch, rows, [s.N for s in segments], block_m, block_n)
    return SegmentGrid(dtype, segments, block_m, block_n)


def _terms(segment: Segment) -> int:
    """Terms of a segment's sums; a symbolic number counts as none."""
    return sum(p.K for p in segment.products if isinstance(p.K, int))


TILE = 128  # rows and columns of a tile, for counting how much of the device a product fills
TENSOR_MAP_BYTES = 128
POINTER_BYTES = 8
MAX_SIDE_BY_SIDE = 16  # products of one launch: its code grows with them
# The block with the longest sum ends last: how many times as long it may be as the shortest.
MAX_DEPTH_RATIO = 2
# A tile with a shorter sum spends more on its start and end than on its terms.
SHORT_DEPTH = 256


def are_siblings(products: Sequence[Product]) -> bool:
    """Whether all products have the left operand and the sizes of batch, rows and terms in common.

    One product is its own sibling.
    """
    first = products[0]
    return all(
        p.left.tensor == first.left.tensor
        and (p.batch, p.m, p.k) == (first.batch, first.m, first.k)
        for p in products
    )


def refuse_side_by_side(
    group: GroupView, parts: Sequence[Sequence[Product]], hw: HardwareProfile
) -> Refusal | None:
    """Why products that are no siblings may not share a launch, or None; `parts` are their
    `components`.
    """

    def refuse(why: str, action: str | None = None, **numbers: float) -> Refusal:
        return group.refuse(RefusalCode.SEVERAL_CONTRACTIONS, why, action, **numbers)

    products = [p for part in parts for p in part]
    if not all(are_siblings(part) for part in parts) or len(parts) == 1:
        return refuse("matrix products of different left operands meet in one output")
    if len(products) > MAX_SIDE_BY_SIDE:
        return refuse(
            "one launch computes no more independent matrix products",
            products=len(products),
            allowed=MAX_SIDE_BY_SIDE,
        )
    graph = group.graph
    if len({graph.tensors[a.tensor].dtype for p in products for a in (p.left, p.right)}) > 1:
        return refuse(
            "the operands of independent matrix products have different dtypes",
            "dtype: store the operands of both in one dtype",
        )
    depths = sorted(p.k for p in products)
    if depths[-1] > MAX_DEPTH_RATIO * depths[0]:
        return refuse(
            "independent matrix products with sums of unlike length wait for the longest",
            shortest=depths[0],
            longest=depths[-1],
            allowed=MAX_DEPTH_RATIO * depths[0],
        )
    tiles = [sum(_tiles(p) for p in part) for part in parts]
    together, apart = _waves(sum(tiles), hw), sum(_waves(t, hw) for t in tiles)
    if together >= apart and depths[-1] > SHORT_DEPTH:
        return group.refuse(
            RefusalCode.NOT_PROFITABLE,
            "each of the independent matrix products fills the device by itself",
            waves_together=together,
            waves_apart=apart,
        )
    return None


def tensor_maps_fit(
    group: GroupView, parts: Sequence[Sequence[Product]], hw: HardwareProfile
) -> tuple[bool, bool]:
    """Whether the kernel's parameters have room for tensor maps of the operands, and for those of
    the outputs as well.
    """
    products = [p for part in parts for p in part]
    maps = len(products) + (1 if are_siblings(products) else len(parts))
    room = hw.kernel_param_bytes - POINTER_BYTES * (len(group.inputs) + len(group.outputs))
    room -= TENSOR_MAP_BYTES * maps
    return room >= 0, room >= TENSOR_MAP_BYTES * len(parts)


def components(group: GroupView, products: Sequence[Product]) -> list[list[Product]]:
    """Products that meet in a block, directly or through others, in the order of their blocks."""
    label = {p.block.writes[0].tensor: i for i, p in enumerate(products)}
    home = list(range(len(products)))
    own = {id(p.block) for p in products}
    for block in group.blocks:
        if id(block) in own:
            continue
        met = sorted({home[label[a.tensor]] for a in block.reads if a.tensor in label})
        if met:
            home = [met[0] if h in met else h for h in home]
            label[block.writes[0].tensor] = met[0]
    return [[p for p, h in zip(products, home, strict=True) if h == i] for i in sorted(set(home))]


def depends_on_another(products: Sequence[Product], upstream: set[int]) -> Product | None:
    """A product that an operand of a product is computed from; `upstream` holds all tensors that
    operands are computed from, and the operands.
    """
    return next((p for p in products if p.block.writes[0].tensor in upstream), None)


def _tiles(product: Product) -> int:
    return product.batch * -(-product.m // TILE) * -(-product.n // TILE)


def _waves(tiles: int, hw: HardwareProfile) -> int:
    return -(-tiles // hw.num_sms)
