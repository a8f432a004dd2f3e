"""Independent groups that gain by sharing a launch: the last step of the greedy search.

Each group is offered to the latest few before it: what is joined was then computed at about the
same time, and the work grows with the number of groups. Matrix products are joined first, and first
with those as deep in the graph: the second products of several chains then wait for nothing but the
first ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..order import topological
from .greedy import merge_gain
from .moves import Merge, MoveKind, fusible, holds_independent, merge_makes_cycle, merges_of
from .search_state import State

REACH = 4  # groups before it that a group is offered to


def join_independent(state: State) -> None:
    """Joins independent groups that gain by sharing a launch."""
    depth = _depths(state)
    for same in (True, False):
        _join(state, products=True, depth=depth if same else None)
    _join(state, products=False)
    state.changed.clear()


def _join(state: State, products: bool, depth: Mapping[int, int] | None = None) -> None:
    """Offers each group with matrix products (or without) to those before it, of its depth where
    that is given.
    """
    before: list[int] = []
    for gid in sorted(g for g in state.owned if fusible(state, g)):
        if not holds_independent(state, gid):
            continue
        if bool(state.cost(gid).fit.contractions) is not products:
            continue
        for move in _offers(state, gid, before, products):
            if depth is not None and depth[move.first] != depth[move.second]:
                continue
            gain = merge_gain(state, move, last=True)
            if gain is not None and not merge_makes_cycle(state, move):
                state.merge(move.first, move.second, move.copies)
                break
        else:
            before.append(gid)


def _offers(state: State, gid: int, before: list[int], products: bool) -> Iterator[Merge]:
    """Moves that join a group to one before it: products that share an operand come first."""
    if products:
        known = set(before)
        for move in merges_of(state, gid):
            other = move.first if move.second == gid else move.second
            if move.kind is MoveKind.SIBLING and other in known:
                yield Merge(move.kind, other, gid, move.copies)
    for other in reversed(before[-REACH:]):
        yield Merge(MoveKind.HORIZONTAL, other, gid)


def _depths(state: State) -> dict[int, int]:
    """How many kernels stand behind each other in front of each live group, at most."""
    live = sorted(g for g in state.owned if state.alive(g))
    sources = {g: state.sources(state.computed(g)) for g in live}
    found: dict[int, int] = {}
    for gid in topological(sources, {g: min(state.owned[g]) for g in live}):
        behind = max((found.get(s, 0) for s in sources[gid] if s != gid), default=0)
        found[gid] = behind + fusible(state, gid)
    return found
