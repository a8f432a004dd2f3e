"""Negation and sign of unsigned integers: TVM's own legalizations end in an error."""

import numpy as np
import pytest
from tvm.relax import op

import tvm_fusion

from ..support.graphs import module


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["negative", "sign"])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int8"])
def test_they_compile_and_are_right(name, dtype):
    x = np.arange(10).reshape(2, 5).astype(dtype)
    compiled = tvm_fusion.compile(
        module(lambda bb, x: getattr(op, name)(x), (x.shape, dtype)), "llvm"
    )
    assert compiled.report.verify.passed
    np.testing.assert_array_equal(compiled(x), getattr(np, name)(x))


def test_the_sign_of_a_boolean_is_itself():
    x = np.array([[True, False, True]])
    compiled = tvm_fusion.compile(module(lambda bb, x: op.sign(x), (x.shape, "bool")), "llvm")
    np.testing.assert_array_equal(compiled(x), x)
