"""Bytes by footprint and evaluation counts of a group: how much of each tensor is touched, how
often each block runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ...ir.access import Block, Pipe
from ...ir.extents import assumed_product
from ...plan.group_view import GroupView
from .block_facts import Index, index_of, is_identity, points, touched_elements

__all__ = [
    "VECTOR_ELEMENTS",
    "Evaluations",
    "costly",
    "evaluations",
    "footprint_bytes",
    "is_identity",
    "operations",
    "points",
    "reached",
]

# Elements for which one thread evaluates an operand that does not vary along the contiguous axis:
# the 16-byte vector of a
# half-precision kernel.
VECTOR_ELEMENTS = 8
UNKNOWN_SLOTS = 4.0
"""Slots of a special function that the profile does not name: a few hardware instructions."""


def footprint_bytes(group: GroupView, tensor: int) -> float:
    """Bytes of an input that the group's reads touch at least once, at most the whole tensor."""
    index = index_of(group)
    found = index.footprints.get(tensor)
    if found is None:
        found = index.footprints[tensor] = _footprint(group, index, tensor)
    return found


def _footprint(group: GroupView, index: Index, tensor: int) -> float:
    whole = group.tensor_bytes(tensor)
    touched = 0.0
    shares = reached(group)
    reads = index.touched.get(tensor, ())
    if tensor in index.made:
        pairs = zip(group.blocks, index.facts, strict=True)
        reads = [(r.touched, id(b)) for b, own in pairs for r in own.reads if r.tensor == tensor]
    for size, block in reads:
        touched += size * shares.get(block, 1.0) if shares else size
        if touched >= whole:
            return float(whole)
    return touched


def reached(group: GroupView) -> dict[int, float]:
    """Share of the domain of blocks, by `id`, that anything needs, where it is not all of it: what
    only a slice is taken of is not computed elsewhere.
    """
    return group.once("reached", lambda: _reached(group)) if index_of(group).slices else {}


def _reached(group: GroupView) -> dict[int, float]:
    shares: dict[int, float] = {}
    outputs = frozenset(group.outputs)
    for block in reversed(group.blocks):
        if block.reduction is not None or any(w.tensor in outputs for w in block.writes):
            continue
        needed = 0.0
        for write in block.writes:
            shape = group.graph.tensors[write.tensor].shape
            whole = assumed_product(shape)
            for reader, access in group.readers_of.get(write.tensor, ()):
                part = touched_elements(reader, access, shape) / whole if whole else 1.0
                needed += part * shares.get(id(reader), 1.0)
                if needed >= 1.0:
                    break
        if 0.0 < needed < 1.0:
            shares[id(block)] = needed
    return shares


class Evaluations(NamedTuple):
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
    index = index_of(group)
    facts, made = index.facts, index.made
    counts = [0.0] * len(facts)
    worst, worst_block = 1.0, None
    kept = once.union(group.outputs)
    shared: dict[int, float] = {}  # of a tensor, by all readers at their own points
    extra: dict[int, float] = {}  # by others, each by itself
    shares = reached(group)
    for k in range(len(facts) - 1, -1, -1):
        own, tensor, tensors, reduces, works, reads = facts[k][:6]
        if shares:
            own *= shares.get(id(group.blocks[k]), 1.0)
        if tensor is not None:
            together, more = shared.get(tensor, 0.0), extra.get(tensor, 0.0)
            stays = reduces or tensor in kept
        else:
            together = max((shared.get(t, 0.0) for t in tensors), default=0.0)
            more = sum(extra.get(t, 0.0) for t in tensors)
            stays = reduces or not kept.isdisjoint(tensors)
        if stays and own > together:
            together = own
        count = together + more
        if not count:
            continue
        if count < own:
            count = own
        counts[k] = count
        if count > own > 0.0 and works and count / own > worst:
            worst, worst_block = count / own, group.blocks[k]
        for t, at_own, guarded, lanes, _ in reads:
            if t in once or t not in made:
                continue
            used, own_source = count, made[t]
            if guarded:
                used = min(used, own_source * max(1.0, used / own))
            if at_own or own_source == used:
                if used > shared.get(t, 0.0):
                    shared[t] = used
            else:
                extra[t] = extra.get(t, 0.0) + used / min(hoist, lanes)
    return Evaluations(tuple(counts), worst, worst_block)


def operations(
    group: GroupView, counts: tuple[float, ...], slots: Mapping[str, float]
) -> dict[str, float]:
    """Operations by pipe over the whole group; those of contractions are not among them (they are
    `tensor_flops`). Those of the special-function unit are counted in its slots.
    """
    total = dict.fromkeys(_PIPES, 0.0)
    for own, count in zip(index_of(group).facts, counts, strict=True):
        if not count:
            continue
        for pipe, number in own.counts:
            total[pipe] += number * count
        for name, number in own.functions:
            total["special"] += (slots.get(name, UNKNOWN_SLOTS) - 1) * number * count
        if own.conversions:
            total["conversion"] += own.conversions * count
    return total


_PIPES = (*(pipe.value for pipe in Pipe), "conversion")


def costly(block: Block) -> bool:
    """Whether recomputing the block costs more than arithmetic: special functions, divisions,
    integer division.
    """
    return any(pipe is not Pipe.ARITHMETIC for pipe, _ in block.counts)
