"""Bounds of roundings: right results stay within them, planted errors do not."""

import numpy as np
import pytest
import torch
import tvm
from tvm import relax, tirx
from tvm.relax import op

from tests.support.graphs import module
from tvm_fusion.check import allowance as bounds_of_roundings
from tvm_fusion.check.allowance import Reference, bounded_reference, bounds_of, disturbed_module
from tvm_fusion.check.bounds.noise import NONE, Draw, disturbed
from tvm_fusion.check.bounds.roundings import UNIT_ROUNDOFF, roundings_of
from tvm_fusion.check.inputs import numpy_dtype, random_inputs
from tvm_fusion.check.plain import plain_module
from tvm_fusion.check.reference import build_reference, run_reference
from tvm_fusion.check.rules import BEYOND, SAFETY, TOLERANCES, check_output
from tvm_fusion.check.verify import judge_outputs
from tvm_fusion.transform.pipeline import lower

LLVM = tvm.target.Target({"kind": "llvm"})


def lowered(emit, *inputs):
    return lower(module(emit, *inputs), LLVM, decompose=False)


def emit_call(call):
    return lambda bb, *params: bb.emit(call(bb, *params))


def total(bb, x):
    return op.sum(x, axis=-1)


def softmax(bb, x):
    return op.nn.softmax(x, axis=-1)


def layer_norm(bb, x, w, b):
    return op.nn.layer_norm(x, w, b, axes=-1, epsilon=1e-5)


def variance(bb, x):
    return op.variance(x, axis=-1)


def product(bb, x, w):
    return op.matmul(x, w)


def gelu_of_product(bb, x, w):
    return op.nn.gelu(bb.emit(op.matmul(x, w)))


def scan(bb, x):
    return op.cumsum(x, axis=-1)


def mean_of_squares(bb, x):
    return op.mean(bb.emit(op.multiply(x, x)))


CASES = [
    (total, [(33, 1037)]),
    (softmax, [(7, 129)]),
    (layer_norm, [(9, 257), (257,), (257,)]),
    (variance, [(5, 603)]),
    (product, [(3, 131), (131, 17)]),
    (gelu_of_product, [(3, 131), (131, 17)]),
    (scan, [(3, 211)]),
    (mean_of_squares, [(1, 1)]),
]
BY_CASE = pytest.mark.parametrize(
    ("emit", "shapes"), CASES, ids=lambda v: getattr(v, "__name__", "")
)


def case_of(emit, shapes, dtype="float32"):
    mod = lowered(emit_call(emit), *((shape, dtype) for shape in shapes))
    return mod, random_inputs(mod["main"])


# ---- disturbed modules ---------------------------------------------------------------------------


@BY_CASE
def test_a_draw_of_amplitude_0_changes_nothing(emit, shapes):
    mod, inputs = case_of(emit, shapes)
    run = build_reference(disturbed_module(mod))
    (given,) = run([*inputs, NONE.array()])
    np.testing.assert_array_equal(given, run_reference(mod, inputs)[0])


@BY_CASE
def test_a_draw_changes_results_a_little_and_the_same_draw_the_same(emit, shapes):
    mod, inputs = case_of(emit, shapes)
    run = build_reference(disturbed_module(mod))
    exact, first, again, second = (
        run([*inputs, Draw(seed, seed > 0).array()])[0] for seed in (0, 1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != second).any()
    assert 0 < np.abs(first - exact).max() < 1e-4 * np.abs(exact).max()


def test_the_module_is_left_as_it_was():
    mod, _ = case_of(*CASES[2])
    before = mod.clone()
    disturbed_module(mod)
    tvm.ir.assert_structural_equal(mod, before)


def test_what_only_moves_values_is_not_disturbed():
    mod = lowered(emit_call(lambda bb, x: op.permute_dims(x)), ((3, 5), "float32"))
    func = next(f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc))
    assert not roundings_of(func.body)
    x = random_inputs(mod["main"])
    assert bounded_reference(mod, x)[1][0].max() == 0


def cancelling_sum():
    """The float64 reference of sums of numbers most of which cancel."""
    mod = lowered(emit_call(total), ((3, 400), "float32"))
    x = np.random.default_rng(0).standard_normal((3, 400)).astype("float32")
    x[:, 1::2] = -x[:, ::2]
    x[:, 0] += 3
    return Reference(mod, [x])


def test_results_within_a_few_units_take_no_disturbed_run(monkeypatch):
    reference = cancelling_sum()
    right = [np.asarray(x).astype("float32") for x in reference.outputs]
    monkeypatch.setattr(bounds_of_roundings, "disturbed_module", None)  # a call would fail
    assert judge_outputs(right, reference).passed


@pytest.mark.parametrize(("share", "passes"), [(0.5, True), (10.0, False)])
def test_results_further_away_are_judged_by_disturbed_runs(share, passes):
    reference = cancelling_sum()
    (exact,), (bound,) = reference.outputs, reference.bounds
    given = [(exact + share * SAFETY * bound.max()).astype("float32")]
    floor = TOLERANCES["float32"].floor * np.abs(exact).max()
    assert np.abs(given[0] - exact).max() > floor
    assert judge_outputs(given, reference).passed is passes


def test_symbolic_extents_are_disturbed_at_any_size():
    n = tirx.Var("n", "int64")
    mod = lowered(emit_call(total), ((n, 2 * n + 1), "float32"))
    inputs = random_inputs(mod["main"], sizes={"n": 7})
    _, (bound,) = bounded_reference(mod, inputs)
    assert bound.shape == (7,)
    assert bound.min() > 0


def test_a_scheduled_function_is_not_disturbed():
    mod, _ = case_of(*CASES[0])
    func = next(f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc))
    assert disturbed(func.with_attr("tirx.is_scheduled", True), 1) is None


def test_a_module_that_computes_in_a_packed_function_has_no_bound():
    def emit(bb, x):
        return bb.emit(relax.call_dps_packed("tests.bounds.double", (x,), out_ty=x.ty))

    tvm.register_global_func(
        "tests.bounds.double", lambda a, out: out.copyfrom(a.numpy() * 2), override=True
    )
    mod = module(emit, ((3,), "float64"))
    x = random_inputs(mod["main"])
    (reference,), bounds = bounded_reference(mod, x)
    np.testing.assert_array_equal(reference, x[0] * 2)
    assert bounds == [None]


@pytest.mark.parametrize("terms", [1, 2, 100, 10_000])
def test_a_bound_grows_like_the_root_of_the_terms(terms):
    mod, inputs = case_of(total, [(50, terms)])
    inputs = [np.abs(inputs[0])]
    (reference,), (bound,) = bounded_reference(mod, inputs)
    unit = np.max(bound / reference) / UNIT_ROUNDOFF["float32"]
    assert 0.5 * terms**0.5 < unit < 2.5 * (terms**0.5 + 3)


@pytest.mark.parametrize("extent", [7, tirx.Var("n", "int64")])
def test_a_window_of_a_pooling_counts_as_the_largest_does(extent):
    def pooled(bb, x):
        return op.nn.adaptive_avg_pool1d(x, 3)  # windows of 3, of 7 elements

    low = plain_module(module(emit_call(pooled), ((1, 2, extent), "float32")), LLVM)
    x = np.random.default_rng(0).uniform(1, 2, (1, 2, 7)).astype("float32")
    [reference], [bound] = bounded_reference(low, [x])
    assert np.all(bound <= 8 * reference * UNIT_ROUNDOFF["float32"])
    assert np.all(bound > 0)


def test_cancellation_widens_the_bound():
    mod, (x,) = case_of(total, [(5, 600)])
    x = np.abs(x)
    (plain,), (near,) = bounded_reference(mod, [x])
    x[:, 300:] = -x[:, :300] * np.float32(0.999)
    (small,), (far,) = bounded_reference(mod, [x])
    assert np.min(far / np.abs(small)) > 10 * np.max(near / plain)


def test_halves_are_bounded_by_where_they_are_stored_and_summed_in_float32():
    mod, inputs = case_of(total, [(33, 1037)], "float16")
    (reference,), (bound,) = bounded_reference(mod, inputs)
    relative = bound.max() / np.abs(reference).max()
    assert UNIT_ROUNDOFF["float16"] / 4 < relative < 3 * UNIT_ROUNDOFF["float16"]


# ---- right and wrong results ---------------------------------------------------------------------

ROUNDED = ["float32", "float16", "bfloat16"]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize(("emit", "shapes"), CASES[:6], ids=lambda v: getattr(v, "__name__", ""))
def test_a_rounded_reference_passes_and_ten_times_the_bound_does_not(emit, shapes, dtype):
    mod, inputs = case_of(emit, shapes, dtype)
    (reference,), (bound,) = bounded_reference(mod, inputs)
    right = reference.astype(numpy_dtype(dtype))
    check = check_output(right, right, reference, dtype, bound=bound)
    assert check.passed
    seen = bound.max() / np.abs(reference).max()
    assert check.limit <= max(TOLERANCES[dtype].ceiling, seen)
    at = np.unravel_index(np.argmax(np.abs(reference)), reference.shape)
    wrong = reference.copy()
    wrong[at] *= 1 + 10 * check.limit
    wrong = wrong.astype(numpy_dtype(dtype))
    assert not check_output(wrong, wrong, reference, dtype, bound=bound).passed


def test_a_bound_does_not_follow_the_unfused_error():
    reference = np.array([1.0, 0.5])
    off = np.array([1.0 + 1e-5, 0.5], "float32")
    bound = np.array([1e-7, 1e-7])
    assert check_output(off, off, reference, "float32").passed
    assert not check_output(off, off, reference, "float32", bound=bound).passed


def test_a_bound_has_a_margin_up_to_the_ceiling_and_an_end_above():
    reference = np.array([1.0, -2.0])
    x = reference.astype("float32")

    def limit(*bound):
        return check_output(x, x, reference, "float32", bound=np.array(bound)).limit

    assert limit(1e-6, 3e-6) == pytest.approx(SAFETY * 1.5e-6)
    assert limit(1.5e-4, 1e-4) == 1e-4
    assert limit(4e-4, 5e-4) == 2.5e-4
    assert limit(1.0, 1.0) == BEYOND * 1e-4
    assert limit(1.0, np.inf) == 1e-4


def wrong_alike(emit, run, *inputs):
    """The verdict where the fused and the unfused module are wrong in the same way."""
    mod = lowered(emit_call(emit), *inputs)
    inputs = random_inputs(mod["main"], integers={"x0": 100})
    return judge_outputs(run(inputs), Reference(mod, inputs))


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_a_dropped_term_is_caught_though_the_unfused_module_drops_it_too(dtype):
    def run(values):
        return [values[0][:, :-1].sum(-1, dtype=dtype)]

    verdict = wrong_alike(total, run, ((33, 1037), dtype))
    assert not verdict.passed


def test_a_wrong_constant_is_caught_though_the_unfused_module_has_it_too():
    def run(values):
        x = values[0].astype("float64")
        return [(x.var(-1, ddof=1)).astype("float32")]  # 1 / (n - 1) for 1 / n

    assert not wrong_alike(variance, run, ((9, 1025), "float32")).passed


@pytest.mark.parametrize("epsilon", [1e-5, 2e-5])
def test_a_wrong_epsilon_of_a_norm_is_caught(epsilon):
    def run(values):
        x, w, b = (v.astype("float64") for v in values)
        centered = x - x.mean(-1, keepdims=True)
        y = centered / np.sqrt(x.var(-1, keepdims=True) + epsilon) * w + b
        return [y.astype("float32")]

    shapes = ((64, 255), "float32"), ((255,), "float32"), ((255,), "float32")
    assert wrong_alike(layer_norm, run, *shapes).passed is (epsilon == 1e-5)


# ---- integers and booleans -----------------------------------------------------------------------


def largest(bb, x, w):
    return op.argmax(bb.emit(op.matmul(x, w)), axis=-1)


def test_an_integer_is_held_against_the_reference_alone():
    mod = lowered(emit_call(largest), ((5, 9), "float32"), ((9, 33), "float32"))
    inputs = random_inputs(mod["main"])
    (reference,), (undecided,) = bounded_reference(mod, inputs)
    assert not undecided.any()
    wrong = (reference + 1) % 33
    assert check_output(reference, wrong, reference, "int64", bound=undecided).passed
    assert not check_output(wrong, wrong, reference, "int64", bound=undecided).passed


def test_a_near_tie_may_be_broken_either_way_and_no_other_integer():
    mod = lowered(emit_call(largest), ((2, 8), "float32"), ((8, 3), "float32"))
    x, w = random_inputs(mod["main"])
    x[0] *= np.sign(x[0] @ w[:, 1])
    w[:, 2] = w[:, 1] * np.float32(1 + 2**-22)  # a tie of columns 1 and 2 in row 0
    x[1], w[:, 0] = -x[0], -100 * w[:, 1]  # and column 0 ahead by far in row 1
    (reference,), (undecided,) = bounded_reference(mod, [x, w])
    assert undecided.tolist() == [True, False]
    assert reference[1] == 0


def test_a_float_that_roundings_take_over_a_step_has_its_height_as_a_bound():
    def floor(bb, x):
        return op.floor(bb.emit(op.multiply(x, relax.const(3.0, "float32"))))

    x = np.array([[(1 + 6e-7) / 3, 0.5]], "float32")  # one of them some roundings away from 1
    _, [[[near, far]]] = bounded_reference(lowered(floor, ((1, 2), "float32")), [x])
    assert near >= 1
    assert far < 8 * UNIT_ROUNDOFF["float32"]


@pytest.mark.parametrize("negated", [False, True])
def test_what_rounds_to_an_equal_value_is_undecided_and_nothing_else(negated):
    """No disturbance makes two float64 numbers equal, and a kernel's halves often are."""

    def equality(bb, x, y):
        compare = op.not_equal if negated else op.equal
        return compare(bb.emit(op.multiply(x, x)), y)

    x = np.linspace(0.5, 0.9, 40).astype("float16")
    y = x * x
    y[20:] = np.nextafter(y[20:] * np.float16(1.05), np.float16(2))
    assert ((x.astype("float64") ** 2) != y).any()
    low = lowered(equality, ((40,), "float16"), ((40,), "float16"))
    (exact,), (undecided,) = bounded_reference(low, [x, y])
    assert undecided[:20].all()
    assert not undecided[20:].any()
    assert (exact[20:] == negated).all()


@pytest.mark.parametrize(("spacings", "passed"), [(0, True), (2, True), (9, False)])
def test_halves_below_the_normal_numbers_are_as_far_apart_as_they_are(spacings, passed):
    reference = np.array([3.4 * 2.0**-24, 2.0**-26])
    given = (np.array([3 + spacings, 0]) * 2.0**-24).astype("float16")
    none = np.zeros(2)
    assert check_output(given, given, reference, "float16", bound=none).passed == passed


def test_what_narrower_numbers_lose_is_no_error_of_wider_ones():
    reference, none = np.full(4, 2e-3), np.zeros(4)
    given = np.zeros(4, "float32")
    for narrow in ("float16", "float8_e4m3fn"):
        assert not check_output(given, given, reference, "float32", narrow, bound=none).passed


@pytest.mark.parametrize("computed", [True, False])
def test_infinite_numbers_are_equal_to_no_finite_one(computed):
    def masked(bb, x):
        y = bb.emit(op.multiply(x, relax.const(2.0, "float32"))) if computed else x
        hidden = bb.emit(op.equal(y, relax.const(-np.inf, "float32")))
        e = bb.emit(op.exp(y))
        return relax.Tuple([hidden, bb.emit(op.where(hidden, relax.const(0.0, "float32"), e))])

    x = np.array([1, -np.inf, 2, np.inf], "float32")
    low = lowered(masked, ((4,), "float32"))
    (hidden, _), (undecided, bound) = bounded_reference(low, [x])
    assert hidden.tolist() == [False, True, False, False]
    assert not undecided.any()
    assert (bound < 1e-3).all()


def test_inputs_that_are_nearly_equal_are_not():
    x = np.array([1.0, 1.0], "float32")
    y = np.array([1.0, 1 + 2**-23], "float32")
    low = lowered(emit_call(lambda bb, x, y: op.equal(x, y)), ((2,), "float32"), ((2,), "float32"))
    (exact,), (undecided,) = bounded_reference(low, [x, y])
    assert exact.tolist() == [True, False]
    assert not undecided.any()


@pytest.mark.parametrize("call", [softmax, variance])
def test_without_steps_draws_for_ties_change_no_bound(monkeypatch, call):
    low = lowered(emit_call(call), ((5, 33), "float32"))
    x = random_inputs(low["main"])
    _, [bound] = bounded_reference(low, x)
    monkeypatch.setattr(bounds_of_roundings, "DECIDING", ())
    _, [without] = bounded_reference(low, x)
    np.testing.assert_array_equal(bound, without)


def test_integer_arithmetic_is_exact():
    mod = lowered(emit_call(total), ((4, 99), "int32"))
    inputs = random_inputs(mod["main"], integers={"x0": 50})
    (reference,), (undecided,) = bounded_reference(mod, inputs)
    assert not undecided.any()
    wrong = reference.copy()
    wrong[3] += 1
    assert not check_output(wrong, wrong, reference, "int32", bound=undecided).passed


# ---- arrays of torch -----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [0.0, 1e-7, 1e-5, np.inf, np.nan])
@pytest.mark.parametrize("bounded", [True, False])
def test_tensors_of_torch_are_judged_as_arrays_are(error, bounded):
    reference = np.random.default_rng(0).standard_normal((3, 5))
    given = reference.astype("float32")
    given[1, 2] += error
    plain, bound = reference.astype("float32"), np.full((3, 5), 1e-8) if bounded else None
    ours = check_output(given, plain, reference, "float32", bound=bound)
    tensors = [None if a is None else torch.from_numpy(a) for a in (given, plain, reference, bound)]
    theirs = check_output(*tensors[:3], "float32", bound=tensors[3])
    assert ours == theirs


@pytest.mark.parametrize("dtype", ["int32", "bool", "uint8"])
def test_integers_of_torch_are_judged_as_arrays_are(dtype):
    reference = np.array([0, 1, 1]).astype(dtype)
    wrong = np.array([0, 1, 0]).astype(dtype)
    ours = check_output(wrong, wrong, reference, dtype, bound=np.zeros(3, "bool"))
    a, b = torch.from_numpy(wrong), torch.from_numpy(reference)
    theirs = check_output(a, a, b, dtype, bound=torch.zeros(3, dtype=torch.bool))
    assert not ours.passed
    assert (theirs.passed, theirs.worst_index) == (ours.passed, ours.worst_index)


def test_bounds_of_tensors_are_those_of_arrays():
    def outputs(draw):
        changed = np.array([1.0, 2.0]) + draw.amplitude * 1e-3
        return [changed, np.array([draw.amplitude > 1, True])]

    _, arrays = bounds_of(outputs)
    _, tensors = bounds_of(lambda draw: [torch.from_numpy(x) for x in outputs(draw)])
    for array, tensor in zip(arrays, tensors, strict=True):
        np.testing.assert_array_equal(array, tensor.numpy())
    assert arrays[1].tolist() == [True, False]


@pytest.mark.parametrize("call", [op.sort, op.permute_dims, op.nn.relu])
def test_a_module_that_rounds_nothing_stays_as_it_was(call):
    mod = lowered(emit_call(lambda bb, x: call(x)), ((4, 6), "float32"))
    before = mod.clone()
    disturbed_module(mod)
    tvm.ir.assert_structural_equal(mod, before)
