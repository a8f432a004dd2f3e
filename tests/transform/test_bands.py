"""Constant masks of causal and local attention, recognised and computed of indices."""

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from tvm_fusion.transform.rewrites.lean_constants import banded

from ..support.graphs import module, plan_of


def mask(rows, columns, lowest, highest, inside, outside, dtype=np.float16):
    apart = np.arange(columns)[None, :] - np.arange(rows)[:, None]
    return np.where((apart >= lowest) & (apart <= highest), inside, outside).astype(dtype)


def evaluated(band, shape):
    """The matrix of a band, by the expression it becomes."""
    made = tvm.te.compute(shape, band.element, name="band")
    built = tvm.compile(tvm.te.create_prim_func([made]), "llvm")
    out = tvm.runtime.empty(shape, band.dtype)
    built(out)
    return out.numpy()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.bool_, np.int32])
@pytest.mark.parametrize(
    ("rows", "columns", "lowest", "highest"),
    [
        (7, 7, -7, 0),
        (7, 7, 1, 7),
        (5, 9, -5, 4),
        (9, 5, -2, 1),
        (64, 80, -16, 0),
        (100, 100, -7, 7),
    ],
)
def test_what_a_band_computes_is_the_matrix(rows, columns, lowest, highest, dtype):
    values = (1, 0) if dtype in (np.bool_, np.int32) else (0.0, -np.inf)
    array = mask(rows, columns, lowest, highest, *values, dtype)
    band = banded(array.reshape(1, 1, rows, columns))
    assert band is not None
    np.testing.assert_array_equal(evaluated(band, array.shape), array)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((8, 8), np.float16),
        np.eye(8, dtype=np.float64),
        np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32),
        np.where(np.arange(64).reshape(8, 8) % 2, 0, -np.inf).astype(np.float16),
        np.full((8, 8), np.nan, np.float32),
        np.stack([mask(8, 8, -8, 0, 0, 1), mask(8, 8, -8, 1, 0, 1)]),
        mask(8, 8, -2, 2, 0, 1) + np.eye(8, dtype=np.float16),
        np.tile(np.array([0, 1], np.float16), (8, 4)),
    ],
    ids=[
        "one value",
        "double",
        "weights",
        "checks",
        "nan",
        "two planes",
        "three values",
        "stripes",
    ],
)
def test_other_matrices_stay_as_they_are(array):
    assert banded(array) is None


def test_a_last_element_that_differs_is_seen():
    array = mask(200, 200, -200, 0, 0.0, -np.inf)
    array[-1, -1] = -np.inf
    assert banded(array) is None


def test_masks_of_bfloat16_are_bands_too():
    array = mask(8, 8, -8, 0, 0, -1).astype(ml_dtypes.bfloat16)
    band = banded(array)
    assert (band.inside, band.outside, band.lowest, band.highest) == (-1, 0, 1, None)
    assert band.dtype == "bfloat16"


def test_a_kernel_computes_its_causal_mask():
    array = mask(128, 128, -128, 0, 0.0, -np.inf)

    def emit(bb, x):
        return op.add(x, relax.const(array, "float16"))

    planned = plan_of(module(emit, ((4, 128, 128), "float16")))
    assert planned.launches == 1
    assert not any(t.is_constant for t in planned.graph.tensors)
    assert any("band" in o.func for o in planned.graph.ops)
