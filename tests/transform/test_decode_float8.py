"""8-bit floats on a CPU: every number of them is read as what it is."""

import ml_dtypes
import numpy as np
import pytest
import torch
import tvm
from tvm import relax, te
from tvm.relax import op

import tvm_fusion
from tvm_fusion.transform import Fuse
from tvm_fusion.transform.lower.decode_float8 import DecodeFloat8

from ..benchmarks.workloads.instance import Apply
from ..support.graphs import module

TYPES = ("float8_e4m3fn", "float8_e5m2")


def widening(source, target):
    a = te.placeholder((256,), source, "a")
    b = te.compute((256,), lambda i: a[i].astype(target), "b")
    return tvm.IRModule({"main": te.create_prim_func([a, b])})


@pytest.mark.parametrize("target", ["float32", "float16", "float64"])
@pytest.mark.parametrize("source", TYPES)
def test_every_8_bit_float_widens_to_its_value(source, target):
    numbers = np.arange(256, dtype="uint8").view(getattr(ml_dtypes, source))
    result = tvm.runtime.empty((256,), target)
    tvm.compile(DecodeFloat8()(widening(source, target)), "llvm")["main"](
        tvm.runtime.tensor(numbers), result
    )
    wanted = numbers.astype(target)
    np.testing.assert_array_equal(result.numpy(), wanted)
    sign = np.signbit(result.numpy())[~np.isnan(wanted)]
    np.testing.assert_array_equal(sign, np.signbit(wanted)[~np.isnan(wanted)])


def test_other_casts_stay_as_they_are():
    mod = widening("float16", "float32")
    assert DecodeFloat8()(mod)["main"].same_as(mod["main"])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", TYPES)
def test_a_model_of_8_bit_floats_computes_with_their_values(name):
    numbers = torch.arange(256).to(torch.uint8).view(getattr(torch, name))
    numbers = numbers[numbers.float().isfinite()].clone()
    compiled = tvm_fusion.compile(
        (Apply(lambda x: x.float() + 1), (numbers,)), "llvm", verify=False
    )
    assert torch.equal(compiled(numbers), numbers.float() + 1)


def test_a_pipeline_decodes_what_fuse_writes():
    """TVM's default build lowers it, in a process with this package."""
    every = np.arange(256, dtype="uint8").view(ml_dtypes.float8_e4m3fn)
    x = every[np.isfinite(every.astype("float32"))].reshape(2, -1)

    def sums(bb, x):
        return op.sum(bb.emit(op.multiply(op.astype(x, "float32"), relax.const(0.5))), 1)

    fused = Fuse("llvm")(module(sums, (x.shape, "float8_e4m3fn")))
    given = relax.VirtualMachine(tvm.compile(fused, "llvm"), tvm.cpu())["main"]
    wanted = x.astype("float32").sum(1) * 0.5
    np.testing.assert_allclose(given(tvm.runtime.tensor(x)).numpy(), wanted, rtol=1e-6)
