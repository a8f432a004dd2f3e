"""The list of all launches and plans of small graphs, and the graphs that keys stand for."""

import pytest
import tvm
from tvm.relax import op

from tests.support.graphs import module
from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.errors import InputError, PlanError, Unsupported
from tvm_fusion.ir.graph import OpKind, build_graph
from tvm_fusion.plan.search.search import search, unfused_plan
from tvm_fusion.plan.search.solution import check_solution, is_kernel, members_of
from tvm_fusion.transform.pipeline import lower

from .random_graphs import graph_of, keys_of, module_of
from .space import PlanSpace

X = ((32, 64), "float32")


def space_of(emit, *inputs, device="llvm") -> PlanSpace:
    hw = load_profile(device)
    graph = build_graph(lower(module(emit, *inputs), hw.to_target(), hw=hw))
    return PlanSpace(graph, hw, load_policy(None))


def chain(bb, x):
    return op.tanh(bb.emit(op.negative(bb.emit(op.exp(x)))))


def fork(bb, x):
    a = bb.emit(op.exp(x))
    return bb.emit(op.tanh(a)), bb.emit(op.negative(a))


def random_space(key: str, device: str = "nvidia_h200") -> PlanSpace:
    hw = load_profile(device)
    return PlanSpace(graph_of(key, hw)[1], hw, load_policy(None))


def names(space: PlanSpace, plan) -> list[tuple[tuple[int, ...], tuple[str, ...]]]:
    kernels = [x for x in plan if is_kernel(space.graph, x)]
    return [
        (members_of(x.members), tuple(space.graph.tensors[t].name for t in x.stores))
        for x in kernels
    ]


def test_a_chain_of_three_has_its_four_partitions():
    space = space_of(chain, X)
    groups = {tuple(members for members, _ in names(space, p)) for p in space.every_plan()}
    wanted = {((0,), (1,), (2,)), ((0, 1), (2,)), ((0,), (1, 2)), ((0, 1, 2),)}
    assert wanted <= groups
    for others in groups - wanted:  # some operator is computed twice
        assert sum(len(g) for g in others) > 3


def test_a_fork_can_compute_its_shared_part_in_both_branches():
    space = space_of(fork, X)
    groups = [sorted(members for members, _ in names(space, p)) for p in space.every_plan()]
    assert [(0, 1), (0, 2)] in groups
    assert [(0,), (1,), (2,)] in groups
    assert [(0, 1, 2)] in groups


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(12))
def test_every_plan_is_a_solution_and_no_two_are_equal(seed):
    space = random_space(f"random-small:{seed}:5")
    plans = space.every_plan()
    assert plans
    assert len(plans) == len(set(plans))
    for plan in plans:
        check_solution(space.graph, plan, space.evaluator)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(12))
def test_the_list_holds_the_planners_plan_its_neighbours_and_random_ones(seed):
    space = random_space(f"random-small:{seed}:5")
    every = set(space.every_plan())
    planned = space.of_plan(search(space.graph, space.hw, space.policy))
    unfused = space.of_plan(unfused_plan(space.graph, space.hw, space.policy))
    assert unfused == space.unfused()
    assert {planned, unfused, *space.neighbours(planned), *space.random_plans(20)} <= every
    best = min(map(space.predicted_us, every))
    assert best <= space.predicted_us(planned) + 1e-9


# Always: the list holds the planner's plan, and a key gives the same.
@pytest.mark.nightly
def test_a_capped_list_is_the_same_each_time_and_keeps_what_has_to_be_in_it():
    space = random_space("random:3:8")
    planned = space.of_plan(search(space.graph, space.hw, space.policy))
    first = space.plans(30, always=[space.unfused(), planned])
    assert len(first) == 30
    assert first[:2] == list(dict.fromkeys([space.unfused(), planned]))[:2]
    assert first == random_space("random:3:8").plans(30, always=[space.unfused(), planned])


def test_neighbours_differ_from_the_plan_and_are_plans():
    space = random_space("random:3:8")
    planned = space.of_plan(search(space.graph, space.hw, space.policy))
    near = space.neighbours(planned)
    assert near
    assert planned not in near
    for plan in near:
        check_solution(space.graph, plan, space.evaluator)


def test_launches_that_miss_a_result_are_no_plan():
    space = space_of(chain, X)
    with pytest.raises(PlanError):
        space.normal(space.unfused()[:-1])


def test_a_graph_with_many_operators_is_sampled():
    def long(bb, x):
        for _ in range(12):
            x = bb.emit(op.tanh(x))
        return bb.emit(op.exp(x))

    space = space_of(long, X)
    with pytest.raises(Unsupported, match="too many"):
        space.launches()
    plans = space.plans(25)
    assert len(plans) == 25
    for plan in plans:
        check_solution(space.graph, plan, space.evaluator)


# ---- keys
@pytest.mark.parametrize(
    "key", ["random:5", "random-small:5:7", "suite:memory/rmsnorm@0.02:float32"]
)
def test_a_key_gives_the_same_module_each_time(key):
    tvm.ir.assert_structural_equal(module_of(key), module_of(key))


def test_random_graphs_have_the_operators_that_were_asked_for():
    hw = load_profile("llvm")  # on a GPU large reductions are split
    counts = []
    for seed in range(20):
        graph = graph_of(f"random:{seed}:6", hw)[1]
        counts.append(sum(o.kind is not OpKind.VIEW for o in graph.ops))
        assert not [o.name for o in graph.ops if o.kind is OpKind.OPAQUE]
    assert counts.count(6) >= 10  # products in half precision come with a conversion
    assert min(counts) >= 5
    assert max(counts) <= 9


def test_keys_are_listed_by_ranges_and_suites():
    assert keys_of("random:3-5,random-small:7-8:6") == [
        "random:3",
        "random:4",
        "random:5",
        "random-small:7:6",
        "random-small:8:6",
    ]
    assert keys_of("suite:small@0.5:float32") == ["suite:small/three_softmaxes_4kb@0.5:float32"]


@pytest.mark.parametrize(
    "key",
    ["random:x", "graph:3", "suite:none/softmax", "suite:memory/softmx", "suite:memory/softmax@y"],
)
def test_unknown_keys_are_refused_with_the_reason(key):
    with pytest.raises(InputError):
        module_of(key)


def test_weights_of_a_workload_become_inputs():
    main = module_of("suite:memory/layernorm@0.02:float32")["main"]
    assert [len(p.ty.shape.values) for p in main.params] == [2, 1, 1]
