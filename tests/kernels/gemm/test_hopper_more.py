"""Forms of the Hopper GEMM beside the plain one: clusters, 8-bit floats, tfloat32."""

import dataclasses

import numpy as np
import pytest
from tvm import relax, tirx
from tvm.relax import op

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.contraction.reader import analyze_contraction
from tvm_fusion.kernels.gemm.hopper.kernel import emit_gemm_hopper, hopper_configs, hopper_ranked
from tvm_fusion.kernels.gemm.hopper.plan import HopperConfig, make_plan
from tvm_fusion.kernels.gemm.hopper.problem import read_problems

from ...support import gemm_cases as graphs
from ...support.gemm_cases import FLOAT, HALF, TENSOR_CORE_CASES, case
from ...support.hopper_on_cpu import compile_hopper, run_hopper_on_cpu
from ...support.kernel_cases import TOLERANCE, fuse, numpy_dtype, outputs_of

H200 = load_profile("nvidia_h200")
# Two clusters of two, or one of four: clusters take several tiles each, one after the other.
TINY_H200 = dataclasses.replace(H200, num_sms=4, sms_per_cluster_group=4)
TF32 = dataclasses.replace(load_policy(None), allow_tf32=True)
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def direct(block_m, block_n, **fields):
    """A configuration that stores from registers."""
    return HopperConfig(block_m, block_n, 4, False, False, 0, **fields)


def staged(block_m, block_n, boxes, **fields):
    """A configuration that stores through shared memory."""
    return HopperConfig(block_m, block_n, 4, True, False, boxes, **fields)


def by_name(name):
    return next(case for case in TENSOR_CORE_CASES if case.name == name)


def run(example, config, hw=TINY_H200):
    """Outputs of a kernel, on poisoned memory, and what they must be."""
    inputs = example.arrays()
    outputs = outputs_of(example.func(), len(inputs))
    kernel = emit_gemm_hopper(analyze_contraction(example.func()), hw, config)
    assert run_hopper_on_cpu(kernel, [*inputs, *outputs]) == 1
    return outputs, example.expected(inputs)


def worst_error(got, expected):
    """The largest error relative to the largest value; NaN where a number is missing."""
    expected = expected.reshape(got.shape)
    return np.abs(got.astype(np.float64) - expected).max() / np.abs(expected).max()


def check(example, config, hw=TINY_H200):
    for got, expected in zip(*run(example, config, hw), strict=True):
        assert worst_error(got, expected) <= 2 * TOLERANCE[str(got.dtype)]


def linear(out_dtype):
    """x w^T with the dtype of the result."""

    def emit(bb, x, w):
        w = bb.emit(op.permute_dims(w, (1, 0)))
        return op.matmul(x, w, out_dtype=out_dtype)

    return emit


def contraction_of(emit, *shapes, dtype=HALF):
    return analyze_contraction(fuse(emit, *((s, dtype) for s in shapes)))


# ---- split terms


SPLIT = [
    ("plain", direct(128, 64, split=2)),
    ("linear weight", direct(64, 48, split=2)),
    ("left operand transposed", staged(64, 128, 1, split=2)),
    ("bias, gelu, residual", staged(64, 128, 1, split=2)),
    ("gate and up", staged(64, 256, 1, split=2)),
    ("gate and up", direct(128, 128, split=4)),
    ("q, k, v with biases", staged(128, 128, 1, split=2)),
    ("values of permuted heads", direct(64, 64, split=2)),
    ("projection split into heads, ragged", direct(64, 64, split=2, batched=1)),
    ("odd columns, bias, residual", direct(128, 64, split=4)),
    ("16 rows", direct(64, 32, split=4)),
    ("row factor", staged(64, 256, 1, split=4)),
    ("bfloat16", direct(64, 128, split=4)),
]


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("name", "config"),
    [pytest.param(n, c, id=f"{n}-{c.block_m}x{c.block_n}-{c.split}-{c.staged}") for n, c in SPLIT],
)
def test_blocks_that_split_the_terms_are_close_to_float64(name, config):
    check(by_name(name), config)


# ---- tiles of three consumers


TALL = [
    ("plain", staged(192, 128, 2)),
    ("bias, gelu, residual", staged(192, 128, 2)),
    ("q, k, v with biases", dataclasses.replace(staged(192, 128, 2), deferred=True)),
    ("left operand transposed", staged(192, 128, 2)),
    ("bfloat16", dataclasses.replace(staged(192, 128, 2), deferred=True)),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "config"), [pytest.param(n, c, id=n) for n, c in TALL])
def test_tall_tiles_are_close_to_float64(name, config):
    check(by_name(name), config)


@pytest.mark.parametrize("name", ["linear", "bias, gelu, residual"])
def test_tall_tiles_compile_without_spills_or_serialised_wgmma(name):
    emit, shapes = LARGE[name]
    compiled = compile_hopper(
        emit_gemm_hopper(contraction_of(emit, *shapes), H200, staged(192, 128, 2))
    )
    assert (compiled.spill_bytes, compiled.remarks) == (0, ())


def test_tall_tiles_are_chosen_where_they_fill_a_wave_and_for_few_waves_only():
    """6,272 x 512 elements are 132 tiles of 192 x 128."""
    few = hopper_ranked(contraction_of(graphs.linear, (6272, 1024), (512, 1024)), H200)
    assert (few[0][1].block_m, few[0][1].block_n) == (192, 128)
    many = hopper_ranked(contraction_of(graphs.linear, (8192, 1024), (8192, 1024)), H200)
    assert all(config.block_m <= 128 for _, config in many)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("terms", "split"), [(192, 2), (328, 4), (520, 8)])
def test_shares_of_unequal_length_give_the_whole_sum(terms, split):
    shapes = [(100, terms), (72, terms)]
    hw = dataclasses.replace(H200, num_sms=8, sms_per_cluster_group=8)
    example = case("uneven", graphs.linear, shapes, lambda x, w: [x @ w.T])
    check(example, direct(64, 64, split=split), hw)


def test_one_split_kernel_serves_all_values_of_a_symbolic_row_count():
    n = tirx.Var("n", "int64")
    contraction = contraction_of(graphs.linear, (n, 256), (64, 256))
    kernel = emit_gemm_hopper(contraction, TINY_H200, direct(64, 64, split=2))
    rng = np.random.default_rng(0)
    w = rng.standard_normal((64, 256)).astype(HALF)
    for rows in (1, 300):
        x, out = rng.standard_normal((rows, 256)).astype(HALF), np.full((rows, 64), np.nan, HALF)
        assert run_hopper_on_cpu(kernel, [x, w, out]) == 1
        assert worst_error(out, x.astype(np.float64) @ w.T) <= 2 * TOLERANCE[HALF]


LARGE = {
    "linear": (graphs.linear, ((300, 4096), (4096, 4096))),
    "bias, gelu, residual": (
        graphs.bias_gelu_residual,
        ((300, 4096), (4096, 4096), (4096,), (300, 4096)),
    ),
    "gate and up": (graphs.gate_up, ((256, 4096), (4096, 4096), (4096, 4096))),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("linear", direct(128, 256, split=4)),
        ("linear", direct(64, 256, split=8)),
        ("bias, gelu, residual", staged(128, 256, 2, split=2)),
        ("gate and up", staged(128, 256, 1, split=2)),
    ],
)
def test_split_kernels_compile_without_spills_or_serialised_wgmma(name, config):
    emit, shapes = LARGE[name]
    compiled = compile_hopper(emit_gemm_hopper(contraction_of(emit, *shapes), H200, config))
    assert (compiled.spill_bytes, compiled.remarks) == (0, ())


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (direct(128, 128, split=3), "split between 3"),
        (direct(128, 128, split=8), "4 steps for 8"),
        (direct(128, 24, split=2), "24 columns shared by 2"),
        (staged(128, 64, 1, split=2), "cannot store"),
        (dataclasses.replace(direct(64, 256, split=4), stages=1), "partial sums in 1 stages"),
        (dataclasses.replace(staged(128, 256, 2, split=2), deferred=True), "deferred"),
    ],
)
def test_splits_that_do_not_fit_are_refused(config, reason):
    contraction = contraction_of(graphs.linear, (300, 256), (256, 256))
    with pytest.raises(Unsupported, match=reason):
        emit_gemm_hopper(contraction, H200, config)


# ---- 8-bit floats


NARROW = [
    ("float16", None),
    ("float16", staged(64, 128, 2, promote=1)),
    ("float16", direct(64, 64, promote=3)),
    ("float16", direct(128, 128, promote=2, split=2)),
    ("bfloat16", dataclasses.replace(staged(128, 64, 1), deferred=True)),
]


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("out_dtype", "config"), NARROW)
def test_products_of_8_bit_floats_are_close_to_float64(out_dtype, config):
    shapes = [(136, 400), (192, 400)]
    example = case("8 bits", linear(out_dtype), shapes, lambda x, w: [x @ w.T], E4M3)
    check(example, config)


def test_both_kinds_of_8_bit_floats_may_meet():
    shapes = [(72, 384), ((128, 384), E5M2)]
    check(case("mixed", linear(HALF), shapes, lambda x, w: [x @ w.T], E4M3), None)


def test_operands_that_are_widened_to_halves_first_are_read_as_they_are():
    def emit(bb, x, w, b):
        x, w = (bb.emit(op.astype(v, HALF)) for v in (x, w))
        return op.add(bb.emit(linear(HALF)(bb, x, w)), b)

    shapes = [(72, 256), (128, 256), ((128,), HALF)]
    example = case("widened", emit, shapes, lambda x, w, b: [x @ w.T + b], E4M3)
    check(example, None)
    assert hopper_configs(analyze_contraction(example.func()), H200)[0].promote


def test_outputs_of_8_bits_are_rounded_once_and_saturate():
    def emit(bb, x, w, s):
        return op.astype(bb.emit(op.multiply(bb.emit(linear(FLOAT)(bb, x, w)), s)), E4M3)

    shapes = [(72, 256), (128, 256), ((128,), FLOAT)]
    scale = {2: lambda rng: rng.uniform(0, 40, 128).astype(FLOAT)}
    example = case("narrow", emit, shapes, lambda x, w, s: [x @ w.T * s], E4M3, scale)
    ((got,), (expected,)) = run(example, None)
    assert np.abs(expected).max() > 448
    rounded = np.clip(expected, -448, 448).astype(np.float32).astype(numpy_dtype(E4M3))
    differ = got.view(np.uint8) != rounded.view(np.uint8)
    assert differ.mean() < 1e-3
    assert np.isfinite(got.astype(np.float32)).all()


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "config",
    [
        staged(128, 192, 3, promote=1),
        direct(128, 128, promote=1, split=2),
    ],
)
def test_8_bit_kernels_compile_without_spills_or_serialised_wgmma(config):
    contraction = contraction_of(linear(HALF), (4096, 4096), (4096, 4096), dtype=E4M3)
    compiled = compile_hopper(emit_gemm_hopper(contraction, H200, config))
    assert (compiled.spill_bytes, compiled.remarks) == (0, ())


def test_8_bit_operands_whose_terms_are_not_neighbours_are_refused():
    contraction = contraction_of(graphs.matmul, (128, 128), (128, 128), dtype=E4M3)
    with pytest.raises(Unsupported, match="not contiguous along the terms"):
        emit_gemm_hopper(contraction, H200)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (direct(128, 256, promote=1), "256 registers of sums"),
        (dataclasses.replace(staged(128, 128, 2, promote=1), deferred=True), "kept twice"),
    ],
)
def test_sums_that_are_kept_twice_are_refused_where_registers_end(config, reason):
    contraction = contraction_of(linear(HALF), (256, 512), (256, 512), dtype=E4M3)
    with pytest.raises(Unsupported, match=reason):
        emit_gemm_hopper(contraction, H200, config)


# ---- tfloat32


@pytest.mark.parametrize("out_dtype", [FLOAT, HALF])
def test_float32_operands_are_rounded_to_tfloat32_where_the_policy_allows_it(out_dtype):
    shapes = [(136, 200), (100, 200)]
    example = case("tf32", linear(out_dtype), shapes, lambda x, w: [x @ w.T], FLOAT)
    config = hopper_ranked(analyze_contraction(example.func()), TINY_H200, TF32)[0][1]
    ((got,), (expected,)) = run(example, config)
    assert 1e-6 < worst_error(got, expected) < 1e-3


@pytest.mark.parametrize("policy", [None, load_policy(None)])
def test_float32_operands_are_refused_where_the_policy_does_not_allow_tfloat32(policy):
    contraction = contraction_of(graphs.linear, (128, 128), (128, 128), dtype=FLOAT)
    with pytest.raises(Unsupported, match="tfloat32"):
        hopper_ranked(contraction, H200, policy)
    with pytest.raises(Unsupported, match="tfloat32"):
        emit_gemm_hopper(contraction, H200, direct(128, 128))


def test_tfloat32_kernels_compile_without_spills_or_serialised_wgmma():
    contraction = contraction_of(graphs.linear, (4096, 4096), (4096, 4096), dtype=FLOAT)
    compiled = compile_hopper(emit_gemm_hopper(contraction, H200, direct(128, 256, tf32=True)))
    assert (compiled.spill_bytes, compiled.remarks) == (0, ())


# ---- shared tiles of B


SHARED = [
    ("linear weight", direct(64, 64, multicast=2)),
    ("linear weight", dataclasses.replace(staged(128, 128, 2, multicast=2), deferred=True)),
    ("bias, gelu, residual", dataclasses.replace(staged(64, 128, 2, multicast=2), deferred=True)),
    ("gate and up", staged(64, 128, 1, multicast=2)),
    ("q, k, v with biases", staged(64, 128, 2, multicast=2)),
    ("values of permuted heads", direct(64, 128, multicast=2)),
    ("odd columns, bias, residual", direct(64, 32, multicast=2)),
]


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("name", "config"),
    [pytest.param(n, c, id=f"{n}-{c.block_m}x{c.block_n}-{c.staged}") for n, c in SHARED],
)
def test_blocks_that_load_b_for_each_other_are_close_to_float64(name, config):
    check(by_name(name), config)


@pytest.mark.nightly
def test_kernels_that_share_b_compile_without_spills_or_serialised_wgmma():
    emit, shapes = LARGE["bias, gelu, residual"]
    config = dataclasses.replace(staged(128, 256, 2, multicast=2), deferred=True)
    compiled = compile_hopper(emit_gemm_hopper(contraction_of(emit, *shapes), H200, config))
    assert (compiled.spill_bytes, compiled.remarks) == (0, ())


CROWDED = {
    "few terms": ((2048, 40), staged(128, 256, 2)),
    "deferred": (
        (4096, 4096),
        dataclasses.replace(staged(128, 256, 2, multicast=2), deferred=True),
    ),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CROWDED)
def test_a_gelu_beside_128_accumulators_does_not_spill(name):
    (rows, terms), config = CROWDED[name]
    contraction = contraction_of(graphs.bias_gelu, (rows, terms), (terms, 4096), (4096,))
    compiled = compile_hopper(emit_gemm_hopper(contraction, H200, config))
    assert (compiled.spill_bytes, compiled.remarks) == (0, ())


@pytest.mark.parametrize(
    ("emit", "config", "reason"),
    [
        (graphs.linear, direct(128, 128, multicast=4), "shared by 4"),
        (graphs.linear, direct(128, 128, multicast=2, split=2), "split the terms and share"),
        (graphs.linear, direct(128, 24, multicast=2), "24 columns of B"),
        (graphs.matmul, direct(128, 64, multicast=2), "64 columns of B"),
    ],
)
def test_shared_tiles_that_do_not_fit_are_refused(emit, config, reason):
    contraction = contraction_of(emit, (256, 256), (256, 256))
    with pytest.raises(Unsupported, match=reason):
        emit_gemm_hopper(contraction, H200, config)


# ---- factors of rows


def scaled(bb, x, w, s):
    """The product rounded behind a factor of its rows."""
    product = bb.emit(op.matmul(x, w, out_dtype=FLOAT))
    return op.astype(bb.emit(op.multiply(product, s)), HALF)


def scaled_gate_up(bb, x, g, u, s):
    gate, up = (bb.emit(scaled(bb, x, w, s)) for w in (g, u))
    return op.multiply(bb.emit(op.nn.silu(gate)), up)


def scaled_bias_gelu(bb, x, w, s, b):
    s = bb.emit(op.rsqrt(bb.emit(op.add(s, op_const(1.0)))))
    return op.nn.gelu(bb.emit(op.add(bb.emit(scaled(bb, x, w, s)), b)))


def op_const(value):
    return relax.const(value, FLOAT)


def positive(rng):
    return rng.uniform(0.5, 2, (136, 1)).astype(FLOAT)


def silu_of(x):
    return x * graphs.sigmoid(x)


SCALED = [
    case(
        "factor",
        scaled,
        [(136, 256), (256, 192), ((136, 1), FLOAT)],
        lambda x, w, s: [x @ w * s],
        make={2: positive},
    ),
    case(
        "gate and up",
        scaled_gate_up,
        [(136, 256), (256, 192), (256, 192), ((136, 1), FLOAT)],
        lambda x, g, u, s: [silu_of(x @ g * s) * (x @ u * s)],
        make={3: positive},
    ),
    case(
        "bias, gelu",
        scaled_bias_gelu,
        [(136, 256), (256, 192), ((136, 1), FLOAT), (192,)],
        lambda x, w, s, b: [graphs.gelu_of(x @ w / np.sqrt(s + 1) + b)],
        make={2: positive},
    ),
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("form", [(True, True), (True, False), (False, False)], ids=str)
@pytest.mark.parametrize("example", SCALED, ids=lambda example: example.name)
def test_factors_of_rows_come_first_in_every_form_of_the_epilogue(example, form):
    contraction = analyze_contraction(example.func())
    configs = hopper_configs(contraction, TINY_H200)
    if form[0]:
        config = next(c for c in configs if (c.staged, c.deferred) == form and c.block_n == 128)
    else:
        config = direct(64, 128, split=2)
    check(example, config)


def test_a_factor_of_columns_is_no_factor_of_rows():
    shapes = [(136, 256), (256, 192), ((192,), FLOAT)]
    example = case("columns", scaled, shapes, lambda x, w, s: [x @ w * s])
    configs = hopper_configs(analyze_contraction(example.func()), TINY_H200)
    assert not any(config.deferred for config in configs)
    check(example, configs[0])


def test_deferred_kernels_with_factors_of_rows_compile_without_spills():
    shapes = (((4096, 4096), HALF), ((4096, 4096), HALF), ((4096, 4096), HALF), ((4096, 1), FLOAT))
    contraction = analyze_contraction(fuse(scaled_gate_up, *shapes))
    config = dataclasses.replace(staged(128, 256, 2), deferred=True)
    compiled = compile_hopper(emit_gemm_hopper(contraction, H200, config))
    assert (compiled.spill_bytes, compiled.remarks) == (0, ())


# ---- rows that start off 4 bytes


ODD = [
    ((100, 333, 64), direct(64, 256)),
    ((130, 129, 136), direct(128, 64)),
    ((70, 77, 64), direct(64, 40)),
    ((40, 333, 128), direct(64, 128, split=2)),
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("sizes", "config"), ODD, ids=str)
def test_outputs_with_odd_rows_leave_row_by_row(sizes, config):
    m, n, k = sizes
    example = case("odd", graphs.linear, [(m, k), (n, k)], lambda x, w: [x @ w.T])
    problem = read_problems(analyze_contraction(example.func()))[0]
    assert make_plan(problem, config, H200).by_rows == (0,)
    check(example, config)


@pytest.mark.parametrize(("columns", "stages"), [(334, 4), (333, 7)])
def test_outputs_leave_from_registers_where_rows_are_even_or_shared_memory_is_full(columns, stages):
    contraction = contraction_of(graphs.linear, (100, 64), (columns, 64))
    config = dataclasses.replace(direct(128, 128), stages=stages)
    plan = make_plan(read_problems(contraction)[0], config, H200)
    assert (plan.by_rows, plan.boxes) == ((None,), 0)


@pytest.mark.parametrize("config", [direct(64, 24), direct(128, 40), direct(64, 80)], ids=str)
def test_rows_in_several_pieces_leave_element_by_element(config):
    def emit(bb, x, w):
        y = bb.emit(op.matmul(x, bb.emit(op.permute_dims(w, (1, 0)))))
        return bb.emit(op.permute_dims(y, (0, 2, 1)))

    def reference(x, w):
        return [(x @ w.T).transpose(0, 2, 1)]

    example = case("pieces", emit, [(8, 49, 64), (128, 64)], reference)
    problem = read_problems(analyze_contraction(example.func()))[0]
    assert make_plan(problem, config, H200).by_rows == (None,)
    check(example, config)


def test_kernels_that_store_by_rows_compile_without_spills_or_serialised_wgmma():
    contraction = contraction_of(graphs.linear, (2048, 768), (50257, 768))
    compiled = compile_hopper(emit_gemm_hopper(contraction, H200, direct(128, 256)))
    assert (compiled.spill_bytes, compiled.remarks) == (0, ())


def test_rings_leave_room_for_rows_of_odd_length():
    """A ring of all shared memory would have them leave in pieces of 2 bytes."""
    contraction = contraction_of(graphs.linear, (1500, 256), (4099, 256))
    problem = read_problems(contraction)[0]
    plans = [make_plan(problem, config, H200) for _, config in hopper_ranked(contraction, H200)]
    assert plans
    assert all(plan.by_rows == (0,) for plan in plans)


def masked(bb, x, w, mask, other):
    """where(mask, x w, other), turned."""
    product = bb.emit(op.matmul(x, w))
    return op.permute_dims(bb.emit(op.where(mask, product, other)), (1, 0))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("config", [direct(192, 128), direct(128, 128)], ids=["ragged", "whole"])
def test_a_mask_is_read_for_existing_rows_and_columns_only(config):
    m, n, k = 256, 136, 64
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(s).astype(HALF) for s in ((m, k), (k, n)))
    mask, other = rng.random((m, n)) < 0.5, np.array(0.5, HALF)
    shapes = ((m, k), HALF), ((k, n), HALF), ((m, n), "bool"), ((), HALF)
    out = np.full((n, m), np.nan, HALF)
    kernel = emit_gemm_hopper(analyze_contraction(fuse(masked, *shapes)), TINY_H200, config)
    assert run_hopper_on_cpu(kernel, [x, w, mask, other, out]) == 1
    wanted = np.where(mask, x.astype("float64") @ w.astype("float64"), 0.5).T
    assert worst_error(out, wanted) <= 2 * TOLERANCE[HALF]
