"""An order in which the groups of a search state can run, kept up to date from merge to merge.

A merge of a and b may not leave a group between them that reads one and is read by the other. Such
a group has a place between theirs, so the search for it never looks beyond; what has to move is
found on the way (Pearce and Kelly, A dynamic topological sort algorithm for directed acyclic
graphs, ACM JEA 11, 2006).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...ir.graph import FusionGraph, bits

if TYPE_CHECKING:
    from .search_state import Members, State


@dataclass
class GroupOrder:
    """See the module docstring.

    Attributes
    ----------
    place : of each group; a group comes after all that its launch reads (dead members read
        nothing)
    above, below : bitsets of the operators that those a group owns depend on, and that depend on
        them
    """

    place: list[int] = field(default_factory=list)
    above: list[int] = field(default_factory=list)
    below: list[int] = field(default_factory=list)

    @staticmethod
    def of(graph: FusionGraph) -> GroupOrder:
        """Every operator alone, in the order of their numbers."""
        count = len(graph.ops)
        return GroupOrder(list(range(count)), list(graph.ancestors), list(graph.descendants))

    def makes_cycle(self, state: State, a: int, b: int, views: Members) -> bool:
        """Whether a path leaves the two groups, once they are one, and comes back to it."""
        if self._surely_between(state, a, b, views) or self._reads_late(state, a, b, views):
            return True
        return self._behind(state, a, b, views) is None

    def merge(self, state: State, a: int, b: int, views: Members) -> None:
        """Gives group a, which b is about to join, a place that suits both.

        Raises
        ------
        ValueError
            There is none.
        """
        behind = self._behind(state, a, b, views)
        if behind is None:
            raise ValueError(f"groups {a} and {b} depend on each other through a third")
        self._move(state, a, b, views, behind)
        self.above[a] |= self.above[b]
        self.below[a] |= self.below[b]

    def _surely_between(self, state: State, a: int, b: int, views: Members) -> bool:
        """Whether operators of neither group depend on one and feed the other.

        Where others hold copies of what the groups own they may not read it from them.
        """
        between = self.below[a] & self.above[b] | self.below[b] & self.above[a]
        if not between:
            return False
        members = state.members(a) | state.members(b) | views
        if not between & ~bits(members):
            return False
        copied = state.copied_in.keys()
        return copied.isdisjoint(state.owned[a]) and copied.isdisjoint(state.owned[b])

    def _reads_late(self, state: State, a: int, b: int, views: Members) -> bool:
        """Whether the copied views read what nobody needed before, or only groups placed behind:
        the group that owns it may have any place.
        """
        last = max(self.place[a], self.place[b])
        read = {p for op in views for p in state.links.producers[op] if p not in views}
        return any(
            not state.live[p] or self.place[state.home[p]] > last
            for p in read
            if state.home[p] not in (a, b)
        )

    def _behind(self, state: State, a: int, b: int, views: Members) -> set[int] | None:
        """Groups placed before the later of the two that depend on either; None if one of them
        feeds either.
        """
        place, last = self.place, max(self.place[a], self.place[b])
        owned = state.owned[a] | state.owned[b]
        stack = [g for g in state.readers(owned, (a, b)) if place[g] < last]
        if not stack:
            return set()
        targets = state.sources(state.computed(a) | state.computed(b) | views)
        found = set(stack)
        while stack:
            gid = stack.pop()
            if gid in targets:
                return None
            for reader in state.readers(state.owned[gid], (gid, a, b)):
                if place[reader] < last and reader not in found:
                    found.add(reader)
                    stack.append(reader)
        return found

    def _move(self, state: State, a: int, b: int, views: Members, behind: set[int]) -> None:
        place = self.place
        last = max(place[a], place[b])
        if not behind:
            place[a] = last
            return
        members = state.computed(a) | state.computed(b) | views
        before = self._feeding(state, members, (a, b), min(place[a], place[b]))
        pool = sorted(place[g] for g in (*before, a, b, *behind))
        self._assign(sorted(before, key=place.__getitem__), pool)
        self._assign(sorted(behind, key=place.__getitem__), pool[len(before) + 2 :])
        place[a] = pool[len(before)]

    def _feeding(
        self, state: State, members: Members, replaced: tuple[int, int], first: int
    ) -> set[int]:
        """Groups placed behind `first` that these operators depend on."""
        place = self.place
        stack = [g for g in state.sources(members) if g not in replaced and place[g] > first]
        found = set(stack)
        while stack:
            gid = stack.pop()
            for source in state.sources(state.computed(gid)):
                if place[source] > first and source not in found and source != gid:
                    found.add(source)
                    stack.append(source)
        return found

    def _assign(self, groups: Iterable[int], places: list[int]) -> None:
        for gid, free in zip(groups, places, strict=False):
            self.place[gid] = free
