"""Topological order of groups."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Set


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
