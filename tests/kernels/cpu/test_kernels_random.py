"""CPU kernels of random graphs give what stock TVM gives with one kernel an operator."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_fusion.kernels.cpu.write import write_cpu

from ...support.cpu_random_graphs import RandomGraph
from ...support.helpers_tir import call, compile_cpu, run_unfused
from ...support.kernel_cases import fuse, outputs_of

# Errors relative to the largest value: stock TVM rounds 16-bit floats after every operation.
TOLERANCE = {"float32": 2e-5, "float16": 2e-2, "bfloat16": 1e-1}


def inputs_of(graph: RandomGraph) -> list[np.ndarray]:
    """Inputs of a graph."""
    from ...support.kernel_cases import numpy_dtype

    rng = np.random.default_rng(graph.seed)
    return [
        rng.integers(0, 4, s) if d == "int64" else rng.standard_normal(s).astype(numpy_dtype(d))
        for s, d in graph.inputs
    ]


def check(graph: RandomGraph, exact: bool = False) -> None:
    """Compare a graph's kernel with its unfused operators."""
    func = fuse(graph.emit, *graph.inputs)
    arrays = inputs_of(graph)
    read = [p.name for p in func.params]
    used = [a for i, a in enumerate(arrays) if f"p{i}" in read]
    kernel = compile_cpu(write_cpu(func, exact))
    got = call(kernel, used, outputs_of(func, len(used)))
    expected = run_unfused(graph.emit, graph.inputs, arrays)
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        a, b = a.astype("float64"), b.astype("float64")
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))
        finite = np.isfinite(b)
        scale = np.abs(b[finite]).max(initial=1.0)
        assert np.abs(a[finite] - b[finite]).max(initial=0.0) <= TOLERANCE[graph.dtype] * scale


@pytest.mark.one_in(8)
@pytest.mark.parametrize("seed", range(12))
def test_float32_graphs(seed):
    check(RandomGraph(seed, size=9))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(100, 104))
def test_larger_float32_graphs(seed):
    check(RandomGraph(seed, size=20))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("seed", range(200, 203))
def test_float16_graphs(seed, exact):
    check(RandomGraph(seed, dtype="float16"), exact)


# Seeds without an argmax, which stock TVM cannot compile in bfloat16.
@pytest.mark.one_in(4)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("seed", [300, 302])
def test_bfloat16_graphs(seed, exact):
    check(RandomGraph(seed, dtype="bfloat16"), exact)


def test_a_seed_always_makes_the_same_graph():
    a, b = (fuse(RandomGraph(5).emit, *RandomGraph(5).inputs) for _ in range(2))
    assert a.script() == b.script()
