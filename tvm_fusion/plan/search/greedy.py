"""Greedy merging by predicted gain, then rematerialisation, until nothing gains; then independent
work side by side.

Merges wait in a queue by what they gain. The gains of a group that has just grown are not asked
for at once: a neighbour's wait as the sum of what it gained with either part, and are asked for
when their turn comes.

Deterministic: candidates are ordered by gain and then by operator number; nothing depends on
hashes, time or threads.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from ...config import Policy
from ...ir.extents import assumed_product
from ...ir.graph import FusionGraph, OpKind
from ..group_view import dtype_bytes
from ..legality import Costed
from ..refusal import Refusal
from .search_state import NOTHING, Members, State

# The moves of the search: which pairs of groups could become one, and which producers could be
# recomputed by their consumers.
#
#     vertical    a -> b, also through views:  {a} {v} {b}   =>  {a, v', b}
#     sibling     a, b read the same tensor:   {a} {b}       =>  {a, b}
#     horizontal  a, b have nothing in common: {a} {b}       =>  {a, b}
#     remat       p -> c1, c2, ...:            {p} {c1} {c2} =>  {p', c1} {p', c2}
#
# A move is a value; applying it to a state is `State.merge` or `State.add_copies`.

SIBLING_MIN_ELEMENTS = 2  # sharing a scalar is no reason to stand in one kernel
SIBLING_REACH = 16  # readers of one tensor, to either side, that a reader is offered to


class MoveKind(Enum):
    VERTICAL = "vertical"
    SIBLING = "sibling"
    HORIZONTAL = "horizontal"


class Merge(NamedTuple):
    """Two groups become one; `copies` are the views between them, copied into the result."""

    kind: MoveKind
    first: int
    second: int
    copies: Members = NOTHING


class Recompute(NamedTuple):
    """Each of the consumer groups computes these operators of the producer group itself.

    Where nobody reads the producer's own instances any more they are dropped: the operators have
    then moved.
    """

    producer: int
    ops: Members
    consumers: tuple[int, ...]


def fusible(state: State, gid: int) -> bool:
    """A live group of operators that can be read, other than a lone view."""
    return state.links.fusible[gid] and state.alive(gid)  # only such groups ever merge


def merges_of(state: State, gid: int) -> Iterator[Merge]:
    """All merges of one group with a neighbour, in a fixed order."""
    if not fusible(state, gid):
        return
    below, above, beside = _below(state, gid), _above(state, gid), _siblings(state, gid)
    for other, views in sorted(below.items()):
        if other != gid and fusible(state, other):
            yield Merge(MoveKind.VERTICAL, gid, other, views)
    for other, views in sorted(above.items()):
        if other != gid and fusible(state, other):
            yield Merge(MoveKind.VERTICAL, other, gid, views)
    for other, views in sorted(beside.items()):
        if other == gid or views in (below.get(other), above.get(other)):
            continue
        if fusible(state, other):
            yield Merge(MoveKind.SIBLING, *sorted((gid, other)), views)


def holds_independent(state: State, gid: int) -> bool:
    """Whether the group's kernel class computes independent groups side by side in one launch."""
    costed = state.cost(gid)
    return not isinstance(costed, Refusal) and costed.kernel.joins_independent


def producers_above(state: State, gid: int) -> Iterable[int]:
    """Groups that this one reads, also through views."""
    return _above(state, gid)


def _below(state: State, gid: int, ops: Members | None = None) -> dict[int, Members]:
    """Groups that read this one (or some of its operators), with the views on the way."""
    starts = state.owned[gid] if ops is None else ops
    return _neighbours(state, gid, starts, state.links.consumers)


def _above(state: State, gid: int) -> dict[int, Members]:
    """Groups this one reads, with the views on the way."""
    return _neighbours(state, gid, state.members(gid), state.links.producers)


def _neighbours(
    state: State, gid: int, starts: Members, steps: tuple[tuple[int, ...], ...]
) -> dict[int, Members]:
    is_view, homes, owned = state.links.view, state.home, state.owned[gid]
    found: dict[int, Members] = {}
    stack = [(op, NOTHING) for op in sorted(starts)]
    while stack:
        op, views = stack.pop()
        for n in steps[op]:
            if n in owned:
                continue
            if is_view[n]:
                stack.append((n, views | {n}))
            else:
                home = homes[n]
                found[home] = found[home] | views if home in found else views
    return found


def _siblings(state: State, gid: int) -> dict[int, Members]:
    """Groups that read a tensor this one reads, or a view of it, with the views on the way."""
    found: dict[int, Members] = {}
    tensors, ops, owned = state.graph.tensors, state.graph.ops, state.owned[gid]
    seen: set[tuple[int, int]] = set()
    for op in sorted(state.members(gid)):
        for t in ops[op].inputs:
            tensor = tensors[t]
            if tensor.producer in owned or assumed_product(tensor.shape) < SIBLING_MIN_ELEMENTS:
                continue
            source, views = _behind_views(state, t)
            near = _near(tensors[source].consumers, op)
            if len(near) == len(tensors[source].consumers):
                if (t, -1) in seen:
                    continue
                seen.add((t, -1))
            for home, more in _readers(state, near, views).items():
                found[home] = found.get(home, NOTHING) | more
    return found


def _near(consumers: tuple[int, ...], op: int) -> tuple[int, ...]:
    """Of many consumers those around an operator."""
    if len(consumers) <= 2 * SIBLING_REACH:
        return consumers
    before = sum(c < op for c in consumers)
    return consumers[max(0, before - SIBLING_REACH) : before + SIBLING_REACH + 1]


def _behind_views(state: State, tensor: int) -> tuple[int, Members]:
    """The tensor that `tensor` is a view of, and the views between."""
    views = NOTHING
    while (producer := state.graph.tensors[tensor].producer) is not None:
        if not state.links.view[producer]:
            break
        views, tensor = views | {producer}, state.graph.ops[producer].inputs[0]
    return tensor, views


def _readers(state: State, consumers: tuple[int, ...], views: Members) -> dict[int, Members]:
    """Groups that own consumers of a tensor, with `views` and the views on the way to them."""
    found: dict[int, Members] = {}
    for c in consumers:
        if state.graph.ops[c].kind is not OpKind.VIEW:
            found[state.home[c]] = found.get(state.home[c], NOTHING) | views
            continue
        for t in state.graph.ops[c].outputs:
            behind = state.graph.tensors[t].consumers
            for home, more in _readers(state, behind, views | {c}).items():
                found[home] = found.get(home, NOTHING) | more
    return found


def tensor_bytes(graph: FusionGraph, tensor: int) -> int:
    t = graph.tensors[tensor]
    return assumed_product(t.shape) * dtype_bytes(t.dtype)


def evaluate_merge(state: State, move: Merge) -> Costed | Refusal:
    return state.evaluate_merge(move.first, move.second, move.copies)


def merge_makes_cycle(state: State, move: Merge) -> bool:
    return state.order.makes_cycle(state, move.first, move.second, move.copies)


def recomputes_of(state: State, gid: int) -> Iterator[Recompute]:
    """The whole group, and each of its operators that others read: into all readers together, then
    into each alone.

    Left out is what cannot gain: a whole group moved to its only reader is a merge, and a reader
    that would read more than before gains only where nobody reads the producer any more.
    """
    if not fusible(state, gid):
        return
    whole = frozenset(op for op in state.owned[gid] if state.live[op])
    for ops in [whole, *(frozenset((op,)) for op in sorted(whole) if len(whole) > 1)]:
        if any(b.reduction is not None for op in ops for b in state.graph.ops[op].blocks):
            continue
        readers = _below(state, gid, ops)
        consumers = tuple(sorted(c for c in readers if c != gid and fusible(state, c)))
        if len(consumers) > 1:
            yield Recompute(gid, ops, consumers)
        only = len(readers) == 1 and not any(state.links.pinned[op] for op in ops)
        if only and ops is whole:
            continue
        for c in consumers:
            if only or _reads_no_more(state, ops, c):
                yield Recompute(gid, ops, (c,))


def _reads_no_more(state: State, ops: Members, reader: int) -> bool:
    """Whether a group would read no more bytes if it computed what it reads of these operators."""
    graph, links = state.graph, state.links
    members = state.members(reader)
    read = {t for op in members for t in graph.ops[op].inputs}
    saved = sum(tensor_bytes(graph, t) for op in ops for t in graph.ops[op].outputs if t in read)
    if any(links.view[c] for op in ops for c in links.consumers[op]):
        return True  # what is read through views is not counted here
    more = {t for op in ops for t in graph.ops[op].inputs} - read
    made = {t for op in ops for t in graph.ops[op].outputs}
    return sum(tensor_bytes(graph, t) for t in more - made) <= saved


def copies_of(state: State, move: Recompute) -> dict[int, Members]:
    """What a rematerialisation copies into each consumer: the operators, and the views behind."""
    views = _below(state, move.producer, move.ops)
    return {c: move.ops | views.get(c, NOTHING) for c in move.consumers}


# Share of what a merge could save at most that one step has to save: below, the model cannot tell
# a gain from a loss, and a step in the wrong direction costs the better ones. Which fusions are
# taken in the end is for `caution`, with the policy's `min_gain`.
LEAST_STEP = 0.02

Pair = tuple[int, int]


def merge_greedily(state: State, policy: Policy, at_once: bool = False) -> None:
    """Merges and rematerialises until nothing gains.

    `at_once` asks for the gains of a group that has grown before anything else merges: more is
    asked, and the order is another one, for better or for worse.
    """
    _Greedy(state, policy, at_once).run()


def merge_gain(state: State, move: Merge, last: bool = False) -> float | None:
    """What a merge saves in microseconds, or None if it may not be or saves too little.

    Independent work shares a launch only at the `last`: before, each part may still join what it
    shares work with.
    """
    merged = evaluate_merge(state, move)
    if isinstance(merged, Refusal) or (merged.fit.side_by_side and not last):
        return None
    apart = [state.cost(g) for g in (move.first, move.second)]
    gain = sum(c.time_us for c in apart) - merged.time_us
    return gain if gain > _least_gain(merged, apart) else None


def _least_gain(merged: Costed, apart: list[Costed]) -> float:
    """What a merge must save: nothing where no term of the model grows, else a share of what it
    could save at most.

    At most about the smaller group's time can be saved.
    """
    one, two = (c.estimate.terms for c in apart)
    for term, time in merged.estimate.terms.items():
        if time > one.get(term, 0.0) + two.get(term, 0.0) + 1e-9:
            return LEAST_STEP * min(c.time_us for c in apart)
    return 0.0


@dataclass
class _Greedy:
    """The queues. `gains` holds for each pair of groups what it was last known to gain."""

    state: State
    policy: Policy
    at_once: bool = False
    merges: list = field(default_factory=list)
    recomputes: list = field(default_factory=list)
    gains: dict[int, dict[int, float]] = field(default_factory=dict)
    seen: dict[tuple, tuple[int, int]] = field(default_factory=dict)
    pushed: int = 0
    unasked: set[int] = field(default_factory=set)

    def run(self) -> None:
        for gid in sorted(self.state.owned):
            self._push(gid, {})
        self.unasked = set(self.state.owned)
        self.state.changed.clear()
        while True:
            self._merge_all()
            if not (self.policy.allow_rematerialisation and self._recompute_best()):
                return

    def _push(self, gid: int, expected: Mapping[int, float]) -> None:
        """Queues a group's merges, with the gain that is `expected` of some neighbours."""
        for move in merges_of(self.state, gid):
            other = move.second if move.first == gid else move.first
            name = (min(gid, other), max(gid, other), move.copies)
            stamp = self._versions(name)
            if self.seen.get(name) == stamp:
                continue
            self.seen[name] = stamp
            if other in expected:
                self._queue(move, expected[other], asked=False)
            else:
                self._ask(move)

    def _ask(self, move: Merge) -> None:
        gain = merge_gain(self.state, move)
        if gain is not None:
            self._queue(move, gain, asked=True)
        else:
            self._know(move.first, move.second, None)

    def _queue(self, move: Merge, gain: float, asked: bool) -> None:
        a, b = move.first, move.second
        self._know(a, b, gain)
        views = tuple(sorted(move.copies))
        entry = (-round(gain, 6), min(a, b), max(a, b), move.kind.value, views)
        self.pushed += 1
        heapq.heappush(self.merges, (*entry, self.pushed, asked, self._versions((a, b)), move))

    def _versions(self, groups: Sequence[int]) -> tuple[int, int]:
        return self.state.version[groups[0]], self.state.version[groups[1]]

    def _know(self, a: int, b: int, gain: float | None) -> None:
        for one, other in ((a, b), (b, a)):
            known = self.gains.setdefault(one, {})
            if gain is None:
                known.pop(other, None)
            else:
                known[other] = gain

    def _merge_all(self) -> None:
        while self.merges:
            *_, asked, stamp, move = heapq.heappop(self.merges)
            a, b = move.first, move.second
            if a not in self.state.owned or b not in self.state.owned:
                continue
            if stamp != self._versions((a, b)):
                continue
            if merge_makes_cycle(self.state, move):
                self._know(a, b, None)
            elif asked:
                self._merge(move)
            else:
                self._ask(move)

    def _merge(self, move: Merge) -> None:
        a, b = move.first, move.second
        expected = self._expected(a, b)
        self.state.merge(a, b, move.copies)
        self._push_changed({} if self.at_once else {a: expected})

    def _expected(self, a: int, b: int) -> dict[int, float]:
        """What neighbours may gain with the two together: the sum of what they do with either."""
        found: dict[int, float] = {}
        for gid, not_with in ((a, b), (b, a)):
            for other, gain in self.gains.pop(gid, {}).items():
                self.gains[other].pop(gid, None)
                if other != not_with:
                    found[other] = found.get(other, 0.0) + gain
        return found

    def _push_changed(self, expected: Mapping[int, Mapping[int, float]]) -> None:
        """Queues the merges of all groups that a move has changed, anew."""
        state = self.state
        changed = sorted(g for g in state.changed if g in state.owned)
        state.changed.clear()
        for gid in changed:
            self._push(gid, expected.get(gid, {}))
        self.unasked.update(changed)
        for gid in changed:
            self.unasked.update(producers_above(state, gid))

    def _recompute_best(self) -> bool:
        """Applies the best rematerialisation, if any gains."""
        self._ask_recomputes()
        state = self.state
        while self.recomputes:
            *_, stamp, move = heapq.heappop(self.recomputes)
            if stamp == self._stamp(move):
                state.add_copies(copies_of(state, move))
                self._push_changed({})
                return True
        return False

    def _ask_recomputes(self) -> None:
        for gid in sorted(g for g in self.unasked if g in self.state.owned):
            for number, move in enumerate(recomputes_of(self.state, gid)):
                gain = self._recompute_gain(move)
                if gain > 1e-9:
                    entry = (-round(gain, 9), gid, number, self._stamp(move), move)
                    heapq.heappush(self.recomputes, entry)
        self.unasked.clear()

    def _stamp(self, move: Recompute) -> tuple[int, ...]:
        return tuple(
            self.state.version[g] if g in self.state.owned else -1
            for g in (move.producer, *move.consumers)
        )

    def _recompute_gain(self, move: Recompute) -> float:
        state, groups = self.state, (move.producer, *move.consumers)
        if any(op in state.copied_in for op in move.ops):
            return 0.0
        apart = [state.time_us(g) for g in groups]
        with state.trial(copies_of(state, move)):
            if any(isinstance(state.cost(c), Refusal) for c in move.consumers):
                return 0.0
            if state.trial_makes_cycle():
                return 0.0
            alive = state.alive(move.producer)
            if alive and isinstance(state.cost(move.producer), Refusal):
                return 0.0
            after = sum(map(state.time_us, groups))
        gain = sum(apart) - after
        return gain if gain > LEAST_STEP * min(apart) else 0.0
