"""The CPU emulator of CUDA: it must run what is right, and notice what is wrong."""

import numpy as np
import pytest
from tvm.script import tirx as T

from ..support.cuda_on_cpu import (
    EmulationError,
    compile_cubins,
    run_cuda_on_cpu,
    without_each_barrier,
)


def tirx_kernel(func):
    return func.with_attr("tvm_fusion.tirx", True)


@T.prim_func
def reversed_blocks(X: T.Buffer((128,), "float32"), Y: T.Buffer((128,), "float32")):
    T.device_entry()
    block = T.cta_id([2])
    thread = T.thread_id([64])
    shared = T.alloc_shared((64,), "float32")
    shared[thread] = X[block * 64 + thread]
    T.cuda.cta_sync()
    Y[block * 64 + thread] = shared[63 - thread]


@T.prim_func
def beyond_the_end(X: T.Buffer((100,), "float32"), Y: T.Buffer((128,), "float32")):
    T.device_entry()
    block = T.cta_id([2])
    thread = T.thread_id([64])
    Y[block * 64 + thread] = X[block * 64 + thread]


@T.prim_func
def before_the_start(X: T.Buffer((64,), "float32"), Y: T.Buffer((64,), "float32")):
    T.device_entry()
    T.cta_id([1])
    thread = T.thread_id([64])
    Y[thread - 1] = X[thread]


@T.prim_func
def shared_beyond_the_end(X: T.Buffer((64,), "float32"), Y: T.Buffer((64,), "float32")):
    T.device_entry()
    T.cta_id([1])
    thread = T.thread_id([64])
    shared = T.alloc_shared((32,), "float32")
    shared[thread * 8] = X[thread]
    Y[thread] = shared[thread * 8]


@T.prim_func
def misaligned(X: T.Buffer((260,), "float32"), Y: T.Buffer((256,), "float32")):
    T.device_entry()
    T.cta_id([1])
    thread = T.thread_id([64])
    T.evaluate(
        T.cuda.func_call(
            "tvmf_store16_wb",
            Y.ptr_to([thread * 4]),
            X.ptr_to([thread * 4]),
            source_code="__device__ void tvmf_store16_wb(void* d, const void* s) {}",
            return_type="void",
        )
    )
    T.evaluate(
        T.cuda.func_call(
            "tvmf_store16_wb",
            Y.ptr_to([thread + 1]),
            X.ptr_to([thread * 4]),
            source_code="__device__ void tvmf_store16_wb(void* d, const void* s) {}",
            return_type="void",
        )
    )


@T.prim_func
def divergent_barrier(X: T.Buffer((64,), "float32"), Y: T.Buffer((64,), "float32")):
    T.device_entry()
    T.cta_id([1])
    thread = T.thread_id([64])
    if thread < 32:
        T.cuda.cta_sync()
    Y[thread] = X[thread]


@T.prim_func
def shuffled(X: T.Buffer((64,), "float32"), Y: T.Buffer((64,), "float32")):
    T.device_entry()
    T.cta_id([1])
    thread = T.thread_id([64])
    Y[thread] = T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), X[thread], 16, 32, 32)


@T.prim_func
def by_value(X: T.Buffer((64,), "float32"), Y: T.Buffer((64,), "float32"), n: T.int64):
    T.device_entry()
    T.cta_id([1])
    thread = T.thread_id([64])
    if T.Cast("int64", thread) < n:
        Y[thread] = X[thread]


def arrays(*sizes):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(size).astype("float32") for size in sizes]


def test_blocks_shared_memory_and_barriers_work():
    x, y = arrays(128, 128)
    assert run_cuda_on_cpu(tirx_kernel(reversed_blocks), [x, y]) == 1
    np.testing.assert_array_equal(y, x.reshape(2, 64)[:, ::-1].reshape(-1))


def test_in_random_orders_warps_do_not_meet_without_a_barrier():
    kernel = tirx_kernel(reversed_blocks)
    (without,) = without_each_barrier(kernel)
    for seed in range(4):
        (x, y), (_, wrong) = arrays(128, 128), arrays(128, 128)
        run_cuda_on_cpu(kernel, [x, y], seed=seed)
        run_cuda_on_cpu(without, [x, wrong], seed=seed)
        right = x.reshape(2, 64)[:, ::-1].reshape(-1)
        np.testing.assert_array_equal(y, right)
        assert np.isnan(wrong).any()


def test_equal_seeds_are_equal_orders():
    (without,) = without_each_barrier(tirx_kernel(reversed_blocks))

    def missing(seed):
        x, y = arrays(128, 128)
        run_cuda_on_cpu(without, [x, y], seed=seed)
        return np.isnan(y).tobytes()

    found = [missing(seed) for seed in range(8)]
    assert found == [missing(seed) for seed in range(8)]
    assert len(set(found)) > 1


def test_shuffles_stay_within_their_warp():
    x, y = arrays(64, 64)
    run_cuda_on_cpu(tirx_kernel(shuffled), [x, y])
    np.testing.assert_array_equal(y, x.reshape(2, 2, 16)[:, ::-1].reshape(-1))


def test_numbers_are_passed_by_value():
    x, y = arrays(64, 64)
    before = y.copy()
    run_cuda_on_cpu(tirx_kernel(by_value), [x, y, 10])
    np.testing.assert_array_equal(y, np.concatenate([x[:10], before[10:]]))


@pytest.mark.parametrize(
    ("func", "sizes", "what"),
    [
        (beyond_the_end, (100, 128), "out of bounds"),
        (before_the_start, (64, 64), "out of bounds"),
        (shared_beyond_the_end, (64, 64), "out of bounds"),
        (misaligned, (260, 256), "misaligned"),
        (divergent_barrier, (64, 64), "wait for each other"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_a_gpu_would_not_forgive_is_reported(func, sizes, what):
    with pytest.raises(EmulationError, match=what):
        run_cuda_on_cpu(tirx_kernel(func), arrays(*sizes))


def test_cubins_report_registers_and_spills():
    (resources,) = compile_cubins({"reversed_blocks": tirx_kernel(reversed_blocks)})
    assert resources.kernel == "reversed_blocks"
    assert 0 < resources.registers <= 255
    assert resources.spill_bytes == 0
