"""Five decisions that the model and the search have to get right, with the numbers behind them.

The device is the profile of an H200; what ptxas says needs nvcc, no GPU. `cases` measures the
same graphs.
"""

import json

import pytest

from tests.support.graphs import Planned, plan_of
from tvm_fusion.config import load_policy
from tvm_fusion.cost.probe import Candidate, candidates_of, probe
from tvm_fusion.plan.decide.probing import guessed
from tvm_fusion.plan.refusal import RefusalCode
from tvm_fusion.plan.search.solution import costed, total_us
from tvm_fusion.runtime.timing.launch_kernels import LaunchSpec, LaunchWriter

from .case_graphs import CASES, SPECIAL
from .cases import POLICY, main
from .forced import evaluator, forced

FREE = ("view", "opaque")
needs_nvcc = pytest.mark.usefixtures("nvcc")


@pytest.fixture(scope="module")
def planned():
    """Plans of the cases, each made once; its policy allows one kernel for what is to be split."""
    known: dict[tuple[str, int], Planned] = {}

    def plan(name: str, max_group_ops: int = POLICY["max_group_ops"]) -> Planned:
        key = name, max_group_ops
        if key not in known:
            policy = {**POLICY, "max_group_ops": max_group_ops}
            known[key] = plan_of(CASES[name].build(1.0), policy=policy)
        return known[key]

    return plan


def kernels(planned: Planned):
    return [g for g in planned.plan.groups if g.kernel_class not in FREE]


def by_hand(planned: Planned, name: str, plan: str):
    """Launches of a rejected plan with what the model says of them, and its total."""
    cost = evaluator(planned.graph, planned.hw, load_policy(None))
    solution = forced(planned.graph, CASES[name].rejected(planned.graph)[plan])
    return [costed(cost, launch) for launch in solution], total_us(cost, solution)


# ---- registers


def test_sixty_live_values_are_split_rather_than_spilled(planned):
    chosen = planned("register_pressure")
    (one,), one_us = by_hand(chosen, "register_pressure", "one kernel")
    assert len(one.view.ops) < POLICY["max_group_ops"]  # the cost decides, not the limit
    assert len(kernels(chosen)) > 1
    assert one.estimate.terms["spill"] > 0
    assert not any(g.terms.get("spill") for g in kernels(chosen))
    assert chosen.plan.predicted_us < 0.8 * one_us


# Always: the plan, above, and the code of chains beside what ptxas makes.
@pytest.mark.nightly
@needs_nvcc
def test_ptxas_spills_the_one_kernel_and_next_to_nothing_of_the_chosen_plan(planned):
    chosen = planned("register_pressure")
    (one,), _ = by_hand(chosen, "register_pressure", "one kernel")
    whole = Candidate(one.view, one.kernel.name)
    args = chosen.low, chosen.graph
    groups = candidates_of(chosen.graph, chosen.plan)
    found = probe(*args, [whole, *groups], chosen.hw, load_policy(None))
    spilled = found[whole.key].spill_bytes
    assert spilled > 1000
    assert found[whole.key].registers_per_thread == 255
    assert sum(found[g.key].spill_bytes for g in groups) < 0.2 * spilled


def test_a_chain_with_few_live_values_stays_one_kernel(planned):
    chosen = planned("short_chain")
    assert len(kernels(chosen)) == 1
    _, apart_us = by_hand(chosen, "short_chain", "apart")
    assert chosen.plan.predicted_us < 0.2 * apart_us


# ---- code


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["code_chain", "code_dag"])
def test_four_hundred_special_functions_are_not_put_in_one_kernel(planned, name):
    chosen = planned(name)
    (one,), one_us = by_hand(chosen, name, "one kernel")
    assert one.estimate.terms["code"] > 0
    assert not any(g.terms.get("code") for g in kernels(chosen))
    assert chosen.plan.predicted_us < one_us
    special = sum(g.kernel_class == "pointwise" for g in kernels(chosen))
    assert special >= 3


def test_the_code_term_alone_keeps_a_long_chain_apart(planned):
    """No limit on operators; with room for all of its code the chain would be one kernel."""
    policy = {**POLICY, "max_group_ops": 2 * SPECIAL}
    chosen = planned("code_chain", policy["max_group_ops"])
    (one,), _ = by_hand(chosen, "code_chain", "one kernel")
    assert len(kernels(chosen)) > 1
    code_us = sum(g.terms.get("code", 0.0) for g in kernels(chosen))
    assert code_us < 0.5 * one.estimate.terms["code"]
    roomy = plan_of(CASES["code_chain"].build(1.0), policy=policy, instruction_cache_bytes=1 << 30)
    assert len(kernels(roomy)) == 1


def test_a_chain_of_twenty_special_functions_is_one_kernel(planned):
    assert len(kernels(planned("short_code"))) == 1


@needs_nvcc
def test_the_code_of_a_chain_is_estimated_within_a_third_of_what_ptxas_makes(planned):
    chosen = planned("short_code")
    (group,) = candidates_of(chosen.graph, chosen.plan)
    found = probe(chosen.low, chosen.graph, [group], chosen.hw, load_policy(None))[group.key]
    costs = evaluator(chosen.graph, chosen.hw, load_policy(None))
    cost = costs.group(group.view.ops, group.view.outputs)
    estimate = guessed(cost, chosen.hw)
    assert found.code_bytes == pytest.approx(estimate.code_bytes, rel=1 / 3)


# ---- coalescing


def test_a_row_sum_that_breaks_the_coalescing_of_a_transposing_group_is_not_fused(planned):
    chosen = planned("coalescing")
    (one,), one_us = by_hand(chosen, "coalescing", "one kernel")
    assert [g.kernel_class for g in kernels(chosen)] == ["transpose", "row"]
    assert chosen.plan.predicted_us < 0.5 * one_us
    assert one.estimate.dominant in ("access", "l2", "sm")  # the memory itself is not the limit
    refusal = next(r for r in chosen.plan.refusals if r.code is RefusalCode.NOT_PROFITABLE)
    numbers = dict(refusal.numbers)
    assert numbers["together_us"] > 2 * numbers["apart_us"]


# ---- broadcast


def test_a_costly_chain_is_not_computed_again_along_a_broadcast(planned):
    chosen = planned("broadcast")
    _, one_us = by_hand(chosen, "broadcast", "one kernel")
    assert chosen.plan.predicted_us < one_us
    outside = [op for g in kernels(chosen)[:-1] for op in g.ops]
    assert len(outside) == 40
    assert not any(g.recomputed for g in kernels(chosen))
    refusal = next(r for r in chosen.plan.refusals if r.code is RefusalCode.RECOMPUTE)
    numbers = dict(refusal.numbers)
    assert numbers["factor"] >= 8192 / 8 > numbers["allowed"]


# ---- rematerialisation


def test_a_cheap_producer_is_rematerialised_into_all_of_its_consumers(planned):
    chosen = planned("remat_all")
    _, stored_us = by_hand(chosen, "remat_all", "stored")
    assert len(kernels(chosen)) == 2
    owned = {op for g in kernels(chosen) for op in g.ops if op not in g.recomputed}
    copied = {op for g in kernels(chosen) for op in g.recomputed}
    assert copied
    assert copied <= owned
    assert chosen.plan.predicted_us < stored_us


def test_what_is_stored_for_one_consumer_is_rematerialised_in_another(planned):
    chosen = planned("remat_some")
    _, stored_us = by_hand(chosen, "remat_some", "stored")
    owned = {op for g in kernels(chosen) for op in g.ops if op not in g.recomputed}
    copied = {op for g in kernels(chosen) for op in g.recomputed}
    assert copied
    assert copied < owned
    assert chosen.plan.predicted_us < stored_us


# ---- the benchmark


def test_the_cases_are_measured_beside_the_plans_they_reject(tmp_path, capsys):
    out = tmp_path / "cases.json"
    names = "short_chain,coalescing,remat_all"
    given = ["--target", "llvm", "--scale", "0.02", "--repeats", "2", "--cases", names]
    assert main([*given, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in (*names.split(","), "chosen", "one kernel", "stored"))
    result = json.loads(out.read_text())
    assert {"device", "date", "tvm", "command"} <= set(result)
    assert all(row["measured_us"] > 0 for row in result["rows"] if not row["problem"])
    assert [row["problem"] for row in result["rows"] if row["plan"] == "chosen"] == [None] * 3


def test_an_unknown_case_is_bad_input(capsys):
    assert main(["--target", "llvm", "--cases", "nothing"]) == 2
    assert "register_pressure" in capsys.readouterr().err


def test_the_kernel_of_forty_functions_of_one_value_a_row_does_not_grow_with_each(planned):
    """Closed forms repeat their argument, which is not bound where it changes once a row."""
    chosen = planned("broadcast")
    (one,), _ = by_hand(chosen, "broadcast", "one kernel")
    writer = LaunchWriter(chosen.low, chosen.graph, chosen.hw, load_policy(POLICY))
    kernel, _ = writer.write(LaunchSpec(one.view.ops, one.view.outputs, one.kernel.name))
    assert len(kernel.script()) < 100_000
