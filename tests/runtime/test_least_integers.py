"""The least integers in generated CUDA: kernels that compare with them compile."""

import numpy as np
import pytest
from tvm.relax import op

from tvm_fusion.config import load_profile
from tvm_fusion.kernels.program.analysis import analyze
from tvm_fusion.kernels.row.kernel import emit_row, row_configs
from tvm_fusion.runtime.build.cuda_compiler import find_compiler, least_integers

from ..support.cuda_on_cpu import cuda_source, run_cuda_on_cpu
from ..support.kernel_cases import fuse

H200 = load_profile("nvidia_h200")


def maxima(bb, x):
    return op.max(x, axis=-1)


def kernel_of(shape, dtype):
    program = analyze(fuse(maxima, (shape, dtype)))
    return emit_row(program, row_configs(program, H200)[0], H200)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("max(x, -2147483648)", "max(x, (-2147483647 - 1))"),
        ("a = (0 < v) ? v : -2147483648;", "a = (0 < v) ? v : (-2147483647 - 1);"),
        ("(int)-2147483648", "(int)(-2147483647 - 1)"),
    ],
)
def test_the_least_int32_becomes_a_difference_of_ints(before, after):
    assert least_integers(before) == after


@pytest.mark.parametrize(
    "source",
    [
        "-2147483647",
        "2147483648",
        "x - 2147483648",
        "-21474836480",
        "-2147483648LL",
        "-2147483648.0f",
        "(int64_t)(-9223372036854775807LL - 1LL)",
    ],
)
def test_other_numbers_stay(source):
    assert least_integers(source) == source


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dtype", ["int8", "int32", "int64"])
@pytest.mark.parametrize("shape", [(64, 1000), (4, 100001)], ids=str)
def test_maxima_of_integers_compile(shape, dtype):
    """Rows of an odd length are read in windows, what is beyond them as the least number."""
    source = cuda_source(kernel_of(shape, dtype))
    assert find_compiler().compile(source, "sm_90a").binary


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_the_least_number_is_its_own_maximum(dtype):
    least = np.iinfo(dtype).min
    x = np.full((3, 520), least, dtype)
    x[1, 17] = least + 1
    out = np.zeros(3, dtype)
    assert run_cuda_on_cpu(kernel_of(x.shape, dtype), [x, out]) == 1
    assert out.tolist() == [least, least + 1, least]
