"""How much a plan search does: about in proportion to the operators, less where layers repeat.

What is counted are groups. A search of 1,000 random operators asks about 10 an operator and finds
the cost of 3, which takes about 2 seconds of one core.
"""

import pytest
from tvm import relax
from tvm.relax import op

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.ir.graph import FusionGraph
from tvm_fusion.plan.search import exact
from tvm_fusion.plan.search.search import search
from tvm_fusion.plan.structure import Structures

from ..support.counting import calls_of, searched
from ..support.graphs import module, plan_of
from ..support.large_graphs import graph_of, random_dag, transformer

H200, POLICY = load_profile("h200"), load_policy()
ASKED, COSTED = 15, 4.5  # an operator, at most
OPERATORS_A_VALUE = 0.85  # of `random_dag` after lowering, which drops what nobody reads


def plan(graph: FusionGraph) -> None:
    found = search(graph, H200, POLICY, structures=Structures())
    found.check(graph)
    assert found.predicted_us < found.unfused_us


@pytest.fixture
def work(monkeypatch):
    """Groups that a search of a graph asks about, and those that it finds the cost of."""

    def count(graph: FusionGraph) -> tuple[int, int]:
        with searched(monkeypatch) as counts:
            plan(graph)
        return counts["asked"], counts["costed"]

    return count


def random_graph(operators: int, seed: int) -> FusionGraph:
    graph = graph_of(random_dag(round(operators / OPERATORS_A_VALUE), seed), H200)
    assert len(graph.ops) >= 0.9 * operators
    return graph


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_thousand_random_operators_take_some_groups_each(work, seed):
    graph = random_graph(1_000, seed)
    asked, costed = work(graph)
    assert asked <= ASKED * len(graph.ops)
    assert costed <= COSTED * len(graph.ops)


@pytest.mark.nightly
def test_ten_thousand_random_operators_take_no_more_each(work):
    graph = random_graph(10_000, 3)
    asked, costed = work(graph)
    assert asked <= ASKED * len(graph.ops)
    assert costed <= COSTED * len(graph.ops)


# Always: the groups of a thousand operators, and of many layers.
@pytest.mark.nightly
@pytest.mark.long
@pytest.mark.parametrize(
    ("few", "many"), [(100, 300), pytest.param(1_000, 8_000, marks=pytest.mark.nightly)]
)
def test_the_work_grows_about_linearly_with_the_graph(few, many):
    """All that Python does is counted, not only groups."""
    small, large = (random_graph(n, 4) for n in (few, many))
    plan(small)  # what the first search imports and loads is no part of it
    each = [calls_of(lambda g=g: plan(g)) / len(g.ops) for g in (small, large)]
    assert each[1] < 1.5 * each[0]


# Always: layers that repeat (`test_plan_repeats`).
@pytest.mark.nightly
def test_a_model_of_many_layers_takes_hardly_more_than_one_of_a_few(work):
    few, many = (graph_of(transformer(layers), H200) for layers in (8, 32))
    assert len(many.ops) > 3.5 * len(few.ops)
    (asked, costed), (asked_many, costed_many) = work(few), work(many)
    assert asked_many < 2 * asked
    assert costed_many == costed


def test_operators_that_know_nothing_of_each_other_are_not_tried_in_all_sets(monkeypatch):
    """Of 20 that stand side by side there are 2^20 sets."""
    grown, hopeless = [], exact._Search._hopeless

    def counted(search_, *args):
        grown.append(args)
        return hopeless(search_, *args)

    monkeypatch.setattr(exact._Search, "_hopeless", counted)
    inputs = [((16, 16), "float32")] * 20
    ones = module(lambda bb, *xs: [op.add(x, relax.const(1.0)) for x in xs], *inputs)
    found = plan_of(ones, "llvm")
    assert found.launches == 1
    assert 0 < len(grown) <= exact.SETS_PER_EVALUATION * POLICY.search_evaluations
