"""A solution while it is improved: its launches in order, who reads what, and the windows through
which it is looked at.

Lone views are left out; they are added again at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...ir.graph import FusionGraph
from ..order import topological
from ..regions.regions import behind_views
from .solution import (
    Launch,
    Solution,
    in_order,
    is_kernel,
    is_view,
    lone_views,
    members_of,
    produced_reads,
    wanted_tensors,
)

REACH = 256  # launches between two of a window: all of them are looked at for paths outside


@dataclass
class Working:
    """See the module docstring.

    Attributes
    ----------
    graph : FusionGraph
    order : list of Launch
    place : of each launch in `order`
    readers, writer : launches that read and write each tensor; views are looked through
    reads : tensors each launch reads
    makers : launches that compute each operator
    results : tensors that are results of the graph
    """

    graph: FusionGraph
    order: list[Launch]
    place: dict[Launch, int] = field(default_factory=dict)
    readers: dict[int, set[Launch]] = field(default_factory=dict)
    writer: dict[int, Launch] = field(default_factory=dict)
    reads: dict[Launch, tuple[int, ...]] = field(default_factory=dict)
    makers: dict[int, set[Launch]] = field(default_factory=dict)
    results: frozenset[int] = frozenset()

    @classmethod
    def of(cls, graph: FusionGraph, launches: Solution) -> Working:
        order = [launch for launch in launches if not is_view(graph, launch)]
        working = cls(graph, order, {launch: k for k, launch in enumerate(order)})
        working.results = frozenset(
            behind_views(graph, t.id).tensor for t in graph.tensors if t.is_output
        )
        for launch in order:
            working._add(launch)
        return working

    def _add(self, launch: Launch) -> None:
        read = (behind_views(self.graph, t).tensor for t in produced_reads(self.graph, launch))
        self.reads[launch] = tuple(dict.fromkeys(read))
        for t in self.reads[launch]:
            self.readers.setdefault(t, set()).add(launch)
        for t in launch.stores:
            self.writer[t] = launch
        for op in members_of(launch.members):
            self.makers.setdefault(op, set()).add(launch)

    def _remove(self, launch: Launch) -> None:
        for t in self.reads.pop(launch):
            self.readers[t].discard(launch)
        for t in launch.stores:
            del self.writer[t]
        for op in members_of(launch.members):
            self.makers[op].discard(launch)
        del self.place[launch]

    def solution(self) -> Solution:
        """The solution, lone views included."""
        views = lone_views(self.graph, wanted_tensors(self.graph, self.order))
        return in_order(self.graph, [*self.order, *views])

    def kernels(self) -> list[Launch]:
        return [launch for launch in self.order if is_kernel(self.graph, launch)]

    def operators(self) -> int:
        """Operators in kernels, each as often as it is computed."""
        return sum(launch.members.bit_count() for launch in self.kernels())

    def closed(self, window: Iterable[Launch]) -> tuple[Launch, ...]:
        """The window as the solution stands now: launches that are gone by those that compute
        their operators, and with them the launches that write what is recomputed in it.
        """
        found: set[Launch] = set()
        waiting = list(window)
        while waiting:
            launch = waiting.pop()
            if launch in found:
                continue
            if launch in self.place:
                found.add(launch)
            for op in members_of(launch.members):
                if launch not in self.place:
                    waiting += self.makers.get(op, ())
                else:
                    made = self.graph.ops[op].outputs
                    waiting += [self.writer[t] for t in made if t in self.writer]
        return tuple(sorted(found, key=self.place.__getitem__))

    def around(self, window: Sequence[Launch]) -> tuple[list[Launch], set[int]]:
        """Other launches that stand between those of a window, and the tensors of the window that
        have to be written for launches outside, or as results.
        """
        inside = set(window)
        places = [self.place[launch] for launch in window]
        between = self.order[min(places) : max(places) + 1]
        others = [launch for launch in between if launch not in inside]
        wanted = set()
        for launch in window:
            for t in launch.stores:
                if t in self.results or not self.readers.get(t, set()) <= inside:
                    wanted.add(t)
        return others, wanted

    def replace(self, window: Sequence[Launch], new: Iterable[Launch]) -> None:
        """Puts other launches in the place of a window's."""
        places = sorted(self.place[launch] for launch in window)
        others, _ = self.around(window)
        for launch in window:
            self._remove(launch)
        new = list(new)
        for launch in new:
            self._add(launch)
        first, last = places[0], places[-1]
        self.order[first : last + 1] = self._sorted([*others, *new])
        tail = range(first, len(self.order)) if len(new) != len(window) else range(first, last + 1)
        for k in tail:
            self.place[self.order[k]] = k

    def _sorted(self, launches: list[Launch]) -> list[Launch]:
        """In an order in which they can run; those with the first operators first."""
        writer = {t: k for k, launch in enumerate(launches) for t in launch.stores}
        sources = {
            k: {writer[t] for t in self.reads[launch] if t in writer}
            for k, launch in enumerate(launches)
        }
        rank = {k: launch.members & -launch.members for k, launch in enumerate(launches)}
        return [launches[k] for k in topological(sources, rank)]

    def windows(self, most_ops: int) -> list[tuple[Launch, ...]]:
        """Windows of at most so many operators (or of two launches) that hold every pair of
        launches of which one reads what the other writes, if they stand near each other.
        """
        covered: set[tuple[int, int]] = set()
        found = []
        for launch in self.kernels():
            near = self._neighbours(launch)
            pairs = {self._pair(launch, n) for n in near}
            if not pairs or pairs <= covered:
                continue
            for window in self._grow(launch, most_ops, covered):
                found.append(window)
        return found

    def _grow(self, launch: Launch, most_ops: int, covered: set) -> list[tuple[Launch, ...]]:
        """Windows around a launch until all pairs it stands in are covered."""
        found = []
        while True:
            missing = [n for n in self._neighbours(launch) if self._pair(launch, n) not in covered]
            if not missing:
                return found
            chosen = [launch, missing[0]]
            ops = sum(c.members.bit_count() for c in chosen)
            queue = [*missing[1:], *self._neighbours(missing[0])]
            while queue:
                n = queue.pop(0)
                size = n.members.bit_count()
                if n in chosen or ops + size > most_ops:
                    continue
                chosen.append(n)
                ops += size
                queue += self._neighbours(n)
            inside = set(chosen)
            for c in chosen:
                for n in self._neighbours(c):
                    if n in inside:
                        covered.add(self._pair(c, n))
            found.append(tuple(sorted(chosen, key=lambda c: self.place[c])))

    def _pair(self, a: Launch, b: Launch) -> tuple[int, int]:
        return tuple(sorted((self.place[a], self.place[b])))

    def _neighbours(self, launch: Launch) -> list[Launch]:
        """Kernels that read what the launch writes or write what it reads, nearest first."""
        near = {r for t in launch.stores for r in self.readers.get(t, ())}
        near |= {self.writer[t] for t in self.reads[launch] if t in self.writer}
        near.discard(launch)
        own = self.place[launch]
        kernels = (
            n for n in near if abs(self.place[n] - own) <= REACH and is_kernel(self.graph, n)
        )
        return sorted(kernels, key=lambda n: (abs(self.place[n] - own), self.place[n]))
