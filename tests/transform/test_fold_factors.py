"""Factors of a matrix product's operands moved behind it or into its weight: where, with the same
numbers, and what is left alone.
"""

import dataclasses
import functools

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op

import tvm_fusion
from tvm_fusion.config import load_policy, load_profile, resolve_target
from tvm_fusion.ir.graph import build_graph
from tvm_fusion.kernels.contraction.reader import analyze_contraction
from tvm_fusion.kernels.gemm.hopper.kernel import emit_gemm_hopper
from tvm_fusion.plan.search.search import search
from tvm_fusion.transform.apply.materialize import materialize
from tvm_fusion.transform.decompose import Decompose
from tvm_fusion.transform.pipeline import lower
from tvm_fusion.transform.rewrites.constant_weights import scaled_weight
from tvm_fusion.transform.rewrites.fold_factors import FoldFactors

from ..support.decompose_tools import calls, operators
from ..support.graphs import module
from ..support.helpers_tir import quick_executable
from ..support.hopper_on_cpu import run_hopper_on_cpu

H200 = load_profile("nvidia_h200")
RNG = np.random.default_rng(11)
K, N = 48, 24
GAMMA = RNG.standard_normal(K).astype("float16")
GAMMA[::7] = 0
WEIGHTS = [(RNG.standard_normal((N, K)) / 8).astype("float16") for _ in range(3)]


def half(array):
    return relax.const(np.asarray(array).astype("float16"))


def linear(bb, x, weight):
    return bb.emit(op.matmul(x, bb.emit(op.permute_dims(weight))))


def llama_norm(bb, x, gamma, by="rsqrt"):
    """As transformers writes it: the scale in half precision, after the rounding."""
    wide = bb.emit(op.astype(x, "float32"))
    mean = bb.emit(op.mean(bb.emit(op.multiply(wide, wide)), axis=[-1], keepdims=True))
    shifted = bb.emit(op.add(mean, relax.const(1e-6, "float32")))
    if by == "rsqrt":
        normal = bb.emit(op.multiply(wide, bb.emit(op.rsqrt(shifted))))
    else:
        normal = bb.emit(op.divide(wide, bb.emit(op.sqrt(shifted))))
    narrow = bb.emit(op.astype(normal, x.ty.dtype))
    return bb.emit(op.multiply(gamma, narrow))


def torch_norm(bb, x, gamma):
    """As `torch.nn.RMSNorm` is exported: scaled in float32, rounded once."""
    return bb.emit(op.nn.rms_norm(x, gamma, axes=[-1], epsilon=1e-6))


def gemma_norm(bb, x, gamma):
    """The scale is 1 + a parameter, in float32."""
    scale = bb.emit(op.add(relax.const(1.0, "float32"), bb.emit(op.astype(gamma, "float32"))))
    wide = bb.emit(op.astype(x, "float32"))
    mean = bb.emit(op.mean(bb.emit(op.multiply(wide, wide)), axis=[-1], keepdims=True))
    factor = bb.emit(op.rsqrt(bb.emit(op.add(mean, relax.const(1e-6, "float32")))))
    normal = bb.emit(op.multiply(bb.emit(op.multiply(wide, factor)), scale))
    return bb.emit(op.astype(normal, x.ty.dtype))


def divided_norm(bb, x, gamma):
    return llama_norm(bb, x, gamma, by="sqrt")


def normalised(x, gamma):
    x = x.astype("float64")
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * gamma.astype("float64")


def folded(mod):
    opened = Decompose()(mod)
    result = FoldFactors()(opened)
    assert relax.analysis.check_well_formed(result)
    return opened, result


def run(mod, *arrays):
    executable = quick_executable(mod)
    result = relax.VirtualMachine(executable, tvm.cpu())["main"](*map(tvm.runtime.tensor, arrays))
    many = not isinstance(result, tvm.runtime.Tensor)
    return [r.numpy() for r in result] if many else [result.numpy()]


def check(mod, arrays, expected, tolerance=3e-3):
    """The folded module gives the expected numbers, within `tolerance` of the largest."""
    opened, result = folded(mod)
    assert not result.same_as(opened)
    for got, wanted in zip(run(result, *arrays), expected, strict=True):
        assert got.shape == wanted.shape
        assert np.isfinite(wanted).all()
        error = np.abs(got.astype("float64") - wanted).max()
        assert error <= tolerance * np.abs(wanted).max()
    assert FoldFactors()(result).same_as(result)
    return result


def full_size_halves(mod, shape):
    """Bindings of half tensors of a shape: what would be written to memory."""
    return [
        name
        for name, call in calls(mod)
        if str(call.ty.dtype) == "float16" and [int(e) for e in call.ty.shape] == list(shape)
    ]


def qkv(norm, bb, x, gamma=GAMMA):
    n = norm(bb, x, half(gamma))
    return [linear(bb, n, half(w)) for w in WEIGHTS]


NORMS = [llama_norm, torch_norm, gemma_norm, divided_norm]


# ---- norms before products


@pytest.mark.one_in(6)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(5, K), (2, 3, K), (1, K)], ids=str)
@pytest.mark.parametrize("size", [1, 100])
def test_a_norm_before_products_becomes_a_factor_behind_them(norm, shape, size):
    x = (size * RNG.standard_normal(shape)).astype("float16")
    gamma = GAMMA.astype("float64") + (norm is gemma_norm)
    expected = [normalised(x, gamma) @ w.astype("float64").T for w in WEIGHTS]
    mod = module(functools.partial(qkv, norm), (shape, "float16"))
    result = check(mod, [x], expected)
    assert full_size_halves(result, shape) == []
    products = [call for _, call in calls(result) if call.op.name == "relax.matmul"]
    assert [str(p.attrs.out_dtype) for p in products] == ["float32"] * 3
    assert all(p.args[0].same_as(result["main"].params[0]) for p in products)


def test_gate_and_up_share_the_factor_of_their_norm():
    def emit(bb, x):
        gate, up, _ = qkv(llama_norm, bb, x)
        return bb.emit(op.multiply(bb.emit(op.nn.silu(gate)), up))

    x = RNG.standard_normal((7, K)).astype("float16")
    gate, up = (normalised(x, GAMMA) @ w.astype("float64").T for w in WEIGHTS[:2])
    result = check(module(emit, ((7, K), "float16")), [x], [gate / (1 + np.exp(-gate)) * up])
    assert operators(result).count("rsqrt") == 1


@pytest.mark.parametrize("transposed", [True, False])
def test_the_scale_goes_into_the_weight_in_its_own_order(transposed):
    weight = WEIGHTS[0] if transposed else np.ascontiguousarray(WEIGHTS[0].T)

    def emit(bb, x):
        n = torch_norm(bb, x, half(GAMMA))
        return linear(bb, n, half(weight)) if transposed else bb.emit(op.matmul(n, half(weight)))

    x = RNG.standard_normal((5, K)).astype("float16")
    mod = module(emit, ((5, K), "float16"))
    result = check(mod, [x], [normalised(x, GAMMA) @ WEIGHTS[0].astype("float64").T])
    (held,) = [c for c in constants(result) if c.ndim == 2]
    assert np.array_equal(held, scaled() if transposed else scaled().T)


def scaled():
    """The first weight with the scale in it."""
    return (WEIGHTS[0].astype("float32") * GAMMA.astype("float32")).astype("float16")


def constants(mod):
    found = []
    relax.analysis.post_order_visit(
        mod["main"], lambda e: found.append(e) if isinstance(e, tvm.ir.Constant) else None
    )
    return [c.value.numpy() for c in found if isinstance(c.value, tvm.runtime.Tensor)]


def test_one_weight_of_several_products_is_scaled_once():
    weight = half(WEIGHTS[0])

    def emit(bb, x, y):
        return [linear(bb, llama_norm(bb, t, half(GAMMA)), weight) for t in (x, y)]

    _, result = folded(module(emit, ((5, K), "float16"), ((3, K), "float16")))
    flipped = [call.args[0] for _, call in calls(result) if call.op.name == "relax.permute_dims"]
    assert all(t.value.same_as(flipped[0].value) for t in flipped)
    (held,) = [c for c in constants(result) if c.ndim == 2]
    assert np.array_equal(held, scaled())


def test_a_scale_of_ones_needs_no_constant_weight():
    def emit(bb, x, w):
        return bb.emit(op.matmul(torch_norm(bb, x, half(np.ones(K))), w))

    x, w = (RNG.standard_normal(s).astype("float16") for s in ((5, K), (K, N)))
    expected = normalised(x, np.ones(K)) @ w.astype("float64")
    check(module(emit, ((5, K), "float16"), ((K, N), "float16")), [x, w], [expected])


def test_reshaped_activations_reshape_the_factor_of_the_rows():
    def emit(bb, x):
        n = bb.emit(op.reshape(llama_norm(bb, x, half(GAMMA)), (6, K)))
        return linear(bb, n, half(WEIGHTS[0]))

    x = RNG.standard_normal((2, 3, K)).astype("float16")
    expected = (normalised(x, GAMMA) @ WEIGHTS[0].astype("float64").T).reshape(6, N)
    check(module(emit, ((2, 3, K), "float16")), [x], [expected])


def test_symbolic_batches_fold():
    n = tirx.Var("n", "int64")

    def emit(bb, x):
        flat = bb.emit(op.reshape(llama_norm(bb, x, half(GAMMA)), (n * 3, K)))
        return linear(bb, flat, half(WEIGHTS[0]))

    x = RNG.standard_normal((5, 3, K)).astype("float16")
    expected = (normalised(x, GAMMA) @ WEIGHTS[0].astype("float64").T).reshape(15, N)
    check(module(emit, ((n, 3, K), "float16")), [x], [expected])


def test_bfloat16_norms_fold():
    import ml_dtypes

    gamma, weight = (relax.const(a.astype(ml_dtypes.bfloat16)) for a in (GAMMA, WEIGHTS[0]))

    def emit(bb, x):
        y = linear(bb, llama_norm(bb, x, gamma), weight)
        return bb.emit(op.astype(y, "float32"))

    x = RNG.standard_normal((5, K)).astype(ml_dtypes.bfloat16)
    g, w = (c.value.numpy().astype("float64") for c in (gamma, weight))
    check(module(emit, ((5, K), "bfloat16")), [x], [normalised(x, g) @ w.T], tolerance=2e-2)


# ---- other factors


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("wide", [True, False])
def test_the_scale_of_an_int8_weight_stands_behind_the_product(transposed, constant, wide):
    weight = RNG.integers(-127, 128, (N, K)).astype("int8")
    scale = RNG.random((N, 1)).astype("float16")
    if not transposed:
        weight, scale = np.ascontiguousarray(weight.T), scale.reshape(-1)
    dtype = "float32" if wide else "float16"

    def emit(bb, x, *given):
        w, s = given or (relax.const(weight), relax.const(scale))
        w, s = (bb.emit(op.astype(t, dtype)) for t in (w, s))
        w = bb.emit(op.astype(bb.emit(op.multiply(w, s)), "float16"))
        return linear(bb, x, w) if transposed else bb.emit(op.matmul(x, w))

    x = RNG.standard_normal((2, 5, K)).astype("float16")
    given = [] if constant else [weight, scale]
    inputs = [(a.shape, str(a.dtype)) for a in [x, *given]]
    matrix = weight.astype("float64") * scale.astype("float64")
    mod = module(emit, *inputs)
    result = check(mod, [x, *given], [x.astype("float64") @ (matrix.T if transposed else matrix)])
    widened = [call for _, call in calls(result) if str(call.args[0].ty.dtype) == "int8"]
    assert {call.op.name for call in widened} == {"relax.astype"}
    assert {str(call.ty.dtype) for call in widened} == {"float16"}


@pytest.mark.parametrize("side", [0, 1])
def test_numbers_move_behind_the_product(side):
    def emit(bb, *operands):
        operands = list(operands)
        operands[side] = bb.emit(op.multiply(operands[side], relax.const(0.125, "float16")))
        return bb.emit(op.matmul(*operands))

    x, y = (RNG.standard_normal(s).astype("float16") for s in ((2, 5, K), (2, K, 7)))
    expected = 0.125 * (x.astype("float64") @ y.astype("float64"))
    mod = module(emit, (x.shape, "float16"), (y.shape, "float16"))
    result = check(mod, [x, y], [expected])
    assert operators(result)[0] == "matmul"


def test_rows_of_a_transposed_left_operand_have_a_factor_too():
    def emit(bb, x, r):
        scaled = bb.emit(op.multiply(x, r))
        return bb.emit(op.matmul(bb.emit(op.permute_dims(scaled)), half(WEIGHTS[0].T)))

    x, r = RNG.standard_normal((K, 5)).astype("float16"), RNG.random((1, 5)).astype("float16")
    expected = (x.astype("float64") * r).T @ WEIGHTS[0].astype("float64").T
    check(module(emit, ((K, 5), "float16"), ((1, 5), "float16")), [x, r], [expected])


def test_a_float32_softmax_is_divided_behind_the_product():
    def emit(bb, x, v):
        return bb.emit(op.matmul(bb.emit(op.nn.softmax(x)), v))

    x, v = (RNG.standard_normal(s).astype("float32") for s in ((5, K), (K, N)))
    p = np.exp(x.astype("float64"))
    expected = (p / p.sum(-1, keepdims=True)) @ v
    result = check(
        module(emit, ((5, K), "float32"), ((K, N), "float32")), [x, v], [expected], tolerance=1e-5
    )
    assert operators(result)[-1] == "divide"


# ---- partly


def test_what_others_read_stays_and_what_is_behind_it_folds():
    def emit(bb, x):
        wide = bb.emit(op.astype(x, "float32"))
        rows = bb.emit(op.rsqrt(bb.emit(op.mean(wide, axis=[-1], keepdims=True))))
        normal = bb.emit(op.astype(bb.emit(op.multiply(wide, rows)), "float16"))
        scaled = bb.emit(op.multiply(normal, half(GAMMA)))
        return [linear(bb, scaled, half(WEIGHTS[0])), normal]

    x = (1 + RNG.random((5, K))).astype("float16")
    normal = x.astype("float64") / np.sqrt(x.astype("float64").mean(-1, keepdims=True))
    expected = [(normal * GAMMA) @ WEIGHTS[0].astype("float64").T, normal]
    result = check(module(emit, ((5, K), "float16")), [x], expected)
    assert len(full_size_halves(result, (5, K))) == 1


# ---- left alone


def unchanged(emit, *inputs):
    opened, result = folded(module(emit, *inputs))
    return result.same_as(opened)


def with_other_reader(bb, x):
    n = llama_norm(bb, x, half(GAMMA))
    return [linear(bb, n, half(WEIGHTS[0])), bb.emit(op.exp(n))]


def with_result(bb, x):
    n = llama_norm(bb, x, half(GAMMA))
    return [linear(bb, n, half(WEIGHTS[0])), n]


def as_right_operand_too(bb, x):
    n = llama_norm(bb, x, half(GAMMA))
    return [linear(bb, n, half(WEIGHTS[0])), linear(bb, x, n)]


def without_constant_weight(bb, x):
    return linear(bb, llama_norm(bb, x, half(GAMMA)), x)


def one_sibling_without_constant_weight(bb, x):
    n = llama_norm(bb, x, half(GAMMA))
    return [linear(bb, n, half(WEIGHTS[0])), linear(bb, n, x)]


def with_computed_scale(bb, x):
    gamma = bb.emit(op.mean(x, axis=[0]))
    return linear(bb, llama_norm(bb, x, gamma), half(WEIGHTS[0]))


def with_infinite_weight(bb, x):
    weight = np.full((N, K), 1e3)
    return linear(bb, llama_norm(bb, x, half(np.full(K, 1e3))), half(weight))


def with_vanishing_weight(bb, x):
    return linear(bb, llama_norm(bb, x, half(np.full(K, 1e-5))), half(WEIGHTS[0]))


def with_one_vanishing_column(bb, x):
    weight = WEIGHTS[0].copy()
    weight[3] = 1e-6
    return linear(bb, llama_norm(bb, x, half(np.full(K, 1e-1))), half(weight))


def with_a_weight_that_is_looked_up(bb, x):
    weight = half(WEIGHTS[0])
    rows = bb.emit(op.take(weight, relax.const(np.arange(4)), axis=0))
    return [linear(bb, llama_norm(bb, x, half(GAMMA)), weight), rows]


def layer_norm(bb, x):
    n = op.nn.layer_norm(x, half(GAMMA), half(GAMMA), axes=[-1])
    return linear(bb, bb.emit(n), half(WEIGHTS[0]))


def half_softmax(bb, x):
    return linear(bb, bb.emit(op.nn.softmax(x)), half(WEIGHTS[0]))


def wide_input(bb, x):
    wide = bb.emit(op.exp(bb.emit(op.astype(x, "float32"))))
    rows = bb.emit(op.max(wide, axis=[-1], keepdims=True))
    n = bb.emit(op.astype(bb.emit(op.divide(wide, rows)), "float16"))
    return linear(bb, n, half(WEIGHTS[0]))


def quantised(bb, x):
    wide = bb.emit(op.astype(x, "float32"))
    rows = bb.emit(op.max(wide, axis=[-1], keepdims=True))
    n = bb.emit(op.astype(bb.emit(op.divide(wide, rows)), "float8_e4m3fn"))
    return linear(bb, bb.emit(op.astype(n, "float16")), half(WEIGHTS[0]))


def plain(bb, x):
    return linear(bb, x, half(WEIGHTS[0]))


def elementwise(bb, x):
    return linear(bb, bb.emit(op.multiply(x, x)), half(WEIGHTS[0]))


def scaled_along_the_sum_on_the_right(bb, x):
    weight = bb.emit(op.multiply(bb.emit(op.permute_dims(x)), half(GAMMA[:, None])))
    return bb.emit(op.matmul(x, weight))


@pytest.mark.parametrize(
    "emit",
    [
        with_other_reader,
        with_result,
        as_right_operand_too,
        without_constant_weight,
        one_sibling_without_constant_weight,
        with_computed_scale,
        with_infinite_weight,
        with_vanishing_weight,
        with_one_vanishing_column,
        with_a_weight_that_is_looked_up,
        layer_norm,
        half_softmax,
        wide_input,
        quantised,
        plain,
        elementwise,
        scaled_along_the_sum_on_the_right,
    ],
    ids=lambda emit: emit.__name__,
)
def test_what_cannot_be_folded_is_returned_as_it_is(emit):
    assert unchanged(emit, ((5, K), "float16"))


def test_exact_rounding_folds_nothing():
    opened = Decompose()(module(functools.partial(qkv, llama_norm), ((5, K), "float16")))
    assert FoldFactors("exact")(opened).same_as(opened)


def test_tensors_of_another_dataflow_block_are_not_reached():
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((5, K), "float16"))
    with bb.function("main", [x]):
        with bb.dataflow():
            n = bb.emit_output(bb.emit(op.multiply(x, relax.const(0.5, "float16"))))
        with bb.dataflow():
            y = bb.emit_output(linear(bb, n, half(WEIGHTS[0])))
        bb.emit_func_output(y)
    opened, result = folded(bb.get())
    assert result.same_as(opened)


# ---- weights


@pytest.mark.parametrize("axis", [-1, -2])
def test_a_scaled_weight_is_rounded_once_from_float32(axis):
    weight = RNG.standard_normal((2, 40, 56)).astype("float16")
    scale = RNG.standard_normal(weight.shape[axis]).astype("float32")
    got = scaled_weight(weight, scale, axis)
    wide = weight.astype("float32") * (scale if axis == -1 else scale[:, None])
    assert np.array_equal(got, wide.astype("float16"))


# ---- plans


def plan(mod, rewrites=("fold_factors",)):
    graph = build_graph(lower(mod, H200.to_target(), hw=H200, rewrites=rewrites))
    return [g for g in search(graph, H200, load_policy(None)).groups if g.kernel_class != "view"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shape", [(4096, 512), (2, 2048, 512)], ids=str)
def test_a_norm_and_its_products_are_a_statistic_and_one_kernel(shape):
    weights = [half(RNG.standard_normal((n, 512)) / 16) for n in (512, 128, 128)]

    def emit(bb, x):
        n = torch_norm(bb, x, half(RNG.standard_normal(512)))
        return [linear(bb, n, w) for w in weights]

    mod = module(emit, (shape, "float16"))
    before, after = plan(mod, ()), plan(mod)
    assert [g.kernel_class for g in after] == ["row", "gemm"]
    assert after[0].bytes < 0.6 * before[0].bytes
    assert sum(g.predicted_us for g in after) < sum(g.predicted_us for g in before)


def test_the_kernel_of_the_products_multiplies_their_rows():
    made = materialized()
    (func,) = [made.mod[n] for n, g in made.groups.items() if g.kernel_class == "gemm"]
    kernel = emit_gemm_hopper(analyze_contraction(func), H200)
    x = RNG.standard_normal((ROWS, 64)).astype("float16")
    rows = RNG.random((ROWS, 1)).astype("float32")
    weights = {n: RNG.standard_normal((64, n)).astype("float16") for n in (40, 24)}
    known = {a.shape: a for a in (x, rows, *weights.values())}
    shapes = [tuple(int(e) for e in p.ty.shape) for p in func.params]
    arrays = [known.get(shape, np.full(shape, np.nan, "float16")) for shape in shapes]
    run_hopper_on_cpu(kernel, arrays)
    results = {shape: got for got, shape in zip(arrays, shapes, strict=True) if shape not in known}
    assert results.keys() == {(ROWS, 40), (ROWS, 24)}
    for shape, got in results.items():
        expected = x.astype("float64") @ weights[shape[1]].astype("float64") * rows
        assert np.abs(got - expected).max() <= 2e-3 * np.abs(expected).max()


ROWS = 70


def materialized():
    weights = [half(RNG.standard_normal((n, 64)) / 8) for n in (40, 24)]

    def emit(bb, x):
        n = torch_norm(bb, x, half(RNG.standard_normal(64)))
        return [linear(bb, n, w) for w in weights]

    mod = module(emit, ((ROWS, 64), "float16"))
    low = lower(mod, H200.to_target(), hw=H200, rewrites=("fold_factors",))
    graph = build_graph(low)
    return materialize(low, graph, search(graph, H200, load_policy(None)))


def test_a_plan_with_the_rewrite_is_compiled_and_verified():
    mod = module(functools.partial(qkv, torch_norm), ((5, K), "float16"))
    target, hw = resolve_target("llvm")
    graph = build_graph(lower(mod, target, hw=hw, rewrites=("fold_factors",)))
    found = search(graph, hw, load_policy(None))
    compiled = tvm_fusion.compile(
        mod, "llvm", plan=dataclasses.replace(found, rewrites=("fold_factors",))
    )
    x = RNG.standard_normal((5, K)).astype("float16")
    for got, weight in zip(compiled(x), WEIGHTS, strict=True):
        expected = normalised(x, GAMMA) @ weight.astype("float64").T
        assert np.abs(got - expected).max() <= 3e-3 * np.abs(expected).max()
    assert not [g.fallback for g in compiled.report.groups if g.fallback]


def test_a_weight_in_double_precision_is_not_scaled_in_single():
    weight, gain = (relax.const(RNG.standard_normal(s), "float64") for s in ((K, N), (K,)))
    mod = module(
        lambda bb, x: op.matmul(bb.emit(op.multiply(x, gain)), weight), ((5, K), "float64")
    )
    opened, result = folded(mod)
    assert result.same_as(opened)
