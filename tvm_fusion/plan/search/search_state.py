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
from ..order import Links
from ..refusal import Refusal

# Who reads what an operator's instances compute, in a search state.
#
# An operator has one home instance, in the group that owns it, and a copy in each group that
# recomputes it. Whatever a group holds it reads from itself.


def home_needed(
    state: State,
    op: int,
    replaced: tuple[int, ...] = (),
    live: Mapping[int, bool] | None = None,
) -> bool:
    """Whether somebody outside the replaced groups reads the home instance of `op`; `live`
    overrides what is known of home instances.
    """
    if state.links.pinned[op]:
        return True
    own = state.home[op]
    holders = state.copied_in.get(op, ())
    for c in state.links.consumers[op]:
        for gid in instances(state, c, live or {}):
            if gid not in replaced and (gid == own or gid not in holders):
                return True
    return False


def instances(state: State, op: int, live: Mapping[int, bool]) -> Iterator[int]:
    """The groups that compute an operator; `live` overrides what is known of home instances."""
    if live.get(op, state.live[op]):
        yield state.home[op]
    if op in state.copied_in:
        yield from state.copied_in[op]


def read_outside(
    state: State, tensors: Iterable[int], replaced: tuple[int, ...], live: Mapping[int, bool]
) -> list[int]:
    """Those of some operators' results that a group reads which is not replaced and holds no copy
    of the operator; `live` as in `home_needed`.
    """
    nodes, home, copied_in = state.graph.tensors, state.home, state.copied_in
    known = state.live
    found = []
    for t in tensors:
        tensor = nodes[t]
        if tensor.is_output:
            found.append(t)
            continue
        holders = copied_in.get(tensor.producer, ())
        for c in tensor.consumers:
            if live.get(c, known[c]) if live else known[c]:
                gid = home[c]
                if gid not in replaced and gid not in holders:
                    found.append(t)
                    break
            if c in copied_in and any(
                gid not in replaced and gid not in holders for gid in copied_in[c]
            ):
                found.append(t)
                break
    return found


# An order in which the groups of a search state can run, kept up to date from merge to merge.
#
# A merge of a and b may not leave a group between them that reads one and is read by the other.
# Such a group has a place between theirs, so the search for it never looks beyond; what has to move
# is found on the way (Pearce and Kelly, A dynamic topological sort algorithm for directed acyclic
# graphs, ACM JEA 11, 2006).


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
