"""Constants of float64 in generated CUDA are those of the program, to the last bit."""

import math

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op

from tvm_fusion.config import load_profile
from tvm_fusion.kernels.program.analysis import analyze
from tvm_fusion.kernels.row.kernel import emit_row, row_configs
from tvm_fusion.runtime.build.cuda_compiler import find_compiler
from tvm_fusion.runtime.build.lowering import with_exact_doubles

from ..support.cuda_on_cpu import cuda_source, run_cuda_on_cpu
from ..support.kernel_cases import fuse

H200 = load_profile("nvidia_h200")
CUDA = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
BY_BITS = "__longlong_as_double"


def scaled_sums(factor):
    def build(bb, x):
        times = relax.const(factor, "float64")
        return op.multiply(op.sum(op.multiply(x, times), axis=-1), times)

    program = analyze(fuse(build, ((5, 33), "float64")))
    return emit_row(program, row_configs(program, H200)[0], H200)


@pytest.mark.parametrize("factor", [1 / 155, 1e-20, -math.pi, 1.2345678901234567e30])
def test_a_constant_is_not_rounded(factor):
    x = np.random.default_rng(0).standard_normal((5, 33))
    out = np.full(5, np.nan)
    assert run_cuda_on_cpu(scaled_sums(factor), [x, out]) == 1
    np.testing.assert_allclose(out, (x * factor).sum(-1) * factor, rtol=1e-15 * 33)


def test_it_compiles():
    source = cuda_source(scaled_sums(1 / 155))
    assert BY_BITS in source
    assert find_compiler().compile(source, "sm_90a").binary


@pytest.mark.parametrize("factor", [2.0, 0.5, -1024.25])
def test_constants_of_few_digits_stay_as_they_are(factor):
    assert BY_BITS not in cuda_source(scaled_sums(factor))


@pytest.mark.parametrize(
    ("target", "dtype", "value", "changed"),
    [
        (CUDA, "float64", 1 / 155, True),
        (CUDA, "float64", math.inf, False),
        (CUDA, "float64", math.nan, False),
        (CUDA, "float32", 1 / 155, False),  # printed by its bits
        (tvm.target.Target("llvm"), "float64", 1 / 155, False),
    ],
)
def test_only_what_cuda_would_round_is_changed(target, dtype, value, changed):
    body = tirx.Evaluate(tirx.FloatImm(dtype, value))
    func = tirx.PrimFunc([], body).with_attr("target", target)
    (found,) = with_exact_doubles(tvm.IRModule({"main": func})).functions.values()
    assert (BY_BITS in str(found)) == changed
