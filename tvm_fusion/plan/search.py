"""Plan search: greedy merging by predicted gain, then rematerialisation, until nothing gains.

Deterministic: candidates are ordered by gain and then by operator number; nothing depends on
hashes, time or threads.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ..config import HardwareProfile, Policy
from ..ir.graph import FusionGraph, OpKind
from ..kernels.base import Refusal, RefusalCode
from .legality import Costed, Evaluator
from .moves import (
    Merge,
    MoveKind,
    Recompute,
    apply_recompute,
    evaluate_merge,
    fusible,
    holds_independent,
    merge_makes_cycle,
    merges_of,
    opaque_neighbours,
    recomputes_of,
)
from .order import topological
from .plan import FusionPlan, PlannedGroup
from .state import NOTHING, State

logger = logging.getLogger(__name__)

HORIZONTAL_REACH = 4  # groups before it that an independent group is offered to


def search(
    graph: FusionGraph,
    hw: HardwareProfile,
    policy: Policy,
    forbidden: frozenset[tuple[str, ...]] = frozenset(),
) -> FusionPlan:
    """Finds a fusion plan.

    Parameters
    ----------
    graph : FusionGraph
    hw : HardwareProfile
    policy : Policy
    forbidden : frozenset of tuples of str
        Groups (names of their operators, in order) that were tried and may not be used.

    Returns
    -------
    FusionPlan
        Every operator in exactly one owning group; groups in an order in which they can run.
    """
    state = State.unfused(Evaluator(graph, hw, policy, forbidden))
    _Greedy(state, policy).run()
    return _to_plan(state, hw, policy)


def unfused_plan(graph: FusionGraph, hw: HardwareProfile, policy: Policy) -> FusionPlan:
    """The plan that fuses nothing."""
    return _to_plan(State.unfused(Evaluator(graph, hw, policy)), hw, policy, explain=False)


@dataclass
class _Greedy:
    state: State
    policy: Policy
    heap: list = field(default_factory=list)
    version: dict[int, int] = field(default_factory=dict)

    def run(self) -> None:
        for gid in sorted(self.state.owned):
            self._push(gid)
        while True:
            self._merge_all()
            if not (self.policy.allow_rematerialisation and self._recompute_best()):
                break
        self._merge_side_by_side()

    def _merge_side_by_side(self) -> None:
        """Joins independent groups that gain by sharing a launch.

        Each group is offered to the latest few before it: what is joined was then computed at about
        the same time, and the work grows with the number of groups. Matrix products are joined
        first, and first with those as deep in the graph: the second products of several chains then
        wait for nothing but the first ones.
        """
        depth = _depths(self.state)
        for same in (True, False):
            self._join(products=True, depth=depth if same else None)
        self._join(products=False)

    def _join(self, products: bool, depth: Mapping[int, int] | None = None) -> None:
        """Offers each group with matrix products (or without) to those before it, of its depth
        where that is given.
        """
        before: list[int] = []
        for gid in sorted(g for g in self.state.owned if fusible(self.state, g)):
            if not holds_independent(self.state, gid):
                continue
            if bool(self.state.cost(gid).fit.contractions) is not products:
                continue
            for move in self._offers(gid, before, products):
                if depth is not None and depth[move.first] != depth[move.second]:
                    continue
                gain = self._gain(move, last=True)
                if gain is not None and not merge_makes_cycle(self.state, move):
                    self.state.merge(move.first, move.second, move.copies)
                    break
            else:
                before.append(gid)

    def _offers(self, gid: int, before: list[int], products: bool) -> Iterator[Merge]:
        """Moves that join a group to one before it: products that share an operand come first."""
        if products:
            for move in merges_of(self.state, gid):
                other = move.first if move.second == gid else move.second
                if move.kind is MoveKind.SIBLING and other in before:
                    yield Merge(move.kind, other, gid, move.copies)
        for other in reversed(before[-HORIZONTAL_REACH:]):
            yield Merge(MoveKind.HORIZONTAL, other, gid)

    def _push(self, gid: int) -> None:
        for move in merges_of(self.state, gid):
            gain = self._gain(move)
            if gain is not None:
                a, b = move.first, move.second
                stamp = (self.version.get(a, 0), self.version.get(b, 0))
                views = tuple(sorted(move.copies))
                entry = (-round(gain, 6), min(a, b), max(a, b), move.kind.value, views)
                heapq.heappush(self.heap, (*entry, stamp, move))

    def _gain(self, move: Merge, last: bool = False) -> float | None:
        """What a merge saves in microseconds, or None if it may not be or saves too little.

        Independent work shares a launch only at the `last`: before, each part may still join what
        it shares work with.
        """
        merged = evaluate_merge(self.state, move)
        if isinstance(merged, Refusal):
            return None
        if merged.fit.side_by_side and not last:
            return None
        apart = [self.state.cost(g) for g in (move.first, move.second)]
        gain = sum(c.time_us for c in apart) - merged.time_us
        return gain if gain > self._least_gain(merged, apart) else None

    def _least_gain(self, merged: Costed, apart: list[Costed]) -> float:
        """What a merge must save: nothing where no term of the model grows, else a share of what it
        could save at most.

        At most about the smaller group's time can be saved.
        """
        if all(
            time <= sum(c.estimate.terms.get(term, 0.0) for c in apart) + 1e-9
            for term, time in merged.estimate.terms.items()
        ):
            return 0.0
        return self.policy.min_gain * min(c.time_us for c in apart)

    def _merge_all(self) -> None:
        while self.heap:
            *_, stamp, move = heapq.heappop(self.heap)
            a, b = move.first, move.second
            if a not in self.state.owned or b not in self.state.owned:
                continue
            if stamp != (self.version.get(a, 0), self.version.get(b, 0)):
                continue
            if merge_makes_cycle(self.state, move):
                continue
            gid = self.state.merge(a, b, move.copies)
            self.version[gid] = self.version.get(gid, 0) + 1
            self._push(gid)

    def _recompute_best(self) -> bool:
        """Applies the best rematerialisation, if any gains."""
        best, best_gain = None, 0.0
        for gid in sorted(self.state.owned):
            for move in recomputes_of(self.state, gid):
                gain = self._recompute_gain(move)
                if gain > best_gain + 1e-9:
                    best, best_gain = move, gain
        if best is None:
            return False
        apply_recompute(self.state, best)
        touched = (best.producer, *best.consumers)
        for gid in touched:
            self.version[gid] = self.version.get(gid, 0) + 1
        for gid in touched:
            self._push(gid)
        return True

    def _recompute_gain(self, move: Recompute) -> float:
        state, groups = self.state, (move.producer, *move.consumers)
        if any(state.copied_in.get(op) for op in move.ops):
            return 0.0
        trial = state.copy()
        apply_recompute(trial, move)
        for c in move.consumers:
            if isinstance(trial.cost(c), Refusal):
                return 0.0
        if trial.alive(move.producer) and isinstance(trial.cost(move.producer), Refusal):
            return 0.0
        before, after = (sum(s.time_us(g) for g in groups) for s in (state, trial))
        gain = before - after
        smallest = min(state.time_us(g) for g in groups)
        if gain <= self.policy.min_gain * smallest:
            return 0.0
        if any(
            trial.makes_cycle(trial.owned[c], trial.copies.get(c, NOTHING), frozenset((c,)))
            for c in move.consumers
        ):
            return 0.0
        return gain


def _to_plan(state: State, hw: HardwareProfile, policy: Policy, explain: bool = True) -> FusionPlan:
    groups = tuple(_planned(state, gid) for gid in _order(state))
    graph = state.graph
    refusals = tuple(_refusals(state)) if explain else ()
    return FusionPlan(graph.function, graph.fingerprint(), hw.name, policy.name, groups, refusals)


def _planned(state: State, gid: int) -> PlannedGroup:
    graph = state.graph
    costed = state.cost(gid)
    if isinstance(costed, Refusal):
        raise AssertionError(f"group {gid} of the final plan is refused: {costed.why}")
    view = costed.view
    names = tuple(graph.ops[i].name for i in view.ops)
    recomputed = tuple(
        n
        for i, n in zip(view.ops, names, strict=True)
        if view.duplicated >> i & 1 and (state.live[i] or len(state.copied_in[i]) > 1)
    )
    if view.is_view:
        return PlannedGroup(names, "view")
    if graph.ops[view.ops[0]].kind is OpKind.OPAQUE:
        return PlannedGroup(names, "opaque")
    alone = [_alone(state, i) for i in view.ops if not view.duplicated >> i & 1]
    return PlannedGroup(
        names,
        costed.kernel.name,
        recomputed,
        round(costed.time_us, 4),
        round(sum(c.time_us for c in alone if c), 4),
        float(costed.bytes),
        float(sum(c.bytes for c in alone if c)),
        {k: round(v, 4) for k, v in sorted(costed.estimate.terms.items())},
    )


def _alone(state: State, op: int) -> Costed | None:
    if state.graph.ops[op].kind is not OpKind.CALL_TIR:
        return None
    costed = state.evaluator.alone(op)
    return None if isinstance(costed, Refusal) else costed


def _depths(state: State) -> dict[int, int]:
    """How many kernels stand behind each other in front of each live group, at most."""
    found: dict[int, int] = {}
    for gid in _order(state):
        sources = state.sources(state.members(gid)) - {gid}
        own = fusible(state, gid)
        found[gid] = max((found.get(s, 0) for s in sources), default=0) + own
    return found


def _order(state: State) -> list[int]:
    """Live groups such that each comes after what it reads."""
    live = sorted(g for g in state.owned if state.alive(g))
    sources = {g: state.sources(state.members(g)) for g in live}
    return topological(sources, {g: min(state.owned[g]) for g in live})


def _refusals(state: State):
    """Why each pair of neighbouring groups of the final plan stayed apart."""
    seen = set()
    for gid in sorted(g for g in state.owned if fusible(state, g)):
        for move in merges_of(state, gid):
            pair = (move.first, move.second)
            if pair in seen or move.kind is not MoveKind.VERTICAL:
                continue
            seen.add(pair)
            yield _why_apart(state, move)
        for other in opaque_neighbours(state, gid):
            op = state.graph.ops[min(state.owned[other])]
            where = (_label(state, gid), op.name)
            yield Refusal(RefusalCode.OPAQUE, where, f"{op.name} cannot be read: {op.why_opaque}")


def _why_apart(state: State, move: Merge) -> Refusal:
    names = [_label(state, g) for g in (move.first, move.second)]
    merged = evaluate_merge(state, move)
    if isinstance(merged, Refusal):
        return Refusal(merged.code, tuple(names), merged.why, merged.numbers)
    if merge_makes_cycle(state, move):
        why = "a path leaves the first group and enters the second through an operator outside both"
        return Refusal(RefusalCode.CYCLE, tuple(names), why)
    before = state.time_us(move.first) + state.time_us(move.second)
    return Refusal(
        RefusalCode.NOT_PROFITABLE,
        tuple(names),
        f"together {merged.time_us:.1f} us, apart {before:.1f} us",
        (("apart_us", round(before, 3)), ("together_us", round(merged.time_us, 3))),
    )


def _label(state: State, gid: int) -> str:
    """A group by the names of its first and last operator."""
    ops = sorted(state.owned[gid])
    names = [state.graph.ops[i].name for i in (ops[0], ops[-1])]
    return names[0] if len(ops) == 1 else f"{names[0]}..{names[1]}"
