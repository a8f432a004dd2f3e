"""Segments with sizes and operands of their own: what is read, and the CUDA cores' numbers."""

import numpy as np
import pytest
from tvm import tirx

from tvm_fusion.config import load_profile
from tvm_fusion.kernels.contraction.reader import analyze_contraction
from tvm_fusion.kernels.gemm.simt.kernel import CONFIGS, emit_gemm_simt, simt_configs

from ...support.cuda_on_cpu import compile_cubins, run_cuda_on_cpu
from ...support.gemm_cases import BRAIN, FLOAT, HALF, sigmoid
from ...support.grouped_cases import experts, experts_of, lora_b, projections, separate
from ...support.kernel_cases import TOLERANCE, fuse, outputs_of

H200 = load_profile("nvidia_h200")


def read(emit, *shapes, dtype=HALF):
    return analyze_contraction(fuse(emit, *((s, dtype) for s in shapes)))


def sizes(contraction):
    """(batch, M, N, K) of each product."""
    return [(s.B, s.M, s.N, p.K) for s in contraction.segments for p in s.products]


def run(func, inputs, config=None):
    """Outputs of the CUDA-core kernel on the emulator, poisoned before."""
    outputs = outputs_of(func, len(inputs))
    assert run_cuda_on_cpu(
        emit_gemm_simt(analyze_contraction(func), H200, config), [*inputs, *outputs]
    )
    return outputs


def close(got, expected, dtype):
    error = np.abs(got.astype(np.float64) - expected).max() / np.abs(expected).max()
    return error <= TOLERANCE[dtype]


def random(*shapes, dtype=FLOAT):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def wide(arrays):
    return [a.astype(np.float64) for a in arrays]


# ---- what is read


def test_products_of_different_sizes_are_segments_of_their_own_sizes():
    contraction = read(separate, (64, 32), (32, 48), (16, 24), (24, 8))
    assert sizes(contraction) == [(1, 64, 48, 32), (1, 16, 8, 24)]
    assert not contraction.uniform


def test_equal_sizes_are_uniform_though_the_operands_differ():
    contraction = read(separate, (64, 32), (32, 48), (64, 32), (32, 8))
    assert contraction.uniform
    a, b = (s.products[0].a.load.source for s in contraction.segments)
    assert not a.same_as(b)


@pytest.mark.parametrize(
    ("shapes", "uniform"),
    [
        (((64, 32), (32, 48), (64, 24), (24, 48)), False),
        (((2, 64, 32), (2, 32, 48), (3, 64, 32), (3, 32, 48)), False),
        (((2, 64, 32), (2, 32, 48), (2, 64, 32), (2, 32, 8)), True),
    ],
    ids=["terms", "batch", "columns"],
)
def test_batch_rows_and_terms_decide_what_is_uniform_and_columns_do_not(shapes, uniform):
    assert read(separate, *shapes).uniform is uniform


def test_a_symbolic_size_is_uniform_with_itself_alone():
    n, m = (tirx.Var(name, "int64") for name in "nm")
    assert read(separate, (n, 32), (32, 48), (n, 32), (32, 8)).uniform
    assert not read(separate, (n, 32), (32, 48), (m, 32), (32, 8)).uniform


def test_a_segment_of_its_own_sizes_has_contiguous_columns():
    contraction = read(separate, (48, 32), (32, 64), (16, 32), (32, 48))
    assert sizes(contraction) == [(1, 48, 64, 32), (1, 16, 48, 32)]


def test_siblings_keep_the_shared_operand_as_their_left_one():
    contraction = read(projections, (64, 32), (32, 48), (32, 64), (32, 16), (32, 16))
    left = {p.a.load.source for p in contraction.products}
    assert left == {contraction.params[0].var}
    assert contraction.uniform


def test_gate_and_up_of_each_expert_are_one_segment():
    contraction = read(experts, (8, 32), (32, 24), (32, 24), (12, 32), (32, 24), (32, 24))
    assert [len(s.products) for s in contraction.segments] == [2, 2]
    assert [s.M for s in contraction.segments] == [8, 12]


# ---- numbers


UNEQUAL = {
    "everything differs": ((20, 33), (33, 24), (70, 17), (17, 65), (3, 40), (40, 5)),
    "one row, one column, one term": ((1, 33), (33, 24), (70, 17), (17, 1), (9, 1), (1, 5)),
    "only rows differ": ((20, 32), (32, 24), (70, 32), (32, 24), (128, 32), (32, 24)),
    "batches differ": ((2, 20, 33), (2, 33, 24), (7, 17), (17, 9), (3, 5, 8), (3, 8, 70)),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("what", UNEQUAL)
def test_products_of_unequal_sizes_are_close_to_float64(what):
    inputs = random(*UNEQUAL[what])
    func = fuse(separate, *((s, FLOAT) for s in UNEQUAL[what]))
    exact = wide(inputs)
    for got, x, w in zip(run(func, inputs), exact[::2], exact[1::2], strict=True):
        assert close(got, x @ w, FLOAT)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_tile_serves_unequal_segments(config):
    shapes = UNEQUAL["everything differs"]
    inputs = random(*shapes)
    outputs = run(fuse(separate, *((s, FLOAT) for s in shapes)), inputs, config)
    exact = wide(inputs)
    for got, x, w in zip(outputs, exact[::2], exact[1::2], strict=True):
        assert close(got, x @ w, FLOAT)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [FLOAT, BRAIN])
def test_experts_with_gate_and_up_are_close_to_float64(dtype):
    shapes = [s for t in (5, 70, 1) for s in ((t, 33), (33, 24), (33, 24))]
    func = fuse(experts, *((s, dtype) for s in shapes))
    inputs = random(*shapes, dtype=np.float32)
    inputs = [a.astype(str(p.ty.dtype)) for a, p in zip(inputs, func.params, strict=False)]
    for got, expected in zip(run(func, inputs), experts_of(*wide(inputs)), strict=True):
        assert close(got, expected, dtype)


def test_low_rank_updates_of_three_projections_are_close_to_float64():
    widths, rows, rank = (24, 8, 9), 37, 4
    shapes = [s for n in widths for s in ((rows, rank), (rank, n), (rows, n))]
    inputs = random(*shapes)
    outputs = run(fuse(lora_b, *((s, FLOAT) for s in shapes)), inputs)
    exact = wide(inputs)
    for i, got in enumerate(outputs):
        a, b, y = exact[3 * i : 3 * i + 3]
        assert close(got, y + a @ b * 0.5, FLOAT)


@pytest.mark.parametrize("extents", [(1, 5), (70, 3)])
def test_one_kernel_serves_all_values_of_two_symbolic_row_counts(extents):
    n, m = (tirx.Var(name, "int64") for name in "nm")
    func = fuse(separate, ((n, 33), FLOAT), ((33, 24), FLOAT), ((m, 17), FLOAT), ((17, 40), FLOAT))
    kernel = emit_gemm_simt(analyze_contraction(func), H200)
    inputs = random((extents[0], 33), (33, 24), (extents[1], 17), (17, 40))
    outputs = [np.full((r, c), np.nan, FLOAT) for r, c in zip(extents, (24, 40), strict=True)]
    assert run_cuda_on_cpu(kernel, [*inputs, *outputs]) == 1
    exact = wide(inputs)
    for got, x, w in zip(outputs, exact[::2], exact[1::2], strict=True):
        assert close(got, x @ w, FLOAT)


def test_many_unequal_experts_stay_a_small_kernel_without_spills():
    shapes = [s for i in range(6) for s in ((5 + 37 * i, 512), (512, 256), (512, 256))]
    contraction = read(experts, *shapes)
    config = simt_configs(contraction, H200)[0]
    assert config.thread_m * config.thread_n <= 16
    (resources,) = compile_cubins({"experts": emit_gemm_simt(contraction, H200)})
    assert resources.spill_bytes == 0


def test_a_few_unequal_segments_may_use_any_tile():
    contraction = read(separate, (4096, 512), (512, 4096), (2048, 512), (512, 4096))
    assert {c.thread_m for c in simt_configs(contraction, H200)} >= {8}


def test_the_reference_of_the_experts_is_a_swiglu():
    x, g, u = wide(random((3, 4), (4, 5), (4, 5)))
    (h,) = experts_of(x, g, u)
    assert np.allclose(h, (x @ g) * sigmoid(x @ g) * (x @ u))
