"""Vectors of weights in half precision: which constants are narrowed, and what they become."""

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from tvm_fusion.transform.narrow_constants import exact_half

from .graphs import module, plan_of

EXACT = np.random.default_rng(4).standard_normal(128).astype("float16").astype("float32")


def test_a_vector_that_is_exact_in_float16_is_narrowed():
    half = exact_half(EXACT.reshape(1, 128, 1))
    assert half.dtype == np.float16
    assert np.array_equal(half.astype("float32"), EXACT.reshape(1, 128, 1))


def test_one_that_float16_cannot_hold_becomes_bfloat16():
    wide = (EXACT.astype(ml_dtypes.bfloat16).astype("float32")) * np.float32(2.0**100)
    assert exact_half(wide).dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    "array",
    [
        EXACT + np.float32(1e-5),
        EXACT.reshape(2, 64),
        EXACT[:8],
        EXACT.astype("float64"),
        np.arange(128, dtype="int32"),
        np.float32(2.0),
    ],
    ids=["rounding", "matrix", "few", "float64", "integers", "number"],
)
def test_other_constants_stay(array):
    assert exact_half(np.asarray(array)) is None


def norm(bb, x):
    gamma = relax.const(EXACT.astype("float16"), "float16")
    return op.nn.rms_norm(x, gamma, axes=[-1], epsilon=1e-5)


def constants(mod):
    found = []
    relax.analysis.post_order_visit(
        mod["main"], lambda e: found.append(e) if isinstance(e, tvm.ir.Constant) else None
    )
    return {
        str(c.value.dtype)
        for c in found
        if isinstance(c.value, tvm.runtime.Tensor) and c.value.shape
    }


def test_the_weight_of_a_half_norm_is_read_in_half_precision_on_a_gpu():
    planned = plan_of(module(norm, ((64, 128), "float16")))
    assert constants(planned.low) == {"float16"}
    assert len(planned.plan.groups) == 1


def test_a_cpu_keeps_the_folded_weight():
    assert constants(plan_of(module(norm, ((64, 128), "float16")), "llvm").low) == {"float32"}
