"""Timing: interleaving, warm-up, attribution of kernels."""

import time

import numpy as np
import pytest
import tvm
import tvm_ffi

from tvm_fusion.runtime.build.build import build
from tvm_fusion.runtime.calls.compiled_module import CompiledModule
from tvm_fusion.runtime.timing import timing
from tvm_fusion.runtime.timing.timing import (
    Timing,
    _event_times,
    attribute,
    kernel_times,
    time_module,
    time_modules,
    wall_times,
)

from ..support.runtime_cases import LLVM, softmax_reshape_relu


def test_a_summary_holds_median_and_quartiles():
    assert Timing.of([4.0, 1.0, 2.0, 3.0, 100.0], "wall") == Timing(3.0, 2.0, 4.0, 5, "wall")
    assert Timing.of([7.0], "wall") == Timing(7.0, 7.0, 7.0, 1, "wall")


def test_callables_are_warmed_up_and_then_take_turns():
    order = []

    def call(name):
        def run():
            order.append(name)
            time.sleep(0.001)  # longer than the shortest sample: one call each

        return run

    found = wall_times({"a": call("a"), "b": call("b")}, repeats=5)
    assert order == ["a", "a", "b", "b"] * 6  # one round of warm-up; in each sample one more call
    assert all(t.samples == 5 and t.clock == "wall" for t in found.values())


def test_the_slower_callable_has_the_longer_time():
    found = wall_times({"slow": lambda: time.sleep(0.004), "fast": lambda: None}, repeats=5)
    assert found["slow"].median_us >= 4000
    assert found["fast"].median_us < found["slow"].median_us


def test_a_budget_cuts_the_samples_but_not_below_three():
    found = wall_times({"slow": lambda: time.sleep(0.01)}, repeats=50, budget_s=0.0)
    assert found["slow"].samples == 3


def test_modules_are_timed_on_the_cpu_beside_plain_callables():
    compiled = CompiledModule.of(build(softmax_reshape_relu(16, 16), LLVM))
    x = np.zeros((16, 16), "float32")
    found = time_modules({"ours": compiled, "numpy": np.exp}, [x], repeats=5)
    assert {t.clock for t in found.values()} == {"wall"}
    assert all(0 < t.low_us <= t.median_us <= t.high_us for t in found.values())
    assert time_module(compiled, [x], repeats=4).samples == 4


def test_kernels_count_for_the_span_that_holds_their_middle():
    spans = [(1, 100.0, 130.0), (0, 0.0, 30.0), (0, 200.0, 230.0)]
    kernels = [
        (40.0, 90.0),  # between spans: the cleaning of the L2
        (5.0, 9.0),
        (12.0, 20.0),
        (99.0, 111.0),  # starts before its span by the skew of the two clocks
        (240.0, 250.0),
    ]
    assert attribute(spans, kernels) == {0: [(12.0, 2), (0, 0)], 1: [(12.0, 1)]}


@pytest.mark.gpu
def test_kernel_time_is_that_of_the_kernels_and_not_of_the_launches():
    import torch

    x = torch.zeros(64 << 20, device="cuda")
    one = torch.zeros(1, device="cuda")
    found = kernel_times({"big": lambda: x.add_(1), "two": lambda: (one.add_(1), one.mul_(2))})
    assert found["big"].kernels == 1
    assert found["two"].kernels == 2
    assert found["big"].median_us > 10 * found["two"].median_us
    assert found["two"].median_us < 20


def test_without_torch_the_evaluator_cleans_the_l2_before_each_sample(monkeypatch):
    cleaned = []
    monkeypatch.setattr(timing, "l2_cleaner", lambda device: counted(cleaned))
    module = CompiledModule.of(build(softmax_reshape_relu(), LLVM))
    x = np.zeros((128, 256), "float32")
    found = _event_times({"a": module}, [x], 3)["a"]
    assert (found.clock, found.samples) == ("event", 3)
    assert len(cleaned) == 3


def counted(calls):
    tvm_ffi.register_global_func("tests.counted", lambda *_: calls.append(1), override=True)
    return "tests.counted"


def test_the_cleaner_is_a_function_that_an_evaluator_can_call():
    tvm_ffi.get_global_func(timing.l2_cleaner(tvm.cpu()))(1, 2)
