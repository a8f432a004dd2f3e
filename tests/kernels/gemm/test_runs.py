"""Products of few terms, whose rows are runs: numbers on the emulator, times, refusals."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tvm.relax import op

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.contraction.reader import analyze_contraction
from tvm_fusion.kernels.convolution.geometry import read_convolution
from tvm_fusion.kernels.convolution.runs import read_runs
from tvm_fusion.kernels.gemm.forms import WRITER
from tvm_fusion.kernels.gemm.hopper.config import HopperConfig
from tvm_fusion.kernels.gemm.runs.problem import MOST_COLUMNS, MOST_TERMS, read_product
from tvm_fusion.kernels.gemm.runs.rank import emit_product, product_ranked
from tvm_fusion.kernels.gemm.runs.shape import RunsConfig, Shape
from tvm_fusion.kernels.gemm.runs.time import runs_seconds

from ...support.conv_suites import SUITES
from ...support.cuda_on_cpu import (
    compile_cubins,
    compile_together,
    lower,
    run_cuda_on_cpu,
    translated,
)
from ...support.helpers_tir import poisoned
from ...support.kernel_cases import fuse
from ...support.thin_products import THIN, WIDE, Thin

A100, H200 = load_profile("nvidia_a100"), load_profile("nvidia_h200")
POLICY = load_policy(None)
SWEEP = Path(__file__).resolve().parents[2] / "data/runs_sweep_h200.json"
ODD = Thin(7, 24, 40, batch=3)
TILES = {
    RunsConfig(64, 32, 32, 16, 64): [ODD, replace(ODD, residual=True, dtype="bfloat16")],
    RunsConfig(32, 16, 16, 16, 32): [replace(ODD, terms=8, columns=9), replace(ODD, terms=64)],
    RunsConfig(64, 64, 32, 32, 64): [replace(ODD, terms=88, columns=72, by_columns=True)],
    RunsConfig(128, 128, 64, 64, 128): [replace(ODD, terms=16, columns=200, by_columns=True)],
}
CLOSE = Thin(9, 91, 65, batch=1, by_columns=True)
CLOSE_TILES = {
    RunsConfig(64, 32, 32, 16, 64): [
        CLOSE,
        replace(CLOSE, by_columns=False),
        replace(CLOSE, terms=12, columns=40),
        replace(CLOSE, terms=2, columns=7),
        replace(CLOSE, terms=72, columns=33, dtype="bfloat16"),
    ],
    RunsConfig(64, 64, 32, 32, 64): [replace(CLOSE, residual=True, dtype="bfloat16")],
    RunsConfig(128, 64, 32, 32, 128): [replace(CLOSE, terms=135, columns=48)],
}
"""Rows, weights or both that are copied as they lie in memory, and words of them read."""


@pytest.mark.parametrize("tiles", [TILES, CLOSE_TILES], ids=["apart", "close"])
def test_thin_products_are_close_to_float64(tiles):
    cases = [(thin, config) for config, found in tiles.items() for thin in found]
    kernels = [lower(emit_product(analyze_contraction(t.func()), H200, c)) for t, c in cases]
    compile_together(map(translated, kernels))
    for (thin, config), kernel in zip(cases, kernels, strict=True):
        inputs = thin.arrays()
        wanted = thin.expected([a.astype("float64") for a in inputs])
        got = poisoned(thin.output_shape, thin.dtype)
        assert run_cuda_on_cpu(kernel, [*inputs, got], seed=1) == 1
        error = np.abs(got.astype("float64") - wanted).max() / np.abs(wanted).max()
        assert error <= (2e-3 if thin.dtype == "float16" else 1.6e-2), (thin, config)


def test_what_is_not_finite_stays_in_its_row_and_its_column():
    """Words at the end of a run hold terms of the next one."""
    thin, config = next((found[0], c) for c, found in CLOSE_TILES.items())
    kernel = lower(emit_product(analyze_contraction(thin.func()), H200, config))
    x, w, *others = thin.arrays()
    x[0, 3, 4], w[7] = np.inf, np.nan
    got = poisoned(thin.output_shape, thin.dtype)
    run_cuda_on_cpu(kernel, [x, w, *others, got], seed=1)
    finite = np.ones(thin.output_shape, bool)
    finite[0, 3, 4], finite[..., 7] = False, False
    assert np.isfinite(got[finite]).all()
    assert np.isnan(got[..., 7]).all()


def test_the_first_configurations_compile_without_spills():
    found = [*THIN[::3], CLOSE, replace(CLOSE, size=40, terms=511, columns=300)]
    problems = {f"p{i}": analyze_contraction(t.func()) for i, t in enumerate(found)}
    kernels = {n: emit_product(p, H200, product_ranked(p, H200)[0][1]) for n, p in problems.items()}
    found = compile_cubins(kernels, "sm_90a")
    assert [r.kernel for r in found if r.spill_bytes] == []
    assert len(found) == len(kernels)


@pytest.mark.parametrize("hw", [A100, H200], ids=["A100", "H200"])
def test_thin_products_are_thought_to_be_fastest_as_runs(hw):
    """All of many positions; of fewer, wider ones other forms may be as fast."""
    large = [t for t in THIN if t.size >= 56 and (t.terms, t.columns) != (64, 64)]
    first = [WRITER.ranked(analyze_contraction(t.func()), hw, POLICY)[0][1] for t in large]
    assert {type(config) for config in first} == {RunsConfig}


def test_wide_products_with_a_residual_are_not_thought_to_be_fastest_as_runs():
    """A thread's loads of a residual meet a line of memory for each of 8 rows."""
    first = [WRITER.ranked(analyze_contraction(t.func()), H200, POLICY)[0][1] for t in WIDE]
    assert {type(config) for config in first} == {HopperConfig}


def test_predicted_times_are_those_of_the_sweep():
    """Of first layers and of thin products, less two whose weights came in otherwise then."""
    rows = json.loads(SWEEP.read_text())["rows"]
    stems, thin = SUITES["stems"](), {t.name: t for t in (*THIN, *WIDE)}
    problems, found = {}, defaultdict(list)
    for suite, name, config, us in rows:
        if (suite, name) not in problems:
            if suite == "stem":
                problem = read_runs(read_convolution(stems[name].func()))
            else:
                problem = read_product(analyze_contraction(thin[name].func()))
            problems[suite, name] = problem
        shape = Shape(problems[suite, name], RunsConfig(*config))
        found[suite, name].append((runs_seconds(shape, H200) * 1e6, us))
    assert len(rows) > 400
    errors = [abs(predicted / us - 1) for pairs in found.values() for predicted, us in pairs]
    assert statistics.median(errors) <= 0.08
    losses = [min(pairs)[1] / min(us for _, us in pairs) for pairs in found.values()]
    assert statistics.median(losses) <= 1.05
    assert max(losses) <= 1.3


REFUSED = {
    "many terms": (replace(ODD, terms=MOST_TERMS + 8), "520 terms"),
    "many columns of rows that lie close": (replace(CLOSE, columns=2049), "2049 columns"),
    "many columns": (replace(ODD, columns=MOST_COLUMNS + 1), "513 columns"),
    "float32": (replace(ODD, dtype="float32"), "float32"),
}


def test_rows_that_lie_far_apart_are_refused():
    def sliced(bb, x, w):
        x = bb.emit(op.strided_slice(x, [1], [0], [13]))
        return bb.emit(op.matmul(x, bb.emit(op.permute_dims(w))))

    contraction = analyze_contraction(fuse(sliced, ((40, 99), "float16"), ((24, 13), "float16")))
    with pytest.raises(Unsupported, match="lie close"):
        product_ranked(contraction, H200)


def reversed_case(side, terms):
    def emit(bb, *given):
        x, w = (bb.emit(op.flip(v, 0)) if i == side else v for i, v in enumerate(given))
        return op.matmul(x, bb.emit(op.permute_dims(w)))

    return analyze_contraction(fuse(emit, ((40, terms), "float16"), ((24, terms), "float16")))


@pytest.mark.parametrize("terms", [91, 64])
def test_rows_in_reverse_are_refused(terms):
    with pytest.raises(Unsupported, match=r"lie close|no runs"):
        product_ranked(reversed_case(0, terms), H200)


@pytest.mark.parametrize("terms", [91, 64])
def test_weights_in_reverse_are_not_copied(terms):
    contraction = reversed_case(1, terms)
    if terms == 64:  # rows are whole pieces: weights come in one by one
        kernel = lower(emit_product(contraction, H200, RunsConfig(64, 32, 32, 16, 64)))
        rng = np.random.default_rng(0)
        x, w = (rng.standard_normal((n, terms)).astype("float16") for n in (40, 24))
        got = poisoned((40, 24), "float16")
        assert run_cuda_on_cpu(kernel, [x, w, got], seed=1) == 1
        wanted = x.astype("float64") @ w[::-1].T.astype("float64")
        assert np.abs(got - wanted).max() <= 2e-3 * np.abs(wanted).max()
    else:
        assert read_product(contraction).weight_step == 0


@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_no_runs_is_refused(kind):
    thin, why = REFUSED[kind]
    with pytest.raises(Unsupported, match=why):
        product_ranked(analyze_contraction(thin.func()), H200)
