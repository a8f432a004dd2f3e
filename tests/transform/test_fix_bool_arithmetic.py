"""Arithmetic on booleans, rewritten into what TVM can build."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tests.support.models import run_unfused
from tvm_fusion.transform.lower.fix_bool_arithmetic import FixBoolArithmetic

A = np.array([[0, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]], "bool")
B = np.array([[0, 1, 0, 1], [0, 1, 0, 1], [0, 1, 1, 1]], "bool")


def module_of(op, *types: str) -> tvm.IRModule:
    """A module that applies one operator to tensors like A."""
    builder = relax.BlockBuilder()
    params = [relax.Var(f"x{i}", relax.TensorType(A.shape, t)) for i, t in enumerate(types)]
    with builder.function("main", params):
        with builder.dataflow():
            result = builder.emit_output(op(*params))
        builder.emit_func_output(result)
    return builder.get()


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (relax.op.add, A | B),
        (relax.op.multiply, A & B),
        (relax.op.maximum, A | B),
        (relax.op.minimum, A & B),
        (relax.op.equal, A == B),
        (relax.op.not_equal, A != B),
        (relax.op.less, A < B),
        (relax.op.less_equal, A <= B),
        (relax.op.greater, A > B),
        (relax.op.greater_equal, A >= B),
    ],
)
def test_two_booleans_are_combined_by_logic(op, expected):
    (result,) = run_unfused(FixBoolArithmetic()(module_of(op, "bool", "bool")), A, B)
    np.testing.assert_array_equal(result, expected, strict=True)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (lambda x: relax.op.max(x, axis=1), A.max(1)),
        (lambda x: relax.op.min(x, axis=[0, 1], keepdims=True), A.min(keepdims=True)),
        (lambda x: relax.op.argmax(x, axis=1), A.argmax(1)),
        (lambda x: relax.op.argmin(x, axis=1), A.argmin(1)),
        (lambda x: relax.op.cumsum(x, axis=1), np.logical_or.accumulate(A, 1)),
        (lambda x: relax.op.cumprod(x, axis=1), np.logical_and.accumulate(A, 1)),
        (lambda x: relax.op.cumsum(x, axis=1, dtype="int64"), A.cumsum(1)),
    ],
)
def test_booleans_are_reduced_on_integers(op, expected):
    (result,) = run_unfused(FixBoolArithmetic()(module_of(op, "bool")), A)
    np.testing.assert_array_equal(result, expected, strict=True)


def test_the_rewritten_module_is_this_one():
    @I.ir_module
    class Before:
        @R.function
        def main(a: R.Tensor(("n",), "bool"), b: R.Tensor(("n",), "bool")):
            with R.dataflow():
                either = R.add(a, b)
                anywhere = R.max(either, axis=[0])
                R.output(anywhere)
            return anywhere

    @I.ir_module
    class Expected:
        @R.function
        def main(a: R.Tensor(("n",), "bool"), b: R.Tensor(("n",), "bool")):
            with R.dataflow():
                either = R.logical_or(a, b)
                wide = R.astype(either, "int8")
                largest = R.max(wide, axis=[0])
                anywhere = R.astype(largest, "bool")
                R.output(anywhere)
            return anywhere

    after = FixBoolArithmetic()(Before)
    tvm.ir.assert_structural_equal(after, Expected)
    assert relax.analysis.check_well_formed(after)


def test_running_it_twice_equals_running_it_once():
    once = FixBoolArithmetic()(module_of(relax.op.equal, "bool", "bool"))
    tvm.ir.assert_structural_equal(FixBoolArithmetic()(once), once)


@pytest.mark.parametrize("dtype", ["float32", "int64"])
@pytest.mark.parametrize("op", [relax.op.add, relax.op.equal, relax.op.maximum])
def test_other_types_are_left_alone(op, dtype):
    mod = module_of(op, dtype, dtype)
    tvm.ir.assert_structural_equal(FixBoolArithmetic()(mod), mod)


def test_a_cumulative_sum_with_a_type_of_its_own_is_left_alone():
    mod = module_of(lambda x: relax.op.cumsum(x, axis=1, dtype="int64"), "bool")
    tvm.ir.assert_structural_equal(FixBoolArithmetic()(mod), mod)


def test_the_input_module_is_unchanged():
    mod = module_of(relax.op.add, "bool", "bool")
    before = tvm.ir.save_json(mod)
    FixBoolArithmetic()(mod)
    assert tvm.ir.save_json(mod) == before
