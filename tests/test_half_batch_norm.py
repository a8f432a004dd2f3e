"""Batch normalization of 16-bit floats, whole: its type, and what it computes."""

import numpy as np
import pytest
import tvm
from tvm import relax

import tvm_fusion
from tvm_fusion.transform.lower import lower

SHAPE, CHANNELS = (2, 4, 8, 6), 4


def module(dtype, training=False):
    """relu(batch_norm(x) + x)."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(SHAPE, dtype))
    numbers = [relax.Var(n, relax.TensorType((CHANNELS,), dtype)) for n in "gbmv"]
    with builder.function("main", [x, *numbers]):
        with builder.dataflow():
            normed = builder.emit(relax.op.nn.batch_norm(x, *numbers, axis=1, training=training))
            first = builder.emit(relax.TupleGetItem(normed, 0))
            out = builder.emit_output(relax.op.nn.relu(relax.op.add(first, x)))
        builder.emit_func_output(out)
    return builder.get()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("training", [False, True])
def test_the_result_keeps_its_type(dtype, training):
    low = lower(module(dtype, training), tvm.target.Target("llvm"), decompose=False)
    assert str(low["main"].body.ty.dtype) == dtype
    assert any("batch_norm" in gvar.name_hint for gvar in low.functions)


def test_it_compiles_and_computes_in_float32():
    rng = np.random.default_rng(0)
    x = rng.standard_normal(SHAPE).astype("float16")
    gamma, beta, mean = (rng.standard_normal(CHANNELS).astype("float16") for _ in range(3))
    variance = rng.uniform(0.5, 2, CHANNELS).astype("float16")
    compiled = tvm_fusion.compile(module("float16"), "llvm", verify="groups")
    assert compiled.report.verify.passed
    g, b, m, v = (a.astype("float64").reshape(1, -1, 1, 1) for a in (gamma, beta, mean, variance))
    wanted = np.maximum((x - m) / np.sqrt(v + 1e-5) * g + b + x, 0)
    got = compiled(x, gamma, beta, mean, variance)
    assert np.abs(got - wanted).max() < 5e-3 * np.abs(wanted).max()
