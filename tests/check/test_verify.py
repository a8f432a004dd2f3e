"""The rule of numbers, verified modules and groups, random inputs: wrong kernels are caught."""

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax, te, tirx

from tvm_fusion.check import inputs
from tvm_fusion.check.allowance import Reference
from tvm_fusion.check.bounds.rounded_products import TFLOAT32
from tvm_fusion.check.checked_sizes import draw_count
from tvm_fusion.check.inputs import random_inputs
from tvm_fusion.check.rules import TOLERANCES, check_output
from tvm_fusion.check.verify import (
    GroupCase,
    compare_outputs,
    judge_outputs,
    run_module,
    verify_group,
)
from tvm_fusion.errors import InputError

HALF_CEILINGS = {"float16": 1e-2, "bfloat16": 2e-2}
DTYPES = {  # of outputs: operands of products alone are of tfloat32
    name: np.dtype(getattr(ml_dtypes, name, name)) for name in TOLERANCES if name != TFLOAT32
}


def reference_of(shape=(4, 8), seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


# ---- the rule on one output ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_correctly_rounded_output_passes(dtype):
    ref = reference_of()
    x = ref.astype(DTYPES[dtype])
    check = check_output(x, x, ref, dtype)
    assert check.passed
    assert check.why == ""
    assert check.error <= check.limit


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("times", "passes"), [(0.9, True), (1.1, False)])
def test_the_error_may_be_a_multiple_of_the_unfused_error(dtype, times, passes):
    rule = TOLERANCES[dtype]
    ref = np.array([1.0, 0.0])
    unfused_error = rule.ceiling / rule.ratio * 0.8
    unfused = np.array([1.0 + unfused_error, 0.0])
    fused = np.array([1.0, times * rule.ratio * unfused_error])
    check = check_output(fused.astype(DTYPES[dtype]), unfused, ref, dtype)
    assert check.passed is passes
    assert check.plain_error == pytest.approx(unfused_error)
    assert check.worst_index == (1,)


@pytest.mark.parametrize(("dtype", "ceiling"), [("float32", 1e-4), *HALF_CEILINGS.items()])
def test_the_ceiling_holds_however_wrong_the_unfused_output_is(dtype, ceiling):
    ref = np.array([1.0, 0.0])
    bad = np.array([1.0, 1.2 * ceiling]).astype(DTYPES[dtype])
    check = check_output(bad, bad, ref, dtype)
    assert not check.passed
    assert check.limit == ceiling


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_few_units_in_the_last_place_pass_beside_an_exact_unfused_output(dtype):
    exact = np.array([1.0, 0.5], DTYPES[dtype])
    spacing = TOLERANCES[dtype].floor / (4 if dtype in ("float32", "float64") else 2)
    near = np.array([1.0 + spacing, 0.5]).astype(DTYPES[dtype])
    far = np.array([1.0 + 8 * spacing, 0.5]).astype(DTYPES[dtype])
    assert near[0] != exact[0]
    assert check_output(near, exact, exact.astype("float64"), dtype).passed
    assert not check_output(far, exact, exact.astype("float64"), dtype).passed


def test_the_verdict_names_the_worst_element_and_its_numbers():
    ref = reference_of((3, 5))
    x = ref.astype("float32")
    bad = x.copy()
    bad[2, 1] += 1
    check = check_output(bad, x, ref, "float32")
    assert check.worst_index == (2, 1)
    assert f"{bad[2, 1]:.9g}" in check.why
    assert f"{ref[2, 1]:.9g}" in check.why


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_one_poisoned_element_fails(poison):
    ref = reference_of()
    x = ref.astype("float32")
    bad = x.copy()
    bad[1, 3] = poison
    check = check_output(bad, x, ref, "float32")
    assert not check.passed
    assert check.worst_index == (1, 3)
    assert check.error == np.inf


@pytest.mark.parametrize(
    ("fused", "reference", "passes"),
    [
        (np.nan, np.nan, True),
        (0.0, np.nan, False),
        (np.inf, np.nan, False),
        (np.inf, np.inf, True),
        (-np.inf, np.inf, False),
        (-np.inf, -np.inf, True),
        (np.nan, np.inf, False),
        (1.0, -np.inf, False),
    ],
)
def test_references_that_are_not_finite_are_met_element_by_element(fused, reference, passes):
    x = np.array([1.0, fused, 2.0], "float32")
    ref = np.array([1.0, reference, 2.0])
    unfused = ref.astype("float32")
    assert check_output(x, unfused, ref, "float32").passed is passes


@pytest.mark.parametrize(
    ("fused", "passes"), [(np.inf, True), (-np.inf, False), (np.nan, False), (60000.0, False)]
)
def test_a_reference_beyond_the_dtype_is_met_by_infinity(fused, passes):
    ref = np.array([1.0, 1e5])
    unfused = np.array([1.0, np.inf], "float16")
    x = np.array([1.0, fused]).astype("float16")
    assert check_output(x, unfused, ref, "float16").passed is passes


def test_a_reference_beyond_the_dtype_is_met_by_what_the_unfused_output_saturates_to():
    ref = np.array([1.0, -np.inf])  # the maximum of a row of -inf
    x = np.array([1.0, -65504], "float16")
    assert check_output(x, x, ref, "float16").passed


def test_an_overflow_of_the_unfused_model_itself_is_no_fault_of_the_fusion():
    ref = np.array([1.0, 2.0])
    x = np.array([1.0, np.inf], "float16")
    assert check_output(x, x, ref, "float16").passed
    assert not check_output(-x, x, ref, "float16").passed


def test_a_finite_result_where_the_unfused_model_overflows_must_be_right():
    ref = np.array([1.0, 2.0])
    unfused = np.array([1.0, np.nan], "float16")
    assert check_output(np.array([1, 2], "float16"), unfused, ref, "float16").passed
    assert not check_output(np.array([1, 3], "float16"), unfused, ref, "float16").passed


@pytest.mark.parametrize(("fused", "passes"), [(0.0, True), (1e-8, True), (1e-3, False)])
def test_a_reference_of_zeros_is_judged_by_the_absolute_error(fused, passes):
    zeros = np.zeros(3)
    x = np.array([0, fused, 0], "float32")
    assert check_output(x, zeros.astype("float32"), zeros, "float32").passed is passes


@pytest.mark.parametrize("dtype", [*DTYPES, "int64", "bool"])
def test_an_empty_output_passes(dtype):
    x = np.empty((0, 4), DTYPES.get(dtype, dtype))
    assert check_output(x, x, x.astype("float64"), dtype).passed


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_a_scalar_output_has_an_index(dtype):
    x = np.asarray(3, dtype)
    check = check_output(np.asarray(5, dtype), x, x.astype("float64"), dtype)
    assert not check.passed
    assert check.worst_index == ()


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint8", "bool"])
def test_integers_and_booleans_are_exact(dtype):
    x = np.array([0, 1, 1]).astype(dtype)
    wrong = np.array([0, 1, 0]).astype(dtype)
    assert check_output(x, x, x, dtype).passed
    check = check_output(wrong, x, x, dtype)
    assert not check.passed
    assert check.worst_index == (2,)


def test_an_integer_may_follow_the_reference_where_the_unfused_output_does_not():
    unfused, reference = np.array([3, 1]), np.array([4, 1])  # argmax of a tie in half precision
    assert check_output(np.array([4, 1]), unfused, reference, "int64").passed
    assert not check_output(np.array([5, 1]), unfused, reference, "int64").passed


def test_a_wrong_shape_or_dtype_fails():
    ref = reference_of()
    x = ref.astype("float32")
    assert "[8, 4]" in check_output(x.T, x, ref, "float32").why
    assert "float16" in check_output(x.astype("float16"), x, ref, "float32").why


def test_outputs_that_do_not_belong_together_are_refused():
    x = np.zeros(3, "float32")
    with pytest.raises(InputError, match="not of one shape"):
        check_output(x, x, np.zeros(4), "float32")
    with pytest.raises(InputError, match="complex64"):
        check_output(x.astype("complex64"), x, np.zeros(3), "complex64")
    with pytest.raises(InputError, match="1 outputs and 2 of the reference"):
        compare_outputs([x], Reference(two_outputs(), [np.zeros((5, 16), "float16")]))


# ---- groups --------------------------------------------------------------------------------------

ROWS, COLUMNS = 3, 4096


def row_sum(kind, rows=ROWS):
    """A kernel for a row sum of halves, computed in float32: right, or wrong in one way."""
    accumulator = "float16" if kind == "half accumulation" else "float32"
    first = 1 if kind == "off by one" else 0
    columns = COLUMNS - 1 if kind in ("off by one", "missing element") else COLUMNS
    x = te.placeholder((rows, COLUMNS), "float16", name="x")
    k = te.reduce_axis((0, columns), name="k")
    total = te.compute(
        (rows,), lambda i: te.sum(x[i, k + first].astype(accumulator), axis=k), name="total"
    )
    y = te.compute((rows,), lambda i: total[i].astype("float16"), name="y")
    return te.create_prim_func([x, y]).without_attr("global_symbol")


def fused_module(kernel, rows=ROWS):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((rows, COLUMNS), "float16"))
    with builder.function("main", [x]):
        with builder.dataflow():
            var = builder.add_func(kernel, "kernel")
            out_ty = relax.TensorType((rows,), "float16")
            out = builder.emit_output(relax.call_tir(var, [x], out_ty))
        builder.emit_func_output(out)
    return builder.get()


def unfused_module(rows=ROWS):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((rows, COLUMNS), "float16"))
    with builder.function("main", [x]):
        with builder.dataflow():
            total = relax.op.sum(relax.op.astype(x, "float32"), axis=-1)
            out = builder.emit_output(builder.normalize(relax.op.astype(total, "float16")))
        builder.emit_func_output(out)
    return relax.transform.LegalizeOps()(builder.get())


def size():
    return tirx.Var("n", "int64")


def group(kind):
    x = reference_of((ROWS, COLUMNS))
    if kind == "half accumulation":
        x = np.abs(x)  # the sum grows until it swallows what is added
    return GroupCase(kind, fused_module(row_sum(kind)), unfused_module(), (x,))


def test_a_right_kernel_passes():
    verdict = verify_group(group("right"))
    assert verdict.passed
    assert verdict.name == "right"
    assert 0 < verdict.worst_error < 1e-3


@pytest.mark.parametrize("kind", ["off by one", "missing element", "half accumulation"])
def test_a_wrong_kernel_is_caught(kind):
    verdict = verify_group(group(kind))
    assert not verdict.passed
    assert (verdict.name, verdict.why[:14]) == (kind, "output 0 error")


def test_a_kernel_that_leaves_an_element_unwritten_is_caught():
    def poisoned(mod, inputs):
        (out,) = run_module(mod, inputs)
        out[-1] = np.nan
        return [out]

    assert not verify_group(group("right"), run_fused=poisoned).passed


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(("kind", "passes"), [("right", True), ("missing element", False)])
def test_a_group_with_a_symbolic_extent_is_verified_at_any_size(rows, kind, passes):
    fused_mod = fused_module(row_sum(kind, size()), size())
    case = GroupCase(kind, fused_mod, unfused_module(size()), (reference_of((rows, COLUMNS)),))
    assert verify_group(case).passed is passes


def test_inputs_from_a_reference_run_are_rounded_to_the_dtype_of_the_parameter():
    seen = []

    def spy(mod, inputs):
        seen.append(inputs[0])
        return run_module(mod, inputs)

    assert verify_group(group("right"), run_fused=spy).passed
    assert seen[0].dtype == np.float16


# ---- modules -------------------------------------------------------------------------------------


def two_outputs():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((tirx.Var("n", "int64"), 16), "float16"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(relax.op.nn.softmax(x))
            outputs = relax.Tuple([y, relax.op.argmax(x, axis=-1)])
            out = builder.emit_output(builder.normalize(outputs))
        builder.emit_func_output(out)
    return relax.transform.LegalizeOps()(builder.get())


def softmax_in_float32(inputs):
    x = inputs[0].astype("float32")
    e = np.exp(x - x.max(-1, keepdims=True))
    return [(e / e.sum(-1, keepdims=True)).astype("float16"), x.argmax(-1)]


def verify_two_outputs(fused_run):
    mod = two_outputs()
    inputs = random_inputs(mod["main"], seed=3, sizes={"n": 5})
    return judge_outputs(fused_run(inputs), Reference(mod, inputs))


def test_a_module_with_several_outputs_passes():
    verdict = verify_two_outputs(softmax_in_float32)
    assert verdict.passed
    assert [check.passed for check in verdict.outputs] == [True, True]
    assert verdict.why == ""


def test_the_output_that_is_wrong_is_named():
    def wrong_argmax(inputs):
        first, second = softmax_in_float32(inputs)
        return [first, (second + 1) % 16]

    verdict = verify_two_outputs(wrong_argmax)
    assert not verdict.passed
    assert [check.passed for check in verdict.outputs] == [True, False]
    assert verdict.why.startswith("output 1 ")
    assert verdict.worst_error == np.inf


# ---- random inputs -------------------------------------------------------------------------------


def function(*params):
    builder = relax.BlockBuilder()
    variables = [relax.Var(name, ty) for name, ty in params]
    with builder.function("main", variables):
        builder.emit_func_output(builder.emit(relax.Tuple([])))
    return builder.get()["main"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_floats_are_drawn_from_a_normal_distribution(dtype):
    (x,) = random_inputs(function(("x", relax.TensorType((100, 100), dtype))))
    assert x.dtype == DTYPES[dtype]
    assert abs(float(x.astype("float64").mean())) < 0.05
    assert abs(float(x.astype("float64").std()) - 1) < 0.05


def test_a_large_tensor_repeats_what_is_drawn_and_has_no_equal_rows():
    shape = (4, 2, 1024, 1024)
    (x,) = random_inputs(function(("x", relax.TensorType(shape, "float16"))))
    assert (x.shape, x.dtype) == (shape, "float16")
    flat, drawn = x.ravel(), inputs._MOST_DRAWN
    np.testing.assert_array_equal(flat[drawn:], flat[: flat.size - drawn])
    rows = x.reshape(-1, 1024)
    assert len(np.unique(rows.view(f"V{rows[0].nbytes}"))) == len(rows)


def test_inputs_depend_on_seed_and_name_only():
    x, y = ("x", relax.TensorType((4,), "float32")), ("y", relax.TensorType((4,), "float32"))
    both, one = random_inputs(function(x, y), seed=1), random_inputs(function(y), seed=1)
    np.testing.assert_array_equal(both[1], one[0])
    assert (both[0] != both[1]).all()
    assert (random_inputs(function(y), seed=2)[0] != one[0]).all()


@pytest.mark.parametrize("dtype", ["int64", "int8", "uint8", "bool"])
def test_integers_range_over_small_numbers_unless_told(dtype):
    func = function(("i", relax.TensorType((400,), dtype)))
    (values,) = random_inputs(func)
    assert values.dtype == dtype
    low, high = {"bool": (0, 1), "uint8": (0, 9)}.get(dtype, (-9, 9))
    assert set(values.tolist()) == set(range(low, high + 1))
    if dtype != "bool":
        assert set(random_inputs(func, integers={"i": 5})[0].tolist()) == set(range(5))


def test_rows_of_a_table_are_looked_up_within_the_table():
    builder = relax.BlockBuilder()
    ids = relax.Var("ids", relax.TensorType((4, 50), "int64"))
    table = relax.const(np.zeros((7, 3), "float32"))
    with builder.function("main", [ids]):
        flat = builder.emit(relax.op.reshape(relax.op.astype(ids, "int32"), (200,)))
        builder.emit_func_output(builder.emit(relax.op.take(table, flat, axis=0)))
    (values,) = random_inputs(builder.get()["main"])
    assert set(values.ravel().tolist()) == set(range(7))


def integers_of(emit):
    """What two integer parameters of a function are drawn from."""
    builder = relax.BlockBuilder()
    a, b = (relax.Var(name, relax.TensorType((2000,), "int32")) for name in "ab")
    with builder.function("main", [a, b]):
        builder.emit_func_output(builder.emit(emit(builder, a, b)))
    values = random_inputs(builder.get()["main"])
    return [set(x.tolist()) for x in values]


SMALL, PLACES, DIVISORS = set(range(-9, 10)), {0, 1}, set(range(1, 10))


@pytest.mark.parametrize(
    ("emit", "expected"),
    [
        (lambda bb, a, b: relax.op.add(a, b), [SMALL, SMALL]),
        (lambda bb, a, b: relax.op.floor_divide(a, b), [SMALL, DIVISORS]),
        (lambda bb, a, b: relax.op.mod(a, relax.op.reshape(b, (2000,))), [SMALL, DIVISORS]),
        (lambda bb, a, b: relax.op.left_shift(a, b), [PLACES, PLACES]),
        (
            lambda bb, a, b: relax.op.gather_elements(a, bb.emit(relax.op.add(b, b)), axis=0),
            [PLACES, PLACES],
        ),
        (
            lambda bb, a, b: relax.op.multiply(
                a, bb.emit(relax.op.floor_divide(bb.emit(relax.op.add(a, a)), b))
            ),
            [SMALL, DIVISORS],
        ),
    ],
)
def test_integers_range_over_what_their_readers_allow(emit, expected):
    assert integers_of(emit) == expected


def test_symbolic_dimensions_take_the_given_sizes():
    n = tirx.Var("n", "int64")
    func = function(
        ("x", relax.TensorType((n, 2 * n + 1), "float32")),
        ("shape", relax.ShapeType([n, 3])),
        ("pair", relax.TupleType([relax.TensorType((n,), "float16")] * 2)),
        ("n", tvm.ir.PrimType("int64")),
    )
    x, shape, pair, scalar = random_inputs(func, sizes={"n": 4})
    assert x.shape == (4, 9)
    assert shape == (4, 3)
    assert [value.shape for value in pair] == [(4,), (4,)]
    assert scalar == 4


@pytest.mark.parametrize(
    ("ty", "arguments", "message"),
    [
        (relax.TensorType((tirx.Var("n", "int64"),), "float32"), {}, "'n': give its size"),
        (relax.TensorType(ndim=2, dtype="float32"), {}, "says no shape"),
        (relax.TensorType((4,), "float32"), {"sizes": {"m": 3}}, "no symbolic dimension.*'m'"),
        (relax.TensorType((4,), "int32"), {"integers": {"y": 3}}, "no parameter.*'y'.*there is x"),
    ],
)
def test_what_cannot_be_drawn_is_refused(ty, arguments, message):
    with pytest.raises(InputError, match=message):
        random_inputs(function(("x", ty)), **arguments)


@pytest.mark.parametrize(("dtype", "largest"), [("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0)])
def test_a_float8_output_may_saturate_where_the_reference_is_beyond(dtype, largest):
    kind = getattr(ml_dtypes, dtype)
    reference = np.array([2 * largest, -np.inf, 1.0])
    unfused = np.array([0.5, 0.5, 1.0]).astype(kind)
    fused = np.array([largest, -largest, 1.0]).astype(kind)
    assert check_output(fused, unfused, reference, dtype).passed
    assert not check_output(-fused, unfused, reference, dtype).passed


@pytest.mark.parametrize("dtype", ["float32", "int32", "uint8"])
def test_extreme_inputs_have_their_extremes_near_the_ends(dtype):
    func = function(("x", relax.TensorType((40, 70), dtype)))
    (plain,), (extreme,) = (random_inputs(func, seed=1, extreme=e) for e in (False, True))
    far = np.abs(extreme.astype("float64")) >= (4 if dtype == "float32" else 27)
    assert far[:, -16:].sum(1).min() >= 1
    assert far[-16:, :].sum(0).min() >= 1
    assert (extreme == plain).mean() > 0.9
    if dtype != "uint8":
        assert {-1, 1} == set(np.sign(extreme[far]).tolist())


@pytest.mark.parametrize(
    ("emit", "differs"),
    [
        (lambda bb, x: relax.op.exp(x), True),
        (lambda bb, x: relax.op.argmax(x), True),
        (lambda bb, x: relax.op.astype(bb.emit(relax.op.exp(x)), "int32"), False),
        (
            lambda bb, x: relax.op.vision.roi_align(
                relax.const(np.ones((1, 4, 8, 8), "float32")), x, (3, 3), 1.0
            ),
            False,
        ),
    ],
)
def test_floats_that_may_be_places_are_the_same_for_all_seeds(emit, differs):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((6, 5), "float32"))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(emit(builder, x)))
    func = builder.get()["main"]
    (plain,), (drawn,) = (random_inputs(func, n, extreme=n == 1) for n in (0, 1))
    assert (plain != drawn).any() == differs


@pytest.mark.parametrize(("rows", "count"), [(8, 6), (1 << 12, 2), (1 << 16, 1), (size(), 6)])
def test_large_modules_are_checked_on_fewer_inputs(rows, count):
    assert draw_count(unfused_module(rows)) == count
