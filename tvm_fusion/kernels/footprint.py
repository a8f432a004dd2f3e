"""Bytes by footprint and evaluation counts of a group: how much of each tensor is touched, how
often each block runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.access import Access, Affine, Block, Pipe
from ..ir.extents import assumed, assumed_product
from .base import GroupView, dtype_bytes

# Elements for which one thread evaluates an operand that does not vary along the contiguous axis:
# the 16-byte vector of a
# half-precision kernel.
VECTOR_ELEMENTS = 8


def points(block: Block) -> int:
    """Iterations of a block's whole domain."""
    return assumed_product(a.extent for a in block.axes)


def is_identity(block: Block, access: Access) -> bool:
    """The access reads, at each point, the element that the point writes: same axes, same order."""
    return access.index == block.writes[0].index


def footprint_bytes(group: GroupView, tensor: int) -> float:
    """Bytes of an input that the group's reads touch at least once, at most the whole tensor."""
    t = group.graph.tensors[tensor]
    touched = 0.0
    for block, access in group.readers_of.get(tensor, ()):
        touched += _touched_elements(block, access, t.shape)
    return min(touched, assumed_product(t.shape)) * dtype_bytes(t.dtype)


def _touched_elements(block: Block, access: Access, shape) -> float:
    elements = 1.0
    for index, extent in zip(access.index, shape, strict=False):
        size = assumed(extent)
        if isinstance(index, Affine):
            steps = [
                abs(c) * (assumed(block.axes[i].extent) - 1)
                for i, c in enumerate(index.coefficients)
            ]
            count = assumed_product(assumed(block.axes[i].extent) for i in index.axes)
            elements *= min(size, sum(steps) + 1, count)
        else:
            count = assumed_product(assumed(block.axes[i].extent) for i in index.axes)
            elements *= min(size, count)
    return min(elements, points(block)) if access.axes else elements


@dataclass(frozen=True, slots=True)
class Evaluations:
    """Points at which each block of a group runs, and the largest ratio to its own domain."""

    counts: tuple[float, ...]
    worst: float
    worst_block: Block | None


def evaluations(
    group: GroupView, once: frozenset[int] = frozenset(), hoist: int = VECTOR_ELEMENTS
) -> Evaluations:
    """How often each block is evaluated when every pointwise producer is computed where it is used.

    Parameters
    ----------
    group : GroupView
    once : frozenset of int
        Tensors that the kernel computes exactly once whatever reads them (reductions,
        accumulators).
    hoist : int
        How many points along the contiguous axis share one evaluation of an operand that does not
        vary along it.

    Notes
    -----
    A producer read at the consumer's own index is computed once for all such consumers. Any other
    read multiplies: one through a broadcast runs once per consumer point (divided by `hoist` if it
    does not vary along the last axis), a guarded one at most once per element for each time that
    its consumer runs.
    """
    blocks = group.blocks
    counts: dict[int, float] = {}
    worst, worst_block = 1.0, None
    for k in reversed(range(len(blocks))):
        block = blocks[k]
        own = points(block)
        tensors = {w.tensor for w in block.writes}
        shared, extra = 0.0, 0.0
        if tensors & (set(group.outputs) | once) or block.reduction is not None:
            shared = own
        for j in range(k + 1, len(blocks)):
            for access in blocks[j].reads:
                if access.tensor not in tensors or access.tensor in once:
                    continue
                used = counts[j]
                if access.guarded:
                    used = min(used, own * max(1.0, used / points(blocks[j])))
                if is_identity(blocks[j], access) or own == used:
                    shared = max(shared, used)
                else:
                    extra += used / _hoisted(blocks[j], access, hoist)
        counts[k] = max(own, shared + extra) if shared or extra else 0.0
        ratio = counts[k] / own if own else 0.0
        if ratio > worst and block.operations():
            worst, worst_block = ratio, block
    return Evaluations(tuple(counts[k] for k in range(len(blocks))), worst, worst_block)


def _hoisted(block: Block, access: Access, hoist: int) -> float:
    last = max(block.spatial, default=None)
    if last is None or last in access.axes:
        return 1.0
    return min(hoist, assumed(block.axes[last].extent))


def operations(group: GroupView, counts: tuple[float, ...]) -> dict[str, float]:
    """Operations by pipe over the whole group; those of contractions are not among them (they are
    `tensor_flops`).
    """
    total: dict[str, float] = {pipe.value: 0.0 for pipe in Pipe}
    for block, count in zip(group.blocks, counts, strict=True):
        for pipe, number in () if block.is_contraction else block.counts:
            total[pipe.value] += number * count
    return total


def costly(block: Block) -> bool:
    """Whether recomputing the block costs more than arithmetic: special functions, divisions,
    integer division.
    """
    return any(pipe is not Pipe.ARITHMETIC for pipe, _ in block.counts)
