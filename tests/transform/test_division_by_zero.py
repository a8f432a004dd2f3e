"""Division by the number 0 gives infinities and NaN, also where the number is a constant."""

import numpy as np
import pytest
from tvm import relax

import tvm_fusion

X = np.array([1.0, -2.0, 0.0, np.inf, np.nan], "float32")


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_division_by_the_number_zero(zero):
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((5,), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(relax.op.divide(x, relax.const(zero, "float32")))
            y = builder.emit_output(relax.op.negative(y))
        builder.emit_func_output(y)
    compiled = tvm_fusion.compile(builder.get(), "llvm")
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(compiled(X), -(X / np.float32(zero)))
