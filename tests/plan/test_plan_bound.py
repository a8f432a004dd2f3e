"""The lower bound of all plans of a graph."""

import sys

import pytest

import tvm_fusion
from tests.support.brute_force import cheapest_us
from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.plan.legality import Evaluator
from tvm_fusion.plan.search.bound import bound_of_plan, lower_bound
from tvm_fusion.plan.search.search import search, solve
from tvm_fusion.plan.search.search_state import State
from tvm_fusion.plan.search.solution import launches_of

from ..benchmarks.plans.random_graphs import graph_of, module_of

HW, POLICY = load_profile("nvidia_h200"), load_policy(None)


def evaluator_of(key: str) -> Evaluator:
    _, graph = graph_of(key, HW)
    return Evaluator(graph, HW, POLICY)


@pytest.mark.parametrize("seed", [1, 2, 4, 5, 6, 8, 12])
def test_no_solution_is_below_the_bound_and_the_best_one_is_near_it(seed):
    evaluator = evaluator_of(f"random:{seed}")
    bound = lower_bound(evaluator.graph, evaluator, solve(evaluator))
    assert bound.least_us <= cheapest_us(evaluator.graph, evaluator) + 1e-6
    assert bound.within <= 0.04


@pytest.mark.parametrize("seed", [1, 5, 12])
def test_the_bound_of_a_plan_is_that_of_its_launches(seed):
    evaluator = evaluator_of(f"random:{seed}")
    plan = search(evaluator.graph, HW, POLICY)
    bound = bound_of_plan(evaluator.graph, HW, POLICY, plan)
    assert bound == lower_bound(evaluator.graph, evaluator, solve(evaluator))
    assert bound.time_us == pytest.approx(plan.predicted_us, rel=1e-3)


def test_explain_says_how_far_the_plan_can_be_from_the_cheapest_one():
    report = tvm_fusion.explain(module_of("random:5"), "h200", bound=True)
    assert "no plan is predicted below" in str(report)
    assert report.to_json()["bound"]["least_us"] <= report.to_json()["bound"]["time_us"]


def test_the_unfused_solution_is_far_from_the_bound():
    evaluator = evaluator_of("random:2")
    bound = lower_bound(evaluator.graph, evaluator, launches_of(State.unfused(evaluator)))
    assert bound.within > 0.2


def test_a_graph_with_too_many_launches_has_no_bound():
    evaluator = evaluator_of("random:2")
    assert lower_bound(evaluator.graph, evaluator, solve(evaluator), most_launches=10) is None


def test_without_scipy_the_error_names_the_extra(monkeypatch):
    evaluator = evaluator_of("random:1")
    solution = solve(evaluator)
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ImportError, match=r"tvm_fusion\[bound\]"):
        lower_bound(evaluator.graph, evaluator, solution)
