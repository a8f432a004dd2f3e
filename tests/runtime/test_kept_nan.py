"""Maxima and minima keep NaN, wherever it stands: on a CPU, on a GPU, in the reference."""

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op
from tvm.script import tirx as T

import tvm_fusion
from tvm_fusion.check.reference import run_reference
from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.flow.planned import Planned
from tvm_fusion.runtime.build.kept_nan import STORED
from tvm_fusion.transform.functions.functions import rewritten
from tvm_fusion.transform.pipeline import lower

from ..support.graphs import module
from ..support.module_on_cpu import EmulatedModule

HW = load_profile("nvidia_h100")
SHAPE = (4, 40)
CASES = {
    "relu": (lambda bb, x: op.nn.relu(x), lambda x: np.maximum(x, 0)),
    "maximum": (lambda bb, x: op.maximum(x, bb.emit(op.negative(x))), np.abs),
    "from the left": (lambda bb, x: op.maximum(relax.const(0.0), x), lambda x: np.maximum(x, 0)),
    "minimum": (lambda bb, x: op.minimum(x, bb.emit(op.abs(x))), lambda x: x),
    "clip": (lambda bb, x: op.clip(x, -1, 1), lambda x: np.clip(x, -1, 1)),
    "row": (lambda bb, x: op.max(x, 1), lambda x: x.max(1)),
    "row, least": (lambda bb, x: op.min(x, 1), lambda x: x.min(1)),
    "column": (lambda bb, x: op.max(x, 0), lambda x: x.max(0)),
    "softmax": (
        lambda bb, x: op.nn.softmax(x),
        lambda x: (
            np.exp(x - x.max(1, keepdims=True))
            / np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True)
        ),
    ),
}


def given(dtype: str = "float32") -> np.ndarray:
    """Numbers with NaN at the beginning, in the middle and at the end of rows, in all of a row."""
    x = np.random.default_rng(0).standard_normal(SHAPE).astype(dtype)
    x[0, 0] = x[1, 17] = x[2, -1] = np.nan
    return x


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", CASES)
def test_nan_is_kept(name):
    made, wanted = CASES[name]
    x = given()
    mod, expected = module(made, (SHAPE, "float32")), wanted(x)
    assert np.isnan(expected).any()
    found = {
        "llvm": tvm_fusion.compile(mod, "llvm", verify=False)(x),
        "reference": run_reference(lower(mod, HW.to_target()), [x])[0],
        "cuda": EmulatedModule.of(Planned.of(mod, HW.to_target(), HW, load_policy(None)))([x])[0],
    }
    for where, result in found.items():
        np.testing.assert_allclose(result, expected, rtol=2e-6, atol=1e-7, err_msg=where)


def test_nan_of_halves_is_kept_on_a_gpu():
    x = given("float16")
    mod = module(lambda bb, x: op.max(bb.emit(op.nn.relu(x)), 1), (SHAPE, "float16"))
    planned = Planned.of(mod, HW.to_target(), HW, load_policy(None))
    (result,) = EmulatedModule.of(planned)([x])
    np.testing.assert_array_equal(result, np.maximum(x, 0).max(1))


def test_integers_are_compared_as_they_were():
    x = np.arange(-80, 80, dtype="int32").reshape(SHAPE)
    mod = module(lambda bb, x: op.max(bb.emit(op.maximum(x, relax.const(3))), 1), (SHAPE, "int32"))
    result = tvm_fusion.compile(mod, "llvm", verify=False)(x)
    np.testing.assert_array_equal(result, np.maximum(x, 3).max(1))


@T.prim_func(s_tir=True)
def rounded(x: T.Buffer((8,), "float32"), y: T.Buffer((8,), "bfloat16")):
    for i in range(8):
        y[i] = T.Cast("bfloat16", x[i])


def test_nan_of_any_payload_is_one_as_bfloat16():
    bits = (0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFFC00000, 0x7F800000, 0xFF7FFFFF, 0, 0x3F808000)
    x = np.array(bits, "uint32").view("float32")
    mod = rewritten(tvm.IRModule({"main": rounded.with_attr("global_symbol", "main")}), STORED)
    y = tvm.runtime.tensor(np.zeros(8, ml_dtypes.bfloat16))
    tvm.compile(mod, tvm.target.Target({"kind": "llvm", "opt-level": 0}))["main"](
        tvm.runtime.tensor(x), y
    )
    with np.errstate(all="ignore"):
        wanted = x.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(y.numpy().astype("float32"), wanted.astype("float32"))


@pytest.mark.parametrize(
    "program", [op.abs, lambda x: op.nn.softmax(x, -1)], ids=["abs", "softmax"]
)
def test_nan_of_any_payload_is_one_in_kernels_that_are_written(program):
    x = np.random.default_rng(0).standard_normal((64, 512)).astype("float32")
    x[3, 7::3] = np.array(0x7FFFFFFF, "uint32").view("float32")
    mod = module(lambda bb, x: op.astype(bb.emit(program(x)), "bfloat16"), (x.shape, "float32"))
    y = tvm_fusion.compile(mod, "llvm", verify=False)(x).astype("float32")
    rows = np.isnan(y).any(axis=1)
    assert np.flatnonzero(rows).tolist() == [3]
    assert np.isnan(y[3, 7::3]).all()
