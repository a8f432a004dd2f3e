"""How long planning takes: 2 seconds of one core for 1,000 operators, 25 for 10,000; about linear
in the operators.

Times are those of the process, so that what else runs on the machine counts little.
"""

import time

import pytest

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.ir.graph import FusionGraph
from tvm_fusion.plan.search import search
from tvm_fusion.plan.structure import Structures

from .large_graphs import graph_of, random_dag, transformer

H200, POLICY = load_profile("h200"), load_policy()
SMALL_LIMIT_S, LARGE_LIMIT_S = 2.0, 25.0
SMALL, LARGE = 1_000, 10_000
OPERATORS_A_VALUE = 0.85  # of `random_dag` after lowering, which drops what nobody reads


def seconds(graph: FusionGraph) -> float:
    started = time.process_time()
    plan = search(graph, H200, POLICY, structures=Structures())
    took = time.process_time() - started
    plan.check(graph)
    assert plan.predicted_us < plan.unfused_us
    return took


def random_graph(operators: int, seed: int) -> FusionGraph:
    graph = graph_of(random_dag(round(operators / OPERATORS_A_VALUE), seed), H200)
    assert len(graph.ops) >= 0.9 * operators
    return graph


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Imports and profiles are no part of planning."""
    search(random_graph(20, 0), H200, POLICY)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_thousand_random_operators_are_planned_in_time(seed):
    graph = random_graph(SMALL, seed)
    assert seconds(graph) <= SMALL_LIMIT_S * len(graph.ops) / SMALL


def test_ten_thousand_random_operators_are_planned_in_time():
    graph = random_graph(LARGE, 3)
    assert seconds(graph) <= LARGE_LIMIT_S * len(graph.ops) / LARGE


def test_the_time_grows_about_linearly_with_the_graph():
    small, large = (random_graph(n, 4) for n in (300, 2_400))
    assert seconds(large) / len(large.ops) < 2 * seconds(small) / len(small.ops)


def test_a_model_of_four_thousand_operators_takes_no_longer_than_a_thousand_random_ones():
    graph = graph_of(transformer(64), H200)
    assert len(graph.ops) >= 3.9 * SMALL
    assert seconds(graph) <= SMALL_LIMIT_S
