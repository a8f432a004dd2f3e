"""Evolved schedules of padded convolutions for a GPU: numbers, arrays of a thread, evolve."""

import re

import numpy as np
import pytest
import tvm
from tvm.relax import op

from tvm_fusion.runtime.build.build import build_functions
from tvm_fusion.tuning.search import evolutionary_search as evolve
from tvm_fusion.tuning.search import replay
from tvm_fusion.tuning.search.evolutionary_search import beyond_limits

from ..support.kernel_cases import fuse
from ..support.stock_cuda_on_cpu import kernels_of, lowered_together, run_launches_on_cpu
from ..support.tune_functions import CUDA, arrays, evolving


def convolution(dtype, x, w):
    def emit(bb, x, w):
        return op.nn.conv2d(x, w, padding=1, out_dtype="float32")

    return fuse(emit, (x, dtype), (w, dtype))


def convolved(x, w):
    """A 3x3 convolution with a border of zeros."""
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    return np.einsum("ncyxij,fcij->nfyx", windows, w)


def test_candidates_compute_the_convolution():
    func = convolution("float32", (2, 3, 5, 8), (4, 3, 3, 3))
    texts = evolving(func, CUDA, space="own", seed=2, trials=6, batch=6).ask(6)
    assert len(texts) == 6
    for kernels in lowered_together([replay.scheduled(func, text) for text in texts]):
        values = arrays(func)
        run_launches_on_cpu(kernels, values)
        wanted = convolved(*(v.astype("float64") for v in values[:2]))
        np.testing.assert_allclose(values[-1], wanted, rtol=1e-4, atol=1e-4)


def test_a_thread_keeps_no_more_than_its_own_results(tmp_path, monkeypatch):
    """Lanes of a loop that was fused of several axes made arrays of gigabytes."""
    monkeypatch.setenv("TVM_FUSION_CACHE", str(tmp_path))
    func = convolution("float16", (4, 32, 28, 28), (32, 32, 3, 3))
    texts = evolving(func, CUDA, space="own", seed=1, trials=4, batch=4).ask(4)
    assert len(texts) == 4
    scheduled = [replay.scheduled(func, text) for text in texts]
    for candidate in scheduled:
        kernels = kernels_of(candidate)
        assert kernels
        for kernel in kernels:
            sizes = re.findall(r"(?:float|half) \w+\[(\d+)\]", kernel.source)
            assert 0 < max(map(int, sizes)) <= 1024
    build_functions(
        tvm.IRModule({"kernel": scheduled[0].with_attr("global_symbol", "kernel")}), CUDA
    )


def threads_over(extent):
    mod = tvm.IRModule({"main": convolution("float16", (1, 4, 8, 8), (4, 4, 3, 3))})
    sch = tvm.s_tir.Schedule(mod)
    block = sch.get_sblock("conv2d_nchw")
    loop = sch.fuse(*sch.get_loops(block)[:4])
    grid = sch.split(loop, [extent, None])[0]
    sch.bind(grid, "blockIdx.y")
    return sch.mod["main"]


def test_grids_and_intermediates_have_limits(monkeypatch):
    func = threads_over(64)
    assert beyond_limits(func) == ""
    monkeypatch.setitem(evolve.LARGEST_GRID, "blockIdx.y", 63)
    assert "64 blocks along blockIdx.y" in beyond_limits(func)


@pytest.mark.parametrize(("bytes_", "fits"), [(1 << 20, True), (100, False)])
def test_large_intermediates_are_refused(monkeypatch, bytes_, fits):
    monkeypatch.setattr("tvm_fusion.tuning.search.evolutionary_search.LARGEST_BYTES", bytes_)
    assert (beyond_limits(threads_over(64)) == "") == fits


def test_what_is_beyond_the_limits_is_not_proposed(monkeypatch):
    func = convolution("float32", (2, 3, 5, 8), (4, 3, 3, 3))
    monkeypatch.setattr(evolve, "beyond_limits", lambda func: "never")
    assert evolving(func, CUDA, space="own", seed=2, trials=4, batch=4).ask(4) == []
