"""Segments with sizes and operands of their own on Hopper's tensor cores."""

import dataclasses

import numpy as np
import pytest
from tvm import relax, tirx
from tvm.relax import op

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.contraction.reader import analyze_contraction
from tvm_fusion.kernels.gemm.forms import WRITER
from tvm_fusion.kernels.gemm.hopper.config import HopperConfig
from tvm_fusion.kernels.gemm.hopper.kernel import emit_gemm_hopper, hopper_configs

from ...support import grouped_cases as graphs
from ...support.gemm_cases import FLOAT, HALF
from ...support.hopper_on_cpu import compile_hopper, run_hopper_on_cpu
from ...support.kernel_cases import TOLERANCE, fuse, outputs_of

H200 = load_profile("nvidia_h200")

# So few multiprocessors that blocks of the small cases take tiles of several segments.
TINY_H200 = dataclasses.replace(H200, num_sms=2)
# As kernels of CUDA 12.1 and later may have.
ROOMY_H200 = dataclasses.replace(H200, kernel_param_bytes=32_000)


def products(*tensors):
    return [x @ w for x, w in zip(tensors[::2], tensors[1::2], strict=True)]


def updates(*tensors):
    triples = zip(tensors[::3], tensors[1::3], tensors[2::3], strict=True)
    return [y + a @ b * 0.5 for a, b, y in triples]


def transposed(bb, *tensors):
    """x @ w.T of each pair."""
    pairs = zip(tensors[::2], tensors[1::2], strict=True)
    return relax.Tuple(
        [bb.emit(op.matmul(x, bb.emit(op.permute_dims(w, (1, 0))))) for x, w in pairs]
    )


def transposed_of(*tensors):
    return [x @ w.T for x, w in zip(tensors[::2], tensors[1::2], strict=True)]


PACKED_TOKENS = (40, 72, 8)


def packed(bb, x, *weights):
    """x[of the expert] @ w of each expert's rows of one packed tensor."""
    results, start = [], 0
    for rows, w in zip(PACKED_TOKENS, weights, strict=True):
        own = bb.emit(op.strided_slice(x, [0], [start], [start + rows]))
        results.append(bb.emit(op.matmul(own, w)))
        start += rows
    return relax.Tuple(results)


def packed_of(x, *weights):
    parts = np.split(x, np.cumsum(PACKED_TOKENS)[:-1])
    return [part @ w for part, w in zip(parts, weights, strict=True)]


def contraction_of(emit, shapes, dtype=HALF):
    return analyze_contraction(fuse(emit, *((s, dtype) for s in shapes)))


def check(emit, reference, shapes, config=None, hw=TINY_H200):
    """Runs a kernel on the emulator; outputs are poisoned before and close to float64 after."""
    func = fuse(emit, *((s, HALF) for s in shapes))
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(s).astype(HALF) for s in shapes]
    outputs = outputs_of(func, len(inputs))
    kernel = emit_gemm_hopper(analyze_contraction(func), hw, config)
    assert run_hopper_on_cpu(kernel, [*inputs, *outputs]) == 1
    expected = reference(*(x.astype(np.float64) for x in inputs))
    for got, want in zip(outputs, expected, strict=True):
        error = np.abs(got.astype(np.float64) - want).max() / np.abs(want).max()
        assert error <= 2 * TOLERANCE[HALF]


EVERYTHING_DIFFERS = ((136, 64), (64, 64), (40, 200), (200, 128), (8, 128), (128, 72))

# Sums of three steps and more.
LONG_SUMS = ((136, 200), (200, 64), (40, 320), (320, 128), (8, 192), (192, 72))
LONG_EXPERTS = ((72, 256), (256, 64), (256, 64), (200, 192), (192, 128), (192, 128))

CASES = {
    "everything differs": (graphs.separate, products, EVERYTHING_DIFFERS),
    "weights by columns": (
        transposed,
        transposed_of,
        ((136, 64), (72, 64), (40, 200), (24, 200), (1, 128), (136, 128)),
    ),
    "experts with gate and up": (
        graphs.experts,
        graphs.experts_of,
        ((72, 128), (128, 64), (128, 64), (200, 64), (64, 64), (64, 64)),
    ),
    "low-rank updates": (
        graphs.lora_b,
        updates,
        ((136, 16), (16, 192), (136, 192), (136, 16), (16, 64), (136, 64)),
    ),
    "batches of different sizes": (
        graphs.separate,
        products,
        ((3, 40, 64), (3, 64, 64), (2, 72, 64), (2, 64, 128)),
    ),
    "rows of one packed tensor": (
        packed,
        packed_of,
        ((120, 64), (64, 64), (64, 128), (64, 72)),
    ),
    "equal sizes and different operands": (
        graphs.separate,
        products,
        ((72, 64), (64, 64)) * 3,
    ),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", CASES)
def test_segments_of_their_own_are_close_to_float64(name):
    check(*CASES[name])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("tile", [(64, 64), (128, 64), (128, 128)])
@pytest.mark.parametrize("staged", [True, False])
def test_tiles_of_all_kinds_serve_unequal_segments(tile, staged):
    contraction = contraction_of(graphs.separate, EVERYTHING_DIFFERS)
    config = next(
        c
        for c in hopper_configs(contraction, TINY_H200)
        if (c.block_m, c.block_n) == tile and c.staged is staged and not c.deferred
    )
    check(graphs.separate, products, EVERYTHING_DIFFERS, config)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("tile", [(64, 128), (128, 128)])
@pytest.mark.parametrize(
    ("emit", "reference", "shapes"),
    [(graphs.separate, products, LONG_SUMS), (graphs.experts, graphs.experts_of, LONG_EXPERTS)],
    ids=["products", "experts"],
)
def test_a_deferred_epilogue_stores_into_the_segment_of_its_own_tile(emit, reference, shapes, tile):
    config = next(
        c
        for c in hopper_configs(contraction_of(emit, shapes), TINY_H200)
        if (c.block_m, c.block_n) == tile and c.deferred
    )
    check(emit, reference, shapes, config)


UPDATES = ((136, 200), (200, 192), (136, 192), (40, 200), (200, 64), (40, 64))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("deferred", "boxes", "stages"),
    [(True, 2, 4), (False, 2, 4), (False, 4, 3)],
    ids=["deferred", "with its own tile", "ahead"],
)
def test_the_tma_brings_the_residual_of_each_segment(deferred, boxes, stages):
    config = HopperConfig(64, 128, stages, True, deferred, boxes)
    check(graphs.lora_b, updates, UPDATES, config)
    kernel = str(emit_gemm_hopper(contraction_of(graphs.lora_b, UPDATES), H200, config))
    assert kernel.count("cuTensorMapEncodeTiled") == 8


def test_residuals_are_asked_for_ahead_where_no_epilogue_can_be_deferred():
    short, long = (
        [c for c in hopper_configs(contraction_of(graphs.lora_b, shapes), H200) if c.staged]
        for shapes in (CASES["low-rank updates"][2], UPDATES)
    )
    assert {c.boxes * 32 // c.block_n for c in short} == {1}
    assert {c.boxes * 64 // c.block_n for c in long if not c.deferred} == {1}


def test_low_rank_updates_of_many_rows_are_for_the_form_that_loads_residuals_ahead():
    shapes = [s for n in (4096, 1024, 512) for s in ((4096, 16), (16, n), (4096, n))]
    _, first = WRITER.ranked(contraction_of(graphs.lora_b, shapes), H200, load_policy())[0]
    assert isinstance(first, HopperConfig)
    assert (first.block_m, first.boxes) == (128, 2 * first.block_n // 64)


def test_a_residual_that_other_segments_lack_is_loaded_into_registers():
    def emit(bb, a, b, y, c, d):
        first = graphs.lora_b(bb, a, b, y)
        return relax.Tuple([*first.fields, bb.emit(op.matmul(c, d))])

    def reference(a, b, y, c, d):
        return [*updates(a, b, y), c @ d]

    config = HopperConfig(64, 128, 4, True, False, 2)
    check(emit, reference, (*UPDATES[:3], (40, 200), (200, 64)), config)


def test_blocks_that_share_tiles_of_b_work_on_one_segment():
    config = HopperConfig(128, 128, 3, False, False, 0, multicast=2)
    four = dataclasses.replace(H200, num_sms=4)
    check(graphs.separate, products, EVERYTHING_DIFFERS, config, four)


@pytest.mark.parametrize("extents", [(1, 200), (130, 7)])
def test_one_kernel_serves_all_values_of_two_symbolic_row_counts(extents):
    n, m = (tirx.Var(name, "int64") for name in "nm")
    func = fuse(
        graphs.separate, ((n, 64), HALF), ((64, 72), HALF), ((m, 128), HALF), ((128, 64), HALF)
    )
    kernel = emit_gemm_hopper(analyze_contraction(func), TINY_H200)
    rng = np.random.default_rng(0)
    shapes = ((extents[0], 64), (64, 72), (extents[1], 128), (128, 64))
    inputs = [rng.standard_normal(s).astype(HALF) for s in shapes]
    outputs = [np.full((rows, n), np.nan, HALF) for rows, n in zip(extents, (72, 64), strict=True)]
    assert run_hopper_on_cpu(kernel, [*inputs, *outputs]) == 1
    for got, want in zip(outputs, products(*(x.astype(np.float64) for x in inputs)), strict=True):
        assert np.abs(got - want).max() <= 2 * TOLERANCE[HALF] * np.abs(want).max()


def tokens(count):
    return [s for t in range(1, count + 1) for s in ((70 * t, 2048), (2048, 1024), (2048, 1024))]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("hw", [H200, ROOMY_H200], ids=["4 KB", "32 KB"])
def test_eight_experts_compile_without_spills_or_serialised_wgmma(hw):
    contraction = contraction_of(graphs.experts, tokens(8))
    compiled = compile_hopper(emit_gemm_hopper(contraction, hw))
    assert (compiled.spill_bytes, compiled.remarks) == (0, ())


def test_tensor_maps_of_outputs_are_left_out_where_the_parameters_have_no_room():
    contraction = contraction_of(graphs.experts, tokens(8))
    assert not any(c.staged for c in hopper_configs(contraction, H200))
    assert hopper_configs(contraction, ROOMY_H200)[0].staged


def test_the_terms_of_products_that_share_nothing_are_never_split():
    contraction = contraction_of(graphs.separate, LONG_SUMS)
    configs = hopper_configs(contraction, H200)
    assert all(c.split == 1 for c in configs)
    with pytest.raises(Unsupported, match="split"):
        emit_gemm_hopper(contraction, H200, dataclasses.replace(configs[0], split=2))


def test_an_epilogue_is_deferred_where_the_shortest_sum_has_steps_for_it():
    long, short = (
        hopper_configs(contraction_of(graphs.separate, shapes), H200)
        for shapes in (LONG_SUMS, EVERYTHING_DIFFERS)
    )
    assert any(c.deferred for c in long)
    assert not any(c.deferred for c in short)


def test_siblings_that_share_their_operand_keep_one_map_of_it():
    contraction = contraction_of(graphs.projections, ((72, 64), (64, 64), (64, 128)))
    apart = contraction_of(graphs.separate, ((72, 64), (64, 64), (72, 64), (64, 128)))
    maps = [
        str(emit_gemm_hopper(c, H200)).count("cuTensorMapEncodeTiled") for c in (contraction, apart)
    ]
    assert maps == [5, 6]


REFUSED = {
    "too many tensor maps": (graphs.separate, [(64, 64)] * 32, HALF),
    "float32": (graphs.separate, EVERYTHING_DIFFERS, FLOAT),
    "an A by rows beside one by columns": (
        lambda bb, x, w, y, u: relax.Tuple(
            [bb.emit(op.matmul(x, w)), bb.emit(op.matmul(bb.emit(op.permute_dims(y, (1, 0))), u))]
        ),
        ((64, 64), (64, 64), (64, 72), (64, 64)),
        HALF,
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refuses(what):
    emit, shapes, dtype = REFUSED[what]
    with pytest.raises(Unsupported):
        emit_gemm_hopper(contraction_of(emit, shapes, dtype), H200)
