"""Decompose: what each composite becomes, and its numbers."""

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax import op
from tvm.script import ir as I
from tvm.script import relax as R

from tests.support.decompose_cases import CASES, IGNORED
from tests.support.decompose_tools import (
    assert_close,
    bound_names,
    calls,
    case_inputs,
    case_module,
    module_of,
    operators,
    reference,
    run,
)
from tests.support.helpers_tir import quick_executable
from tvm_fusion.transform.decompose import COMPOSITES_ATTR, Decompose

CASE_NAMES = list(CASES)
SYMBOLIC_NAMES = [name for name, case in CASES.items() if any("n" in s for s in case.shapes)]


@pytest.mark.one_in(16)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", CASE_NAMES)
def test_a_composite_is_gone_and_its_numbers_are_right(name: str, dtype: str):
    case = CASES[name]
    before = case_module(case, dtype, 13)
    after = Decompose()(before)

    assert case.composite in "".join(operators(before))
    assert not [o for o in operators(after) if o.split(".")[-1].startswith(case.composite)]
    assert relax.analysis.check_well_formed(after)
    arrays = case_inputs(case, dtype, 13)
    assert_close(run(after, *arrays), reference(case, arrays), dtype)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SYMBOLIC_NAMES)
def test_one_build_with_a_symbolic_extent_serves_all_sizes(name: str):
    case = CASES[name]
    after = Decompose()(case_module(case, "float32", tirx.Var("n", "int64")))

    assert relax.analysis.check_well_formed(after)
    executable = quick_executable(after)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    for extent in (2, 17):
        arrays = case_inputs(case, "float32", extent)
        got = machine["main"](*[tvm.runtime.tensor(array) for array in arrays]).numpy()
        assert_close(got, reference(case, arrays), "float32")


@pytest.mark.parametrize("name", CASE_NAMES)
@pytest.mark.parametrize("extent", [13, tirx.Var("n", "int64")], ids=["static", "symbolic"])
def test_running_twice_equals_running_once(name: str, extent):
    once = Decompose()(case_module(CASES[name], "float16", extent))

    assert Decompose()(once).same_as(once)


@pytest.mark.parametrize("name", CASE_NAMES)
def test_legalized_parts_read_no_scalar_constants(name: str):
    """FuseTIR refuses a group with a constant operand; 0-d ones have to be in the PrimFuncs."""
    legal = relax.transform.LegalizeOps()(Decompose()(case_module(CASES[name], "float16", 13)))

    assert calls(legal)
    for _, call in calls(legal):
        assert call.op.name == "relax.call_tir"
        assert all(isinstance(argument, relax.Var) for argument in call.args[1])


@pytest.mark.parametrize("name", CASE_NAMES)
def test_the_input_module_is_left_unchanged(name: str):
    before = case_module(CASES[name], "float16", 13)
    copy = tvm.ir.load_json(tvm.ir.save_json(before))
    Decompose()(before)

    tvm.ir.assert_structural_equal(before, copy)


def test_softmax_becomes_the_five_primitives_of_the_docstring():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4, 8), "float32")) -> R.Tensor((4, 8), "float32"):
            with R.dataflow():
                y = R.nn.softmax(x, axis=-1)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((4, 8), "float32")) -> R.Tensor((4, 8), "float32"):
            R.func_attr(
                {
                    "tvm_fusion.composites": {
                        "softmax1_max": "softmax#1",
                        "softmax1_shifted": "softmax#1",
                        "softmax1_exp": "softmax#1",
                        "softmax1_sum": "softmax#1",
                        "y": "softmax#1",
                    }
                }
            )
            with R.dataflow():
                softmax1_max = R.max(x, axis=[-1], keepdims=True)
                softmax1_shifted = R.subtract(x, softmax1_max)
                softmax1_exp = R.exp(softmax1_shifted)
                softmax1_sum = R.sum(softmax1_exp, axis=[-1], keepdims=True)
                y = R.divide(softmax1_exp, softmax1_sum)
                R.output(y)
            return y

    after = Decompose()(Before)
    tvm.ir.assert_structural_equal(after, Expected)
    assert bound_names(after) == bound_names(Expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_product_of_half_tensors_accumulates_in_float32(dtype: str):
    after = Decompose()(module_of(op.matmul, ((4, 8), dtype), ((8, 3), dtype)))

    (_, product), (_, cast) = calls(after)
    assert str(product.ty.dtype) == "float32"
    assert cast.op.name == "relax.astype"
    assert str(cast.ty.dtype) == dtype


@pytest.mark.parametrize(
    "types",
    [
        [((4, 8), "float32"), ((8, 3), "float32")],
        [((4, 8), "float64"), ((8, 3), "float64")],
        [((4, 8), "int32"), ((8, 3), "int32")],
    ],
    ids=["float32", "float64", "int32"],
)
def test_a_product_of_other_tensors_is_left_alone(types):
    before = module_of(op.matmul, *types)

    assert Decompose()(before).same_as(before)


def test_a_long_half_product_loses_nothing_to_its_accumulator():
    a, b = np.full((1, 4096), 0.25, "float16"), np.full((4096, 3), 1.0, "float16")
    after = Decompose()(module_of(op.matmul, (a.shape, "float16"), (b.shape, "float16")))

    np.testing.assert_array_equal(run(after, a, b), np.full((1, 3), 1024, "float16"))


@pytest.mark.parametrize(
    ("convolution", "rank"), [(op.nn.conv1d, 1), (op.nn.conv2d, 2), (op.nn.conv3d, 3)]
)
def test_a_half_convolution_keeps_its_attributes_and_accumulates_in_float32(convolution, rank):
    def build(x, w):
        return convolution(x, w, strides=2, padding=1, dilation=2, groups=2)

    x, w = ((1, 4, *[9] * rank), "float16"), ((6, 2, *[3] * rank), "float16")
    before = module_of(build, x, w)
    after = Decompose()(before)

    (_, product), (_, cast) = calls(after)
    (_, original) = calls(before)[0]
    assert str(product.ty.dtype) == "float32"
    assert tvm_ffi.structural_equal(cast.ty, original.ty)
    for key in ("strides", "padding", "dilation", "groups", "data_layout", "kernel_layout"):
        assert tvm_ffi.structural_equal(getattr(product.attrs, key), getattr(original.attrs, key))


@pytest.mark.parametrize(
    ("reduce", "row", "expected"),
    [
        (op.sum, [1.0] * 4096, 4096.0),
        (op.mean, [32.0, 16.0] * 2048, 24.0),
        (op.prod, [2.0**-10] * 4 + [2.0**10] * 4, 1.0),
    ],
    ids=["a sum that would stall", "a mean that would overflow", "a product that would vanish"],
)
def test_a_half_reduction_runs_in_float32(reduce, row: list[float], expected: float):
    x = np.array([row, row], "float16")
    after = Decompose()(module_of(lambda x: reduce(x, axis=1), (x.shape, "float16")))

    np.testing.assert_array_equal(run(after, x), np.full(2, expected, "float16"))


def test_a_bfloat16_softmax_is_computed_in_float32():
    def build(x):
        return op.astype(op.nn.softmax(op.astype(x, "bfloat16")), "float32")

    x = np.random.default_rng(3).integers(-8, 8, (3, 37)).astype("float32")
    got = run(Decompose()(module_of(build, (x.shape, "float32"))), x)

    np.testing.assert_allclose(got, CASES["softmax"].numpy(x.astype("float64")), rtol=2**-8)


def test_log_softmax_of_large_logits_stays_finite():
    x = np.array([[-1e4, 0.0, 1e4], [1e4, 1e4, 1e4]], "float32")
    after = Decompose()(module_of(op.nn.log_softmax, (x.shape, "float32")))

    assert_close(run(after, x), CASES["log_softmax"].numpy(x.astype("float64")), "float32")


def test_a_variance_far_from_zero_keeps_its_precision():
    x = (np.random.default_rng(5).standard_normal((3, 4097)) + 1e4).astype("float32")
    after = Decompose()(module_of(lambda x: op.variance(x, -1), (x.shape, "float32")))

    np.testing.assert_allclose(run(after, x), x.astype("float64").var(-1), rtol=1e-3)


def test_a_mean_nll_loss_of_ignored_labels_only_is_nan_as_in_torch():
    case = CASES["nll_loss mean"]
    after = Decompose()(case_module(case, "float32", 3))
    x = np.ones((3, 7), "float32")

    assert np.isnan(run(after, x, np.full(3, IGNORED, "int64")))


def test_the_loss_gathers_one_element_a_row_before_it_widens():
    after = Decompose()(case_module(CASES["nll_loss none"], "float16", 13))

    widened = [call for _, call in calls(after) if call.op.name == "relax.astype"]
    assert [tuple(int(n) for n in call.ty.shape) for call in widened] == [(13,), (13,)]


def test_attention_cancels_the_permutes_that_made_its_operands():
    def build(q, k, v):
        q, k, v = (op.permute_dims(t, [0, 2, 1, 3]) for t in (q, k, v))
        return op.nn.attention(q, k, v)

    heads = ((2, 3, 7, 8), "float32")
    after = Decompose()(module_of(build, heads, heads, heads))
    permutes = [call for _, call in calls(after) if call.op.name == "relax.permute_dims"]

    assert [list(call.attrs.axes) for call in permutes] == [[0, 1, 3, 2], [0, 2, 1, 3]]
    q, k, v = (
        np.random.default_rng(i).standard_normal(heads[0]).astype("float32") for i in range(3)
    )
    expected = CASES["attention"].numpy(
        *(np.swapaxes(t, 1, 2).astype("float64") for t in (q, k, v))
    )
    assert_close(run(after, q, k, v), expected, "float32")


def test_a_permute_without_axes_is_a_reversal_to_attention():
    def build(reversed_q, k):
        return op.nn.attention(op.permute_dims(reversed_q), k, k)

    after = Decompose()(module_of(build, ((8, 3, 5, 2), "float32"), ((2, 7, 3, 8), "float32")))
    q = np.random.default_rng(0).standard_normal((8, 3, 5, 2)).astype("float32")
    k = np.random.default_rng(1).standard_normal((2, 7, 3, 8)).astype("float32")

    expected = CASES["attention"].numpy(q.T.astype("float64"), *[k.astype("float64")] * 2)
    assert_close(run(after, q, k), expected, "float32")


def test_batch_norm_with_constant_parameters_folds_into_one_scale_and_one_shift():
    def build(x):
        gamma, beta, mean, variance = (
            relax.const(np.linspace(i, i + 1, 6, dtype="float32")) for i in (1, 2, 3, 4)
        )
        return op.nn.batch_norm(x, gamma, beta, mean, variance, 1, training=False)[0]

    after = Decompose()(module_of(build, ((2, 6, 3, 5), "float32")))
    folded = relax.transform.FoldConstant()(relax.transform.LegalizeOps()(after))

    kernels = [call.args[0].name_hint.rstrip("0123456789") for _, call in calls(folded)]
    assert kernels == ["multiply", "add"]
    tags = folded["main"].attrs[COMPOSITES_ATTR]
    assert [tags[name] for name, _ in calls(folded)] == ["batch_norm#1"] * 2


@pytest.mark.parametrize("dataflow", [True, False], ids=["dataflow", "plain bindings"])
def test_all_three_results_of_batch_norm_can_be_used(dataflow: bool):
    def build(x, gamma, beta, mean, variance):
        return op.nn.batch_norm(x, gamma, beta, mean, variance, 1, training=False)

    vector = ((6,), "float32")
    before = module_of(build, ((2, 6), "float32"), *[vector] * 4, dataflow=dataflow)
    after = Decompose()(before)

    assert relax.analysis.check_well_formed(after)
    arrays = case_inputs(CASES["batch_norm of the last axis"], "float32", 2)
    executable = quick_executable(after)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    variance = np.square(arrays[4])
    got = machine["main"](*[tvm.runtime.tensor(a) for a in (*arrays[:4], variance)])
    expected = reference(CASES["batch_norm of the last axis"], arrays)
    assert_close(got[0].numpy(), expected, "float32")
    np.testing.assert_array_equal(got[1].numpy(), arrays[3])
    np.testing.assert_array_equal(got[2].numpy(), variance)
