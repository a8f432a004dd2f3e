"""16-bit floats are computed in float32; their constants are rounded, as their arrays are."""

import math

import ml_dtypes
import numpy as np
import pytest
from tvm import te, tirx

from tvm_fusion.kernels.cpu.stages.resolve import round_constant
from tvm_fusion.kernels.cpu.write import write_cpu

from ....support.helpers_tir import call, compile_cpu, poisoned

KINDS = {"float16": np.dtype("float16"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
TIES = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11]
"""Halfway between two bfloat16 (the first two) or two float16 numbers: the even one is nearest."""


@pytest.mark.parametrize("dtype", KINDS)
def test_constants_are_rounded_to_the_nearest_number_of_their_type(dtype):
    random = np.random.default_rng(0).standard_normal(100).astype("float32").tolist()
    values = [0.0, -0.0, 0.3, 1 / 3, math.pi, math.inf, -math.inf, *TIES, *random]
    for value in [*values, *(-v for v in values)]:
        nearest = float(np.float32(value).astype(KINDS[dtype]))
        assert round_constant(value, dtype).hex() == nearest.hex()
    assert math.isnan(round_constant(math.nan, dtype))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", KINDS)
def test_a_kernel_computes_with_the_rounded_constant(dtype, exact):
    x = te.placeholder((64,), dtype)
    y = te.compute((64,), lambda i: x[i] * tirx.const(0.3, dtype))
    kernel = compile_cpu(write_cpu(te.create_prim_func([x, y]), exact))
    powers = np.exp2(np.arange(64) % 8).astype(KINDS[dtype])
    (got,) = call(kernel, [powers], [poisoned((64,), dtype)])
    np.testing.assert_array_equal(got, powers * KINDS[dtype].type(0.3))
