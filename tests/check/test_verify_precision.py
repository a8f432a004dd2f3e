"""The ceiling of an error is that of the narrowest float that an output is computed in."""

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

import tvm_fusion
from tvm_fusion.check.allowance import Reference, computed_dtypes, narrowest
from tvm_fusion.check.rules import check_output
from tvm_fusion.check.verify import judge_outputs, run_module
from tvm_fusion.config import resolve_target
from tvm_fusion.transform.pipeline import lower

LLVM = resolve_target("llvm")[0]


def lowered(build, *dtypes, shape=(16, 64)):
    builder = relax.BlockBuilder()
    params = [relax.Var(f"x{i}", relax.TensorType(shape, d)) for i, d in enumerate(dtypes)]
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(builder.normalize(build(*params)))
        builder.emit_func_output(out)
    return lower(builder.get(), LLVM, decompose=False)


def wide(x):
    return op.astype(x, "float32")


CASES = {
    "float32 only": (lambda x: op.exp(x), ["float32"], ["float32"]),
    "half input, float32 arithmetic": (lambda x: op.exp(wide(x)), ["float16"], ["float32"]),
    "half arithmetic, widened": (lambda x: wide(op.exp(x)), ["float16"], ["float16"]),
    "rounded to bfloat16 on the way": (
        lambda x: op.exp(wide(op.astype(x, "bfloat16"))),
        ["float32"],
        ["bfloat16"],
    ),
    "half that is only moved": (
        lambda x: op.exp(wide(op.permute_dims(x))),
        ["float16"],
        ["float32"],
    ),
    "half beside the path": (
        lambda x, y: relax.Tuple([op.exp(x), op.exp(y)]),
        ["float32", "float16"],
        ["float32", "float16"],
    ),
    "two paths": (lambda x, y: op.add(x, wide(op.exp(y))), ["float32", "bfloat16"], ["bfloat16"]),
    "product of halves in float32": (
        lambda x, y: op.matmul(x, op.permute_dims(y), out_dtype="float32"),
        ["float16", "float16"],
        ["float32"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_narrowest_float_on_the_way_is_found(name):
    build, inputs, expected = CASES[name]
    assert computed_dtypes(lowered(build, *inputs)) == expected


def test_the_narrowest_is_the_one_that_allows_most():
    assert narrowest(["float32", None, "bfloat16", "float16", "int8"]) == "bfloat16"
    assert narrowest([None, "int32"]) is None


def test_a_float32_output_of_half_arithmetic_may_be_as_wrong_as_halves():
    ref = np.linspace(1, 2, 64)
    plain = (ref * (1 + 1e-3)).astype("float32")
    near = (ref * (1 - 1.5e-3)).astype("float32")
    assert not check_output(near, plain, ref, "float32").passed
    assert check_output(near, plain, ref, "float32", "float16").passed


def test_twice_as_wrong_as_unfused_stays_the_limit():
    ref = np.linspace(1, 2, 64)
    plain = (ref * (1 + 1e-3)).astype("float32")
    far = (ref * (1 + 4e-3)).astype("float32")
    assert not check_output(far, plain, ref, "float32", "float16").passed
    exact = ref.astype("float32")
    assert not check_output(plain, exact, ref, "float32", "float16").passed


def test_the_ceiling_of_halves_is_the_last_word():
    ref = np.linspace(1, 2, 64)
    plain = (ref * 1.02).astype("float32")
    assert not check_output(plain, plain, ref, "float32", "float16").passed


def difference_of_halves(x):
    """A float32 result that float16 cannot give to 1e-4: exp is rounded before the sum."""
    return op.sum(
        wide(op.subtract(op.exp(x), op.exp(op.multiply(x, relax.const(0.99, "float16")))))
    )


def test_unfused_operators_pass_against_themselves():
    mod = lowered(difference_of_halves, "float16")
    x = np.random.default_rng(0).uniform(1, 4, (16, 64)).astype("float16")

    verdict = judge_outputs(run_module(mod, [x]), Reference(mod, [x]))
    assert verdict.worst_error > 1e-4
    assert verdict.passed, verdict.why


def test_a_module_of_half_arithmetic_with_a_float32_result_is_verified():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((16, 64), "float16"))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(builder.normalize(difference_of_halves(x)))
        builder.emit_func_output(out)
    compiled = tvm_fusion.compile(builder.get(), "llvm", verify=True)
    assert compiled.report.verify.passed
