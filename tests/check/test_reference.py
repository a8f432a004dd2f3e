"""The float64 reference: what is widened, what is not, and that the numbers are float64's."""

import math

import ml_dtypes
import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, te, tirx
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tests.support.helpers_tir import quick_executable
from tvm_fusion.check.checked_sizes import has_large_loops, order_loops
from tvm_fusion.check.inputs import numpy_dtype
from tvm_fusion.check.reference import (
    _allocator,
    build_reference,
    fill_pool,
    run_reference,
    to_float64,
    widen_array,
    with_intermediates,
)
from tvm_fusion.errors import InputError
from tvm_fusion.runtime.calls.call_memory import MemoryPlan

FLOATS = ["float16", "bfloat16", "float32"]


def graph(emit, *types):
    """A legalised module whose `main` returns emit(*parameters); types are (shape, dtype)."""
    builder = relax.BlockBuilder()
    params = [relax.Var(f"p{i}", relax.TensorType(*t)) for i, t in enumerate(types)]
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(builder.normalize(emit(*params)))
        builder.emit_func_output(out)
    return relax.transform.LegalizeOps()(builder.get())


def normal(shape, dtype="float16", seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(numpy_dtype(dtype))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def norm_chain(x, w):
    """Softmax, gelu and a norm: reductions, intrinsics, casts, constants, temporaries."""
    y = relax.op.nn.gelu(relax.op.nn.softmax(x))
    centred = y - relax.op.mean(y, axis=-1, keepdims=True)
    variance = relax.op.mean(centred * centred, axis=-1, keepdims=True)
    dtype = str(x.ty.dtype)
    return centred * relax.op.rsqrt(variance + relax.const(2.0**-9, dtype)) * w + w


def norm_chain_numpy(x, w):
    s = softmax(x)
    g = 0.5 * s * (1 + np.vectorize(math.erf)(s / math.sqrt(2)))
    centred = g - g.mean(-1, keepdims=True)
    return centred / np.sqrt(g.var(-1, keepdims=True) + 2.0**-9) * w + w


@pytest.mark.parametrize("dtype", FLOATS)
def test_no_narrow_float_is_left(dtype):
    wide = to_float64(graph(norm_chain, ((4, 8), dtype), ((8,), dtype)))
    assert relax.analysis.check_well_formed(wide)
    assert not any(name in wide.script() for name in FLOATS)


def test_the_input_module_is_unchanged():
    mod = graph(lambda x: relax.op.add(x, relax.const(np.ones(8, "float16"))), ((4, 8), "float16"))
    before = tvm.ir.load_json(tvm.ir.save_json(mod))
    to_float64(mod)
    with_intermediates(mod, "main", ["gv"])
    assert tvm_ffi.structural_equal(before, mod)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", FLOATS)
def test_numbers_are_those_of_numpy_in_float64(dtype):
    mod = graph(norm_chain, ((4, 40), dtype), ((40,), dtype))
    x, w = normal((4, 40), dtype), normal((40,), dtype, 1)
    (out,) = run_reference(mod, [x, w])
    assert out.dtype == np.float64
    expected = norm_chain_numpy(x.astype("float64"), w.astype("float64"))
    np.testing.assert_allclose(out, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    ("op", "function"),
    [
        ("exp", np.exp),
        ("tanh", np.tanh),
        ("erf", np.vectorize(math.erf)),
        ("sigmoid", lambda x: 1 / (1 + np.exp(-x))),
        ("rsqrt", lambda x: 1 / np.sqrt(x)),
        ("log", np.log),
        ("cos", np.cos),
        ("atan", np.arctan),
    ],
)
def test_intrinsics_have_float64_accuracy(op, function):
    x = np.abs(normal((64,))) + np.float16(0.1)
    (out,) = run_reference(graph(getattr(relax.op, op), ((64,), "float16")), [x])
    np.testing.assert_allclose(out, function(x.astype("float64")), rtol=1e-14)


def test_powers_have_float64_accuracy():
    x = np.abs(normal((64,))) + np.float16(0.1)
    mod = graph(relax.op.power, ((64,), "float16"), ((64,), "float16"))
    wide = x.astype("float64")
    np.testing.assert_allclose(run_reference(mod, [x, x])[0], wide**wide, rtol=1e-14)


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_symbolic_shapes_run_at_every_size(rows):
    n = tirx.Var("n", "int64")
    run = build_reference(graph(relax.op.nn.softmax, ((n, 9), "float16")))
    x = normal((rows, 9))
    np.testing.assert_allclose(run([x])[0], softmax(x.astype("float64")), rtol=1e-13)


def test_rounding_inside_the_graph_vanishes():
    def emit(x):
        third = relax.op.divide(x, relax.const(3, "float32"))
        return relax.op.astype(relax.op.astype(third, "float16"), "float32")

    x = normal((16,), "float32")
    np.testing.assert_array_equal(
        run_reference(graph(emit, ((16,), "float32")), [x])[0], x.astype("float64") / 3
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("op", "sign"), [("max", -1), ("min", 1)])
def test_extremes_start_below_everything_that_float64_holds(dtype, op, sign):
    def emit(x):
        huge = relax.op.multiply(relax.op.multiply(x, x), x)
        return getattr(relax.op, op)(huge, axis=-1)

    largest = {"float16": 60000.0, "bfloat16": 1e38, "float32": 1e38}[dtype]
    x = np.full((2, 5), sign * largest, numpy_dtype(dtype))
    (out,) = run_reference(graph(emit, ((2, 5), dtype)), [x])
    np.testing.assert_allclose(out, x.astype("float64")[:, 0] ** 3)


def test_a_finite_mask_constant_keeps_its_value():
    mod = graph(lambda x: relax.op.add(x, relax.const(-1e9, "float32")), ((3,), "float32"))
    x = normal((3,), "float32")
    np.testing.assert_array_equal(run_reference(mod, [x])[0], x.astype("float64") - 1e9)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_row_masked_with_the_lowest_number_stays_uniform(dtype):
    mask = np.full((2, 4), ml_dtypes.finfo(numpy_dtype(dtype)).min)
    mask[0, :2] = 0
    mod = graph(lambda x: relax.op.nn.softmax(relax.op.add(x, relax.const(mask))), ((2, 4), dtype))
    (out,) = run_reference(mod, [normal((2, 4), dtype)])
    assert (out[0, 2:] == 0).all()
    np.testing.assert_array_equal(out[1], np.full(4, 0.25))


def test_widening_an_array_keeps_what_is_no_narrow_float():
    x = np.arange(4)
    assert widen_array(x) is x


def test_infinities_and_nans_of_an_array_stay():
    wide = widen_array(np.array([np.inf, -np.inf, np.nan, 65504], "float16"))
    np.testing.assert_array_equal(wide, [np.inf, -np.inf, np.nan, np.finfo("float64").max])


def test_integers_and_casts_to_integers_stay():
    def emit(x, i):
        return relax.op.add(relax.op.astype(x, "int32"), relax.op.multiply(i, i))

    mod = graph(emit, ((8,), "float16"), ((8,), "int32"))
    x, i = normal((8,)) * np.float16(9), np.arange(8, dtype="int32")
    (out,) = run_reference(mod, [x, i])
    assert out.dtype == np.int32
    np.testing.assert_array_equal(out, x.astype("int32") + i * i)


@I.ir_module
class Sampled:
    """Reads pixel floor(0.08 i): 25 * 0.08 is 2 in float32, and below 2 in float64."""

    @T.prim_func(private=True, s_tir=True)
    def sample(x: T.Buffer((4,), "float32"), y: T.Buffer((50,), "float32")):
        for i in range(50):
            with T.sblock("y"):
                v = T.axis.spatial(50, i)
                y[v] = x[
                    T.Cast("int32", T.floor(T.Cast("float32", v) * T.float32(0.079999998211860657)))
                ] * T.Cast("float32", v)

    @R.function
    def main(x: R.Tensor((4,), "float32")) -> R.Tensor((50,), "float32"):
        cls = Sampled
        y = R.call_tir(cls.sample, (x,), out_ty=R.Tensor((50,), "float32"))
        return y


def test_coordinates_are_computed_as_the_kernel_computes_them():
    x = np.arange(4, dtype="float32") + 1
    i = np.arange(50)
    in_float32 = np.floor(i.astype("float32") * np.float32(0.08)).astype(int)
    in_float64 = np.floor(i * float(np.float32(0.08))).astype(int)
    assert (in_float32 != in_float64).any()
    np.testing.assert_array_equal(
        run_reference(Sampled, [x])[0], x.astype("float64")[in_float32] * i
    )


BITS = [  # of a type and of integers as wide
    ("float32", "int32"),
    ("float32", "uint32"),
    ("float16", "int16"),
    ("float16", "uint16"),
    ("bfloat16", "int16"),
]


def bit_cast(source, target, divisor=1):
    """A module that casts the bits of the quotients of five numbers."""
    x = te.placeholder((5,), source, name="x")
    number = x
    if divisor != 1:
        number = te.compute((5,), lambda i: x[i] / tirx.const(divisor, source), name="number")
    y = te.compute((5,), lambda i: tirx.reinterpret(target, number[i]), name="y")
    builder = relax.BlockBuilder()
    given = relax.Var("x", relax.TensorType((5,), source))
    with builder.function("main", [given]):
        cast = te.create_prim_func([x, y]).with_attr("global_symbol", "bits")
        gvar = builder.add_func(cast, "bits")
        out = builder.emit(relax.call_tir(gvar, (given,), relax.TensorType((5,), target)))
        builder.emit_func_output(out)
    return builder.get()


@pytest.mark.parametrize(("dtype", "integer"), BITS)
def test_bits_are_those_of_the_original_type(dtype, integer):
    info = ml_dtypes.finfo(dtype)
    numbers = [0.1, -0.0, float(info.max), float(info.min), float(info.smallest_subnormal)]
    x = np.array(numbers, numpy_dtype(dtype))
    (bits,) = run_reference(bit_cast(dtype, integer), [x])
    np.testing.assert_array_equal(bits, x.view(integer))
    (back,) = run_reference(bit_cast(integer, dtype), [bits])
    assert back.dtype == np.float64
    np.testing.assert_array_equal(back, x.astype("float64"))
    np.testing.assert_array_equal(np.signbit(back), np.signbit(x))


def test_a_number_that_was_computed_is_rounded_before_its_bits_are_read():
    x = np.arange(5, dtype="float32")
    (bits,) = run_reference(bit_cast("float32", "int32", divisor=3), [x])
    np.testing.assert_array_equal(bits, (x / np.float32(3)).view("int32"))


def test_intermediates_follow_the_outputs_in_the_order_asked_for():
    def emit(x):
        return relax.op.exp(relax.op.nn.relu(x))

    mod = graph(emit, ((4,), "float16"))
    names = [b.var.name for b in mod["main"].body.blocks[0].bindings]
    x = normal((4,))
    out, second, first = run_reference(mod, [x], capture=[names[1], names[0]])
    wide = np.maximum(x.astype("float64"), 0)
    np.testing.assert_array_equal(first, wide)
    np.testing.assert_array_equal(second, out)
    np.testing.assert_allclose(out, np.exp(wide), rtol=1e-15)


def test_intermediates_outlive_the_memory_plan():
    def emit(x):
        steps = [x]
        for _ in range(6):
            steps.append(relax.op.add(steps[-1], relax.const(1, "float32")))
        return relax.Tuple([steps[-1], steps[3]])

    mod = graph(emit, ((64,), "float32"))
    calls = [b.var for b in mod["main"].body.blocks[0].bindings if "Tuple" not in str(b.var.ty)]
    x = normal((64,), "float32")
    last, third, *captured = run_reference(mod, [x], capture=[var.name for var in calls])
    wide = x.astype("float64")
    np.testing.assert_allclose(last, wide + 6)
    np.testing.assert_allclose(third, wide + 3)
    np.testing.assert_allclose(captured, [wide + 1 + i for i in range(6)])


def test_an_intermediate_that_does_not_exist_is_refused():
    with pytest.raises(InputError, match="'nothing'"):
        run_reference(graph(relax.op.exp, ((4,), "float16")), [normal((4,))], capture=["nothing"])


def test_outputs_in_tuples_are_flattened_and_scalars_stay_scalars():
    def emit(x, s):
        return relax.Tuple([relax.op.multiply(x, s), relax.op.sum(x)])

    mod = graph(lambda x, s: emit(x, s), ((4,), "float16"), ((), "float16"))
    x, s = normal((4,)), np.asarray(2, "float16")
    product, total = run_reference(mod, [x, s])
    np.testing.assert_array_equal(product, x.astype("float64") * 2)
    assert total.shape == ()
    np.testing.assert_allclose(total, x.astype("float64").sum(), rtol=1e-14)


ORDERED = {
    "matmul": (relax.op.matmul, ((9, 5), "float32"), ((5, 7), "float32")),
    "row sum": (lambda x: relax.op.sum(x, axis=-1), ((9, 5), "float32")),
    "column sum": (lambda x: relax.op.sum(x, axis=0), ((9, 5), "float32")),
    "argmax": (lambda x: relax.op.argmax(x, axis=-1), ((9, 5), "float32")),
    "softmax": (relax.op.nn.softmax, ((3, 5), "float32")),
    "conv": (
        lambda x, w: relax.op.nn.conv2d(x, w, padding=1),
        ((1, 3, 6, 5), "float32"),
        ((4, 3, 3, 3), "float32"),
    ),
    "pool": (lambda x: relax.op.nn.max_pool2d(x, (2, 2)), ((1, 3, 6, 5), "float32")),
    "symbolic matmul": (
        relax.op.matmul,
        ((tirx.Var("m", "int64"), 5), "float32"),
        ((5, 7), "float32"),
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ORDERED)
def test_another_loop_order_gives_the_same_numbers(name):
    emit, *types = ORDERED[name]
    mod = graph(emit, *types)
    ordered = order_loops(mod, large=0)
    inputs = [normal([e if isinstance(e, int) else 4 for e in s], d) for s, d in types]
    np.testing.assert_array_equal(run_stock(ordered, inputs), run_stock(mod, inputs))


@pytest.mark.parametrize("name", ["matmul", "row sum", "conv", "symbolic matmul"])
def test_large_loops_run_in_parallel(name):
    emit, *types = ORDERED[name]
    mod = graph(emit, *types)
    assert "T.parallel" in order_loops(mod, large=0).script()
    if name != "symbolic matmul":
        assert tvm_ffi.structural_equal(order_loops(mod), mod)


@pytest.mark.parametrize("name", ORDERED)
def test_loops_are_large_by_their_points_or_where_nobody_knows_them(name):
    emit, *types = ORDERED[name]
    mod = graph(emit, *types)
    assert has_large_loops(mod) == (name == "symbolic matmul")
    assert has_large_loops(mod, large=15)


@pytest.mark.parametrize(("rows", "large"), [(127, False), (128, True)])
def test_a_product_of_two_to_the_18_terms_is_large(rows, large):
    mod = graph(relax.op.matmul, ((rows, 32), "float32"), ((32, 64), "float32"))
    assert has_large_loops(mod) == large


def run_stock(mod, inputs):
    machine = relax.VirtualMachine(quick_executable(mod), tvm.cpu())
    return machine["main"](*map(tvm.runtime.tensor, inputs)).numpy()


# ---- memory that holds no result ----------------------------------------------------------------


def test_storages_of_the_pool_are_filled_before_a_module_gets_them():
    device = tvm.cpu()
    sizes = MemoryPlan(0, (80_000,), ((80_000, 80_000, 12_288, "n * 4"),)).storages()
    assert sorted(sizes) == [12_288, 80_000, 80_000]
    tvm.get_global_func("vm.builtin.memory_manager.clear")()
    fill_pool(device, sizes)
    given = [_allocator(device)(tvm_ffi.Shape([size])) for size in sizes]
    assert all((tensor.numpy() == 0xFF).all() for tensor in given)
