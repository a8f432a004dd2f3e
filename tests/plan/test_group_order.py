"""The order of groups that the search keeps holds through every move, and so does what it was told
of a merge before making it.
"""

import random

import pytest

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.plan.legality import Evaluator
from tvm_fusion.plan.order import topological
from tvm_fusion.plan.refusal import Refusal
from tvm_fusion.plan.search.greedy import (
    copies_of,
    evaluate_merge,
    fusible,
    merge_makes_cycle,
    merges_of,
    recomputes_of,
)
from tvm_fusion.plan.search.search_state import State

from ..support.large_graphs import graph_of, random_dag

H200, POLICY = load_profile("h200"), load_policy()
MOVES = 60


def misplaced(state: State) -> list[tuple[int, int]]:
    """Live groups, with one that they read and that has no place before theirs."""
    place = state.order.place
    return [
        (gid, source)
        for gid in state.owned
        if state.alive(gid)
        for source in state.sources(state.computed(gid))
        if source != gid and place[source] >= place[gid]
    ]


def check_order(state: State) -> None:
    assert not misplaced(state)
    live = [g for g in state.owned if state.alive(g)]
    sources = {g: state.sources(state.computed(g)) & set(live) for g in live}
    topological(sources, {g: g for g in live})


def any_merge(state: State, rng: random.Random):
    """A legal merge, whether it gains or not."""
    gids = sorted(g for g in state.owned if fusible(state, g))
    rng.shuffle(gids)
    for gid in gids:
        for move in rng.sample(moves := list(merges_of(state, gid)), len(moves)):
            costed = evaluate_merge(state, move)
            if not isinstance(costed, Refusal) and not merge_makes_cycle(state, move):
                return move, costed
    return None


def recompute_any(state: State, rng: random.Random) -> bool:
    """Does a legal rematerialisation, whether it gains or not; whether there is one."""
    gids = sorted(g for g in state.owned if fusible(state, g))
    for gid in rng.sample(gids, len(gids)):
        for move in rng.sample(moves := list(recomputes_of(state, gid)), len(moves)):
            if any(op in state.copied_in for op in move.ops):
                continue
            groups = [*move.consumers, move.producer]
            with state.trial(copies_of(state, move)):
                alive = [g for g in groups if state.alive(g)]
                legal = not any(isinstance(state.cost(g), Refusal) for g in alive)
                legal &= not state.trial_makes_cycle()
            if legal:
                state.add_copies(copies_of(state, move))
                return True
    return False


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(12))
def test_groups_keep_places_after_all_that_they_read(seed):
    rng = random.Random(seed)
    graph = graph_of(random_dag(50, seed), H200)
    state = State.unfused(Evaluator(graph, H200, POLICY))
    merged = recomputed = with_copies = 0
    for _ in range(MOVES):
        if rng.random() < 0.4:
            recomputed += recompute_any(state, rng)
        elif found := any_merge(state, rng):
            move, told = found
            with_copies += bool(state.copies.keys() & {move.first, move.second})
            state.merge(move.first, move.second, move.copies)
            merged += 1
            assert state.cost(move.first).view.ops == told.view.ops
        check_order(state)
    assert min(merged, recomputed, with_copies) > 5


def test_a_merge_with_what_a_group_recomputes_is_told_to_hold_it():
    """p -> c1, c2 recomputed in both, so that p is dead; then c1 joins p's group."""
    graph = graph_of(random_dag(20, 0), H200)
    evaluator = Evaluator(graph, H200, POLICY)
    for gid in range(len(graph.ops)):
        state = State.unfused(evaluator)
        for move in recomputes_of(state, gid):
            if len(move.consumers) < 2:
                continue
            state.add_copies(copies_of(state, move))
            if state.alive(gid):
                continue
            consumer = move.consumers[0]
            told = state.evaluate_merge(gid, consumer, frozenset())
            assert not isinstance(told, Refusal)
            assert gid in told.view.ops
            return
    pytest.fail("no producer of the graph can be recomputed by all who read it")
