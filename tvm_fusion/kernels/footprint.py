"""Bytes by footprint and evaluation counts of a group: how much of each tensor is touched, how
often each block runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..ir.access import Access, Affine, Block, Pipe
from ..ir.extents import assumed, assumed_product
from .base import GroupView, dtype_bytes

# Elements for which one thread evaluates an operand that does not vary along the contiguous axis:
# the 16-byte vector of a
# half-precision kernel.
VECTOR_ELEMENTS = 8
UNKNOWN_SLOTS = 4.0
"""Slots of a special function that the profile does not name: a few hardware instructions."""


def points(block: Block) -> int:
    """Iterations of a block's whole domain."""
    known = block.derived.get("points")
    if known is None:
        known = block.derived["points"] = assumed_product(a.extent for a in block.axes)
    return known


def is_identity(block: Block, access: Access) -> bool:
    """The access reads, at each point, the element that the point writes: same axes, same order."""
    return access.index == block.writes[0].index


def _identities(block: Block) -> tuple[bool, ...]:
    """`is_identity` of all reads."""
    known = block.derived.get("identities")
    if known is None:
        known = tuple(is_identity(block, access) for access in block.reads)
        block.derived["identities"] = known
    return known


def footprint_bytes(group: GroupView, tensor: int) -> float:
    """Bytes of an input that the group's reads touch at least once, at most the whole tensor."""
    t = group.graph.tensors[tensor]
    size, whole = dtype_bytes(t.dtype), group.tensor_bytes(tensor)
    touched = 0.0
    shares = reached(group)
    for block, access in group.readers_of.get(tensor, ()):
        touched += _touched_elements(block, access, t.shape) * size * shares.get(id(block), 1.0)
        if touched >= whole:
            return float(whole)
    return touched


def reached(group: GroupView) -> dict[int, float]:
    """Share of the domain of blocks, by `id`, that anything needs, where it is not all of it: what
    only a slice is taken of is not computed elsewhere.
    """
    return group.once("reached", lambda: _reached(group))


def _reached(group: GroupView) -> dict[int, float]:
    shares: dict[int, float] = {}
    if not any(_slices(group, block) for block in group.blocks):
        return shares
    outputs = frozenset(group.outputs)
    for block in reversed(group.blocks):
        if block.reduction is not None or any(w.tensor in outputs for w in block.writes):
            continue
        needed = 0.0
        for write in block.writes:
            shape = group.graph.tensors[write.tensor].shape
            whole = assumed_product(shape)
            for reader, access in group.readers_of.get(write.tensor, ()):
                part = _touched_elements(reader, access, shape) / whole if whole else 1.0
                needed += part * shares.get(id(reader), 1.0)
                if needed >= 1.0:
                    break
        if 0.0 < needed < 1.0:
            shares[id(block)] = needed
    return shares


def _slices(group: GroupView, block: Block) -> bool:
    """Whether some read of the block leaves a part of its tensor untouched."""
    known = block.derived.get("slices")
    if known is None:
        shapes = ((a, group.graph.tensors[a.tensor].shape) for a in block.reads)
        known = any(_touched_elements(block, a, s) < assumed_product(s) for a, s in shapes)
        block.derived["slices"] = known
    return known


def _touched_elements(block: Block, access: Access, shape) -> float:
    known = access.derived.get("touched")
    if known is None:
        known = access.derived["touched"] = _count_touched(block, access, shape)
    return known


def _count_touched(block: Block, access: Access, shape) -> float:
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
    counts = [0.0] * len(blocks)
    worst, worst_block = 1.0, None
    kept = once.union(group.outputs)
    shared: dict[int, float] = {}  # of a tensor, by all readers at their own points
    extra: dict[int, float] = {}  # by others, each by itself
    shares = reached(group)
    for k in range(len(blocks) - 1, -1, -1):
        block = blocks[k]
        own = points(block) * shares.get(id(block), 1.0)
        tensors = [w.tensor for w in block.writes]
        if len(tensors) == 1:
            together, more = shared.get(tensors[0], 0.0), extra.get(tensors[0], 0.0)
        else:
            together = max((shared.get(t, 0.0) for t in tensors), default=0.0)
            more = sum(extra.get(t, 0.0) for t in tensors)
        if block.reduction is not None or not kept.isdisjoint(tensors):
            together = max(together, own)
        count = counts[k] = max(own, together + more) if together or more else 0.0
        ratio = count / own if own else 0.0
        if ratio > worst and block.counts:
            worst, worst_block = ratio, block
        for access, identity in zip(block.reads, _identities(block), strict=True):
            t = access.tensor
            source = group.writer_of.get(t)
            if source is None or t in once:
                continue
            used, own_source = count, points(source)
            if access.guarded:
                used = min(used, own_source * max(1.0, used / own))
            if identity or own_source == used:
                shared[t] = max(shared.get(t, 0.0), used)
            else:
                extra[t] = extra.get(t, 0.0) + used / _hoisted(block, access, hoist)
    return Evaluations(tuple(counts), worst, worst_block)


def _hoisted(block: Block, access: Access, hoist: int) -> float:
    last = max(block.spatial, default=None)
    if last is None or last in access.axes:
        return 1.0
    return min(hoist, assumed(block.axes[last].extent))


def operations(
    group: GroupView, counts: tuple[float, ...], slots: Mapping[str, float]
) -> dict[str, float]:
    """Operations by pipe over the whole group; those of contractions are not among them (they are
    `tensor_flops`). Those of the special-function unit are counted in its slots.
    """
    total: dict[str, float] = {pipe.value: 0.0 for pipe in Pipe}
    total["conversion"] = 0.0
    for block, count in zip(group.blocks, counts, strict=True):
        if not count or block.is_contraction:
            continue
        for pipe, number in block.counts:
            total[pipe.value] += number * count
        for name, number in block.functions:
            total["special"] += (slots.get(name, UNKNOWN_SLOTS) - 1) * number * count
        total["conversion"] += block.conversions * count
    return total


def costly(block: Block) -> bool:
    """Whether recomputing the block costs more than arithmetic: special functions, divisions,
    integer division.
    """
    return any(pipe is not Pipe.ARITHMETIC for pipe, _ in block.counts)
