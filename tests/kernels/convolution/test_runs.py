"""Convolutions of few channels, whose filters' rows are runs of the data: numbers on the emulator,
what lies beside a run, resources, refusals.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from tvm_fusion.config import HardwareProfile, load_policy, load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.convolution.forms import CUDA_WRITER
from tvm_fusion.kernels.convolution.geometry import read_convolution
from tvm_fusion.kernels.convolution.runs import emit_convolution_runs as emit_runs
from tvm_fusion.kernels.convolution.runs import read_runs, runs_ranked
from tvm_fusion.kernels.gemm.runs.shape import RunsConfig, Shape
from tvm_fusion.kernels.gpu import product_frame

from ...support.conv_suites import square
from ...support.convolutions import DATA_LAYOUTS, EPILOGUES, WEIGHT_LAYOUTS, Conv, plain
from ...support.cuda_on_cpu import (
    compile_cubins,
    compile_together,
    lower,
    run_cuda_on_cpu,
    translated,
)
from ...support.helpers_tir import poisoned

H200, A100 = (load_profile(name) for name in ("nvidia_h200", "nvidia_a100"))
POLICY = load_policy(None)
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2}
SMALL = RunsConfig(32, 16, 16, 16, 8)
STEM = plain(
    **dict(sizes=(14, 24), kernel=(7, 7), strides=(2, 2), padding=(3,) * 4, channels=3),
    **dict(filters=24, batch=2, data_layout="NHWC", weight_layout="OHWI", dtype="float16"),
)


def read(conv: Conv):
    return read_convolution(conv.func(), conv.exact)


@dataclass
class Case:
    """A convolution, how it is computed, and an order of warps."""

    conv: Conv
    config: RunsConfig
    seed: int | None = None
    hw: HardwareProfile = H200


def check(cases: Iterable[Case]) -> None:
    """Every element is written, and close to float64; kernels are compiled together."""
    cases = list(cases)
    kernels = [lower(emit_runs(read(c.conv), c.hw, c.config)) for c in cases]
    compile_together(map(translated, kernels))
    for case, kernel in zip(cases, kernels, strict=True):
        inputs = case.conv.arrays()
        expected = case.conv.expected(inputs)
        outputs = [poisoned(e.shape, case.conv.dtype) for e in expected]
        assert run_cuda_on_cpu(kernel, [*inputs, *outputs], seed=case.seed) == 1
        for got, wanted in zip(outputs, expected, strict=True):
            error = np.abs(got.astype("float64") - wanted).max()
            assert error <= TOLERANCE[case.conv.dtype] * max(1.0, np.abs(wanted).max()), case


def any_config(conv: Conv, rng: random.Random) -> RunsConfig:
    """One of all that can be written."""
    problem = read_runs(read(conv))
    while True:
        rows, columns = rng.choice((16, 32, 64)), rng.choice((16, 32, 64))
        config = RunsConfig(
            rows * rng.choice((1, 2)),
            columns * rng.choice((1, 1, 2)),
            rows,
            columns,
            rng.choice((8, 16, 32)),
        )
        try:
            Shape(problem, config).check(H200)
        except Unsupported:
            continue
        return config


def random_runs(seed: int) -> Conv:
    """A convolution of few channels, of odd sizes."""
    rng = random.Random(seed)
    rank = rng.choice((1, 2, 2, 2, 3))
    kernel = tuple(rng.choice((1, 2, 3, 3, 4, 7)) for _ in range(rank))
    if rank == 3:
        kernel = tuple(min(k, 3) for k in kernel)
    dilation = (*(rng.choice((1, 1, 2)) for _ in range(rank - 1)), 1)
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    most = {1: 60, 2: 15, 3: 5}[rank]
    strides = tuple(rng.choice((1, 2, 2, 3, 4)) for _ in range(rank))
    return Conv(
        tuple(r + s + rng.randint(1, most) for r, s in zip(reach, strides, strict=True)),
        kernel,
        rng.choice((1, 2, 3, 3, 4, 5, 7, 9)),
        rng.choice((2, 8, 17, 24, 33, 40)),
        rng.choice((1, 2, 3)),
        strides=strides,
        padding=tuple(rng.randint(0, r) for r in (*reach, *reach)),
        dilation=dilation,
        data_layout=rng.choice(DATA_LAYOUTS[rank]),
        weight_layout=rng.choice(WEIGHT_LAYOUTS[rank]),
        dtype=rng.choice(("float16", "float16", "bfloat16")),
        epilogue=rng.choice(EPILOGUES),
        exact=rng.random() < 0.2,
    )


@pytest.mark.one_in(10)
@pytest.mark.parametrize("first", range(0, 60, 6))
def test_random_convolutions_of_few_channels(first):
    seeds = range(first, first + 6)
    check(Case(c := random_runs(s), any_config(c, random.Random(s)), s) for s in seeds)


KINDS = {
    "16 bytes a copy, a lead": (STEM, (8, 1, False)),
    "8 bytes a copy": (replace(STEM, sizes=(14, 28)), (4, 1, False)),
    "4 bytes a copy": (replace(STEM, sizes=(14, 22), padding=(3, 2, 3, 2)), (2, 0, False)),
    "elements": (replace(STEM, sizes=(14, 23)), (1, 0, False)),
    "every other run within a word": (replace(STEM, strides=(2, 1)), (8, 0, True)),
    "such of elements": (replace(STEM, strides=(1, 1), sizes=(7, 11)), (1, 0, True)),
    "channels first": (replace(STEM, data_layout="NCHW", weight_layout="OIHW"), (8, 1, False)),
    "channels first, every position": (
        plain(channels=3, sizes=(9, 16), dtype="float16", epilogue="residual"),
        (8, 0, True),
    ),
    "one channel": (replace(STEM, channels=1), (8, 1, False)),
    "patches": (
        replace(STEM, kernel=(4, 4), strides=(4, 4), padding=(0,) * 4, sizes=(13, 40)),
        (8, 0, False),
    ),
    "runs apart": (
        replace(STEM, kernel=(4, 4), strides=(4, 4), padding=(0,) * 4, channels=2, sizes=(13, 40)),
        (8, 0, False),
    ),
    "odd numbers of octets apart": (
        replace(STEM, kernel=(3, 3), strides=(3, 3), padding=(0,) * 4, channels=8, sizes=(9, 27)),
        (8, 0, False),
    ),
    "one dimension": (
        Conv((90,), (10,), 1, 40, 3, strides=(5,), data_layout="NWC", dtype="bfloat16"),
        (2, 0, True),
    ),
    "three dimensions, dilated": (
        Conv((7, 8, 9), (3, 2, 3), 2, 16, 2, 1, (2, 1, 2), (1,) * 6, (2, 3, 1), dtype="float16"),
        (1, 0, False),
    ),
}


EPILOGUED = [replace(STEM, epilogue=e, filters=40) for e in EPILOGUES]
TILE = RunsConfig(64, 32, 32, 16, 8)


# Always: random convolutions, below, and runs of any size (`test_any_size`).
@pytest.mark.nightly
def test_kinds_of_runs_and_epilogues_behind_ragged_tiles():
    """In copies of so many elements, with so many terms in front, shifted within words or not."""
    cases = [Case(conv, TILE) for conv in EPILOGUED]
    for conv, expected in KINDS.values():
        config = SMALL if conv.rank > 1 else replace(SMALL, columns=32)
        shape = Shape(read_runs(read(conv)), config)
        assert (shape.problem.piece, shape.lead, shape.shifted) == expected
        cases.append(Case(conv, config))
    check(cases)


def test_blocks_take_several_tiles_in_any_order_of_warps():
    """Five and four tiles of positions for each of two blocks, and two of filters."""
    few = dataclasses.replace(H200, num_sms=1, smem_per_sm_bytes=40_000)
    conv = replace(STEM, sizes=(25, 48), batch=1)
    shape = Shape(read_runs(read(conv)), SMALL)
    assert shape.column_tiles == 2
    assert shape.row_tiles / shape.slots(few) > 4
    check(Case(conv, SMALL, seed, few) for seed in range(3))


def test_indices_may_take_64_bits(monkeypatch):
    monkeypatch.setattr(product_frame, "INT32_ELEMENTS", 100)
    assert "int64_t" in lower(emit_runs(read(STEM), H200, SMALL)).source
    check([Case(STEM, SMALL)])


@pytest.mark.parametrize("kind", ["16 bytes a copy, a lead", "every other run within a word"])
def test_what_lies_beside_a_run_does_not_reach_it(kind):
    """Infinite elements beside a position's, which fill up its fragments, meet weights of zero."""
    conv, _ = KINDS[kind]
    inputs = conv.arrays()
    inputs[0][:, :, ::9] = np.inf
    with np.errstate(invalid="ignore"):
        (expected,) = conv.expected(inputs)
    got = poisoned(expected.shape, conv.dtype)
    run_cuda_on_cpu(emit_runs(read(conv), H200, SMALL), [*inputs, got])
    finite = np.isfinite(expected)
    assert 0.1 < finite.mean() < 0.9
    assert np.isfinite(got)[finite].all()
    np.testing.assert_allclose(got[finite], expected[finite], atol=4e-3, rtol=4e-3)


# ---- resources, ranking, refusals

LARGE = {
    "stem": square(224, 7, 3, 64, stride=2),
    "small_stem": square(224, 3, 3, 32, stride=2),
    "patches": square(224, 4, 3, 96, stride=4, padding=(0,) * 4),
    "odd": square(299, 3, 3, 32, stride=2),
    "residual": square(224, 3, 3, 64, epilogue="residual"),
}


@pytest.mark.parametrize(
    ("arch", "hw"),
    [pytest.param("sm_80", A100, marks=pytest.mark.nightly), ("sm_90a", H200)],
)
def test_the_first_configurations_compile_without_spills(arch, hw):
    """But for two registers of the 7 x 7 layer's on sm_80, which the estimate of a thread's misses
    where three blocks share a multiprocessor.
    """
    kernels = {}
    for name, conv in LARGE.items():
        problem = read(conv)
        kernels[name] = emit_runs(problem, hw, runs_ranked(problem, hw, POLICY)[0][1])
    found = compile_cubins(kernels, arch)
    assert len(found) == len(kernels)
    allowed = {"stem": 8} if arch == "sm_80" else {}
    assert [r.kernel for r in found if r.spill_bytes > allowed.get(r.kernel, 0)] == []


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["stem", "small_stem", "patches", "odd"])
@pytest.mark.parametrize("hw", [A100, H200], ids=["A100", "H200"])
def test_stems_are_thought_to_be_fastest_as_runs(name, hw):
    _, first = CUDA_WRITER.ranked(read(LARGE[name]), hw, POLICY)[0]
    assert isinstance(first, RunsConfig)


REFUSED = {
    "groups": (replace(STEM, channels=6, filters=24, groups=2), "groups"),
    "one filter": (replace(STEM, filters=1), "one filter"),
    "many channels": (replace(STEM, channels=16), "16 channels"),
    "many terms": (replace(STEM, kernel=(16, 16), sizes=(20, 24)), "16 lines of 48 terms"),
    "float32": (replace(STEM, dtype="float32"), "float32"),
    "computed": (replace(STEM, prologue=True), "computed"),
    "taps apart": (replace(STEM, dilation=(1, 2)), "no neighbours"),
    "steps of less than an element": (
        Conv((6, 5), (4, 3), 3, 24, strides=(2, 3), transposed=True, dtype="float16"),
        "transposed",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_no_runs_is_refused(kind):
    conv, why = REFUSED[kind]
    with pytest.raises(Unsupported, match=why):
        runs_ranked(read(conv), H200, POLICY)


def test_devices_without_asynchronous_copies_are_refused():
    with pytest.raises(Unsupported, match=r"cp\.async"):
        runs_ranked(read(STEM), dataclasses.replace(A100, arch="sm_75"), POLICY)
