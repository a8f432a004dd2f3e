"""Vectors of constants: which are narrowed or computed, and what they become."""

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from tvm_fusion.transform.rewrites.lean_constants import exact_half, progression

from ..support.graphs import module, plan_of
from ..support.helpers_tir import quick_executable

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
        np.arange(1, dtype="int32"),
        np.arange(128, dtype="int32").reshape(2, 64),
        np.zeros(128, "int64"),
        np.append(np.arange(127), 0),
        np.arange(255, 100, -1).astype("uint8"),
        (np.arange(128) * 2**25 - 2**31).astype("int32"),
    ],
    ids=[
        "rounding",
        "matrix",
        "few",
        "float64",
        "one",
        "table",
        "zeros",
        "uneven",
        "down",
        "far",
    ],
)
def test_other_constants_stay(array):
    def emit(bb, x):
        constant = relax.const(array, str(array.dtype))
        return op.multiply(bb.emit(op.astype(x, str(array.dtype))), constant)

    shape = array.shape if array.ndim > 1 else (16, *array.shape)
    low = plan_of(module(emit, (shape, "float32"))).low
    assert constants(low) == {str(array.dtype)}


@pytest.mark.parametrize(
    ("array", "steps"),
    [
        (np.arange(64), (0, 1)),
        (np.array([0, 4], "uint8"), (0, 4)),
        (np.arange(200, 0, -2, dtype="int32").reshape(1, -1), (200, -2)),
    ],
)
def test_evenly_spaced_integers_are_computed(array, steps):
    assert progression(array) == steps

    def emit(bb, x):
        hit = bb.emit(op.equal(x, relax.const(array, str(array.dtype))))
        return op.astype(hit, "float32")

    mod = module(emit, ((16, array.size), str(array.dtype)))
    planned = plan_of(mod)
    assert constants(planned.low) == set()
    assert planned.launches == 1
    x = np.random.default_rng(5).integers(0, array.size, (16, array.size)).astype(array.dtype)
    executable = quick_executable(planned.low)
    got = relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(x)).numpy()
    assert np.array_equal(got, x == array.reshape(-1))


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
