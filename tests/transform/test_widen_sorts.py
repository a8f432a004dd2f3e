"""Sorts of bfloat16 on a CPU.

Modules are checked and left as they are, since a check of another kind mends what is wrong.
"""

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm.relax import op

import tvm_fusion
from tvm_fusion.transform.lower.sorts import WidenSorts

from ..support import graphs

SHAPE = (3, 11)


def module(dtype, result):
    """A module that returns `result(x)`."""
    return graphs.module(lambda bb, x: bb.normalize(result(x)), (SHAPE, dtype))


def numbers():
    """Numbers with ties and infinities."""
    x = np.random.default_rng(0).integers(-4, 4, SHAPE).astype("float32") / 4
    x[0, 3], x[1, 2] = np.inf, -np.inf
    return x.astype(ml_dtypes.bfloat16)


def order(x, descending):
    """The stable order of the rows."""
    return np.argsort(-x if descending else x, axis=-1, kind="stable")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("descending", [False, True])
def test_rows_are_sorted(descending):
    compiled = tvm_fusion.compile(
        module("bfloat16", lambda x: op.sort(x, -1, descending)), "llvm", verify="report"
    )
    assert compiled.report.verify.passed
    x = numbers()
    wide = x.astype("float32")
    wanted = np.take_along_axis(wide, order(wide, descending), -1)
    got = np.asarray(compiled(x))
    assert got.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(got.astype("float32"), wanted)


def test_the_order_is_found():
    mod = module("bfloat16", lambda x: op.argsort(x, -1))
    compiled = tvm_fusion.compile(mod, "llvm", verify="report")
    x = numbers()
    places = np.asarray(compiled(x))
    np.testing.assert_array_equal(np.sort(places, -1), np.indices(SHAPE)[1])
    found = np.take_along_axis(x.astype("float32"), places, -1)
    np.testing.assert_array_equal(found, np.sort(x.astype("float32"), -1))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", ["both", "values", "indices"])
def test_the_largest_are_found(kind):
    compiled = tvm_fusion.compile(
        module("bfloat16", lambda x: op.topk(x, 3, ret_type=kind)), "llvm", verify="report"
    )
    assert compiled.report.verify.passed
    x = numbers()
    wide = x.astype("float32")
    wanted = -np.sort(-wide, -1)[:, :3]
    found = compiled(x)
    results = [np.asarray(r) for r in (found if kind == "both" else [found])]
    for result in results:
        if result.dtype == np.int32:
            result = np.take_along_axis(wide, result, -1)
        np.testing.assert_array_equal(result.astype("float32"), wanted)


def test_the_median_is_found():
    compiled = tvm_fusion.compile(
        module("bfloat16", lambda x: op.median(x, axis=[-1])), "llvm", verify="report"
    )
    assert compiled.report.verify.passed
    x = numbers()
    median, place = (np.asarray(r) for r in compiled(x))
    wide = x.astype("float32")
    np.testing.assert_array_equal(median.astype("float32"), np.median(wide, -1))
    np.testing.assert_array_equal(np.take_along_axis(wide, place[:, None], -1)[:, 0], median)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_types_are_left_alone(dtype):
    mod = module(dtype, op.sort)
    assert WidenSorts()(mod).same_as(mod)


def test_a_second_run_changes_nothing():
    mod = module("bfloat16", lambda x: op.topk(x, 3))
    once = WidenSorts()(mod)
    assert not once.same_as(mod)
    tvm.ir.assert_structural_equal(WidenSorts()(once), once)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "bool"])
def test_integers_of_8_bits_are_sorted(dtype):
    """TVM's runtime refuses them."""
    x = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 100, SHAPE).astype(dtype)
    x = -x if dtype == "int8" else x

    def sorts(bb, x):
        return bb.emit(op.sort(x, -1)), bb.emit(op.argsort(x, -1))

    mod = graphs.module(sorts, (SHAPE, dtype))
    compiled = tvm_fusion.compile(mod, "llvm", verify="report")
    assert compiled.report.verify.passed
    values, places = (np.asarray(r) for r in compiled(x))
    np.testing.assert_array_equal(values, np.sort(x, -1))
    np.testing.assert_array_equal(np.take_along_axis(x, places, -1), np.sort(x, -1))
