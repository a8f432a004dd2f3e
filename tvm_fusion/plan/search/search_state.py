"""The search state: which group owns each operator, and which groups recompute it.

Every operator has one home group. Other groups may hold copies of it (rematerialisation; views are
copied freely). A home instance that nobody reads any more is dead and costs nothing. A group's id
is the number of an operator it owns.

All of it is kept up to date move by move: a move costs what it touches, not what the graph holds.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from ...ir.graph import FusionGraph, bits
from ..legality import Costed, Evaluator
from ..refusal import Refusal
from ..regions.edges import Links
from .group_order import GroupOrder
from .instances import home_needed, read_outside

Members = frozenset[int]
NOTHING: Members = frozenset()


@dataclass
class State:
    """See the module docstring.

    Attributes
    ----------
    evaluator : Evaluator
    owned, copies : operators of each group; groups without copies are not in `copies`
    home : the group that owns each operator
    copied_in : groups that hold a copy of an operator, where there are any
    live : whether the home instance of each operator is needed
    order : an order in which the groups can run
    version : how often the cost of a group has changed
    changed : groups whose cost has changed since somebody emptied this
    """

    evaluator: Evaluator
    owned: dict[int, Members] = field(default_factory=dict)
    copies: dict[int, Members] = field(default_factory=dict)
    home: list[int] = field(default_factory=list)
    copied_in: dict[int, set[int]] = field(default_factory=dict)
    live: list[bool] = field(default_factory=list)
    order: GroupOrder = field(default_factory=GroupOrder)
    version: list[int] = field(default_factory=list)
    changed: set[int] = field(default_factory=set)
    _costs: dict[int, Costed | Refusal] = field(default_factory=dict)
    _log: dict[int, tuple[Costed | Refusal | None, int, bool]] | None = None

    @classmethod
    def unfused(cls, evaluator: Evaluator) -> State:
        """Every operator alone."""
        state = cls(evaluator)
        count = len(evaluator.graph.ops)
        state.owned = {op: frozenset((op,)) for op in range(count)}
        state.home = list(range(count))
        state.version = [0] * count
        state.live = [True] * count
        for op in reversed(range(count)):
            state.live[op] = home_needed(state, op)
        state.order = GroupOrder.of(evaluator.graph)
        return state

    @property
    def graph(self) -> FusionGraph:
        return self.evaluator.graph

    @property
    def links(self) -> Links:
        return self.evaluator.links

    def members(self, gid: int) -> Members:
        copies = self.copies.get(gid)
        return self.owned[gid] | copies if copies else self.owned[gid]

    def computed(self, gid: int) -> Members:
        """The members that the group's launch computes: without what nobody needs any more."""
        needed = frozenset(op for op in self.owned[gid] if self.live[op])
        copies = self.copies.get(gid)
        return needed | copies if copies else needed

    def alive(self, gid: int) -> bool:
        return self.live[gid] or any(self.live[op] for op in self.owned[gid])

    def cost(self, gid: int) -> Costed | Refusal:
        """The group as it stands; a dead group may not be asked."""
        if gid not in self._costs:
            copies = self.copies.get(gid, NOTHING)
            self._costs[gid] = self.evaluate(self.owned[gid], copies, (gid,))
        return self._costs[gid]

    def time_us(self, gid: int) -> float:
        """Predicted time of a group; nothing for a dead one and for a lone view."""
        if not self.alive(gid):
            return 0.0
        costed = self.cost(gid)
        return 0.0 if isinstance(costed, Refusal) or costed.view.is_view else costed.time_us

    def evaluate(
        self, owned: Members, copies: Members, replaced: tuple[int, ...]
    ) -> Costed | Refusal:
        """The group of these operators, were it to stand in place of the replaced groups."""
        members = {op for op in owned if self.live[op]} | (copies - owned)
        for op in sorted(copies & owned, reverse=True):  # read here again, once the copies go
            if not members.isdisjoint(self.links.consumers[op]):
                members.add(op)
        copies -= owned
        live: dict[int, bool] = {}
        for op in sorted(copies, reverse=True):
            live[op] = home_needed(self, op, replaced, live)
        members = sorted(members)
        ops = self.graph.ops
        made = [t for op in members if op not in copies for t in ops[op].outputs]
        outputs = read_outside(self, made, replaced, live)
        return self.evaluator.group(tuple(members), tuple(outputs), bits(copies))

    def evaluate_merge(self, a: int, b: int, views: Members) -> Costed | Refusal:
        """Two groups as one, with copies of the views between them."""
        if views or a in self.copies or b in self.copies:
            copies = self.copies.get(a, NOTHING) | self.copies.get(b, NOTHING) | views
            return self.evaluate(self.owned[a] | self.owned[b], copies, (a, b))
        one, two = self.cost(a), self.cost(b)
        if isinstance(one, Refusal) or isinstance(two, Refusal):
            return self.evaluate(self.owned[a] | self.owned[b], NOTHING, (a, b))
        made = (*one.view.outputs, *two.view.outputs)
        outputs = tuple(sorted(read_outside(self, made, (a, b), {})))
        return self.evaluator.group(tuple(sorted(one.view.ops + two.view.ops)), outputs)

    def readers(self, owned: Iterable[int], replaced: tuple[int, ...]) -> set[int]:
        """Groups, other than the replaced ones, that read what `owned` writes."""
        found: set[int] = set()
        consumers, live, home = self.links.consumers, self.live, self.home
        for op in owned:
            for c in consumers[op]:
                if live[c] and home[c] not in found and op not in self.members(home[c]):
                    found.add(home[c])
                if c in self.copied_in:
                    found.update(g for g in self.copied_in[c] if op not in self.members(g))
        return found.difference(replaced)

    def sources(self, members: Members) -> set[int]:
        """Home groups of what these operators read from outside."""
        home, producers = self.home, self.links.producers
        return {home[p] for op in members for p in producers[op] if p not in members}

    def merge(self, a: int, b: int, views: Members) -> int:
        """Group b joins group a, with copies of the views between them.

        Raises
        ------
        ValueError
            Another group stands between the two: they would depend on each other in a circle.
        """
        self.order.merge(self, a, b, views)
        merged = None
        if not (views or a in self.copies or b in self.copies):
            merged = self.evaluate_merge(a, b, views)  # nothing outside the two changes
        before = (self.copies.pop(a, NOTHING), self.copies.pop(b, NOTHING))
        joined = self.owned.pop(b)
        self.owned[a] |= joined
        for op in joined:
            self.home[op] = a
        for gid, copies in zip((a, b), before, strict=True):
            for op in copies:
                self._forget_copy(op, gid)
        copies = (before[0] | before[1] | views) - self.owned[a]
        if copies:
            self.copies[a] = copies
            for op in copies:
                self.copied_in.setdefault(op, set()).add(a)
        self._touch(a)
        self._costs.pop(b, None)
        self._settle((before[0] | before[1] | views) & self.owned[a] | copies)
        if merged is not None:
            self._costs[a] = merged
        return a

    def add_copies(self, added: Mapping[int, Members]) -> dict[int, Members]:
        """Groups get copies of operators; returns the copies they held before, for `set_copies`."""
        new = {
            gid: (self.copies.get(gid, NOTHING) | ops) - self.owned[gid]
            for gid, ops in added.items()
        }
        return self.set_copies(new)

    def set_copies(self, copies: Mapping[int, Members]) -> dict[int, Members]:
        """Sets which copies groups hold; returns those they held before."""
        before, moved = {}, set()
        for gid, ops in copies.items():
            before[gid] = self.copies.pop(gid, NOTHING)
            if ops:
                self.copies[gid] = ops
            for op in before[gid] - ops:
                self._forget_copy(op, gid)
            for op in ops - before[gid]:
                self.copied_in.setdefault(op, set()).add(gid)
            moved |= before[gid] ^ ops
            self._touch(gid)
        self._settle(moved)
        return before

    def trial_makes_cycle(self) -> bool:
        """Whether a group that the trial has changed reads one that cannot come before it: what
        was dead may be read again.
        """
        place = self.order.place
        return any(
            place[source] >= place[gid]
            for gid in self._log or ()
            if self.alive(gid)
            for source in self.sources(self.computed(gid))
            if source != gid
        )

    @contextmanager
    def trial(self, added: Mapping[int, Members]) -> Iterator[None]:
        """Groups hold more copies for as long as the context lasts."""
        self._log = log = {}
        before = self.add_copies(added)
        try:
            yield
        finally:
            self.set_copies(before)
            self._log = None
            for gid, (costed, version, changed) in log.items():
                self._costs.pop(gid, None)
                if costed is not None:
                    self._costs[gid] = costed
                self.version[gid] = version
                if not changed:
                    self.changed.discard(gid)

    def _forget_copy(self, op: int, gid: int) -> None:
        holders = self.copied_in[op]
        holders.discard(gid)
        if not holders:
            del self.copied_in[op]

    def _settle(self, moved: Iterable[int]) -> None:
        """Finds which home instances are needed after copies of some operators came or went."""
        producers, home = self.links.producers, self.home
        waiting = set(moved)
        for op in moved:
            self._touch(home[op])
            waiting.update(producers[op])
        for op in list(waiting):
            self._touch(home[op])
        heap = [-op for op in waiting]
        heapq.heapify(heap)
        while heap:
            op = -heapq.heappop(heap)
            needed = home_needed(self, op)
            if needed == self.live[op]:
                continue
            self.live[op] = needed
            self._touch(home[op])
            for p in producers[op]:
                self._touch(home[p])
                if p not in waiting:
                    waiting.add(p)
                    heapq.heappush(heap, -p)

    def _touch(self, gid: int) -> None:
        costed = self._costs.pop(gid, None)
        if self._log is not None and gid not in self._log:
            self._log[gid] = (costed, self.version[gid], gid in self.changed)
        self.version[gid] += 1
        self.changed.add(gid)
