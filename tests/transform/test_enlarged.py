"""Images that are enlarged whole times by their nearest elements."""

import numpy as np
import pytest
from tvm import tirx
from tvm.relax import op

import tvm_fusion
from tvm_fusion.config import load_profile
from tvm_fusion.ir.reader import read_prim_func
from tvm_fusion.transform.pipeline import lower

from ..support.graphs import module

HW = load_profile("llvm")
CENTRES = dict(coordinate_transformation_mode="half_pixel", rounding_method="round")
CORNERS = dict(coordinate_transformation_mode="asymmetric", rounding_method="floor")


def resized(size, dtype="float32", **modes):
    shape = (2, 3, *(5, 4, 3)[: len(size)])
    resize = op.image.resize2d if len(size) == 2 else op.image.resize3d
    modes = {"method": "nearest_neighbor", **modes}
    return module(lambda bb, x: resize(x, size, **modes), (shape, dtype)), shape


def repeats(mod) -> list[int]:
    """How often each dimension is told to be repeated."""
    low = lower(mod, HW.to_target(), hw=HW)
    (func,) = (f for f in low.functions.values() if isinstance(f, tirx.PrimFunc))
    return [getattr(i, "repeats", 1) for i in read_prim_func(func).blocks[0].reads[0].index]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("modes", [CENTRES, CORNERS])
@pytest.mark.parametrize("size", [(10, 12), (5, 28), (10, 4, 9)])
def test_elements_are_repeated_by_a_division(size, modes):
    mod, shape = resized(size, **modes)
    counts = [n // m for n, m in zip(size, shape[2:], strict=True)]
    assert repeats(mod) == [1, 1, *counts]
    x = np.random.default_rng(0).standard_normal(shape).astype("float32")
    expected = x
    for axis, count in enumerate(counts):
        expected = expected.repeat(count, 2 + axis)
    np.testing.assert_array_equal(tvm_fusion.compile(mod, "llvm")(x), expected)


@pytest.mark.parametrize(
    ("size", "modes"),
    [
        ((10, 6), CENTRES),
        ((10, 8), {**CORNERS, "rounding_method": "round"}),
        ((10, 8), {**CENTRES, "rounding_method": "floor"}),
        ((10, 8), {**CENTRES, "method": "linear"}),
    ],
    ids=["no multiple", "rounded corners", "floors of centres", "linear"],
)
def test_other_changes_of_size_are_left_to_tvm(size, modes):
    assert repeats(resized(size, **modes)[0]) == [1, 1, 1, 1]
