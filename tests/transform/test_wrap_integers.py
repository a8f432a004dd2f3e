"""Small integers on a GPU wrap around, as what an unfused graph stores in them does."""

import numpy as np
import pytest
import tvm
from tvm import te
from tvm.relax import op

from tvm_fusion.config import load_profile
from tvm_fusion.flow.functions import planned_function
from tvm_fusion.kernels.pointwise.kernel import emit_pointwise
from tvm_fusion.kernels.program.analysis import analyze
from tvm_fusion.transform.lower.wrap_integers import WrapIntegers

from ..support.cuda_on_cpu import run_cuda_on_cpu
from ..support.graphs import module
from ..support.kernel_cases import fuse, outputs_of

H200 = load_profile("nvidia_h200")
SUMS = {"add": np.add, "subtract": np.subtract, "multiply": np.multiply}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16"])
@pytest.mark.parametrize("name", SUMS)
def test_what_goes_on_as_a_float_is_wrapped_first(name, dtype):
    def emit(bb, a, b):
        return op.astype(bb.emit(getattr(op, name)(a, b)), "float32")

    func = fuse(emit, ((64,), dtype), ((64,), dtype))
    kernel = emit_pointwise(analyze(func), H200)
    kernel = WrapIntegers()(tvm.IRModule({"main": kernel}))["main"]
    limits = np.iinfo(dtype)
    a, b = np.random.default_rng(0).integers(limits.min, limits.max, (2, 64)).astype(dtype)
    (got,) = outputs = outputs_of(func, 2)
    assert run_cuda_on_cpu(kernel, [a, b, *outputs]) == 1
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got, SUMS[name](a, b).astype("float32"))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16"])
def test_a_complement_is_wrapped_before_it_is_widened(dtype):
    func = fuse(lambda bb, a: op.astype(bb.emit(op.bitwise_not(a)), "int32"), ((64,), dtype))
    kernel = emit_pointwise(analyze(func), H200)
    kernel = WrapIntegers()(tvm.IRModule({"main": kernel}))["main"]
    limits = np.iinfo(dtype)
    a = np.random.default_rng(0).integers(limits.min, limits.max, 64).astype(dtype)
    (got,) = outputs = outputs_of(func, 1)
    assert run_cuda_on_cpu(kernel, [a, *outputs]) == 1
    np.testing.assert_array_equal(got, (~a).astype("int32"))


def test_a_module_that_is_built_for_a_gpu_wraps():
    def emit(bb, a, b):
        return op.astype(bb.emit(op.subtract(a, b)), "float32")

    mod = module(emit, ((64,), "int8"), ((64,), "int8"))
    built = planned_function(mod, "nvidia_h200").build().built
    (source,) = built.cuda_sources
    assert "(float)((signed char)(((int)" in source


def test_other_arithmetic_stays_as_it_is():
    a, b = (te.placeholder((8,), "int32", name) for name in "ab")
    total = te.compute((8,), lambda i: a[i] + b[i])
    mod = tvm.IRModule({"main": te.create_prim_func([a, b, total])})
    assert WrapIntegers()(mod)["main"].same_as(mod["main"])
