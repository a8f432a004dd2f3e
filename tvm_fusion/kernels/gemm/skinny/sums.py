"""What both ways to multiply share: where a thread stands, and the products of one sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.ir import Expr, Var

from ...contraction.reader import Product, Segment
from ...gpu.product_frame import Frame, coordinates
from ...program.expr import same, substitute
from .config import SkinnyConfig
from .values import Loaded, Values, inlined


@dataclass(frozen=True, slots=True, eq=False)
class Position:
    """A thread's place.

    Attributes
    ----------
    batch : the axes of the batch.
    tile : the column tile of the segment.
    share : which part of the sum the warp takes.
    across : the warp's place along the columns of the tile.
    lane : within the warp.
    """

    batch: dict[Var, Expr]
    tile: Expr
    share: Expr
    across: Expr
    lane: Expr


@dataclass(slots=True, eq=False)
class Step:
    """What one block of terms needs, on its way from memory."""

    chunk: Expr
    a: dict[tuple[int, int], Loaded]
    b: dict[tuple[int, int, int], Loaded]


@dataclass(slots=True, eq=False)
class Factors:
    """Both operands of the products of a segment.

    `shares[p]` is the first product with the same left operand as product `p`.
    """

    frame: Frame
    segment: Segment
    config: SkinnyConfig
    a: list[Values]
    b: list[Values]
    shares: list[int]

    @property
    def products(self) -> Sequence[Product]:
        """Products of the segment."""
        return self.segment.products

    def terms(self, values: Values, chunk: Expr) -> dict[Var, Expr]:
        """The axes of the sum at block number `chunk`."""
        return coordinates(values.reader.k.axes, chunk, self.frame)

    def beside(self, values: Values, unit: Expr) -> dict[Var, Expr]:
        """The rows or columns number `unit`."""
        return coordinates(values.reader.side.axes, unit, self.frame)


def shared_operands(products: Sequence[Product]) -> list[int]:
    """For each product the first one that has the same left operand."""
    found: list[int] = []
    for number, product in enumerate(products):
        mine = inlined(product.a)
        for first in dict.fromkeys(found):
            other = products[first]
            renamed = {k.var: o.var for k, o in zip(product.k, other.k, strict=False)}
            alike = [k.extent for k in product.k] == [k.extent for k in other.k]
            if alike and same(substitute(mine, renamed), inlined(other.a)):
                found.append(first)
                break
        else:
            found.append(number)
    return found
