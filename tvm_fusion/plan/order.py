"""Topological order of groups."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Set
from dataclasses import dataclass

from ..ir.graph import FusionGraph, OpKind

# Who feeds whom in a graph, worked out once.


@dataclass(frozen=True, slots=True)
class Links:
    """Facts about each operator, by its number.

    Attributes
    ----------
    producers, consumers : operators it reads from, and that read from it, ascending
    pinned : whether it has to be computed whoever reads it: results, and what cannot be read
    view : whether it only renames indices
    fusible : whether a kernel class may compute it with others
    """

    producers: tuple[tuple[int, ...], ...]
    consumers: tuple[tuple[int, ...], ...]
    pinned: tuple[bool, ...]
    view: tuple[bool, ...]
    fusible: tuple[bool, ...]

    @staticmethod
    def of(graph: FusionGraph) -> Links:
        tensors = graph.tensors
        return Links(
            tuple(graph.producers(op.id) for op in graph.ops),
            tuple(graph.consumers(op.id) for op in graph.ops),
            tuple(
                op.kind is OpKind.OPAQUE or any(tensors[t].is_output for t in op.outputs)
                for op in graph.ops
            ),
            tuple(op.kind is OpKind.VIEW for op in graph.ops),
            tuple(op.kind is OpKind.CALL_TIR for op in graph.ops),
        )


def topological(sources: Mapping[int, Set[int]], rank: Mapping[int, int]) -> list[int]:
    """Groups such that each comes after its sources; of those that are ready, the one of lowest
    rank first.

    Raises
    ------
    ValueError
        Groups depend on each other in a circle.
    """
    waiting = {g: {s for s in found if s != g} for g, found in sources.items()}
    readers: dict[int, list[int]] = {}
    for g, found in waiting.items():
        for s in found:
            readers.setdefault(s, []).append(g)
    ready = [(rank[g], g) for g, found in waiting.items() if not found]
    heapq.heapify(ready)
    order = []
    while ready:
        _, g = heapq.heappop(ready)
        order.append(g)
        for r in readers.get(g, ()):
            waiting[r].discard(g)
            if not waiting[r]:
                heapq.heappush(ready, (rank[r], r))
    if len(order) != len(waiting):
        raise ValueError("groups depend on each other in a circle")
    return order
