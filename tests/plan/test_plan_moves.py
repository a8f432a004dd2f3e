"""Improving a solution: launches, exact search, beam moves and windows, most of it with made-up
times, so that it is known what has to be found.
"""

import random
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
from tvm import relax
from tvm.relax import op

from tests.support.brute_force import cheapest_us
from tests.support.graphs import module
from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.errors import PlanError
from tvm_fusion.ir.graph import FusionGraph, OpKind, build_graph
from tvm_fusion.plan.legality import Evaluator
from tvm_fusion.plan.refusal import Refusal, RefusalCode
from tvm_fusion.plan.regions.regions import region_key, region_of
from tvm_fusion.plan.search.beam import Beam, parts_of, search_beam, unfused
from tvm_fusion.plan.search.exact import Limits, Pricing, Spent, solve
from tvm_fusion.plan.search.improve import improve, improved
from tvm_fusion.plan.search.search import greedy_solution
from tvm_fusion.plan.search.search_state import State
from tvm_fusion.plan.search.solution import (
    Launch,
    check_solution,
    complete,
    copies,
    launches_of,
    members_of,
    total_us,
)
from tvm_fusion.transform.pipeline import lower

from ..benchmarks.plans.random_graphs import graph_of

HW = load_profile("nvidia_h200")
POLICY = load_policy(None)
NO_RATES = replace(HW, hbm_bytes_per_s=1e30, l2_bytes_per_s=1e30, queued_launch_us=0.0)
X = ((256, 512), "float16")
MUCH = Limits(10**6, 10**6, refused=9)


def graph_from(emit, *inputs) -> FusionGraph:
    return build_graph(lower(module(emit, *inputs), HW.to_target(), hw=HW))


@dataclass
class MadeUp:
    """An evaluator whose times are those of a function of (operators, tensors written)."""

    graph: FusionGraph
    time: object
    hw: object = NO_RATES
    policy: object = POLICY
    forbidden: frozenset = frozenset()
    probed: dict = field(default_factory=dict)
    asked: int = 0

    def group(self, ops, outputs, duplicated=0):
        self.asked += 1
        time = self.time(ops, outputs)
        if time is None:
            return Refusal(RefusalCode.SPACE_MISMATCH, (), "made up")
        return SimpleNamespace(time_us=time)


def any_time(seed: int):
    """Times that follow no rule, and refusals; single operators are always accepted."""

    def time(ops, outputs):
        rng = random.Random(f"{seed} {ops} {outputs}")
        if len(ops) > 1 and rng.random() < 0.3:
            return None
        return 3.0 * rng.random() + 0.5 * len(ops) + len(outputs) * rng.random()

    return time


def one_region(graph: FusionGraph):
    kernels = [Launch(1 << o.id, o.outputs) for o in graph.ops if o.kind is OpKind.CALL_TIR]
    return region_of(graph, kernels, (), {t.id for t in graph.tensors if t.is_output})


def fan(bb, x):
    """p is read by a, b and c."""
    p = bb.emit(op.exp(x))
    return bb.emit(op.negative(p)), bb.emit(op.tanh(p)), bb.emit(op.sqrt(p))


def diamond(bb, x):
    p = bb.emit(op.exp(x))
    a, b = bb.emit(op.tanh(p)), bb.emit(op.sqrt(p))
    return bb.emit(op.add(bb.emit(op.negative(a)), bb.emit(op.multiply(a, b))))


def two_chains(bb, x):
    a, b = bb.emit(op.tanh(bb.emit(op.exp(x)))), bb.emit(op.sqrt(bb.emit(op.negative(x))))
    return bb.emit(op.sigmoid(a)), bb.emit(op.add(a, b))


@pytest.mark.parametrize("emit", [fan, diamond, two_chains], ids=lambda e: e.__name__)
@pytest.mark.parametrize("seed", range(8))
def test_the_exact_search_finds_what_brute_force_finds_whatever_launches_cost(emit, seed):
    graph = graph_from(emit, X)
    evaluator = MadeUp(graph, any_time(seed))
    region = one_region(graph)
    found = solve(region, Pricing(region, evaluator, 10**6), float("inf"), MUCH)
    assert found.proven
    assert found.time_us == pytest.approx(cheapest_us(graph, evaluator))
    total = sum(any_time(seed)(members_of(o), region.tensors(s)) for o, s in found.launches)
    assert total == pytest.approx(found.time_us)


def test_the_exact_search_says_when_nothing_is_below_the_bound_and_when_it_gave_up():
    graph = graph_from(diamond, X)
    evaluator, region = MadeUp(graph, any_time(0)), one_region(graph)
    best = solve(region, Pricing(region, evaluator, 10**6), float("inf"), MUCH).time_us
    assert solve(region, Pricing(region, evaluator, 10**6), best, MUCH) is None
    with pytest.raises(Spent):
        solve(region, Pricing(region, evaluator, 5), float("inf"), MUCH)


def test_without_rematerialisation_nothing_is_computed_twice():
    graph = graph_from(fan, X)
    region = one_region(graph)
    pairs = {(0, 1), (0, 2), (0, 3)}
    pricing = Pricing(region, MadeUp(graph, lambda ops, _: 1.0 if ops in pairs else 5.0), 10**6)
    twice = solve(region, pricing, float("inf"), MUCH)
    once = solve(region, pricing, float("inf"), replace(MUCH, rematerialise=False))
    assert (twice.time_us, sum(o.bit_count() for o, _ in twice.launches)) == (3.0, 6)
    assert (once.time_us, sum(o.bit_count() for o, _ in once.launches)) == (5.0, 4)


P, A, B, C = 1, 2, 4, 8
MOVES = {
    "merge": ([P, A, B, C], [P | A, B, C]),
    "horizontal": ([P, A, B, C], [P, A | B, C]),
    "split": ([P | A | B | C], [P, A | B | C]),
    "move": ([P | A | B, C], [P | A, B, C]),
    "recompute into a subset": ([P, A, B, C], [P | A, P, P | B, C]),
    "recompute into all": ([P, A, B, C], [P | A, P | B, P | C]),
    "take back": ([P | A, P | B, P | C], [P | A, P | B, C]),
}


@pytest.mark.parametrize("move", MOVES)
def test_the_beam_finds_each_kind_of_move(move):
    """Only the launches of the wanted solution are cheap; the start is dear."""
    before, after = MOVES[move]
    graph = graph_from(fan, X)
    region = one_region(graph)

    def time(ops, outputs):
        return 1.0 if sum(1 << i for i in ops) in after else 20.0

    start = parts_of(region, launches(region, before))
    pricing = Pricing(region, MadeUp(graph, time), 10**6)
    found = search_beam(region, pricing, [start], Beam(8, 10**5))
    assert found.time_us <= len(after)


def launches(region, sets: list[int]) -> list[tuple[int, int]]:
    """Launches of a region by their operators: each result is written by the first that can."""
    tensors = complete(region.graph, [region.members(s) for s in sets])
    return [(region.ops_of(launch.members), region.results_of(launch.stores)) for launch in tensors]


@pytest.mark.parametrize("seed", range(6))
def test_the_beam_returns_a_solution_no_worse_than_its_starts(seed):
    graph = graph_from(two_chains, X)
    region, evaluator = one_region(graph), MadeUp(graph, any_time(seed))
    pricing = Pricing(region, evaluator, 10**6)
    alone = sum(evaluator.group((o.id,), o.outputs).time_us for o in graph.ops)
    found = search_beam(region, pricing, [unfused(region)], Beam(4, 500))
    assert found.time_us <= alone
    assert found.time_us >= cheapest_us(graph, evaluator) - 1e-9


# ---- whole graphs, with the real evaluator


@pytest.mark.one_in(2)
@pytest.mark.parametrize("key", ["random:0:12", "random:1:14", "random:3:16", "random:0:40"])
def test_improving_gives_a_legal_solution_that_is_no_costlier_and_always_the_same(key):
    _, graph = graph_of(key, HW)
    evaluator = Evaluator(graph, HW, POLICY)
    greedy = greedy_solution(evaluator)
    better = improve(graph, evaluator, greedy, POLICY)
    check_solution(graph, better, evaluator)
    assert total_us(evaluator, better) <= total_us(evaluator, greedy)
    again = Evaluator(graph, HW, POLICY)
    assert improve(graph, again, greedy_solution(again), POLICY) == better


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("start", ["greedy", "unfused"])
def test_windows_that_are_smaller_than_the_graph_give_legal_solutions(seed, start):
    _, graph = graph_of(f"random:{seed}", HW)
    policy = load_policy({"exact_ops": 3 + seed % 3, "beam_width": 2})
    evaluator = Evaluator(graph, HW, policy)
    alone = launches_of(State.unfused(evaluator))
    given = greedy_solution(evaluator) if start == "greedy" else alone
    better = improve(graph, evaluator, given, policy)
    check_solution(graph, better, evaluator)
    assert total_us(evaluator, better) <= total_us(evaluator, given)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", [0, 3, 11, 17])
def test_windows_keep_the_order_that_launches_between_them_impose(seed):
    _, graph = graph_of(f"random:{seed}:25", HW)
    policy = load_policy({"exact_ops": 6, "search_evaluations": 400})
    evaluator = Evaluator(graph, HW, policy)
    for given in (greedy_solution(evaluator), launches_of(State.unfused(evaluator))):
        better = improve(graph, evaluator, given, policy)
        check_solution(graph, better, evaluator)
        assert total_us(evaluator, better) <= total_us(evaluator, given)


def test_a_group_that_no_class_takes_any_more_is_taken_apart(monkeypatch):
    graph = graph_from(fan, X)
    evaluator = Evaluator(graph, HW, POLICY)
    state = State.unfused(evaluator)
    state.merge(0, 1, frozenset())
    assert P | A in {launch.members for launch in launches_of(state)}
    refused = Refusal(RefusalCode.SPACE_MISMATCH, (), "made up")
    known = evaluator.group
    monkeypatch.setattr(
        evaluator, "group", lambda ops, *rest: refused if len(ops) > 1 else known(ops, *rest)
    )
    state._costs.clear()
    found = launches_of(state)
    check_solution(graph, found, evaluator)
    assert {launch.members for launch in found} == {P, A, B, C}


def test_improving_starts_from_any_solution():
    _, graph = graph_of("random:2", HW)
    evaluator = Evaluator(graph, HW, POLICY)
    alone = launches_of(State.unfused(evaluator))
    better = improved(graph, evaluator, alone, POLICY)
    check_solution(graph, better.launches, evaluator)
    greedy = improve(graph, evaluator, greedy_solution(evaluator), POLICY)
    assert total_us(evaluator, better.launches) <= 1.001 * total_us(evaluator, greedy)


def test_a_policy_without_evaluations_changes_nothing():
    _, graph = graph_of("random:2", HW)
    policy = load_policy({"search_evaluations": 0})
    evaluator = Evaluator(graph, HW, policy)
    alone = launches_of(State.unfused(evaluator))
    assert improve(graph, evaluator, alone, policy) == alone


def test_improving_leaves_out_groups_that_are_forbidden():
    graph = graph_from(fan, X)
    evaluator = Evaluator(graph, HW, POLICY)
    free = improve(graph, evaluator, launches_of(State.unfused(evaluator)), POLICY)
    names = tuple(graph.ops[i].name for i in members_of(free[0].members))
    assert len(names) > 1
    evaluator = Evaluator(graph, HW, POLICY, frozenset({names}))
    found = improve(graph, evaluator, launches_of(State.unfused(evaluator)), POLICY)
    assert free[0].members not in {launch.members for launch in found}


def detour(bb, x):
    """a and b may not share a launch: c, which cannot be read, stands between them."""
    a = bb.emit(op.exp(x))
    c = bb.emit(relax.call_dps_packed("somewhere.f", (a,), out_ty=x.ty))
    return bb.emit(op.add(bb.emit(op.tanh(a)), c)), bb.emit(op.sqrt(a))


def test_a_path_through_an_opaque_operator_keeps_its_order():
    graph = graph_from(detour, X)
    evaluator = Evaluator(graph, HW, POLICY)
    found = improve(graph, evaluator, launches_of(State.unfused(evaluator)), POLICY)
    check_solution(graph, found, evaluator)
    opaque = next(o for o in graph.ops if o.kind is OpKind.OPAQUE)
    source = graph.tensors[opaque.inputs[0]].producer
    reader = next(o.id for o in graph.ops if opaque.outputs[0] in o.inputs)
    writer = next(launch for launch in found if graph.ops[source].outputs[0] in launch.stores)
    assert not writer.members >> reader & 1


def two_layers(width):
    def emit(bb, x, g):
        for _ in range(2):
            x = bb.emit(op.multiply(bb.emit(op.tanh(bb.emit(op.add(x, g)))), g))
        return x

    return graph_from(emit, ((64, width), "float16"), ((width,), "float16"))


def test_equal_regions_have_equal_keys_and_others_do_not():
    def half(graph, k, wanted):
        ops = [o for o in graph.ops if o.kind is OpKind.CALL_TIR][3 * k : 3 * k + 3]
        kernels = [Launch(1 << o.id, o.outputs) for o in ops]
        return region_key(region_of(graph, kernels, (), wanted(ops)))

    def last(ops):
        return {ops[-1].outputs[0]}

    def first(ops):
        return {ops[0].outputs[0]}

    three = graph_from(
        lambda bb, x: [x := bb.emit(op.tanh(bb.emit(op.negative(x)))) for _ in range(6)][-1], X
    )
    assert half(three, 1, last) != half(three, 0, last)  # reads a parameter, reads a result
    assert half(two_layers(512), 0, last) == half(two_layers(512), 0, last)
    assert half(two_layers(512), 0, last) != half(two_layers(256), 0, last)
    assert half(two_layers(512), 0, last) != half(two_layers(512), 0, first)


def test_the_owner_is_the_launch_that_writes_and_copies_are_the_others():
    graph = graph_from(fan, X)
    a, b, c = (graph.ops[i].outputs[0] for i in (1, 2, 3))
    solution = (Launch(P | A, (graph.ops[0].outputs[0], a)), Launch(P | B, (b,)), Launch(C, (c,)))
    check_solution(graph, solution)
    assert copies(graph, solution) == (0, P, 0)


def broken():
    """Each is no solution of `fan`; tensors are given by the operator that makes them."""
    return {
        "reads": [Launch(A, (1,)), Launch(P | B, (2,)), Launch(C, (3,))],
        "before": [Launch(A, (1,)), Launch(P, (0,)), Launch(B, (2,)), Launch(C, (3,))],
        "written by no launch": [Launch(P | A, (0, 1)), Launch(B, (2,))],
        "nobody reads": [Launch(P | A, (0, 1)), Launch(P | B, (2,)), Launch(P | C, (3,))],
        "written twice": [Launch(P | A, (0, 1)), Launch(P | B, (0, 2)), Launch(C, (3,))],
        "does not compute": [Launch(P, (0, 1)), Launch(B, (2,)), Launch(C, (3,))],
        "writes nothing": [Launch(P | A, (0, 1)), Launch(A, ()), Launch(B, (2,)), Launch(C, (3,))],
    }


@pytest.mark.parametrize("message", broken())
def test_what_is_no_solution_is_refused(message):
    graph = graph_from(fan, X)
    made = [o.outputs[0] for o in graph.ops]
    given = [Launch(w.members, tuple(made[i] for i in w.stores)) for w in broken()[message]]
    with pytest.raises(PlanError, match=message):
        check_solution(graph, tuple(given))
