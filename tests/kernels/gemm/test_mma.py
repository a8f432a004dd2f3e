"""The mma.sync GEMM: numbers on the emulator against float64, resources and PTX, refusals."""

import dataclasses
import itertools
import re

import ml_dtypes
import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import te, tirx
from tvm.relax import op
from tvm.script import tirx as T

from tvm_fusion.config import HardwareProfile, load_policy, load_profile, resolve_target
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.contraction.reader import analyze_contraction
from tvm_fusion.kernels.gemm.mma import kernel as kernel_of_warps
from tvm_fusion.kernels.gemm.mma import rank
from tvm_fusion.kernels.gemm.mma.kernel import emit_gemm_mma
from tvm_fusion.kernels.gemm.mma.plan import MmaConfig, Panel, Words
from tvm_fusion.kernels.gemm.mma.problem import Way, read_mma
from tvm_fusion.kernels.gemm.mma.rank import TILES, mma_ranked

from ...support import gemm_cases as graphs
from ...support.cuda_on_cpu import compile_cubins, cuda_source, run_cuda_on_cpu
from ...support.gemm_cases import BRAIN, CUDA_CORE_CASES, FLOAT, HALF, TENSOR_CORE_CASES, case
from ...support.hopper_on_cpu import compile_hopper, run_hopper_on_cpu
from ...support.kernel_cases import TOLERANCE, Case, assert_close, fuse, outputs_of
from ...support.partial_cases import residual_squares
from ...support.ptx import ptx_of

H200, A100, RTX = (load_profile(n) for n in ("nvidia_h200", "nvidia_a100", "nvidia_rtx4090"))
SM90 = dataclasses.replace(load_profile("nvidia_h100"), arch="sm_90")
DEVICES = {"sm_80": A100, "sm_90a": H200}
EIGHT = "float8_e4m3fn"

CONFIGS = [
    MmaConfig(*tile, step_bytes, stages)
    for tile, step_bytes, stages in zip(TILES, (64, 128) * 8, (3, 4, 3, 5, 4) * 4, strict=False)
]


def run(kernel: tirx.PrimFunc, arrays: list[np.ndarray]) -> int:
    """Runs a kernel on the emulator; returns the number of launches."""
    hopper = "wgmma" in cuda_source(kernel)
    return (run_hopper_on_cpu if hopper else run_cuda_on_cpu)(kernel, arrays)


def check(case: Case, kernel: tirx.PrimFunc, slack: float = 1.0) -> None:
    """Runs a kernel on the emulator; every output is poisoned before and close to float64 after."""
    inputs = case.arrays()
    outputs = outputs_of(case.func(), len(inputs))
    assert run(kernel, [*inputs, *outputs]) == 1
    wide = [
        a.astype(np.float64) if a.dtype == np.dtype(ml_dtypes.float8_e4m3fn) else a for a in inputs
    ]
    for got, expected in zip(outputs, case.expected(wide), strict=True):
        dtype = str(got.dtype)
        expected = np.asarray(expected, np.float64).reshape(got.shape)
        if dtype not in TOLERANCE:
            assert_close(got, expected, dtype)
            continue
        error = np.abs(got.astype(np.float64) - expected).max() / np.abs(expected).max()
        assert error <= slack * TOLERANCE[dtype]


def emit(case: Case, config: MmaConfig | None = None, hw=H200, exact=False) -> tirx.PrimFunc:
    return emit_gemm_mma(analyze_contraction(case.func(), exact=exact), hw, config)


def ways(case: Case) -> list[Way]:
    (segment,) = read_mma(analyze_contraction(case.func()), H200, False)
    return [source.way for loop in segment.loops for source in (loop.a, *loop.b)]


def named(name: str) -> Case:
    return next(c for c in TENSOR_CORE_CASES + CUDA_CORE_CASES if c.name == name)


# ---- numbers


@pytest.mark.one_in(30)
@pytest.mark.parametrize(
    ("case", "config"),
    [(c, CONFIGS[i % len(CONFIGS)]) for i, c in enumerate(TENSOR_CORE_CASES)],
    ids=[c.name for c in TENSOR_CORE_CASES],
)
def test_the_kernel_is_close_to_float64(case, config):
    if case.name == "gate and up" or config.threads > 128:
        config = dataclasses.replace(CONFIGS[6], step_bytes=config.step_bytes)
    check(case, emit(case, config))


@pytest.mark.one_in(16)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.block_m}x{c.block_n}")
def test_every_tile_is_close_to_float64(config):
    shapes = [(2 * config.block_m + 8, 72), (72, config.block_n + 40), (config.block_n + 40,)]
    found = case("tile", graphs.bias_gelu, shapes, lambda x, w, b: [graphs.gelu_of(x @ w + b)])
    check(found, emit(found, config))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("tile", "stages", "terms"),  # 2, 9, 14 and 18 steps of 64 terms
    [
        (rank.DEEP_TILES[0], 8, 72),
        (rank.DEEP_TILES[0], 6, 1096),
        (rank.DEEP_TILES[1], 6, 520),
        ((16, 64, 16, 16), 8, 1096),
        ((64, 32, 32, 16), 8, 520),
        (rank.DEEP_TILES[0], 16, 1096),
        (rank.DEEP_TILES[0], 6, 840),
    ],
)
def test_deep_rings_are_close_to_float64(tile, stages, terms):
    shapes = [(2 * tile[0] - 7, terms), (tile[1] + 8, terms)]
    found = case("deep", graphs.linear, shapes, lambda x, w: [x @ w.T])
    check(found, emit(found, MmaConfig(*tile, 128, stages), A100))


def ring_of(rows: int, hw: HardwareProfile, graph=graphs.linear, terms: int = 4096):
    found = case("ring", graph, [(rows, terms), (4096, terms)], lambda x, w: [x @ w.T])
    return mma_ranked(analyze_contraction(found.func()), hw, load_policy(None))


def test_products_of_few_rows_have_deep_rings():
    for rows in (16, 32, 64, 256):
        ranked = ring_of(rows, SM90)
        (seconds, best), shallow = ranked[0], next(x for x in ranked if not x[1].is_deep)
        assert best.is_deep
        assert seconds < shallow[0]
        assert best.stages * best.stage_bytes(1) <= SM90.smem_per_block_bytes


def test_other_products_have_no_deep_rings():
    assert not any(c.is_deep for _, c in ring_of(16, H200))  # Hopper's form is there
    assert not any(c.is_deep for _, c in ring_of(512, SM90))
    assert not any(c.is_deep for _, c in ring_of(16, SM90, terms=4098))  # no copies of 16 bytes


@pytest.mark.parametrize("tile", [*TILES, *rank.DEEP_TILES])
def test_no_loop_of_a_single_turn_is_unrolled(tile):
    found = case("turns", graphs.linear, [(16, 4096), (64, 4096)], lambda x, w: [x @ w.T])
    source = cuda_source(emit(found, MmaConfig(*tile, 64, 3)))
    assert not re.search(r"#pragma unroll\n *for \(int \w+ = 0; \w+ < 1;", source)


@pytest.mark.parametrize(("card", "deep"), [("b200", True), ("a100", False), ("rtx5090", False)])
def test_rings_are_deep_where_memory_has_more_under_way_than_others_hold(card, deep):
    hw = resolve_target(f"nvidia_{card}")[1]
    assert any(c.is_deep for _, c in ring_of(16, hw)) == deep


def test_a_ring_does_not_exceed_shared_memory():
    small = dataclasses.replace(SM90, smem_per_block_bytes=A100.smem_per_block_bytes // 4)
    rings = [c for _, c in ring_of(256, small) if c.is_deep]
    assert rings
    assert all(c.stages * c.stage_bytes(1) <= small.smem_per_block_bytes for c in rings)


def test_a_ring_that_memory_waits_for_is_the_longer_one():
    ranked = ring_of(16, SM90)
    by_stages = {c.stages: s for s, c in reversed(ranked) if c.block_n == 32 and c.is_deep}
    assert by_stages[8] < by_stages[6]


PITCHES = [
    (graphs.linear, (40, 64), (72, 64), Way.COPY),
    (graphs.linear, (40, 68), (72, 68), Way.COPY),
    (graphs.linear, (40, 70), (72, 70), Way.COPY),
    (graphs.linear, (40, 33), (65, 33), Way.SHIFT),
    (graphs.linear, (5, 999), (3, 999), Way.SHIFT),
    (graphs.linear, (1, 1), (1, 1), None),
    (graphs.matmul, (40, 36), (36, 68), Way.COPY),
    (graphs.matmul, (40, 38), (38, 70), Way.COPY),
    (graphs.matmul, (33, 33), (33, 65), Way.SHIFT),
    (graphs.left_transposed, (33, 41), (33, 65), Way.SHIFT),
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("graph", "x", "w", "way"), PITCHES, ids=[str(n) for n in range(len(PITCHES))]
)
def test_any_row_pitch_is_read_by_its_widest_way(graph, x, w, way):
    def reference(x, w):
        x = x.T if graph is graphs.left_transposed else x
        return [x @ (w.T if graph is graphs.linear else w)]

    found = case("pitch", graph, [x, w], reference)
    assert way is None or ways(found) == [way, way]
    check(found, emit(found, MmaConfig(32, 64, 16, 32, 64, 3)))


@pytest.mark.parametrize("start", [1, 2, 8])
def test_operands_may_start_at_an_offset(start):
    def sliced(bb, x, w):
        return graphs.linear(bb, bb.emit(op.strided_slice(x, [1], [start], [start + 40])), w)

    found = case(
        "offset", sliced, [(20, 56), (24, 40)], lambda x, w: [x[:, start : start + 40] @ w.T]
    )
    check(found, emit(found))


def int4_linear(group: int):
    """x by the transposed 4-bit weight (q - 8) * scale, eight values a word."""

    def emit(bb, x, w, s):
        def unpack(w, s):
            def at(n, k):
                shift = (k % 8 * 4).astype("int32")
                nibble = (w[n, k // 8] >> shift) & tirx.IntImm("int32", 15)
                return (nibble - tirx.IntImm("int32", 8)).astype(HALF) * s[n, k // group]

            return te.compute((w.shape[0], w.shape[1] * 8), at, name="unpack")

        return op.matmul(x, bb.emit(op.permute_dims(bb.emit_te(unpack, w, s), (1, 0))))

    def reference(x, w, s):
        nibbles = (w[..., None] >> (4 * np.arange(8))) & 15
        weight = (nibbles.reshape(w.shape[0], -1) - 8.0) * np.repeat(s, group, 1)
        return [x @ weight.T]

    return emit, reference


def words(rng, n, k):
    return rng.integers(-(2**31), 2**31, (n, k)).astype("int32")


def int8_weight(bb, x, w, s):
    return op.matmul(x, bb.emit(op.multiply(bb.emit(op.astype(w, HALF)), s)))


def scaled_rows(bb, x, w):
    return graphs.linear(bb, x, bb.emit(op.nn.relu(w)))


INT4, int4_reference = int4_linear(32)

COMPUTED = [
    case(
        "silu in front",
        graphs.silu_in_front,
        [(72, 64), (64, 40)],
        named("computed operand").reference,
    ),
    named("computed operand"),
    case(
        "relu of columns", scaled_rows, [(20, 72), (24, 72)], lambda x, w: [x @ np.maximum(w, 0).T]
    ),
    Case(
        "int4",
        INT4,
        (((20, 64), HALF), ((40, 8), "int32"), ((40, 2), HALF)),
        int4_reference,
        {1: lambda rng: words(rng, 40, 8)},
    ),
    Case(
        "int8 weights, scaled",
        int8_weight,
        (((20, 64), HALF), ((64, 48), "int8"), ((48,), HALF)),
        lambda x, w, s: [x @ (w * s)],
        {1: lambda rng: rng.integers(-128, 128, (64, 48)).astype("int8")},
    ),
    Case(
        "gathered rows",
        graphs.embedding,
        (((7,), "int64"), ((100, 40), HALF), ((40, 24), HALF)),
        lambda ids, table, w: [table[ids] @ w],
        {0: lambda rng: rng.integers(0, 100, 7)},
    ),
    case(
        "convolution",
        graphs.convolution,
        [(2, 3, 6, 7), (5, 3, 3, 3)],
        lambda x, w: [graphs.conv_of(x, w)],
    ),
    named("products of different operands"),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("found", COMPUTED, ids=lambda c: c.name)
def test_operands_may_be_computed(found):
    check(found, emit(found, MmaConfig(32, 64, 16, 32, 64, 3)), slack=2.0)


def test_a_word_of_eight_4_bit_weights_is_read_once():
    shapes = (((256, 4096), HALF), ((4096, 512), "int32"), ((4096, 128), HALF))
    config = MmaConfig(128, 128, 64, 32, 64, 3)
    source = cuda_source(emit_gemm_mma(analyze_contraction(fuse(INT4, *shapes)), H200, config))
    loop = source[source.rindex("#pragma unroll 1") :]
    assert loop.count("p1_ptr[") == 128 * 64 // 16 // config.threads
    assert ">> 28" in loop


def integers(transposed):
    def emit(bb, x, w):
        w = bb.emit(op.permute_dims(w, (1, 0))) if transposed else w
        return op.matmul(x, w, out_dtype="int32")

    return emit


@pytest.mark.parametrize("depth", [64, 36, 33])
@pytest.mark.parametrize("transposed", [True, False])
def test_8_bit_integers_are_multiplied_exactly(depth, transposed):
    shape = (40, depth) if transposed else (depth, 40)
    numbers = {
        i: lambda rng, s=s: rng.integers(-128, 128, s).astype("int8")
        for i, s in enumerate(((24, depth), shape))
    }
    found = Case(
        "int8",
        integers(transposed),
        (((24, depth), "int8"), (shape, "int8")),
        lambda x, w: [x.astype(int) @ (w.T if transposed else w).astype(int)],
        numbers,
    )
    check(found, emit(found))


def test_8_bit_floats_are_multiplied_on_sm_89_and_later():
    found = Case(
        "float8",
        lambda bb, x, w: op.matmul(x, bb.emit(op.permute_dims(w, (1, 0))), out_dtype=FLOAT),
        (((24, 64), EIGHT), ((40, 64), EIGHT)),
        lambda x, w: [x @ w.T],
    )
    check(found, emit(found, hw=RTX))
    with pytest.raises(Unsupported, match="8-bit floats"):
        emit(found, hw=A100)


@pytest.mark.parametrize("graph", [graphs.linear, graphs.matmul], ids=["linear", "matmul"])
def test_float32_is_rounded_to_tf32_only_if_the_policy_allows_it(graph):
    shapes = [(24, 36), (40, 36) if graph is graphs.linear else (36, 40)]
    found = case(
        "tf32", graph, shapes, lambda x, w: [x @ (w.T if graph is graphs.linear else w)], FLOAT
    )
    contraction = analyze_contraction(found.func())
    config = mma_ranked(contraction, H200, load_policy(None))[0][1]
    assert (config.split, config.tf32) == (True, False)
    check(found, emit_gemm_mma(contraction, H200, config))
    allowed = dataclasses.replace(load_policy(None), allow_tf32=True)
    config = mma_ranked(contraction, H200, allowed)[0][1]
    assert (config.split, config.tf32) == (False, True)
    check(found, emit_gemm_mma(contraction, H200, config), slack=500.0)


def test_float32_is_not_multiplied_in_parts_where_roundings_are_exact():
    found = case("exact", graphs.matmul, [(24, 36), (36, 40)], lambda x, w: [x @ w], FLOAT)
    contraction = analyze_contraction(found.func())
    exact = load_policy({"rounding": "exact"})
    with pytest.raises(Unsupported, match="'exact'"):
        mma_ranked(contraction, H200, exact)
    assert mma_ranked(contraction, H200, load_policy(None))[0][1].split
    assert mma_ranked(contraction, H200, load_policy({"rounding": "exact", "allow_tf32": True}))


SPLIT = [MmaConfig(*tile, 64, 3, split=True) for tile in ((32, 64, 16, 32), (64, 32, 32, 16))]
FLOATS = [
    (graphs.linear, (40, 36), (72, 36), (Way.COPY, True)),
    (graphs.linear, (33, 41), (65, 41), (Way.COPY, True)),
    (graphs.left_transposed, (36, 40), (36, 72), (Way.COPY, False)),
    (graphs.left_transposed, (41, 33), (41, 65), (Way.COPY, False)),
]


# Of warpgroups: one, and two.
GROUPS = [MmaConfig(m, 64, 16, 64, 128, 3, split=True, wgmma=True) for m in (64, 128)]
MORE_STAGES = dataclasses.replace(GROUPS[0], stages=5)


def product_of_rows(x, w):
    return [x @ w.T]


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("graph", "x", "w", "way"), FLOATS, ids=range(len(FLOATS)))
@pytest.mark.parametrize("config", SPLIT + GROUPS, ids=lambda c: f"{c.block_m}x{c.block_n}")
def test_float32_of_any_layout_is_multiplied_in_parts(graph, x, w, way, config):
    def reference(x, w):
        return [x.T @ w if graph is graphs.left_transposed else x @ w.T]

    found = case("split", graph, [x, w], reference, FLOAT)
    (segment,) = read_mma(analyze_contraction(found.func()), H200, True)
    assert {(s.way, s.k_major) for loop in segment.loops for s in (loop.a, *loop.b)} == {way}
    check(found, emit(found, config))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("config", [GROUPS[0], MORE_STAGES], ids=lambda c: f"{c.stages}")
def test_parts_of_a_step_are_split_while_those_before_are_multiplied(config, monkeypatch):
    monkeypatch.setattr(kernel_of_warps, "GROUP_STEPS", 2)
    # Steps of 32 terms: one, fewer than slices under way, and an odd number.
    for terms in (1, 96, 300):
        found = case("steps", graphs.linear, [(24, terms), (40, terms)], product_of_rows, FLOAT)
        check(found, emit(found, config))


def small(inputs):
    """The inputs of a case in float32, of fewer rows, columns and terms."""
    sizes = {graphs.M: 40, graphs.N: 48, graphs.K: 72}
    return tuple((tuple(sizes.get(n, n) for n in shape), FLOAT) for shape, _ in inputs)


BESIDE = (
    "bias, gelu, residual",
    "gate and up",
    "scores of permuted heads",
    "computed operand",
    "products of different operands",
)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", BESIDE)
def test_warpgroups_multiply_parts_of_float32_beside_what_is_computed(name):
    found = dataclasses.replace(named(name), inputs=small(named(name).inputs))
    config = dataclasses.replace(GROUPS[0], block_n=32, warp_n=32)
    check(found, emit(found, config))


def test_warpgroups_multiply_parts_without_spills_or_waiting_for_each_product():
    func = fuse(graphs.linear, ((512, 511), FLOAT), ((768, 511), FLOAT))
    config = MmaConfig(128, 128, 16, 128, 128, 3, split=True, wgmma=True)
    found = compile_hopper(emit_gemm_mma(analyze_contraction(func), H200, config))
    assert found.spill_bytes == 0
    assert found.registers <= 255
    assert not found.remarks


def test_warpgroups_multiply_parts_of_float32_only_in_tiles_of_their_own():
    one = case("one", graphs.linear, [(64, 64), (64, 64)], None, FLOAT)
    for changed in ({"warp_n": 32}, {"step_bytes": 64}, {"warp_m": 32}, {"split": False}):
        with pytest.raises(Unsupported):
            emit(one, dataclasses.replace(GROUPS[0], **changed))
    with pytest.raises(Unsupported, match="wgmma"):
        emit(one, GROUPS[0], hw=A100)
    with pytest.raises(Unsupported, match="float32"):
        emit(case("half", graphs.linear, [(64, 64), (64, 64)], None), GROUPS[0])


@pytest.mark.parametrize("shape", [(4096, 4096), (2000, 511)])
def test_large_products_of_float32_are_those_of_warpgroups(shape):
    contraction = analyze_contraction(fuse(graphs.linear, (shape, FLOAT), (shape, FLOAT)))
    least = 2 * 6 * shape[0] ** 2 * shape[1] / H200.tensor_flop_per_s["bfloat16"]
    seconds, best = mma_ranked(contraction, H200, load_policy(None))[0]
    assert best.wgmma
    assert (best.block_m, best.block_n) == (128, 128)
    assert seconds > least
    assert not mma_ranked(contraction, A100, load_policy(None))[0][1].wgmma


@pytest.mark.parametrize("config", [SPLIT[0], GROUPS[0]], ids=["warps", "warpgroups"])
def test_products_of_float32_with_zeros_and_powers_of_two_move_numbers_as_they_are(config):
    rng = np.random.default_rng(0)
    rows, terms = 40, 48
    x = rng.uniform(-2, 2, (rows, terms)) * 2.0 ** rng.integers(-60, 60, (rows, terms))
    x = x.astype(FLOAT)
    x[:, 0] = np.nextafter(np.float32(2), np.float32(0))  # all bits of the mantissa
    w = np.zeros((terms, 56), FLOAT)
    w[rng.integers(0, terms, 56), np.arange(56)] = 2.0 ** rng.integers(-3, 4, 56)
    w[:, 0] = np.eye(terms)[0]
    for left, right in ((x, w), (w.T, x.T)):
        found = case("moved", graphs.matmul, [left.shape, right.shape], None, FLOAT)
        (out,) = outputs_of(found.func(), 2)
        left, right = np.ascontiguousarray(left), np.ascontiguousarray(right)
        assert run(emit(found, config), [left, right, out]) == 1
        np.testing.assert_array_equal(out, left.astype(np.float64) @ right.astype(np.float64))


@pytest.mark.parametrize("config", [SPLIT[0], GROUPS[0]], ids=["warps", "warpgroups"])
def test_less_than_a_quarter_of_a_millionth_of_a_product_of_float32_is_lost(config):
    rng = np.random.default_rng(1)
    x, w = (rng.uniform(1, 2, (64, 1)).astype(FLOAT) for _ in range(2))
    found = case("one term", graphs.linear, [x.shape, w.shape], None, FLOAT)
    (out,) = outputs_of(found.func(), 2)
    assert run(emit(found, config), [x, w, out]) == 1
    exact = x.astype(np.float64) * w.astype(np.float64).T
    # What the largest numbers lose in parts (2^-21.9), and are rounded by (2^-24).
    assert 0 < np.abs(out / exact - 1).max() < 2**-21.9 + 2**-24


@pytest.mark.parametrize("config", [SPLIT[0], GROUPS[0]], ids=["warps", "warpgroups"])
def test_parts_of_float32_keep_infinities_and_the_largest_numbers(config):
    largest = np.finfo(FLOAT).max
    x = np.zeros((16, 16), FLOAT)
    x[0, :2] = np.inf, 3.0
    x[1, :2] = -np.inf, np.inf
    x[2, 0] = np.nan
    x[3, 0] = largest
    x[4, 0] = 1e-30
    x[5, :9] = -1e36, *[0.0] * 7, np.inf
    x[6, :9] = 1e36, *[0.0] * 7, -np.inf
    w = np.ones((16, 16), FLOAT)
    w[1] = np.float32(1 / 3)
    w[2, 0] = np.inf
    found = case("largest", graphs.linear, [(16, 16), (16, 16)], None, FLOAT)
    (out,) = outputs_of(found.func(), 2)
    assert run(emit(found, config), [x, w, out]) == 1
    with np.errstate(invalid="ignore", over="ignore"):
        expected = x.astype(np.float64) @ w.astype(np.float64).T
    expected[np.abs(expected) > largest] *= np.inf
    np.testing.assert_allclose(out, expected, rtol=1e-6)


@pytest.mark.parametrize("extent", [1, 5, 70])
def test_one_kernel_serves_all_values_of_a_symbolic_size(extent):
    n = tirx.Var("n", "int64")
    func = fuse(graphs.bias_gelu, ((2, n, 40), HALF), ((40, 24), HALF), ((24,), HALF))
    kernel = emit_gemm_mma(analyze_contraction(func), H200)
    rng = np.random.default_rng(0)
    x, w, b = (rng.standard_normal(s).astype(HALF) for s in ((2, extent, 40), (40, 24), (24,)))
    out = np.full((2, extent, 24), np.nan, HALF)
    assert run_cuda_on_cpu(kernel, [x, w, b, out]) == 1
    wide = [a.astype(np.float64) for a in (x, w, b)]
    assert_close(out, graphs.gelu_of(wide[0] @ wide[1] + wide[2]), HALF)


def test_attention_with_a_symbolic_sequence_has_a_symbolic_depth():
    n = tirx.Var("n", "int64")
    func = fuse(graphs.values(2), ((2, 2, n, n), HALF), ((2, n, 16), HALF))
    kernel = emit_gemm_mma(analyze_contraction(func), H200, MmaConfig(16, 64, 16, 16, 64, 3))
    rng = np.random.default_rng(0)
    p, v = (rng.standard_normal(s).astype(HALF) for s in ((2, 2, 13, 13), (2, 13, 16)))
    out = np.full((2, 13, 16), np.nan, HALF)
    run_cuda_on_cpu(kernel, [p, v, out])
    heads = graphs.heads_of(v.astype(np.float64), 2)
    expected = (p.astype(np.float64) @ heads).transpose(0, 2, 1, 3)
    assert_close(out, expected.reshape(v.shape), HALF)


def test_exact_rounding_is_close_to_float64():
    found = named("bias, gelu, residual")
    check(found, emit(found, CONFIGS[6], exact=True), slack=4.0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_outputs_leave_wide_or_in_pairs(wide, dtype):
    found = case(
        "two outputs",
        graphs.two_outputs,
        [(72, 64), (64, 88)],
        named("two outputs").reference,
        dtype,
    )
    kernel = emit(found, MmaConfig(64, 64, 32, 32, 64, 3, wide=wide))
    assert ("store16" in cuda_source(kernel)) is wide
    check(found, kernel)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("tile", "dtype"),
    [
        ((64, 64, 32, 16), HALF),
        ((64, 64, 32, 32), BRAIN),
        ((64, 128, 32, 64), HALF),
    ],
    ids=lambda x: x if isinstance(x, str) else f"{x[3]} columns",
)
def test_halves_of_rows_of_odd_length_leave_in_aligned_words(tile, dtype):
    """Of a tile that ends with its last row, and one that goes on; the last columns are none of
    the first words."""
    shapes = [(77, 40), (40, 2 * tile[1] + 1), (2 * tile[1] + 1,)]
    found = case(
        "odd rows", graphs.bias_gelu, shapes, lambda x, w, b: [graphs.gelu_of(x @ w + b)], dtype
    )
    kernel = emit(found, MmaConfig(*tile, 64, 3))
    assert "store_row_word" in cuda_source(kernel)
    check(found, kernel)


def test_rows_of_odd_length_leave_in_words_where_blocks_take_turns():
    m, k, n = 393, 91, 1209
    contraction = analyze_contraction(fuse(graphs.linear, ((m, k), HALF), ((n, k), HALF)))
    seen = set()
    for _, config in mma_ranked(contraction, H200):
        tiles = -(-m // config.block_m) * -(-n // config.block_n)
        assert config.wide is (tiles > H200.num_sms)
        seen.add(config.wide)
    assert seen == {True, False}


@pytest.mark.parametrize(("width", "depth"), [(64, 33), (128, 72)])
def test_runs_of_columns_are_reduced_in_the_epilogue(width, depth):
    found = case(
        "squares",
        residual_squares(width),
        [(40, depth), (depth, 256), (40, 256)],
        lambda x, w, r: [x @ w + r, ((x @ w + r) ** 2).reshape(40, -1, width).sum(-1)],
    )
    check(found, emit(found), slack=2.0)
    with pytest.raises(Unsupported, match="runs of columns"):
        emit(found, MmaConfig(64, 64, 32, 32))


# ---- resources


def large(graph, *shapes):
    return analyze_contraction(fuse(graph, *((s, HALF) for s in shapes)))


LARGE = {
    "linear": large(graphs.linear, (4096, 4096), (4096, 4096)),
    "bias_gelu_residual": large(
        graphs.bias_gelu_residual, (4096, 4096), (4096, 4096), (4096,), (4096, 4096)
    ),
    "odd": large(graphs.linear, (1000, 999), (1001, 999)),
    "gate_up": large(graphs.gate_up, (2048, 4096), (4096, 5504), (4096, 5504)),
    "silu": large(graphs.silu_in_front, (2048, 4096), (4096, 4096)),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("arch", DEVICES)
def test_the_first_configurations_compile_without_spills(arch):
    kernels = {}
    for name, contraction in LARGE.items():
        kernels[name] = emit_gemm_mma(contraction, DEVICES[arch])
    found = compile_cubins(kernels, arch)
    assert len(found) == len(kernels)
    assert [r.kernel for r in found if r.spill_bytes] == []


def test_the_kernel_consists_of_the_instructions_it_is_for():
    ptx = ptx_of(emit_gemm_mma(LARGE["bias_gelu_residual"], A100), "sm_80")
    for instruction in (
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
        "cp.async.cg.shared.global",
        "ldmatrix.sync.aligned.m8n8.x4.shared",
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared",
    ):
        assert instruction in ptx
    assert ".local" not in ptx


@pytest.mark.parametrize("side", ["m", "n"])
@pytest.mark.parametrize("rows", [16, 32, 128])
def test_words_lie_in_different_banks(rows, side, monkeypatch):
    """Each of 128 bytes once: what the lanes of a warp read of 8 rows and 4 terms."""
    monkeypatch.setattr(T, "Bind", lambda value: value)
    panel, analyzer = Panel(rows, 64, False, 4), tvm.sym.Analyzer()
    lanes = [Words(panel, side, T.int32(lane), T.int32(0)) for lane in range(32)]
    seen = set()
    for tile, turn, number in itertools.product(range(rows // 16), range(2), range(4)):
        places = [int(analyzer.simplify(lane.place(tile, turn, number))) for lane in lanes]
        assert len({p % 128 for p in places}) == 32
        seen |= {*places}
    assert seen == {*range(0, panel.size, 4)}


@pytest.mark.parametrize("rows", [16, 32, 64, 128])
@pytest.mark.parametrize("k_major", [True, False])
@pytest.mark.parametrize("step_bytes", [64, 128])
def test_matrices_lie_in_different_banks(rows, k_major, step_bytes):
    panel = Panel(rows, step_bytes, k_major, 2)

    def place(line, chunk):
        found = panel.place(T.int32(line), T.int32(chunk))
        return int(tvm.sym.Analyzer().simplify(found))

    chunks = range(panel.line // 16)
    assert {place(n, c) for n in range(panel.lines) for c in chunks} == {*range(0, panel.size, 16)}
    for first in range(0, panel.lines, 8):
        for chunk in chunks:
            banks = {place(first + i, chunk) % 128 for i in range(8)}
            assert len(banks) == 8


# ---- the function, refusals


def test_kernels_keep_the_parameters_and_equal_functions_give_equal_kernels():
    func = named("q, k, v").func().with_attr("global_symbol", "fused_qkv")
    first, second = (emit_gemm_mma(analyze_contraction(func), H200) for _ in range(2))
    assert tvm_ffi.structural_equal(first, second)
    assert first.attrs["global_symbol"] == "fused_qkv"
    assert [p.name for p in first.params] == [p.name for p in func.params]


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        ((((64, 64), "float64"), ((64, 64), "float64")), "float64"),
        ((((64, 64), "int32"), ((64, 64), "int32")), "integer"),
    ],
)
def test_other_dtypes_are_refused(inputs, why):
    with pytest.raises(Unsupported, match=why):
        mma_ranked(analyze_contraction(fuse(graphs.matmul, *inputs)), H200)


def test_devices_without_asynchronous_copies_are_refused():
    old = dataclasses.replace(A100, arch="sm_75")
    with pytest.raises(Unsupported, match=r"cp\.async"):
        emit(named("plain"), hw=old)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (MmaConfig(128, 128, 64, 48), "evenly"),
        (MmaConfig(96, 96, 48, 48), "powers of two"),
        (MmaConfig(64, 64, 32, 32, 64, 2), "ring"),
        (MmaConfig(64, 64, 32, 32, 128, 40), "shared memory"),
        (MmaConfig(128, 256, 128, 128), "registers"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(config, why):
    with pytest.raises(Unsupported, match=why):
        emit(named("plain"), config)


def test_thin_products_get_thin_tiles():
    thin = large(graphs.linear, (16, 4096), (4096, 4096))
    assert mma_ranked(thin, H200)[0][1].block_m == 16
    first = mma_ranked(LARGE["linear"], H200)[0][1]
    assert first.block_m * first.block_n >= 128 * 128


def test_halves_beside_float32_that_is_split_are_multiplied_once():
    ((half,),) = (s.loops for s in read_mma(LARGE["linear"], H200, True))
    split, whole = (MmaConfig(64, 64, 32, 32, 64, 3, split=split) for split in (True, False))
    seconds = [rank._step_seconds(half, config, H200) for config in (split, whole)]
    assert seconds[0] == seconds[1]
    wide = dataclasses.replace(half, a=dataclasses.replace(half.a, dtype=FLOAT))
    assert rank._step_seconds(wide, split, H200) > rank._step_seconds(wide, whole, H200)


@pytest.mark.parametrize("tile", [(64, 64, 32, 32), (128, 128, 64, 64)])
def test_a_residual_of_16_rows_is_asked_for_before_warps_wait_for_each_other(tile):
    shapes = [(256, 64), (64, 128), (256, 128)]
    example = case("r", graphs.residual, shapes, lambda x, w, r: [x @ w + r])
    source = cuda_source(emit(example, MmaConfig(*tile, 64, 3), A100))
    summed, barrier = source.rindex("tvmf_mma_"), source.rindex("cta_sync();")
    words_of_thread = 16 * tile[3] // 32 // 2
    assert source[summed:barrier].count("p2_ptr[") == words_of_thread
