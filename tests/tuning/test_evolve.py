"""Schedules that MetaSchedule evolves: what is proposed, what it computes, what is learned."""

import json
import math

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import tirx
from tvm.relax import op

from tvm_fusion.errors import Unsupported
from tvm_fusion.runtime.build.build import build_functions
from tvm_fusion.runtime.build.lowering import SCHEDULED_ATTR
from tvm_fusion.tuning.database import replay
from tvm_fusion.tuning.search import evolve
from tvm_fusion.tuning.search.evolve import beyond_limits

from ..support.kernel_cases import fuse
from ..support.stock_cuda_on_cpu import lowered_together, run_launches_on_cpu
from ..support.tune_functions import (
    CASES,
    CUDA,
    LLVM,
    arrays,
    assert_right,
    evolving,
    fused,
    run,
    softmax,
    texts_of,
)


def synthetic_us(text: str) -> float:
    """A cost with one best decision for each choice: the second of a list, 8 iterations inside."""
    _, decisions = json.loads(text)
    far = [abs(math.log2(d[-1]) - 3) if isinstance(d, list) else abs(d - 1) for _, d in decisions]
    return 10.0 * (1 + sum(far))


@pytest.mark.one_in(16)
@pytest.mark.parametrize("name", CASES)
def test_schedules_on_a_cpu_compute_what_the_function_computes(name):
    func = fused(name)
    texts = texts_of(evolving(func, LLVM, seed=3), 4)
    assert 1 <= len(set(texts)) == len(texts) <= 4
    values = arrays(func)
    for text in texts[-2:]:
        kernel = replay.scheduled(func, text)
        assert bool(kernel.attrs[SCHEDULED_ATTR])
        assert "global_symbol" not in kernel.attrs
        assert_right(name, run(kernel, values), values)


def test_evolution_finds_better_schedules_than_the_first_batch(monkeypatch):
    monkeypatch.setattr(evolve, "THREADS", 1)  # several propose what the faster one finds
    np.random.seed(0)  # which XGBModel ranks by before it has learned anything
    func = fused("linear")
    search = evolving(func, LLVM, batch=8)
    costs, every = [], []
    for _ in range(4):
        texts = texts_of(search, 8)
        every += texts
        costs.append([synthetic_us(text) for text in texts])
        search.tell(list(zip(texts, costs[-1], strict=True)))
    assert len(set(every)) == len(every) == 32
    assert len({tvm_ffi.structural_hash(replay.scheduled(func, t)) for t in every}) == 32
    assert np.mean(costs[-1]) < np.mean(costs[0])


def test_starting_points_come_first_and_what_is_known_never():
    func = fused("linear")
    slow, fast, *known = texts_of(evolving(func, LLVM), 10)
    told = [(known[0], None), *((text, 7.0) for text in known[1:])]
    seeds = [(slow, 9.0), (fast, 1.0), ("[]", 2.0)]
    texts = texts_of(evolving(func, LLVM, seeds=seeds, known=told), 6)
    assert texts[:2] == [fast, slow]
    assert len(texts) == 6
    assert not set(texts) & set(known)


def test_failures_teach_nothing():
    search = evolving(fused("linear"), LLVM)
    model = search._model
    texts = texts_of(search, 3)
    search.tell([(text, None) for text in texts])
    assert model.data_size == 0
    search.tell([(texts[0], 20.0), ("no trace", 1.0)])
    assert model.data_size == 1
    assert set(texts).isdisjoint(texts_of(search, 8))


def symbolic_softmax() -> tirx.PrimFunc:
    return fuse(softmax, ((tirx.Var("n", "int64"), 96), "float32"))


def test_functions_that_no_space_holds_are_refused():
    with pytest.raises(Unsupported, match="symbolic"):
        evolving(symbolic_softmax(), LLVM)
    with pytest.raises(Unsupported, match="no block"):
        evolving(tirx.PrimFunc([], tirx.Evaluate(0)), LLVM)


def convolution(dtype, x, w):
    def emit(bb, x, w):
        return op.nn.conv2d(x, w, padding=1, out_dtype="float32")

    return fuse(emit, (x, dtype), (w, dtype))


def two_sums(bb, x):
    return op.sum(bb.emit(op.exp(x)), axis=[1])


GPU_CASES = {
    "softmax": (
        lambda: fuse(softmax, ((33, 60), "float32")),
        lambda x: np.exp(x) / np.exp(x).sum(1, keepdims=True),
    ),
    "sum": (lambda: fuse(two_sums, ((21, 9, 10), "float32")), lambda x: np.exp(x).sum(1)),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", GPU_CASES)
def test_schedules_for_a_gpu_compute_what_the_function_computes(name):
    make, reference = GPU_CASES[name]
    func = make()
    texts = texts_of(evolving(func, CUDA, seed=2), 3)
    assert texts
    for kernels in lowered_together([replay.scheduled(func, text) for text in texts]):
        values = arrays(func)
        run_launches_on_cpu(kernels, values)
        wanted = reference(*(v.astype("float64") for v in values[:-1]))
        np.testing.assert_allclose(values[-1], wanted, rtol=1e-4, atol=1e-4)


def test_schedules_for_a_gpu_compile(tmp_path, monkeypatch):
    monkeypatch.setenv("TVM_FUSION_CACHE", str(tmp_path))
    func = fuse(softmax, ((64, 256), "float32"))
    (text,) = texts_of(evolving(func, CUDA, batch=1), 1)
    kernel = replay.scheduled(func, text).with_attr("global_symbol", "kernel")
    _, resources = build_functions(tvm.IRModule({"kernel": kernel}), CUDA)
    assert resources
    assert all(r.registers > 0 for r in resources)


def threads_over(extent):
    mod = tvm.IRModule({"main": convolution("float16", (1, 4, 8, 8), (4, 4, 3, 3))})
    sch = tvm.s_tir.Schedule(mod)
    loop = sch.fuse(*sch.get_loops(sch.get_sblock("conv2d_nchw"))[:4])
    sch.bind(sch.split(loop, [extent, None])[0], "blockIdx.y")
    return sch.mod["main"]


def test_grids_and_intermediates_have_limits(monkeypatch):
    func = threads_over(64)
    assert beyond_limits(func) == ""
    monkeypatch.setitem(evolve.LARGEST_GRID, "blockIdx.y", 63)
    assert "64 blocks along blockIdx.y" in beyond_limits(func)
    monkeypatch.setitem(evolve.LARGEST_GRID, "blockIdx.y", 64)
    monkeypatch.setattr(evolve, "LARGEST_BYTES", 100)
    assert "100 at most" in beyond_limits(func)


def test_what_is_beyond_the_limits_is_not_proposed(monkeypatch):
    func = fuse(softmax, ((33, 60), "float32"))
    monkeypatch.setattr(evolve, "beyond_limits", lambda func: "never")
    assert texts_of(evolving(func, CUDA), 4) == []
