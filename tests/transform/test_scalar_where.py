"""`relax.where` with numbers: they stand in the PrimFunc."""

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op

from tests.support.graphs import module
from tests.support.models import run_unfused
from tvm_fusion.transform.lower.legalizers import legalize_where

X, MASK = ((3, 1, 5), "float32"), ((4, 5), "bool")


def legalized(emit, *inputs):
    mod = module(emit, *inputs)
    return relax.transform.LegalizeOps({"relax.where": legalize_where})(mod)


def parameters(mod):
    (func,) = (f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc))
    return len(func.params)


@pytest.mark.parametrize("number", [-np.inf, 2.5])
@pytest.mark.parametrize("side", ["yes", "no", "both"])
def test_numbers_are_no_parameters(number, side):
    def emit(bb, x, mask):
        constant = relax.const(number, "float32")
        yes, no = (constant if side in (name, "both") else x for name in ("yes", "no"))
        return bb.emit(op.where(mask, yes, no))

    mod = legalized(emit, X, MASK)
    assert parameters(mod) == (2 if side == "both" else 3)
    rng = np.random.default_rng(0)
    x, mask = rng.standard_normal(X[0]).astype("float32"), rng.random(MASK[0]) < 0.5
    (got,) = run_unfused(mod, x, mask)
    yes, no = (np.float32(number) if side in (name, "both") else x for name in ("yes", "no"))
    np.testing.assert_array_equal(got, np.where(mask, yes, no))


def test_tensors_are_legalized_as_before():
    def emit(bb, x, mask):
        return bb.emit(op.where(mask, x, bb.emit(op.negative(x))))

    mod = module(emit, X, MASK)
    ours = relax.transform.LegalizeOps({"relax.where": legalize_where})(mod)
    tvm.ir.assert_structural_equal(ours, relax.transform.LegalizeOps()(mod))


def test_symbolic_shapes():
    n = tirx.Var("n", "int64")

    def emit(bb, x, mask):
        return bb.emit(op.where(mask, x, relax.const(0, "int32")))

    mod = legalized(emit, ((n, 3), "int32"), ((n, 1), "bool"))
    x, mask = np.arange(6, dtype="int32").reshape(2, 3), np.array([[True], [False]])
    (got,) = run_unfused(mod, x, mask)
    np.testing.assert_array_equal(got, np.where(mask, x, 0))
