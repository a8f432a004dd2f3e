"""Configurations of each kernel class on random problems: numbers, and stores counted by thread."""

import numpy as np
import pytest
from tvm.script import tirx as T

from tests.check.test_emulated_programs import lost_walkers
from tests.kernel_sweep import EVERYTHING, swept
from tests.support.kernel_problems import CLASSES, MODULES

from ..support.cuda_on_cpu import Watch, run_cuda_on_cpu


def assert_right(tried):
    assert tried.wrong == [], f"{tried.name} {tried.seed} for {tried.device}"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.nightly] * (name == "attention"))  # test_random.py
        for name in sorted(CLASSES)
    ],
)
def test_a_sample_of_configurations_is_right(name):
    tried = [swept(name, seed, 3) for seed in range(1 if name == "attention" else 2)]
    for of in tried:
        assert_right(of)
    assert sum(of.right for of in tried) >= 2


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", sorted(MODULES))
def test_modules_of_several_launches_are_right_in_some_configurations(name):
    tried = swept(name, 7, 6)
    assert_right(tried)
    assert tried.right == 2


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(100, 400, 25))
@pytest.mark.parametrize("name", EVERYTHING)
def test_configurations_of_hundreds_of_problems_are_right(name, first):
    for seed in range(first, first + 25):
        assert_right(swept(name, seed, 12))


def test_walkers_that_do_not_meet_are_found_by_the_sweep(monkeypatch):
    lost_walkers(monkeypatch)
    assert any(swept("column", seed, 6).wrong for seed in range(12))


@T.prim_func
def stored_twice_and_never(X: T.Buffer((64,), "float32"), Y: T.Buffer((64,), "float32")):
    T.device_entry()
    T.cta_id([1])
    thread = T.thread_id([64])
    if thread < 40:
        Y[thread] = X[thread]
    if thread < 3:
        Y[thread + 2] = X[thread + 2]


@T.prim_func
def read_before_written(X: T.Buffer((64,), "float32"), Y: T.Buffer((64,), "float32")):
    T.device_entry()
    T.cta_id([1])
    thread = T.thread_id([64])
    shared = T.alloc_shared((64,), "float32")
    if thread < 60:
        shared[thread] = X[thread]
    T.cuda.cta_sync()
    Y[thread] = shared[63 - thread]


def run(func, fill=0xFF):
    x, y = np.arange(64, dtype="float32"), np.zeros(64, "float32")
    watch = Watch(1, fill)
    run_cuda_on_cpu(func.with_attr("tvm_fusion.tirx", True), [x, y], watch)
    return y, watch.counts[0].reshape(64, 4)


def test_stores_of_each_byte_are_counted():
    _, counts = run(stored_twice_and_never)
    expected = np.repeat([1, 1, 2, 2, 2, 1, 0], [1, 1, 1, 1, 1, 35, 24])
    np.testing.assert_array_equal(counts, expected[:, None].repeat(4, 1))


def test_what_shared_memory_holds_before_shows_where_it_is_read_unwritten():
    y, counts = run(read_before_written)
    other, _ = run(read_before_written, 0x3C)
    assert (counts == 1).all()
    np.testing.assert_array_equal(y.view("int32") != other.view("int32"), np.arange(64) < 4)
