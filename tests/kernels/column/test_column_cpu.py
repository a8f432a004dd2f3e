"""Reductions over leading axes on a CPU: with what comes before, between and after they are one
launch, and right.
"""

import numpy as np
import pytest
from tvm.relax import op

import tvm_fusion
from tests.support.graphs import module, plan_of

F32 = "float32"


def sum_of_exp(bb, x):
    return op.sum(bb.emit(op.exp(x)), 0)


def two_sums(bb, x):
    return op.sum(x, 0), op.sum(bb.emit(op.multiply(x, x)), 0)


def stored_and_summed(bb, x):
    y = bb.emit(op.tanh(x))
    return y, bb.emit(op.sum(y, 0))


def normalized(bb, x):
    centred = bb.emit(op.subtract(x, bb.emit(op.mean(x, 0, keepdims=True))))
    variance = bb.emit(op.mean(bb.emit(op.multiply(centred, centred)), 0, keepdims=True))
    return op.divide(centred, bb.emit(op.sqrt(bb.emit(op.add(variance, variance)))))


def softmax(bb, x):
    return op.nn.softmax(x, 0)


def numpy_normalized(x):
    centred = x - x.mean(0)
    return centred / np.sqrt(2 * (centred * centred).mean(0))


def numpy_softmax(x):
    shifted = np.exp(x - x.max(0))
    return shifted / shifted.sum(0)


WANTED = {
    sum_of_exp: lambda x: np.exp(x).sum(0),
    two_sums: lambda x: (x.sum(0), (x * x).sum(0)),
    stored_and_summed: lambda x: (np.tanh(x), np.tanh(x).sum(0)),
    normalized: numpy_normalized,
    softmax: numpy_softmax,
}


@pytest.mark.parametrize("emit", WANTED)
def test_one_launch_computes_them_as_on_a_gpu(emit):
    mod = module(emit, ((512, 768), F32))
    assert plan_of(mod, "llvm").launches == plan_of(mod, "h200").launches == 1


@pytest.mark.one_in(15)
@pytest.mark.parametrize("shape", [(2, 1), (7, 333), (130, 67)])
@pytest.mark.parametrize("emit", WANTED)
def test_their_numbers_are_right(emit, shape):
    compiled = tvm_fusion.compile(
        module(emit, (shape, F32)), "llvm", policy={"coverage": 0.0, "min_gain": 0.0}, verify=False
    )
    assert compiled.launches == 1
    x = np.random.default_rng(0).standard_normal(shape, dtype=F32)
    found = compiled(x)
    wanted = WANTED[emit](x.astype("float64"))
    pairs = zip(found, wanted, strict=True) if isinstance(wanted, tuple) else [(found, wanted)]
    for got, right in pairs:
        np.testing.assert_allclose(np.asarray(got), right, rtol=2e-5, atol=2e-5)
