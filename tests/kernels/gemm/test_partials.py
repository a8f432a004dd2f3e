"""Reductions of runs of columns in the epilogue of the Hopper GEMM."""

import dataclasses

import numpy as np
import pytest
from tvm import tirx

from tvm_fusion.config import load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.contraction.reader import analyze_contraction
from tvm_fusion.kernels.gemm.hopper.kernel import emit_gemm_hopper, hopper_configs
from tvm_fusion.kernels.gemm.simt.kernel import emit_gemm_simt

from ...support.gemm_cases import HALF
from ...support.hopper_on_cpu import compile_hopper, run_hopper_on_cpu
from ...support.kernel_cases import TOLERANCE, fuse, outputs_of
from ...support.partial_cases import (
    PARTIAL_CASES,
    maxima,
    residual_case,
    residual_squares,
    squares_of,
)

H200 = load_profile("nvidia_h200")
TINY_H200 = dataclasses.replace(H200, num_sms=2)  # blocks of the small cases take several tiles


def run(kernel, case, inputs):
    outputs = outputs_of(case.func(), len(inputs))
    assert run_hopper_on_cpu(kernel, [*inputs, *outputs]) == 1
    return outputs


def check(case, config, exact=False):
    """Every output is close to float64; a sum of halves in float32 as close as the halves are."""
    contraction = analyze_contraction(case.func(), exact)
    kernel = emit_gemm_hopper(contraction, TINY_H200, config)
    inputs = case.arrays()
    outputs = run(kernel, case, inputs)
    half = str(inputs[0].dtype)
    for got, expected in zip(outputs, case.expected(inputs), strict=True):
        error = np.abs(got.astype(np.float64) - expected).max() / np.abs(expected).max()
        assert error <= 2 * TOLERANCE[half]
    return outputs


def kinds():
    """Configurations of all tiles, and of all forms, for the first case, of all forms for the
    others.
    """
    found = []
    for case in PARTIAL_CASES:
        seen, tiles = {}, {}
        for c in hopper_configs(analyze_contraction(case.func()), TINY_H200):
            if c.split == 1 and c.batched == 0 and c.block_n % 64 == 0:
                seen.setdefault((c.staged, c.deferred), c)
                if case is PARTIAL_CASES[0]:
                    tiles.setdefault((c.block_m, c.block_n), c)
        chosen = dict.fromkeys([*seen.values(), *tiles.values()])
        found += [pytest.param(case, c, id=f"{case.name}-{key(c)}") for c in chosen]
    return found


def key(c):
    form = "deferred" if c.deferred else "staged" if c.staged else "direct"
    return f"{c.block_m}x{c.block_n}-{form}"


@pytest.mark.one_in(24)
@pytest.mark.parametrize(("case", "config"), kinds())
def test_runs_of_columns_are_reduced_in_every_form_of_the_epilogue(case, config):
    check(case, config)


def test_the_forms_tested_are_all_there_are():
    forms = {(c.values[1].staged, c.values[1].deferred) for c in kinds()}
    assert forms == {(True, True), (True, False), (False, False)}
    tiles = {(c.values[1].block_m, c.values[1].block_n) for c in kinds()}
    assert {(m, n) for m in (64, 128) for n in (128, 256)} <= tiles


def test_blocks_that_split_the_terms_of_a_tile_reduce_their_own_columns():
    case = residual_case(136, 256, 256, 128)
    contraction = analyze_contraction(case.func())
    configs = hopper_configs(contraction, TINY_H200)
    single = next(c for c in configs if c.staged and not c.deferred and c.block_m == 64)
    config = dataclasses.replace(single, block_n=256, split=2, stages=3, boxes=2)
    check(case, config)
    with pytest.raises(Unsupported, match="runs of 128 columns"):
        emit_gemm_hopper(contraction, H200, dataclasses.replace(config, split=4))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("deferred", [False, True])
def test_exact_rounding_sums_up_what_is_stored(deferred):
    case = residual_case(72, 256, 192, 128)
    contraction = analyze_contraction(case.func(), exact=True)
    config = next(c for c in hopper_configs(contraction, TINY_H200) if c.deferred == deferred)
    h, sums = check(case, config, exact=True)
    np.testing.assert_allclose(sums, squares_of(h.astype(np.float64), 128), rtol=2e-6)


def test_sums_that_are_not_stored_as_halves_are_exact_to_float32():
    case = residual_case(72, 256, 192, 128)
    contraction = analyze_contraction(case.func())
    config = next(c for c in hopper_configs(contraction, TINY_H200) if not c.deferred)
    inputs = case.arrays()
    _, sums = run(emit_gemm_hopper(contraction, TINY_H200, config), case, inputs)
    np.testing.assert_allclose(sums, case.expected(inputs)[1], rtol=4e-6)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("extent", [1, 100, 200])
def test_one_kernel_serves_all_values_of_a_symbolic_row_count(extent):
    n = tirx.Var("n", "int64")
    shapes = ((n, 128), (128, 192), (n, 192))
    func = fuse(residual_squares(64), *((s, HALF) for s in shapes))
    kernel = emit_gemm_hopper(analyze_contraction(func), TINY_H200)
    rng = np.random.default_rng(0)
    shapes = ((extent, 128), (128, 192), (extent, 192))
    x, w, r = (rng.standard_normal(s).astype(HALF) for s in shapes)
    h, sums = np.full((extent, 192), np.nan, HALF), np.full((extent, 3), np.nan, "float32")
    assert run_hopper_on_cpu(kernel, [x, w, r, h, sums]) == 1
    expected = squares_of(x.astype(np.float64) @ w + r, 64)
    np.testing.assert_allclose(sums, expected, rtol=2e-3)


LARGE = {
    "residual": (residual_squares(128), (4096, 4096), (4096, 4096), (4096, 4096)),
    "gelu, maxima": (maxima(128), (4096, 4096), (4096, 4096), (4096,)),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", LARGE)
def test_kernels_with_partial_results_compile_without_spills(name):
    emit, *shapes = LARGE[name]
    contraction = analyze_contraction(fuse(emit, *((s, HALF) for s in shapes)))
    compiled = compile_hopper(emit_gemm_hopper(contraction, H200))
    assert (compiled.spill_bytes, compiled.remarks) == (0, ())


def test_tiles_that_hold_parts_of_runs_are_no_configurations():
    contraction = analyze_contraction(residual_case(256, 384, 256, 128).func())
    configs = hopper_configs(contraction, H200)
    assert {c.block_n % 128 for c in configs} == {0}
    with pytest.raises(Unsupported, match="runs of 128 columns"):
        emit_gemm_hopper(contraction, H200, dataclasses.replace(configs[0], block_n=192))


def test_the_cuda_core_kernel_refuses_partial_results():
    contraction = analyze_contraction(residual_case(256, 384, 256, 128).func())
    with pytest.raises(Unsupported, match="runs of columns"):
        emit_gemm_simt(contraction, H200)
