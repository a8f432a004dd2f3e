"""Timing: interleaving, warm-up, attribution of kernels."""

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import te

from tvm_fusion.runtime.build.build import build
from tvm_fusion.runtime.calls.compiled_module import CompiledModule
from tvm_fusion.runtime.timing import timing
from tvm_fusion.runtime.timing.timing import (
    Timing,
    _event_times,
    attribute,
    kernel_times,
    time_modules,
    wall_times,
)

from ..support.runtime_cases import LLVM, softmax_reshape_relu


def test_a_summary_holds_median_and_quartiles():
    assert Timing.of([4.0, 1.0, 2.0, 3.0, 100.0], "wall") == Timing(3.0, 2.0, 4.0, 5, "wall")
    assert Timing.of([7.0], "wall") == Timing(7.0, 7.0, 7.0, 1, "wall")


class Clock:
    """Time that passes in `sleep` alone; what sleeps is `rested` after it."""

    now, rested = 0.0, False

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.rested = True


@pytest.fixture
def clock(monkeypatch):
    """Stands for the module `time`."""
    monkeypatch.setattr(timing, "time", Clock())
    return timing.time


def test_callables_are_warmed_up_and_then_take_turns(clock):
    order = []

    def call(name):
        def run():
            order.append(name)
            clock.now += 0.001  # longer than the shortest sample: one call each

        return run

    found = wall_times({"a": call("a"), "b": call("b")}, repeats=5)
    assert order == ["a", "a", "b", "b"] * 6  # one round of warm-up; in each sample one more call
    assert all(t.samples == 5 and t.clock == "wall" for t in found.values())


def test_a_time_is_that_of_one_call(clock):
    calls = []

    def fast():
        calls.append(1)
        clock.now += 10e-6

    def slow():
        clock.now += 0.004

    found = wall_times({"slow": slow, "fast": fast}, repeats=5)
    assert found["slow"].values_us == pytest.approx([4000] * 5)
    assert found["fast"].values_us == pytest.approx([10] * 5)
    assert len(calls) > 5 * 20  # 200 us a sample


def test_the_first_call_after_a_pause_does_not_count(clock):
    def call():
        clock.now += 0.05 if clock.rested else 0.005
        clock.rested = False

    assert wall_times({"call": call}, repeats=4)["call"].values_us == pytest.approx([5000] * 4)


def test_the_wait_for_the_work_counts(clock):
    def wait():
        clock.now += 0.002

    found = wall_times({"launch": lambda: None}, repeats=4, wait=wait)
    assert found["launch"].values_us == pytest.approx([2000] * 4)


@pytest.mark.parametrize(("budget_s", "samples"), [(0.0, 3), (0.25, 10), (10.0, 50)])
def test_a_budget_cuts_the_samples_but_not_below_three(clock, budget_s, samples):
    def call():  # twice a sample, and a pause of 3 ms
        clock.now += 0.01

    found = wall_times({"slow": call}, repeats=50, budget_s=budget_s)
    assert found["slow"].samples == samples


def test_modules_are_timed_on_the_cpu_beside_plain_callables(monkeypatch):
    compiled = CompiledModule.of(build(softmax_reshape_relu(512, 512), LLVM))
    x, given = np.zeros((512, 512), "float32"), []
    monkeypatch.setattr(CompiledModule, "__call__", None)  # inputs are checked once
    found = time_modules({"ours": compiled, "append": given.append}, [x], repeats=5)
    assert {(t.clock, t.samples) for t in found.values()} == {("wall", 5)}
    assert found["ours"].median_us > 20 > found["append"].median_us > 0
    assert len(given) >= 5
    assert all(one is x for one in given)


def test_kernels_count_for_the_span_that_holds_their_middle():
    spans = [(1, 100.0, 130.0), (0, 0.0, 30.0), (0, 200.0, 230.0)]
    kernels = [
        (40.0, 90.0),  # between spans: the cleaning of the L2
        (5.0, 9.0),
        (12.0, 18.0),
        (17.0, 20.0),  # launched before the one in front of it ended
        (99.0, 111.0),  # starts before its span by the skew of the two clocks
        (240.0, 250.0),
    ]
    assert attribute(spans, kernels) == {0: [(12.0, 3), (0, 0)], 1: [(12.0, 1)]}


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
    assert 1 < found.low_us <= found.high_us < 1e6  # 32,768 exponentials
    assert len(cleaned) == 3


def counted(calls):
    tvm_ffi.register_global_func("tests.counted", lambda *_: calls.append(1), override=True)
    return "tests.counted"


def test_the_cleaner_moves_all_its_bytes_whatever_an_evaluator_gives_it(monkeypatch):
    taken, empty = [], tvm.runtime.empty
    monkeypatch.setattr(tvm.runtime, "empty", lambda *a: taken.append(empty(*a)) or taken[-1])
    cleaner = tvm_ffi.get_global_func(timing.l2_cleaner(tvm.cpu()))
    source, sink = taken
    source.copyfrom(np.full(source.shape, 7, "uint8"))
    assert cleaner(1, 2) is None
    moved = sink.numpy()
    assert moved.nbytes * 2 == timing.L2_CLEANING_BYTES
    assert moved.min() == moved.max() == 7


def test_an_evaluator_of_a_kernel_takes_the_cleaner(monkeypatch):
    """What a cleaner returned stood in the place of the kernel's result, which refuses that."""
    monkeypatch.setattr(timing, "L2_CLEANING_BYTES", 1 << 12)
    a = te.placeholder((8,), "float32")
    kernel = te.create_prim_func([a, te.compute((8,), lambda i: a[i] + 1.0)])
    library = tvm.compile(kernel, target="llvm").mod
    x, y = (tvm.runtime.tensor(np.zeros(8, "float32")) for _ in range(2))
    clean = timing.l2_cleaner(tvm.cpu())
    evaluate = library.time_evaluator("main", tvm.cpu(), number=1, repeat=2, f_preproc=clean)
    assert len(evaluate(x, y).results) == 2
