"""Windows: reductions over a few neighbours of each element (pooling), cheap enough to be computed
where they are read.

    y[h, w] = max over a < 2, b < 2 of x[2 * h + a, 2 * w + b]

    ->  max(max(x[2h, 2w], x[2h, 2w + 1]), max(x[2h + 1, 2w], x[2h + 1, 2w + 1]))

A window slides: each of its reduced axes is added to a kept axis in some index. Other reductions
over few elements (the last axis of [M, 4]) are rows or columns, which their own kernels read once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import tvm_ffi
from tvm import tirx
from tvm.ir import Expr, TensorLoad

from ...ir.access import Affine, Block, Reduction
from .definitions import Definition
from .expr import uses_any
from .program import COMBINE, ReduceKind

LARGEST_WINDOW = 64
"""Elements; beyond, unrolled code outgrows what it saves."""


def is_window_block(block: Block) -> bool:
    """Whether a block, as the planner sees it, reduces a window."""
    kinds = (Reduction.SUM, Reduction.PRODUCT, Reduction.MAX, Reduction.MIN)
    if block.reduction not in kinds or block.is_contraction:
        return False
    extents = block.extents(block.reduced)
    if not all(isinstance(e, int) for e in extents) or math.prod(extents) > LARGEST_WINDOW:
        return False
    spatial = set(block.spatial)
    slides = {
        axis
        for access in block.reads
        for index in access.index
        if isinstance(index, Affine) and index.axes & spatial
        for axis in index.axes
    }
    return {axis for axis in block.reduced if block.axes[axis].extent != 1} <= slides


def is_window(definition: Definition) -> bool:
    """Whether a definition of a fused PrimFunc reduces a window."""
    if definition.kind not in COMBINE:
        return False
    extents = [extent for _, extent in definition.reduced]
    if not all(isinstance(e, int) for e in extents) or math.prod(extents) > LARGEST_WINDOW:
        return False
    loads: list[TensorLoad] = []
    tvm_ffi.structural_walk(definition.value, [(TensorLoad, loads.append)])
    kept = [axis for axis in definition.axes if axis is not None]
    sliding = [i for load in loads for i in load.indices if uses_any(i, kept)]
    if isinstance(definition.value, tirx.Mul) and len(loads) > 1:
        return False
    return all(
        any(uses_any(index, [axis]) for index in sliding)
        for axis, extent in definition.reduced
        if extent != 1
    )


def places(definition: Definition) -> Iterator[tuple[int, ...]]:
    """The values of the reduced axes, one tuple an element of the window."""
    return itertools.product(*(range(extent) for _, extent in definition.reduced))


def combined(kind: ReduceKind, terms: list[Expr]) -> Expr:
    """The terms combined as a balanced tree."""
    while len(terms) > 1:
        pairs = itertools.zip_longest(terms[::2], terms[1::2])
        terms = [a if b is None else COMBINE[kind](a, b) for a, b in pairs]
    return terms[0]
