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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...config import Policy
from ..legality import Costed
from ..refusal import Refusal
from .moves import (
    Merge,
    Recompute,
    copies_of,
    evaluate_merge,
    merge_makes_cycle,
    merges_of,
    producers_above,
    recomputes_of,
)
from .search_state import State

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
