"""The analytic estimate of launches on a CPU: which term a resource raises, and how they add up."""

from dataclasses import replace

import pytest

from tvm_fusion.config import load_profile
from tvm_fusion.cost.analytic import COMPUTING, estimate, estimate_many, resident
from tvm_fusion.cost.traffic import Resources, Traffic

CPU = load_profile("llvm_cpu")
NONE = Resources(16, 0)
BASE = Traffic(8e6, 8e6, {"arithmetic": 1e6, "special": 1e6, "conversion": 1e6, "integer": 1e4})
RAISED = {
    "hbm": {"l2_bytes": 8e7},
    "arithmetic": {"operations": {"arithmetic": 1e9}},
    "special": {"operations": {"division": 1e8}},
    "integer": {"operations": {"integer": 1e7}},
    "conversion": {"operations": {"conversion": 1e9}},
    "tensor": {"tensor_flops": 1e9},
}


def time_of(hw=CPU, **changes):
    return estimate(replace(BASE, **changes), NONE, hw)


@pytest.mark.parametrize("term", RAISED)
def test_more_of_a_resource_raises_its_term_and_the_time(term):
    low, high = time_of(), time_of(**RAISED[term])
    assert high.terms[term] > low.terms.get(term, 0.0)
    assert high.time_us > low.time_us


def test_what_fits_into_the_cache_moves_at_its_rate_and_what_does_not_at_that_of_the_memory():
    assert resident(1e5, CPU) > 0.99
    assert resident(1e9, CPU) < 0.01
    small, large = (time_of(l2_bytes=size).terms for size in (1e5, 1e9))
    assert small["l2"] > small.get("hbm", 0.0)
    assert large["hbm"] > large["l2"]


def test_few_operations_run_on_one_core_and_wake_no_other():
    tiny = time_of(l2_bytes=512.0, operations={"arithmetic": 64.0})
    assert tiny.terms["launch"] == pytest.approx(CPU.kernel_gap_us)
    assert time_of().terms["launch"] == pytest.approx(CPU.kernel_gap_us + CPU.launch_us)


def test_a_launch_that_fills_one_core_of_many_takes_as_long_as_on_one():
    many = replace(CPU, num_sms=16)
    assert time_of(many, parallel=1 / 16).time_us > 4 * time_of(many).time_us


def test_instructions_add_up_and_are_what_a_launch_has_in_common_with_its_operators_apart():
    found = time_of()
    assert found.computing_us == pytest.approx(sum(found.terms.get(t, 0.0) for t in COMPUTING))
    assert found.computing_us < found.time_us - found.terms["launch"]


def test_one_formula_for_one_launch_and_for_many():
    traffics = [replace(BASE, l2_bytes=size) for size in (1e3, 1e6, 1e9)]
    many = estimate_many([(t, NONE) for t in traffics], CPU)
    assert list(many) == [estimate(t, NONE, CPU).time_us for t in traffics]
