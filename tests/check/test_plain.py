"""A module as TVM alone lowers it: what this package's own lowering has no part in."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

import tvm_fusion
from tvm_fusion.check.allowance import Reference
from tvm_fusion.check.inputs import random_inputs
from tvm_fusion.check.plain import LLVM, plain_build, plain_module
from tvm_fusion.check.reference import run_built
from tvm_fusion.transform import pipeline as lower
from tvm_fusion.transform.lower.legalizers import legalize_where

from ..support.graphs import module

F = ((5, 7), "float32")
H = ((5, 7), "bfloat16")
B = ((5, 7), "bool")
I = ((5, 7), "int32")  # noqa: E741


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


CASES = {
    "softmax": (lambda bb, x: op.nn.softmax(x), [F], softmax),
    "power of halves": (lambda bb, x: op.power(op.abs(x), x), [H], lambda x: np.abs(x) ** x),
    "norm of halves": (
        lambda bb, x: op.nn.layer_norm(
            x, relax.const(np.ones(7), "bfloat16"), relax.const(np.zeros(7), "bfloat16"), [-1]
        ),
        [H],
        lambda x: (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5),
    ),
    "sum of masks": (lambda bb, a, b: op.add(a, b), [B, B], np.logical_or),
    "equal masks": (lambda bb, a, b: op.equal(a, b), [B, B], np.equal),
    "any": (lambda bb, a: op.max(a, axis=[-1]), [B], lambda a: a.any(-1)),
    "integers": (lambda bb, a: op.sum(a, axis=[0]), [I], lambda a: a.sum(0, dtype="int32")),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CASES)
def test_what_tvm_lowers_alone_is_what_the_operator_means(name):
    emit, inputs, expected = CASES[name]
    plain = plain_module(module(emit, *inputs), LLVM)
    given = random_inputs(plain["main"], seed=3)
    (exact,) = Reference(plain, given).outputs
    wide = [x.astype("float64") if "float" in x.dtype.name else x for x in given]
    np.testing.assert_allclose(exact, expected(*wide), rtol=1e-12, atol=1e-12)
    (narrow,) = run_built(plain_build(plain, LLVM), given)
    assert narrow.dtype.name == str(plain["main"].ret_ty.dtype)
    np.testing.assert_allclose(narrow.astype(exact.dtype), exact, rtol=0.03, atol=0.03)


def test_it_is_lowered_without_what_this_package_knows_of_operators(monkeypatch):
    """Nothing of `lower` is called, nor any legalization but those that its docstring names."""
    for name in ("lower", "legalize", "open_composites", "legalize_where", "legalize_permutes"):
        monkeypatch.setattr(lower, name, None)
    monkeypatch.setattr(lower, "HALF_OPERATORS", None)
    emit = CASES["softmax"][0]
    assert "call_tir" in plain_module(module(emit, F), LLVM).script()


def test_a_wrong_legalization_of_this_package_does_not_get_through(monkeypatch):
    def swapped(builder, call):
        condition, a, b = call.args
        return legalize_where(builder, builder.normalize(op.where(condition, b, a)))

    def emit(bb, x):
        zero = relax.const(0.0, "float32")
        return op.exp(bb.emit(op.where(bb.emit(op.greater(x, zero)), x, zero)))

    monkeypatch.setattr(lower, "legalize_where", swapped)
    mod = module(emit, F)
    x = np.random.default_rng(0).standard_normal((5, 7)).astype("float32")
    wrong = tvm_fusion.compile(mod, "llvm", verify=False)
    right = tvm_fusion.compile(mod, "llvm")
    exact = np.exp(np.maximum(x, 0))
    assert np.abs(wrong(x) - exact).max() > 0.1
    np.testing.assert_allclose(right(x), exact, rtol=1e-5)
    assert right.report.verify.passed


def test_memory_is_planned_by_tvm(monkeypatch):
    """A memory plan that lets results share their storage would spoil both sides alike."""
    from tvm_fusion.runtime.build import lowering as pipeline

    monkeypatch.setattr(pipeline, "PlanMemory", None)
    steps = pipeline.lowering_pipeline(tvm.target.Target("cuda"), plan_memory=False)
    assert "tvm_fusion.PlanMemoryByTVM" in [p.info.name for p in steps.passes]
