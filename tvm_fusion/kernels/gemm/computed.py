"""Left operands that a product's kernel computes on their way to the tensor cores.

    relu(x * s + b) w      x is read like any left operand, s and b are vectors of its terms

Which groups the Hopper form takes so, asked of access maps (see `hopper.prologue`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...config import HardwareProfile
from ...ir.access import Access, Block
from ...ir.extents import assumed
from ...plan.group_view import GroupView, dtype_bytes
from ..program.expr import HALF_DTYPES
from .product import Product

LEAST_ROWS = 65
"""Fewer rows than a tile has are left to other forms, and what is in front of them to others."""
PITCH_BYTES = 16

Read = tuple[int, list[frozenset[int]]]
"""A tensor, and the product's axes that move along each dimension of it."""


def reads_of(group: GroupView, access: Access) -> Iterator[Read]:
    """What the group reads to compute an operand."""
    waiting: list[Read] = [(access.tensor, [index.axes for index in access.index])]
    while waiting:
        tensor, axes = waiting.pop()
        block = group.writer_of.get(tensor)
        if block is None:
            yield tensor, axes
            continue
        waiting += reads_behind(block, axes)


def reads_behind(block: Block, axes: Sequence[frozenset[int]]) -> Iterator[Read]:
    """What an operator reads for an element whose dimensions these axes move along."""
    own: dict[int, frozenset[int]] = {}
    for index, moved in zip(block.writes[0].index, axes, strict=True):
        own |= dict.fromkeys(index.axes, moved)
    for read in block.reads:
        indices = (frozenset().union(*(own.get(i, ()) for i in x.axes)) for x in read.index)
        yield read.tensor, list(indices)


def matrix_of(group: GroupView, product: Product) -> Read | None:
    """The matrix that a left operand is computed of, element by element, beside vectors of its rows
    or of its terms; None where there is no such one, or several.
    """
    block = product.block
    sizes = [assumed(axis.extent) for axis in block.axes]
    terms = set(block.reduced)
    whole = []
    for read in dict.fromkeys((t, tuple(axes)) for t, axes in reads_of(group, product.left)):
        moved = {i for axes in read[1] for i in axes if sizes[i] > 1}
        if moved & terms and moved & ((product.left.axes - product.right.axes) - terms):
            whole.append(read)
    if len(whole) != 1:
        return None
    tensor, axes = whole[0]
    return tensor, list(axes)


def computes_left(group: GroupView, products: Sequence[Product], hw: HardwareProfile) -> bool:
    """Whether wgmma can take the left operand of a single product as it is computed."""
    if not hw.architecture.has_wgmma or len(products) != 1:
        return False
    (product,) = products
    block, tensors = product.block, group.graph.tensors
    found = matrix_of(group, product)
    inner = (block.axes[i].extent for i in (*block.reduced, *product.columns))
    if found is None or not all(isinstance(extent, int) for extent in inner):
        return False
    tensor, axes = found
    dtype = tensors[product.left.tensor].dtype
    same = {dtype} == {tensors[t].dtype for t in (tensor, product.right.tensor)}
    others = {tensors[t].dtype for t, _ in reads_of(group, product.left)} - {dtype, "float32"}
    shape = tensors[tensor].shape
    along_terms = bool(axes[-1]) and axes[-1] <= set(block.reduced)
    pitch = assumed(shape[-1]) * dtype_bytes(dtype)
    return (
        dtype in HALF_DTYPES
        and same
        and not others
        and along_terms
        and pitch % PITCH_BYTES == 0
        and product.k % 2 == 0
        and product.m >= LEAST_ROWS
    )
