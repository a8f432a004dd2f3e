"""Statistics in one pass, where a GPU would read their data twice: accuracy, and where not."""

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

from tvm_fusion.transform.decompose import Decompose

from ...support.decompose_tools import operators
from ...support.graphs import module
from ...transform.test_split_reductions import H200, random, run, split

MEAN = 1000.0


def takes_one_pass(mod):
    return any("typical" in var.name_hint for var in mod.functions)


def far_from_zero(shape, dtype):
    spread = 1.0 if dtype == "float32" else 50.0
    return (MEAN * (1 if dtype == "float32" else 0.1) + spread * random(shape)).astype(dtype)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("shape", "axis"), [((512, 48), [0]), ((4, 6, 16, 16), [0, 2, 3]), ((2, 8, 8, 3, 5), [1, 2, 4])]
)
@pytest.mark.parametrize("keepdims", [False, True])
def test_the_variance_of_one_pass_survives_a_large_mean(shape, axis, dtype, keepdims):
    mod = module(lambda bb, x: op.variance(x, axis=axis, keepdims=keepdims), (shape, dtype))
    assert takes_one_pass(split(mod))
    x = far_from_zero(shape, dtype)
    (got,) = run(split(mod), x)
    expected = x.astype("float64").var(axis=tuple(axis), keepdims=keepdims)
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=1e-3 if dtype == "float16" else 2e-5)


def test_trailing_statistics_keep_their_two_passes():
    mod = module(lambda bb, x: op.variance(x, axis=[1]), ((512, 64), "float32"))
    assert operators(Decompose(hw=H200)(mod)) == operators(Decompose()(mod))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_group_norm_over_the_inner_part_of_the_channels(dtype):
    shape, groups = (2, 8, 8, 12), 3

    def emit(bb, x, g, b):
        return op.nn.group_norm(x, g, b, groups, channel_axis=3, axes=[1, 2], epsilon=1e-5)

    mod = split(module(emit, (shape, dtype), ((12,), dtype), ((12,), dtype)))
    assert takes_one_pass(mod)
    x, g, b = far_from_zero(shape, dtype), random((12,), dtype), random((12,), dtype)
    wide = x.astype("float64").reshape(2, 8, 8, groups, 4)
    normal = (wide - wide.mean((1, 2, 4), keepdims=True)) / np.sqrt(
        wide.var((1, 2, 4), keepdims=True) + 1e-5
    )
    expected = normal.reshape(shape) * g.astype("float64") + b.astype("float64")
    (got,) = run(mod, x, g, b)
    assert np.abs(got - expected).max() < (2e-3 if dtype == "float32" else 1e-2)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("axis", [1, 3])
def test_batch_norm_in_training_gives_the_running_statistics_too(axis, dtype):
    shape = (4, 6, 8, 10)
    channels, momentum = shape[axis], 0.25

    def emit(bb, x, *parameters):
        return op.nn.batch_norm(
            x, *parameters, axis=axis, epsilon=1e-3, momentum=momentum, training=True
        )

    vector = ((channels,), dtype)
    mod = split(module(emit, (shape, dtype), vector, vector, vector, vector))
    assert "nn.batch_norm" not in operators(mod)
    x = far_from_zero(shape, dtype)
    g, b, m, v = (random((channels,), dtype) for _ in range(4))
    wide, over = x.astype("float64"), tuple(a for a in range(4) if a != axis)
    place = [1] * 4
    place[axis] = channels
    mean, variance = wide.mean(over), wide.var(over)
    scale = g / np.sqrt(variance + 1e-3)
    expected = (wide - mean.reshape(place)) * scale.reshape(place) + b.reshape(place)
    out, new_mean, new_variance = run(mod, x, g, b, m, v)
    tolerance = 2e-3 if dtype == "float32" else 2e-2
    assert np.abs(out - expected).max() < tolerance
    moved = [(1 - momentum) * old + momentum * new for old, new in ((m, mean), (v, variance))]
    for got, want in zip((new_mean, new_variance), moved, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5 if dtype == "float32" else 2e-3)


def test_batch_norm_in_training_stays_whole_on_a_cpu():
    def emit(bb, x, *parameters):
        return op.nn.batch_norm(x, *parameters, axis=1, training=True)

    mod = module(emit, ((4, 6, 8, 10), "float32"), *[((6,), "float32")] * 4)
    assert operators(Decompose()(mod)) == ["nn.batch_norm"]


def test_a_batch_norm_that_tvm_cannot_legalize_is_opened_in_any_case():
    def emit(bb, x, *parameters):
        return op.nn.batch_norm(x, *parameters, axis=1, training=True)

    large = module(emit, ((32, 2, 64, 64), "float16"), *[((2,), "float16")] * 4)
    small = module(emit, ((4, 2, 64, 64), "float16"), *[((2,), "float16")] * 4)
    assert "nn.batch_norm" not in operators(Decompose(keep_all=True)(large))
    assert operators(Decompose(keep_all=True)(small)) == ["nn.batch_norm"]
    x = far_from_zero((32, 2, 64, 64), "float16")
    g, b, m, v = (np.abs(random((2,), "float16")) for _ in range(4))
    out, *_ = run(Decompose()(large), x, g, b, m, v)
    wide = x.astype("float64")
    normal = wide - wide.mean((0, 2, 3), keepdims=True)
    normal /= np.sqrt(wide.var((0, 2, 3), keepdims=True) + 1e-5)
    place = (1, 2, 1, 1)
    assert np.abs(out - (normal * g.reshape(place) + b.reshape(place))).max() < 2e-2


@pytest.mark.parametrize("name", ["layer_norm", "instance_norm"])
def test_a_bfloat16_norm_that_tvm_cannot_legalize_is_opened_in_any_case(name):
    def emit(bb, x, g, b):
        if name == "layer_norm":
            return op.nn.layer_norm(x, g, b, axes=[-1])
        return op.nn.instance_norm(x, g, b, 1, [2])

    shapes = ((2, 8, 8), (8,), (8,))
    brain, half = (
        Decompose(keep_all=True)(module(emit, *((s, dtype) for s in shapes)))
        for dtype in ("bfloat16", "float16")
    )
    assert f"nn.{name}" not in operators(brain)
    assert operators(half) == [f"nn.{name}"]
    assert relax.transform.LegalizeOps()(brain)


def squared(bb, d, how):
    if how == "product":
        return bb.emit(op.multiply(d, d))
    two = relax.const(np.array(2, "float32"), "float32")
    return bb.emit(op.power(d, two) if how == "power" else op.square(d))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", ["product", "power", "square"])
@pytest.mark.parametrize("keepdims", [True, False])
def test_a_variance_in_operators_of_the_model_is_taken_in_one_pass(how, keepdims):
    def emit(bb, x):
        y = bb.emit(op.astype(x, "float32"))
        mean = bb.emit(op.mean(y, [0, 2, 3], keepdims=True))
        square = squared(bb, bb.emit(op.subtract(y, mean)), how)
        return relax.Tuple([mean, bb.emit(op.mean(square, [0, 2, 3], keepdims=keepdims))])

    shape = (4, 6, 16, 16)
    mod = split(module(emit, (shape, "float16")))
    assert takes_one_pass(mod)
    x = far_from_zero(shape, "float16")
    mean, variance = run(mod, x)
    wide = x.astype("float64")
    np.testing.assert_allclose(mean, wide.mean((0, 2, 3), keepdims=True), rtol=1e-6)
    expected = wide.var((0, 2, 3), keepdims=keepdims)
    assert variance.shape == expected.shape
    np.testing.assert_allclose(variance, expected, rtol=2e-5)


@pytest.mark.parametrize("other", ["axes", "center"])
def test_squares_of_other_differences_are_no_variance(other):
    def emit(bb, x):
        mean = bb.emit(op.mean(x, [0], keepdims=True))
        second = bb.emit(op.mean(x, [0, 1] if other == "axes" else [0], keepdims=True))
        center = mean if other == "axes" else bb.emit(op.multiply(second, second))
        square = squared(bb, bb.emit(op.subtract(x, center)), "product")
        return op.mean(square, [0, 1] if other == "axes" else [0])

    mod = module(emit, ((512, 48), "float32"))
    assert not takes_one_pass(split(mod))


def test_a_mean_and_its_variance_in_different_blocks_stay_well_formed():
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((512, 48), "float32"))
    with bb.function("main", [x], pure=False):
        with bb.dataflow():
            mean = bb.emit_output(op.mean(x, [0], keepdims=True))
        bb.emit(op.print(mean, format="{}"))
        with bb.dataflow():
            square = squared(bb, bb.emit(op.subtract(x, mean)), "product")
            out = bb.emit_output(op.mean(square, [0]))
        bb.emit_func_output(out)
    mod = split(bb.get())
    relax.analysis.well_formed(mod)  # raises
    assert not takes_one_pass(mod)


def variance_of(x):
    mod = split(module(lambda bb, v: op.variance(v, axis=[0]), (x.shape, "float32")))
    assert takes_one_pass(mod)
    (got,) = run(mod, x)
    return got


def test_what_is_not_finite_shows_in_the_variance():
    x = random((1024, 4), "float32")
    x[5, 0], x[7, 1] = np.nan, np.inf
    got = variance_of(x)
    assert np.isnan(got[:2]).all()
    np.testing.assert_allclose(got[2:], x[:, 2:].astype("float64").var(0), rtol=2e-5)


@pytest.mark.parametrize("place", [0, 511, 1023])
def test_an_outlier_where_the_shift_is_read_costs_no_precision(place):
    x = random((1024, 4), "float32")
    x[place] = 1000.0
    np.testing.assert_allclose(variance_of(x), x.astype("float64").var(0), rtol=1e-4)


def test_equal_elements_have_no_variance():
    assert (variance_of(np.full((1024, 4), 0.1, "float32")) == 0).all()
