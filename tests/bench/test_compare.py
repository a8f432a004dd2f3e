"""Times of a user's model beside other compilers, and its twin on which torch's are timed."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from tvm import relax

from tvm_fusion.bench import compare
from tvm_fusion.bench.twin import torch_library, twin
from tvm_fusion.demo import demo_block
from tvm_fusion.errors import Unsupported
from tvm_fusion.runtime.build.build import build
from tvm_fusion.runtime.calls.compiled_module import CompiledModule

from ..support.runtime_cases import LLVM, relax_module


def test_the_demo_block_computes_the_same_in_torch():
    mod = demo_block(1, 16, 64, 4, 96, "float32")
    x = np.random.default_rng(0).standard_normal((1, 16, 64)).astype("float32")
    function, constants = twin(mod, torch_library("cpu"))
    given = function(constants, torch.from_numpy(x))
    wanted = CompiledModule.of(build(mod, LLVM))(x)
    np.testing.assert_allclose(given.numpy(), wanted, rtol=1e-4, atol=1e-5)


def _many_operators(bb, x, w):
    op = relax.op
    emit = bb.emit
    y = emit(op.nn.layer_norm(x, w, w, axes=[-1]))
    y = emit(op.nn.gelu(emit(op.add(y, emit(op.permute_dims(x))))))
    top = emit(op.max(y, axis=[1], keepdims=True))
    total = emit(op.sum(emit(op.exp(emit(op.subtract(y, top)))), axis=[1]))
    rows = emit(op.take(y, relax.const(np.asarray([2, 0], "int64")), axis=0))
    wide = emit(op.astype(emit(op.expand_dims(total, 0)), "float64"))
    half = emit(op.strided_slice(y, [1], [0], [8], [2]))
    parts = emit(relax.Tuple([y, top]))
    first = emit(relax.TupleGetItem(parts, 0))
    return relax.Tuple([emit(op.mean(first)), rows, wide, half])


def test_a_twin_computes_what_the_module_computes():
    mod = relax_module(_many_operators, ("x", (8, 8), "float32"), ("w", (8,), "float32"))
    rng = np.random.default_rng(1)
    x, w = (rng.standard_normal(shape).astype("float32") for shape in ((8, 8), (8,)))
    function, constants = twin(mod, torch_library("cpu"))
    given = function(constants, torch.from_numpy(x), torch.from_numpy(w))
    wanted = CompiledModule.of(build(mod, LLVM))(x, w)
    for got, want in zip(given, wanted, strict=True):
        assert got.numpy().dtype == want.dtype
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=1e-5)


def test_a_twin_refuses_an_operator_that_it_does_not_know():
    mod = relax_module(lambda bb, x: relax.op.sort(x), ("x", (8,), "float32"))
    with pytest.raises(Unsupported, match=r"no operator relax\.sort"):
        twin(mod, torch_library("cpu"))


# Always: a model timed without peers, and rows beside peers (`benchmarks/rows`).
@pytest.mark.nightly
@pytest.mark.usefixtures("no_torch")
def test_a_model_is_timed_fused_and_unfused_and_by_peers():
    mod = relax_module(lambda bb, x: relax.op.sort(x), ("x", (32, 64), "float32"))
    report = compare.bench(mod, target="llvm", peers=("tvm", "torch"))
    assert report.time_us.fused > 0
    assert report.time_us.unfused > 0
    assert report.times["tvm"].low_us <= report.times["tvm"].median_us
    assert "this process needs no torch" in report.times["torch"].failure
    assert all(group.measured_us > 0 for group in report.groups)


def test_a_model_can_be_timed_without_torch():
    code = "import sys; sys.modules['torch'] = None; from tvm_fusion.bench.compare import bench"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
